"""`write_tfrecords`: writes the records of a Python iterable as they come."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

import tfdml
from tfdml.data.format import columns as by_column
from tfdml.data.format import manifest as manifests
from tfdml.data.format import storage
from tfdml.data.format.framing import FRAME, Frames, cut, framed
from tfdml.data.format.inference import infer
from tfdml.data.format.manifest import SUFFIX, DatasetManifest, Shard
from tfdml.data.format.schema import Schema
from tfdml.data.format.shard_writer import ShardWriter, open_shard, shard_name
from tfdml.data.format.values import encoder

SHARD_BYTES = 150 << 20
SAMPLED_RECORDS = 1000
ENCODED_RECORDS, ENCODED_BYTES = 512, 4 << 20


def write_tfrecords(
    records: Iterable[Mapping[str, Any]],
    directory: str,
    *,
    name: str = "data",
    split: str = "train",
    schema: Schema | Mapping[str, Any] | None = None,
    shards: int = 1,
    compressed: bool = False,
    allow_nonfinite: bool = False,
) -> DatasetManifest:
    """Writes records that Python makes: sharded, indexed, and with a manifest.

    Records are dealt to the shards in turn, so memory does not grow with their number. The split is
    added to the data set if that exists already. Use `tfdml records convert` for files: it is
    parallel.

    Args:
        records: Dicts of values: numbers, strings, bytes, NumPy arrays, lists.
        directory: Directory to write to; created if missing.
        name: Name of the data set, with which its files' names begin.
        split: Name of the split.
        schema: Schema of the records: a `Schema`, or a dict such as `{"label": "int64"}`; inferred
            from the first 1,000 records by default.
        shards: Number of shards; 100 to 200 MB is a good size for a shard.
        compressed: Whether to compress by gzip.
        allow_nonfinite: Whether NaN and infinity are allowed.

    Returns:
        Manifest of the data set.

    Raises:
        ValueError: If a record does not fit the schema; the message has the record's number and the
            feature. No file appears then.
    """
    directory = str(directory)
    if shards < 1:
        raise ValueError(f"`shards` must be positive. Received: shards={shards}.")
    storage.make_directory(directory)
    manifest = _manifest(directory, name, split)
    records = iter(records)
    sample = [] if schema is not None else list(itertools.islice(records, SAMPLED_RECORDS))
    schema = infer(sample) if schema is None else Schema.from_json(_json_of(schema))
    if manifest.splits and manifest.schema != schema:
        raise ValueError(
            f"`schema` must be that of the data set's other splits, {manifest.schema.to_json()}. "
            f"Received: {schema.to_json()}."
        )
    names = [shard_name(name, split, i, shards, compressed) for i in range(shards)]
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(open_shard(directory, n)) for n in names]
        number = 0
        for frames in _framed(schema, itertools.chain(sample, records), allow_nonfinite):
            _deal(frames, number, [o.writer for o in opened])
            number += len(frames.lengths)
        if number < shards:
            raise ValueError(
                f"`shards` must be at most the number of records. Received: shards={shards}, "
                f"{number} records."
            )
    written: list[Shard] = [o.shard for o in opened]
    counts = {k: manifest.counts.get(k, 0) + number for k in ("in", "written")}
    result = DatasetManifest(
        directory,
        name,
        schema,
        {**manifest.splits, split: written},
        {"kind": "python"},
        tfdml.__version__,
        {**counts, "rejected": manifest.counts.get("rejected", 0)},
    )
    result.save()
    return result


def _framed(
    schema: Schema, records: Iterable[Mapping[str, Any]], allow_nonfinite: bool
) -> Iterator[Frames]:
    """Yields the records, hundreds at once: encoded by columns or, if that fails, one by one."""
    encode, number, count = encoder(schema, allow_nonfinite), 0, 1
    records = iter(records)
    while part := list(itertools.islice(records, count)):
        columns = _columns(schema, part)
        frames = columns and by_column.encode(schema, columns, allow_nonfinite)
        if not frames:
            encoded = []
            for i, record in enumerate(part, number):
                try:
                    encoded.append(encode(record))
                except ValueError as error:
                    raise ValueError(f"Record {i}: {error}") from error
            frames = framed(encoded)
        yield frames
        number += len(part)
        # Fewer of large records: all of them are in memory.
        count = max(1, min(ENCODED_RECORDS, ENCODED_BYTES * len(part) // len(frames.data)))


def _columns(schema: Schema, records: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns the values of each feature; None if records differ in its type."""
    if any(record.keys() != schema.keys() for record in records):
        return None
    columns: dict[str, Any] = {}
    for name in schema:
        values = [record[name] for record in records]
        kind = type(values[0])
        if any(type(value) is not kind for value in values):
            return None
        if kind is np.ndarray:
            if len({(value.dtype, value.shape) for value in values}) > 1 or not values[0].ndim:
                return None
            columns[name] = np.stack(values)
        elif kind in (str, bytes):
            columns[name] = values
        elif kind in (int, float) or issubclass(kind, np.number):
            columns[name] = np.array(values)
        else:
            return None
    return columns


def _deal(frames: Frames, number: int, writers: list[ShardWriter]) -> None:
    """Appends records to shards in turn; `number` is that of the first record."""
    parts = cut(frames.data, frames.lengths + FRAME)
    for i, writer in enumerate(writers):
        own = slice((i - number) % len(writers), None, len(writers))
        writer.write(Frames(b"".join(parts[own]), frames.lengths[own]))


def _json_of(schema: Any) -> Any:
    return schema.to_json() if isinstance(schema, Schema) else schema


def _manifest(directory: str, name: str, split: str) -> DatasetManifest:
    """Returns the existing manifest, or an empty one.

    Raises:
        ValueError: If the split exists already.
    """
    path = storage.join(directory, name + SUFFIX)
    if not storage.exists(path):
        return DatasetManifest(directory, name, Schema(), {})
    found = manifests.load(path)
    if split in found.splits:
        raise ValueError(
            f"`split` must be new. Received: split={split!r}, which {path} has already. Choose "
            f"another directory or name."
        )
    return found
