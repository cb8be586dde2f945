"""Inspection of a data set without TensorFlow: sample records, balance of classes, images."""

import collections
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.data import optional
from tfdml.data.format.manifest import DatasetManifest
from tfdml.data.format.schema import IMAGE, INT64, RAW
from tfdml.data.sources.tfrecords import TfrecordSource

_COLUMNS, _ROWS, _TILE = 10, 6, 96


def _rows(manifest: DatasetManifest, split: str) -> Iterator[dict[str, Any]]:
    for shard in manifest.shards(split):
        if not shard.records:
            continue
        source = TfrecordSource([manifest.path_of(shard)], manifest.schema)
        for chunk in source.chunks():
            for row in source.rows(chunk.key):
                if row.values is None:
                    raise ValueError(f"{row.where}: {row.reason}. Run `tfdml records verify`.")
                yield row.values


def examples(manifest: DatasetManifest, split: str, count: int) -> list[dict[str, Any]]:
    """Returns the first `count` records of a split.

    Raises:
        ValueError: If a record is damaged.
    """
    return list(itertools.islice(_rows(manifest, split), count))


def shown(value: Any) -> str:
    """Returns a value as one line of text."""
    if isinstance(value, bytes):
        if value[:4] in (b"\xff\xd8\xff\xe0", b"\xff\xd8\xff\xe1", b"\x89PNG") or b"\0" in value:
            return f"{len(value)} bytes"
        return repr(value.decode(errors="backslashreplace"))[:200]
    if isinstance(value, np.ndarray) and value.size > 8:
        head = np.array2string(value.ravel()[:8], separator=", ")[1:-1]
        return f"{value.dtype} {list(value.shape)}: {head}, ..."
    return str(value.tolist() if isinstance(value, np.ndarray | np.generic) else value)[:200]


def balance(manifest: DatasetManifest, split: str, label: str | None = None) -> dict[str, int]:
    """Returns the number of records of each class.

    Args:
        manifest: Manifest of the data set.
        split: Name of the split.
        label: Feature that holds the class; by default the first one with class names, else
            `label` or `y`.

    Raises:
        ValueError: If the feature does not exist or is not a single integer.
    """
    schema = manifest.schema
    if label is None:
        named = [name for name in sorted(schema) if schema[name].classes]
        label = next(iter([*named, *(n for n in ("label", "y") if n in schema)]), None)
        if label is None or schema[label].kind != INT64 or schema[label].shape:
            return {}
    if label not in schema or schema[label].kind != INT64 or schema[label].shape:
        raise ValueError(f"`label` must be a feature of one integer. Received: {label!r}.")
    counts = collections.Counter(int(row[label]) for row in _rows(manifest, split))
    classes = schema[label].classes
    return {classes[i] if classes else str(i): counts[i] for i in sorted(counts)}


def contact_sheet(manifest: DatasetManifest, split: str, path: Path) -> int:
    """Draws the first images of a split side by side; returns the number of images.

    Raises:
        MissingPackageError: If Pillow is not installed.
        ValueError: If the data set has neither images nor arrays that look like images.
    """
    pillow = optional.load("PIL.Image", "Drawing a sheet of images")
    schema = manifest.schema
    names = [n for n, f in sorted(schema.items()) if f.kind == IMAGE] + [
        n
        for n, f in sorted(schema.items())
        if f.kind == RAW and f.dtype == "uint8" and _looks_like_image(f.shape)
    ]
    if not names:
        raise ValueError(f"`sheet` must be of a data set with images. Received: {list(schema)}.")
    rows = examples(manifest, split, _COLUMNS * _ROWS)
    sheet = pillow.new("RGB", (_COLUMNS * _TILE, -(-len(rows) // _COLUMNS) * _TILE), "white")
    for i, row in enumerate(rows):
        value = row[names[0]]
        if isinstance(value, bytes):
            image = pillow.open(io.BytesIO(value))
        else:
            image = pillow.fromarray(value.squeeze(-1) if value.shape[2:] == (1,) else value)
        image = image.convert("RGB")
        image.thumbnail((_TILE - 4, _TILE - 4))
        sheet.paste(image, (i % _COLUMNS * _TILE + 2, i // _COLUMNS * _TILE + 2))
    sheet.save(path, "PNG")
    return len(rows)


def _looks_like_image(shape: tuple) -> bool:
    return len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))
