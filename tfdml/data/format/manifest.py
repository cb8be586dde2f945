"""Manifest of a data set: its schema, and every shard with its counts and digests."""

import dataclasses
import json
from typing import Any

from tfdml.data.format import storage
from tfdml.data.format.schema import Schema

FORMAT, VERSION = "tfdml records", 1
SUFFIX = ".manifest.json"


@dataclasses.dataclass(frozen=True)
class Shard:
    """Entry of one file of records.

    Attributes:
        file: Name of the file, in the directory of the manifest.
        records: Number of records.
        bytes: Size of the file in bytes.
        sha256: SHA-256 digest of the file.
        index_sha256: SHA-256 digest of its index.
    """

    file: str
    records: int
    bytes: int
    sha256: str
    index_sha256: str


@dataclasses.dataclass(frozen=True)
class DatasetManifest:
    """Description of a data set.

    Attributes:
        directory: Directory of the data set's files.
        name: Name of the data set, with which its files' names begin.
        schema: Schema of the records.
        splits: Shards of each split.
        source: Origin of the records, and the options of their conversion.
        tool: Version of tfdml that wrote the data set.
        counts: Numbers of records that the input had, that were written, and that were rejected.
    """

    directory: str
    name: str
    schema: Schema
    splits: dict[str, list[Shard]]
    source: dict[str, Any] = dataclasses.field(default_factory=dict)
    tool: str = ""
    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def path(self) -> str:
        """Path of the manifest."""
        return storage.join(self.directory, self.name + SUFFIX)

    def shards(self, split: str | None = None) -> list[Shard]:
        """Returns the shards of a split; without a name, those of the only split.

        Raises:
            ValueError: If the split does not exist, or there are several and none is named.
        """
        if split is None and len(self.splits) == 1:
            (split,) = self.splits
        if split not in self.splits:
            raise ValueError(
                f"`split` must be one of {sorted(self.splits)} of {self.name}. Received: "
                f"split={split!r}."
            )
        return self.splits[split]

    def path_of(self, shard: Shard) -> str:
        """Returns the path of a shard."""
        return storage.join(self.directory, shard.file)

    def save(self) -> None:
        """Writes the manifest; the file appears whole."""
        description = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "tool": self.tool,
            "source": self.source,
            "counts": self.counts,
            "schema": self.schema.to_json(),
            "splits": {
                split: [dataclasses.asdict(shard) for shard in shards]
                for split, shards in sorted(self.splits.items())
            },
        }
        storage.write_bytes(self.path, (json.dumps(description, indent=1) + "\n").encode())


def load(path: str) -> DatasetManifest:
    """Reads a manifest.

    Args:
        path: Path of the manifest, or of a directory that holds only one.

    Raises:
        ValueError: If there is no manifest, or several, or it is not valid.
    """
    path = str(path)
    if path.endswith(SUFFIX):
        directory = path.rsplit("/", 1)[0] if "/" in path else "."
    else:
        directory = path.rstrip("/") or "/"
        found = [name for name in storage.names_in(directory) if name.endswith(SUFFIX)]
        if len(found) != 1:
            raise ValueError(
                f"`path` must be a manifest (NAME{SUFFIX}) or a directory with one. Received: "
                f"{path!r}, which has {found or 'none'}."
            )
        path = storage.join(directory, found[0])
    try:
        description = json.loads(storage.read_bytes(path))
        if description["format"] != FORMAT or description["version"] > VERSION:
            raise ValueError(f"format {description['format']!r}, version {description['version']}")
        splits = {
            split: [Shard(**shard) for shard in shards]
            for split, shards in description["splits"].items()
        }
        return DatasetManifest(
            directory,
            description["name"],
            Schema.from_json(description["schema"]),
            splits,
            description["source"],
            description["tool"],
            description["counts"],
        )
    except FileNotFoundError as error:
        raise ValueError(f"`path` must exist. Received: {path!r}.") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"`path` must be a manifest of version {VERSION} or before. Received: {path!r}; "
            f"{error!r}."
        ) from error
