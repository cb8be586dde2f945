"""`read_tfrecords`: checks its arguments and makes the pipeline."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdml.data.read.class_balancing import BalancedDataset
from tfdml.data.read.dataset import SHARDS_AT_ONCE, RecordDataset, Shuffling
from tfdml.data.read.mixing import MixedDataset
from tfdml.data.read.parsing import ImageDecoding
from tfdml.data.read.pipeline import TFRecordPipeline
from tfdml.data.read.read_options import ReadOptions
from tfdml.data.read.sharding import Batches, process_replicas


def read_tfrecords(
    path: str | Sequence[str],
    batch_size: int,
    split: str | None = None,
    *,
    label: str | None = None,
    features: Sequence[str] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    window: int | None = None,
    shards_at_once: int = SHARDS_AT_ONCE,
    reshuffle: bool = True,
    bucket_by_length: bool = False,
    balance: str | None = None,
    ratios: Sequence[float] | Mapping[Any, float] | None = None,
    epoch_records: int | None = None,
    end: str = "exact",
    image_size: tuple[int, int] | None = None,
    channels: int = 3,
    crop: str = "resize",
    transform: Callable | None = None,
    augment: Callable | None = None,
    on_corrupt: str = "error",
    strategy: Any = None,
    state: dict[str, Any] | None = None,
    ledger: str | None = None,
    cache: str | None = None,
    keep_shards: bool = False,
) -> TFRecordPipeline:
    """Returns decoded, shuffled, batched and prefetched data for `model.fit`.

    ```python
    with strategy.scope():
        train = tfdml.data.read_tfrecords("data/mnist", 256, "train", label="label", seed=1)
    model.fit(train, epochs=10, callbacks=[train.callback()])
    ```

    Args:
        path: Path of the data set's manifest, or of its directory; or several paths, to mix them.
        batch_size: Number of rows in a *global* batch, shared by all workers.
        split: Name of the split; optional if there is only one.
        label: Feature that is the target: batches are then `(x, y)`.
        features: Features that are `x`; all others by default. A single one is a tensor, several
            are a dict.
        shuffle: Whether to shuffle epochs; else records come in the order of the files.
        seed: Seed of the order, used with the number of the epoch.
        window: Number of records that are permuted together, from `shards_at_once` shards whose
            blocks are permuted; by default as many as 64 MB hold, at least 1,024. It bounds the
            memory.
        shards_at_once: Number of shards from which a window's blocks are drawn.
        reshuffle: Whether each epoch has its own order.
        bucket_by_length: Whether batches hold records of similar length in bytes, for text.
        balance: Feature that holds the class, an integer or a string: classes are then drawn
            equally often, or by `ratios`, and those of few records more than once an epoch. All
            workers read the classes of all records once, at the start.
        ratios: Shares of an epoch, with any sum: of the data sets, in the order of `path` (by
            their records if it is None), or of the classes, as a dict.
        epoch_records: Number of records drawn in an epoch of mixed or balanced data; by default
            the number of records there are. The next epoch continues where this one ended.
        end: Handling of records that do not fill the last batch: "exact" makes a smaller one,
            "drop" leaves them out, "pad" fills it with rows of weight 0, as `(x, y, weights)`.
        image_size: Height and width to which images are resized; see `crop`.
        channels: Number of channels of images, 1 or 3.
        crop: "resize", "center" or "random" (Inception's); a part of a JPEG is cropped while it
            is decoded.
        transform: Function `transform(x, y)` of a whole batch, such as a Keras preprocessing layer
            without randomness.
        augment: Function `augment(x, y, seeds)` of a whole batch. `seeds` has shape `[rows, 2]` and
            is derived from the seed, the epoch and the sample, for `tf.image.stateless_random_*`:
            so augmentation too is the same after a resume and for any number of workers.
        on_corrupt: "error" raises at a damaged record, with its file, number and offset; "skip"
            gives the row of that record weight 0, counts it in `skipped`, and warns. Batches then
            have weights.
        strategy: Strategy whose processes share the batches; that of the scope by default.
        state: Result of `TFRecordPipeline.state`: the first pass resumes from it, with any number
            of workers. `fit` then needs `initial_epoch=state["epoch"]`.
        ledger: Directory in which each worker notes the samples it reads and uses, for
            `tfdml records verify --ledger`.
        cache: "memory" caches all that was read in memory; a directory caches it there, for shards
            that are far away. Copies are checked like data read from the shards.
        keep_shards: Whether each worker reads about the same shards in every epoch, so that a
            `cache` on its disk holds only its part. Shards are then drawn from `shards_at_once`
            runs of neighbours, which should be a multiple of the number of workers.

    Raises:
        ValueError: If an argument is wrong, or `state` is of other data or another order.
    """
    if on_corrupt not in ("error", "skip"):
        raise ValueError(
            f'`on_corrupt` must be "error" or "skip". Received: on_corrupt={on_corrupt!r}.'
        )
    for name, value in (("window", window), ("shards_at_once", shards_at_once)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be positive. Received: {name}={value}.")
    dataset = _dataset(path, split, balance, ratios, epoch_records)
    if not isinstance(dataset, RecordDataset) and (bucket_by_length or ledger):
        raise ValueError(
            "`bucket_by_length` and `ledger` must be left out where data are mixed or balanced: "
            "records are drawn more than once, or not at all. Received: "
            f"bucket_by_length={bucket_by_length}, ledger={ledger!r}."
        )
    batches = Batches(batch_size, end)
    names = _names(dataset, features, label)
    if isinstance(dataset, MixedDataset):
        dataset.check_features(names)
    shuffling = Shuffling(
        int(seed) if shuffle else None,
        window or dataset.default_window(),
        shards_at_once,
        reshuffle,
        batch_size if bucket_by_length else 0,
        keep_shards,
    )
    options = ReadOptions(
        features=names,
        label=label,
        batches=batches,
        shuffling=shuffling,
        images=ImageDecoding(image_size, channels, crop),
        transform=transform,
        augment=augment,
        on_corrupt=on_corrupt,
        ledger=ledger,
        cache=str(cache) if cache is not None else None,
    )
    present = strategy or tf.distribute.get_strategy()
    worker = process_replicas(present)
    return TFRecordPipeline(
        dataset, options, worker, state, lambda: process_replicas(present).weights
    )


def _dataset(
    path: str | Sequence[str],
    split: str | None,
    balance: str | None,
    ratios: Sequence[float] | Mapping[Any, float] | None,
    length: int | None,
) -> RecordDataset | MixedDataset | BalancedDataset:
    """Returns the data set to draw from."""
    several = not isinstance(path, str | os.PathLike)
    if length is not None and length < 1:
        raise ValueError(f"`epoch_records` must be positive. Received: epoch_records={length}.")
    if several and balance:
        raise ValueError(
            f"`balance` must be of one data set. Received: balance={balance!r} with several in "
            f"`path`. Mix them, or balance one."
        )
    if balance is not None:
        if ratios is not None and not isinstance(ratios, Mapping):
            raise ValueError(
                f"`ratios` must be a dict, of classes to their parts, with `balance`. Received: "
                f"{ratios!r}."
            )
        return BalancedDataset(RecordDataset(str(path), split), balance, ratios, length)
    if several:
        if not path or isinstance(ratios, Mapping):
            raise ValueError(
                f"`path` must be one or more data sets, and `ratios` a number for each. Received: "
                f"path={path!r}, ratios={ratios!r}."
            )
        return MixedDataset([RecordDataset(str(p), split) for p in path], ratios, length)
    if ratios is not None or length is not None:
        raise ValueError(
            f"`ratios` and `epoch_records` must be left out for one data set without `balance`. "
            f"Received: ratios={ratios!r}, epoch_records={length!r}."
        )
    return RecordDataset(str(path), split)


def _names(
    dataset: RecordDataset | MixedDataset | BalancedDataset,
    features: Sequence[str] | None,
    label: str | None,
) -> list[str]:
    schema = dataset.manifest.schema
    names = list(features) if features is not None else [n for n in sorted(schema) if n != label]
    wanted = [*names, *([label] if label else [])]
    unknown = [name for name in wanted if name not in schema]
    if unknown or not names:
        raise ValueError(
            f"`features` and `label` must be of the schema, {sorted(schema)}. Received: {wanted}."
        )
    return list(dict.fromkeys(wanted))
