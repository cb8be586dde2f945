"""Sampling at fixed ratios: the classes of a data set, equally often or in given shares."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.data.format.manifest import DatasetManifest
from tfdml.data.order import Order
from tfdml.data.read.blocks import BlockReader
from tfdml.data.read.dataset import RecordDataset, Shuffling
from tfdml.data.read.mixing import Mixed, digest_of, normalised
from tfdml.data.read.parsing import parser

_ROWS = 8192  # Records whose classes are read at once.


class BalancedDataset:
    """Data set whose classes are drawn at fixed ratios; small classes more than once an epoch.

    The constructor reads the classes of all records, on every worker.

    Args:
        dataset: Data set to draw from.
        feature: Feature that holds the class: an integer or a string.
        ratios: Share of each class, with any sum; None for equal shares. A class that is left out
            is not drawn.
        length: Number of draws in an epoch; None for the number of records.

    Raises:
        ValueError: If the feature or a class does not exist.
    """

    def __init__(
        self,
        dataset: RecordDataset,
        feature: str,
        ratios: Mapping[Any, float] | None,
        length: int | None,
    ):
        self._dataset, self._length = dataset, length or dataset.records
        self.records = dataset.records
        labels = class_of_records(dataset, feature)
        classes, self._class_of = np.unique(labels, return_inverse=True)
        found = [c.decode() if isinstance(c, bytes) else int(c) for c in classes.tolist()]
        if ratios is None:
            ratios = dict.fromkeys(found, 1.0)
        unknown = [c for c in ratios if c not in found]
        if unknown:
            raise ValueError(
                f"`ratios` must name classes of the data, {found[:20]}. Received: {unknown}."
            )
        self._drawn = [found.index(c) for c in ratios]
        self._ratios = normalised(list(ratios.values()))
        counts = np.bincount(self._class_of, minlength=len(found))
        self._groups_of = functools.lru_cache(maxsize=1)(
            lambda shuffling: [
                _Class(self._by_class(shuffling), c, int(counts[c])) for c in self._drawn
            ]
        )
        self._feature = feature

    @property
    def manifest(self) -> DatasetManifest:
        """Manifest of the data set."""
        return self._dataset.manifest

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that are equal only if the same is drawn from the same data."""
        drawn = list(zip(self._drawn, self._ratios, strict=True))
        return digest_of(self._dataset.digest, self._feature, drawn, self._length)

    def default_window(self) -> int:
        """Returns the default window of the data set."""
        return self._dataset.default_window()

    def reader(self, window: int, cache: str | None = None) -> BlockReader:
        """Returns a reader that caches two windows per class, as classes are read separately."""
        return self._dataset.reader(window * len(self._drawn), cache)

    def order(self, shuffling: Shuffling, epoch: int) -> Order:
        """Returns the order of an epoch."""
        epoch = epoch if shuffling.reshuffle else 0
        groups = self._groups_of(shuffling)
        return Mixed(groups, self._ratios, self._length, shuffling.seed or 0, epoch)

    def _by_class(self, shuffling: Shuffling):
        """Returns a function that lists the ids of each class's records in an epoch's order."""

        @functools.lru_cache(maxsize=4)
        def by_class(number: int) -> list[np.ndarray]:
            order = self._dataset.order(shuffling, number)
            ids = order.ids(0, len(order))
            classes = self._class_of[ids]
            return [ids[classes == c] for c in range(int(self._class_of.max()) + 1)]

        return by_class


class _Class:
    """Group of the records of one class, in the order that they have among all records.

    Args:
        by_class: Function that returns the ids of each class's records in the n-th pass.
        number: Index of the class.
        count: Number of its records.
    """

    def __init__(self, by_class: Any, number: int, count: int):
        self._by_class, self._number, self._count = by_class, number, count

    def __len__(self) -> int:
        return self._count

    def order(self, number: int) -> Order:
        """Returns the order of the records in the `number`-th pass over them, from 0."""
        return _Listed(self._by_class(number)[self._number])


class _Listed:
    """Order given by a list of ids."""

    def __init__(self, ids: np.ndarray):
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self, begin: int, end: int) -> np.ndarray:
        return self._ids[begin:end]


def class_of_records(dataset: RecordDataset, feature: str) -> np.ndarray:
    """Returns the value of a feature in each record: int64 or bytes, `[records]`.

    A damaged record gets the class of a sound one: it is skipped, or an error, when it is read.

    Raises:
        ValueError: If the feature does not exist or is not a single integer or string.
    """
    schema = dataset.manifest.schema
    if feature not in schema or schema[feature].kind not in ("int64", "string"):
        fit = [n for n, f in schema.items() if f.kind in ("int64", "string") and f.shape == ()]
        raise ValueError(
            f"`balance` must be a feature of one integer or string, one of {fit}. "
            f"Received: {feature!r}."
        )
    parse = parser(schema, [feature])
    reader = dataset.reader(_ROWS)
    parts = []
    for begin in range(0, dataset.records, _ROWS):
        ids = np.arange(begin, min(begin + _ROWS, dataset.records))
        records, bad = reader.read(ids)
        spare = next(r for i, r in enumerate(records) if i not in bad)
        for row in bad:
            records[row] = spare
        parts.append(parse(tf.constant(records))[feature].numpy())
    return np.concatenate(parts)
