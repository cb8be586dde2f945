"""`write_tfrecords`: records of a Python iterable, written as they come."""

import contextlib
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import tfdml
from tfdml.data import manifest as manifests
from tfdml.data import storage
from tfdml.data.inference import infer
from tfdml.data.manifest import SUFFIX, Manifest, Shard
from tfdml.data.schema import Schema
from tfdml.data.values import encoder
from tfdml.data.writer import open_shard, shard_name

SHARD_BYTES = 150 << 20
SAMPLED_RECORDS = 1000


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
) -> Manifest:
    """Writes records that Python makes: sharded, indexed, and with a manifest.

    Records are dealt to the shards in turn, so nothing is held in memory; a split is added to the
    data set if it is there already. Use `tfdml records convert` for files: it is parallel.

    Args:
        records: Dicts of values: numbers, strings, bytes, NumPy arrays, lists.
        directory: Where to write; made if need be.
        name: The data set's name, with which its files' names begin.
        split: The split's name.
        schema: What the records hold: a `Schema`, or a dict such as `{"label": "int64"}`; found
            from the first 1,000 records by default.
        shards: The number of shards; a shard of 100 to 200 MB is a good one.
        compressed: Whether to compress by gzip.
        allow_nonfinite: Whether NaN and infinity are values.

    Returns:
        The manifest.

    Raises:
        ValueError: If a record does not fit the schema; it names the record's number and the
            feature. Nothing appears then.
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
    encode = encoder(schema, allow_nonfinite)
    names = [shard_name(name, split, i, shards, compressed) for i in range(shards)]
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(open_shard(directory, n)) for n in names]
        number = 0
        for source in (sample, records):
            for record in source:
                try:
                    opened[number % shards].writer.write(encode(record))
                except ValueError as error:
                    raise ValueError(f"Record {number}: {error}") from error
                number += 1
        if number < shards:
            raise ValueError(
                f"`shards` must be at most the number of records. Received: shards={shards}, "
                f"{number} records."
            )
    written: list[Shard] = [o.shard for o in opened]
    counts = {k: manifest.counts.get(k, 0) + number for k in ("in", "written")}
    result = Manifest(
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


def _json_of(schema: Any) -> Any:
    return schema.to_json() if isinstance(schema, Schema) else schema


def _manifest(directory: str, name: str, split: str) -> Manifest:
    """Returns the manifest that is there, or an empty one.

    Raises:
        ValueError: If the split is there already.
    """
    path = storage.join(directory, name + SUFFIX)
    if not storage.exists(path):
        return Manifest(directory, name, Schema(), {})
    found = manifests.load(path)
    if split in found.splits:
        raise ValueError(
            f"`split` must be new. Received: split={split!r}, which {path} has already. Choose "
            f"another directory or name."
        )
    return found
