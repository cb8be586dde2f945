"""Verification of a data set against its manifest, to the last bit, and repair."""

import dataclasses
import gzip
import hashlib
import io
import zlib
from collections.abc import Callable

from tfdml.data.format import index, storage
from tfdml.data.format import manifest as manifests
from tfdml.data.format.framing import BadRecord, framed, scan, unframe
from tfdml.data.format.index import SUFFIX, ShardIndex
from tfdml.data.format.manifest import DatasetManifest, Shard
from tfdml.data.format.shard_writer import write_shard


@dataclasses.dataclass(frozen=True)
class Problem:
    """A deviation from the manifest.

    Attributes:
        file: Path of the file.
        what: Description of the problem.
        record: Number of the record in its shard; -1 if the problem is not that of one record.
    """

    file: str
    what: str
    record: int = -1

    def __str__(self) -> str:
        position = f", record {self.record}" if self.record >= 0 else ""
        return f"{self.file}{position}: {self.what}"


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of `verify`.

    Attributes:
        problems: Problems that were found.
        records: Number of sound records.
        dropped: Number of records that `repair` has dropped.
    """

    problems: list[Problem]
    records: int
    dropped: int = 0

    @property
    def sound(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


def verify(
    path: str, repair: bool = False, progress: Callable[[Shard], None] | None = None
) -> Report:
    """Reads a whole data set and compares it with its manifest.

    For every shard it checks the bytes and their digest, the index and its digest, the checksum of
    every record, and the number of records. So a truncated file is noticed wherever it was cut,
    even between two records.

    Args:
        path: Path of the manifest, or of its directory.
        repair: Whether to rewrite damaged shards with the records that are sound, and the manifest
            with them. Missing shards and indices are restored as far as possible.
        progress: Function called with each shard that has been checked.

    Returns:
        Report of the problems before any repair.

    Raises:
        ValueError: If there is no manifest, or it cannot be read.
    """
    manifest = manifests.load(path)
    problems: list[Problem] = []
    sound = dropped = 0
    splits: dict[str, list[Shard]] = {}
    for split, shards in manifest.splits.items():
        splits[split] = []
        for shard in shards:
            found, records = _check(manifest, shard)
            problems += found
            sound += len(records)
            if found and repair:
                dropped += max(0, shard.records - len(records))
                shard = write_shard(manifest.directory, shard.file, [framed(records)])
            splits[split].append(shard)
            if progress:
                progress(shard)
    if repair and problems:
        counts = {**manifest.counts, "dropped": manifest.counts.get("dropped", 0) + dropped}
        dataclasses.replace(manifest, splits=splits, counts=counts).save()
    return Report(problems, sound, dropped)


def _check(manifest: DatasetManifest, shard: Shard) -> tuple[list[Problem], list[bytes]]:
    """Returns the problems of a shard, and its sound records."""
    path = manifest.path_of(shard)
    try:
        data = storage.read_bytes(path)
    except FileNotFoundError:
        return [Problem(path, f"is missing, with its {shard.records} records")], []
    problems = []
    if len(data) != shard.bytes:
        problems.append(Problem(path, f"has {len(data)} bytes instead of {shard.bytes}"))
    if hashlib.sha256(data).hexdigest() != shard.sha256:
        problems.append(Problem(path, "its digest differs from the manifest's"))
    found = _index(path, shard, problems)
    bad, records = _records(path, data, found)
    problems += bad
    if not bad and len(records) != shard.records:
        difference = f"has {len(records)} records instead of {shard.records}"
        problems.append(Problem(path, difference))
    return problems, records


def _index(path: str, shard: Shard, problems: list[Problem]) -> ShardIndex | None:
    """Returns a shard's index, if its digest is that of the manifest."""
    try:
        data = storage.read_bytes(path + SUFFIX)
    except FileNotFoundError:
        problems.append(Problem(path + SUFFIX, "is missing"))
        return None
    if hashlib.sha256(data).hexdigest() == shard.index_sha256:
        return index.from_bytes(data, path + SUFFIX)
    problems.append(Problem(path + SUFFIX, "its digest differs from the manifest's"))
    return None


def _records(path: str, data: bytes, found: ShardIndex | None) -> tuple[list[Problem], list[bytes]]:
    """Returns a shard's problems and sound records; with an index, finds each record by itself."""
    if found is None:
        return _scanned(path, data)
    problems, records = [], []
    for block, (offset, stored) in enumerate(
        zip(found.block_offsets.tolist(), found.block_bytes.tolist(), strict=True)
    ):
        raw = data[offset : offset + stored]
        if path.endswith(".gz"):
            raw = _decompressed(raw)
        first = int(found.first_records[block])
        begins, lengths = found.frames_of(block)
        for slot, (begin, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
            try:
                records.append(unframe(raw, begin, length))
            except BadRecord as error:
                problems.append(Problem(path, error.reason, first + slot))
    return problems, records


def _decompressed(data: bytes) -> bytes:
    """Returns the data of a gzip member, up to where it is damaged."""
    stream, parts = zlib.decompressobj(31), []
    try:
        for begin in range(0, len(data), 4096):
            parts.append(stream.decompress(data[begin : begin + 4096]))
    except zlib.error:
        pass
    return b"".join(parts)


def _scanned(path: str, data: bytes) -> tuple[list[Problem], list[bytes]]:
    """Reads records without an index: records after a damaged length cannot be found."""
    stream = io.BytesIO(data)
    if path.endswith(".gz"):
        stream = io.BufferedReader(gzip.GzipFile(fileobj=stream))
    records: list[bytes] = []
    try:
        for frame in scan(stream, path):
            records.append(frame.record)
    except (BadRecord, OSError, EOFError, zlib.error) as error:
        return [Problem(path, str(error), len(records))], records
    return [], records
