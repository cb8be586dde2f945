"""File layers that stop, fail or lose data: real files, and a model of a power failure."""

import dataclasses
import itertools
import os
from pathlib import Path

from tfdml.checkpointing.files import Files


class Crash(BaseException):
    """End of the process: nothing may catch it and continue."""


@dataclasses.dataclass
class File:
    """File: the written bytes, and the bytes that are durable on the disk."""

    written: bytes = b""
    durable: bytes = b""


@dataclasses.dataclass
class Directory:
    """Directory: its visible names, and the names that are durable on the disk."""

    names: dict = dataclasses.field(default_factory=dict)
    durable: dict = dataclasses.field(default_factory=dict)


class CrashingFiles(Files):
    """File layer that stops before its `stop_at`-th operation; a write may be half done by then.

    Args:
        root: Directory whose present content is durable.
        stop_at: Number of the operation, from 0; None to never stop.
        half: Whether to do half of the operation, if it is a write.
    """

    def __init__(self, root: Path, stop_at: int | None = None, half: bool = False):
        self.operations: list[str] = []
        self._root, self._stop_at, self._half = str(root), stop_at, half
        self._open: dict[int, File] = {}
        self._tree = _read(Path(root))

    def _count(self, operation: str) -> bool:
        """Returns whether the process ends in the middle of this operation."""
        stops = len(self.operations) == self._stop_at
        self.operations.append(operation)
        if stops and not (self._half and operation == "write"):
            raise Crash
        return stops

    def make_directory(self, path):
        self._count("make_directory")
        super().make_directory(path)
        here = self._tree
        for part in self._parts(path):
            here = here.names.setdefault(part, Directory())

    def create(self, path):
        self._count("create")
        descriptor = super().create(path)
        self._open[descriptor] = File()
        self._parent(path).names[os.path.basename(path)] = self._open[descriptor]
        return descriptor

    def write(self, file, data):
        ends = self._count("write")
        written = super().write(file, data[: len(data) // 2] if ends else data)
        self._open[file].written += bytes(data[:written])
        if ends:
            raise Crash
        return written

    def sync(self, file):
        self._count("sync")
        self._open[file].durable = self._open[file].written

    def sync_directory(self, path):
        self._count("sync_directory")
        here = self._node(path)
        here.durable = dict(here.names)

    def rename(self, source, target):
        self._count("rename")
        super().rename(source, target)
        moved = self._parent(source).names.pop(os.path.basename(source))
        self._parent(target).names[os.path.basename(target)] = moved

    def unlink(self, path):
        self._count("unlink")
        super().unlink(path)
        del self._parent(path).names[os.path.basename(path)]

    def remove_directory(self, path):
        self._count("remove_directory")
        super().remove_directory(path)
        del self._parent(path).names[os.path.basename(path)]

    def survivors(self, target: Path):
        """Yields directories that a power failure at this moment could leave, created in `target`.

        Data, names in the root and names elsewhere reach the disk in any order: each of the three
        is either as last seen or as last made durable.
        """
        for number, (data, root, inner) in enumerate(itertools.product([False, True], repeat=3)):
            left = target / str(number)
            _write(left, self._tree, data, root, inner)
            yield left

    def _parts(self, path) -> list[str]:
        relative = os.path.relpath(path, self._root)
        return [] if relative == "." else relative.split(os.sep)

    def _node(self, path):
        here = self._tree
        for part in self._parts(path):
            here = here.names[part]
        return here

    def _parent(self, path):
        return self._node(os.path.dirname(path))


def _read(path: Path):
    if path.is_file():
        return File(path.read_bytes(), path.read_bytes())
    names = {p.name: _read(p) for p in path.iterdir()} if path.exists() else {}
    return Directory(names, dict(names))


def _write(path: Path, node, data: bool, names: bool, inner: bool) -> None:
    if isinstance(node, File):
        path.write_bytes(node.written if data else node.durable)
        return
    path.mkdir(parents=True)
    for name, child in (node.names if names else node.durable).items():
        _write(path / name, child, data, inner, inner)


class FailingFiles(Files):
    """File layer that raises an `OSError` in one operation, or in all operations from there on.

    Args:
        fail_at: Number of the operation, from 0.
        error: Error number.
        lasting: Whether all later operations that need space fail too.
    """

    def __init__(self, fail_at: int, error: int, lasting: bool = False):
        self.count, self._fail_at, self._error, self._lasting = 0, fail_at, error, lasting

    def _check(self, needs_space: bool):
        number, self.count = self.count, self.count + 1
        if number == self._fail_at or (self._lasting and needs_space and number > self._fail_at):
            raise OSError(self._error, os.strerror(self._error))


for _name in ("make_directory", "create", "write", "sync", "sync_directory", "rename", "unlink"):

    def _checked(self, *args, _name=_name):
        self._check(_name in ("make_directory", "create", "write"))
        return getattr(Files, _name)(self, *args)

    setattr(FailingFiles, _name, _checked)
