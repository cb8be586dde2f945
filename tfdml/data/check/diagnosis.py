"""Diagnosis of how fast a data set is read: each stage timed alone, then the whole pipeline."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf

from tfdml.data.format import storage
from tfdml.data.format.schema import IMAGE
from tfdml.data.read.dataset import RecordDataset, Shuffling
from tfdml.data.read.fetching import Spans
from tfdml.data.read.parsing import ImageDecoding, decoder, parser
from tfdml.data.read.read_tfrecords import read_tfrecords

SMALL_SHARD, LARGE_SHARD = 10 << 20, 1 << 30
# Size to which images of unequal size are resized, and number of images whose sizes are compared.
DEFAULT_SIZE, _COMPARED = (224, 224), 64
# Number of starts of an epoch, of which the fastest counts: others may be held up by the machine.
_STARTS = 3


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of reading, timed alone.

    Attributes:
        name: Name of the stage.
        rate: Records per second.
        detail: Other measurements, in words.
        fix: Remedy if this is the slowest stage.
    """

    name: str
    rate: float
    detail: str
    fix: str


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Result of `diagnose`.

    Attributes:
        stages: Stages, in the order of the work.
        pipeline: Records per second of the whole pipeline, with all stages at once.
        advice: Suggested changes to the files, in words.
    """

    stages: list[Stage]
    pipeline: float
    advice: list[str]

    @property
    def slowest(self) -> Stage:
        """The stage that limits the pipeline."""
        return min(self.stages, key=lambda stage: stage.rate)


def diagnose(
    path: str,
    split: str | None = None,
    batch_size: int = 256,
    image_size: tuple[int, int] | None = None,
    seconds: float = 2.0,
) -> Diagnosis:
    """Times the stages of reading a data set on this machine, for one process.

    Args:
        path: Path of the manifest, or of its directory.
        split: Name of the split; optional if there is only one.
        batch_size: Number of records in a batch.
        image_size: Height and width to which images are resized. By default they keep the size of
            their files if that is the same for all, and are resized to 224 x 224 otherwise.
        seconds: Approximate time for each stage. A smaller data set is read several times.

    Raises:
        ValueError: If the data set does not exist, has no records, or is damaged.
    """
    dataset = RecordDataset(str(path), split)
    if not dataset.records:
        raise ValueError(f"`path` must be a data set with records. Received: {path!r}, of 0.")
    schema = dataset.manifest.schema
    pictures = [name for name, feature in schema.items() if feature.kind == IMAGE]
    if pictures and image_size is None and not _same_sizes(dataset, pictures):
        image_size = DEFAULT_SIZE
    images = ImageDecoding(image_size)
    stages = [_disk(dataset, seconds), _ordered(dataset, batch_size, seconds)]
    batches = _in_memory(dataset, _rows_at_once(dataset, batch_size), seconds)
    others = [name for name in schema if name not in pictures]
    if others:
        rate = _parsed(dataset, others, images, batches, seconds)
        fix = "Ask for fewer `features`, or store arrays as they are used (raw, not lists)."
        stages.append(Stage("parse", rate, f"{len(others)} features", fix))
    if pictures:
        rate = _parsed(dataset, pictures, images, batches, seconds)
        fix = "Store smaller images: `tfdml records convert --resize`; or give it more cores."
        size = f"resized to {image_size[0]}x{image_size[1]}" if image_size else "as they are"
        stages.append(Stage("decode images", rate, f"{len(pictures)} a record, {size}", fix))
    pipeline = read_tfrecords(str(path), batch_size, split, image_size=image_size)
    stages.append(_start(dataset, pipeline))
    whole = _rate(lambda: map(_rows, pipeline), seconds)
    return Diagnosis(stages, whole, _advice(dataset))


def _start(dataset: RecordDataset, pipeline: tf.data.Dataset) -> Stage:
    """Times the start of an epoch, until its first batch; for few records it takes longest."""
    # The first time, functions are traced.
    next(iter(pipeline))
    seconds = min(_seconds_to_first_batch(pipeline) for _ in range(_STARTS))
    fix = "The data set is small: keep it in memory as arrays, or measure a larger one."
    detail = f"{seconds:.2f} s to the first batch, once per epoch"
    return Stage("start an epoch", dataset.records / seconds, detail, fix)


def _seconds_to_first_batch(pipeline: tf.data.Dataset) -> float:
    began = time.perf_counter()
    next(iter(pipeline))
    return time.perf_counter() - began


def _rows(batch: object) -> int:
    return len(tf.nest.flatten(batch)[0])


def _same_sizes(dataset: RecordDataset, pictures: list[str]) -> bool:
    """Returns whether some images, spread over the data set, have one size for each feature."""
    ids = np.unique(np.linspace(0, dataset.records - 1, _COMPARED).astype(np.int64))
    found, bad = dataset.reader(len(ids)).read(ids)
    records = [record for row, record in enumerate(found) if row not in bad]
    parsed = parser(dataset.manifest.schema, pictures)(tf.constant(records, tf.string))
    for name in pictures:
        files = parsed[name].numpy()
        sizes = {tuple(tf.io.decode_image(f, expand_animations=False).shape[:2]) for f in files}
        if len(sizes) > 1:
            return False
    return True


def _rate(make_pass: Callable[[], Iterable[int]], seconds: float) -> float:
    """Returns the records per second of steps, in as many passes as fit the time.

    The first step is not counted: threads start, and functions are traced.

    Args:
        make_pass: Function that returns the steps of one pass: their numbers of records.
        seconds: Approximate time.
    """
    records, began = 0, None
    for count in itertools.chain.from_iterable(make_pass() for _ in itertools.count()):
        now = time.perf_counter()
        if began is None:
            began = now
            continue
        records += count
        if now - began > seconds:
            break
    return records / (now - began)


def _rows_at_once(dataset: RecordDataset, batch_size: int) -> int:
    """Returns the number of rows that the pipeline fetches and parses together."""
    return Spans.for_batches(batch_size, dataset.reader(1).record_bytes).batches * batch_size


def _disk(dataset: RecordDataset, seconds: float) -> Stage:
    """Times reading the shards' bytes, in the order of the files."""

    def blocks() -> Iterator[int]:
        for path, found in zip(dataset.paths, dataset.indices, strict=True):
            lengths = zip(found.block_offsets, found.block_bytes, found.block_records, strict=True)
            for offset, size, records in lengths:
                storage.read_range(path, int(offset), int(size))
                yield int(records)

    rate = _rate(blocks, seconds)
    speed = rate * sum(int(i.block_bytes.sum()) for i in dataset.indices) / dataset.records / 1e6
    fix = "Copy the shards to a disk of this machine, or to memory (/dev/shm) if they fit."
    return Stage("read from disk", rate, f"{speed:,.0f} MB/s; cached files are faster", fix)


