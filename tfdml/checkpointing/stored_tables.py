"""Tables in a checkpoint, of which parameter servers have written the rows that each of them had.

Rows are read when they are asked for, by any number of readers: a table may have any size.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from tfdml.checkpointing.files import Files
from tfdml.checkpointing.manifest import CheckpointManifest
from tfdml.checkpointing.names import ROWS
from tfdml.checkpointing.row_blocks import row_blocks
from tfdml.checkpointing.store import open_files
from tfdml.checkpointing.tensors import StoredTensor, stored_tensors


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """A table in a checkpoint. A slice of it is read from its files.

    Attributes:
        parts: The table's parts in the order of their rows, by the index of their first row.
    """

    parts: dict[int, StoredTensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the table."""
        first, last = list(self.parts.items())[-1]
        return (first + last.shape[0], *last.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the table."""
        return next(iter(self.parts.values())).dtype

    @property
    def nbytes(self) -> int:
        """Size of the table in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def blocks(self) -> Iterator[slice]:
        """Returns the indices of rows, block by block; see `row_blocks`."""
        return row_blocks(self.shape, self.dtype.itemsize)

    def __getitem__(self, rows: slice) -> np.ndarray:
        begin, end, _ = rows.indices(self.shape[0])
        found = [
            part.rows(max(begin - first, 0), min(end - first, part.shape[0]))
            for first, part in self.parts.items()
            if first < end and begin < first + part.shape[0]
        ]
        return np.concatenate(found) if found else np.zeros((0, *self.shape[1:]), self.dtype)


class StoredTables(Mapping[str, StoredTable]):
    """The tables of a checkpoint by name. Only the headers of its files are read.

    Args:
        files: File system to read from.
        directory: Directory of the checkpoint.
        members: File names of the servers' members.
        saved: Time of the save; it tells this checkpoint from an earlier one of the same name.
    """

    def __init__(self, files: Files, directory: str, members: list[str], saved: float):
        self._place = {"directory": directory, "members": members, "saved": saved}
        parts: dict[str, dict[int, StoredTensor]] = {}
        for member in members:
            for name, tensor in stored_tensors(files, os.path.join(directory, member))[0].items():
                table, _, first = name.rpartition(ROWS)
                parts.setdefault(table, {})[int(first)] = tensor
        self._tables = {name: StoredTable(dict(sorted(of.items()))) for name, of in parts.items()}

    @classmethod
    def of(cls, files: Files, directory: str, manifest: CheckpointManifest) -> "StoredTables":
        """Returns the tables of a checkpoint, given its directory and manifest."""
        members = [member.name for member in manifest.server_members]
        return cls(files, directory, members, manifest.saved)

    @classmethod
    def from_json(cls, text: str, say: Callable[[str], None]) -> "StoredTables":
        """Returns the tables that `to_json` describes, in another process.

        Args:
            text: The description.
            say: Function called with messages for the user.
        """
        place = json.loads(text)
        return cls(open_files(place["directory"], say), **place)

    def to_json(self) -> str:
        """Returns a description of the files, from which another process reads them."""
        return json.dumps(self._place)

    def __getitem__(self, name: str) -> StoredTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)