def _ordered(dataset: RecordDataset, batch_size: int, seconds: float) -> Stage:
    """Times finding, checking and extracting records, in the order of an epoch."""
    window = dataset.default_window()
    reader = dataset.reader(window)
    order = dataset.order(Shuffling(0, window), 0)

    def batches() -> Iterator[int]:
        rows = _rows_at_once(dataset, batch_size)
        for begin in range(0, len(order), rows):
            ids = order.ids(begin, begin + rows)
            reader.read(ids)
            yield len(ids)

    compressed = any(path.endswith(".gz") for path in dataset.paths)
    fix = "Write fewer and larger records, which take less time each, or use more processes."
    if compressed:
        fix = "Convert without `--gzip`: decompression is part of this."
    detail = f"windows of {window:,} records" + (", gzip" if compressed else "")
    return Stage("pick records in the epoch's order", _rate(batches, seconds), detail, fix)


def _in_memory(dataset: RecordDataset, rows: int, seconds: float) -> list[tf.Tensor]:
    """Returns up to 8 batches of `rows` serialised records."""
    reader = dataset.reader(rows)
    batches, began = [], time.perf_counter()
    for begin in range(0, dataset.records, rows):
        found, bad = reader.read(np.arange(begin, min(begin + rows, dataset.records)))
        sound = [record for row, record in enumerate(found) if row not in bad]
        if sound:
            batches.append(tf.constant(sound))
        if len(batches) == 8 or time.perf_counter() - began > seconds:
            break
    if not batches:
        raise ValueError(f"{dataset.paths[0]} must hold sound records. Run `tfdml records verify`.")
    return batches


def _parsed(
    dataset: RecordDataset,
    names: list[str],
    images: ImageDecoding,
    batches: list[tf.Tensor],
    seconds: float,
) -> float:
    """Returns the records per second of parsing features, on all cores as in the pipeline."""
    parse: Callable = parser(dataset.manifest.schema, names)
    decode: Callable = decoder(dataset.manifest.schema, names, images)
    several = tf.data.Dataset.range(1 << 30).map(
        tf.autograph.experimental.do_not_convert(
            lambda i: tf.switch_case(
                tf.cast(i % len(batches), tf.int32), [lambda b=b: b for b in batches]
            )
        )
    )

    @tf.autograph.experimental.do_not_convert
    def parsed(records):
        seeds = tf.zeros([tf.shape(records)[0], 2], tf.int64)
        with tf.control_dependencies(
            tf.nest.flatten(decode(parse(records), seeds), expand_composites=True)
        ):
            return tf.shape(records)[0]

    counts = several.map(parsed, num_parallel_calls=tf.data.AUTOTUNE)
    return _rate(lambda: map(int, counts), seconds)


def _advice(dataset: RecordDataset) -> list[str]:
    """Returns advice that follows from the sizes of the shards."""
    sizes = np.array([shard.bytes for shard in dataset.shards])
    advice = []
    if len(sizes) > 1 and np.median(sizes) < SMALL_SHARD:
        advice.append(
            f"{len(sizes)} shards of {np.median(sizes) / 1e6:.1f} MB: on remote storage fewer and "
            f"larger ones (100 to 200 MB) are read faster."
        )
    if sizes.max() > LARGE_SHARD:
        advice.append(
            f"The largest shard has {sizes.max() / 1e9:.1f} GB: shards of 100 to 200 MB mix better."
        )
    if len(sizes) > 1 and sizes.max() > 2 * np.median(sizes):
        advice.append(
            f"Shards are uneven, {sizes.min() / 1e6:.1f} to {sizes.max() / 1e6:.1f} MB: that does "
            f"no harm here, because records are assigned to ranks by number; other readers wait "
            f"for the longest one."
        )
    return advice
