"""File operations of checkpoints, all of which go through one object.

So a test can count them, stop at each one, let it fail, or drop data that was not made durable; and
a store of objects can replace the disk.
"""

import os
from typing import Any


class Files:
    """This machine's file system. Of the operations that change it, only `rename` is atomic.

    Attributes:
        renames_whole: Whether a directory is renamed at once, with all its content.
        look_every: Seconds to wait before looking for a file again.
    """

    renames_whole = True
    look_every = 0.05

    def names(self, path: str) -> list[str]:
        """Returns the sorted names in a directory."""
        return sorted(os.listdir(path))

    def exists(self, path: str) -> bool:
        """Returns whether a file or directory exists."""
        return os.path.exists(path)

    def is_directory(self, path: str) -> bool:
        """Returns whether a path is a directory, and not a link to one."""
        return os.path.isdir(path) and not os.path.islink(path)

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """Returns the content of a file, or its bytes from `begin` to `end`."""
        with open(path, "rb") as file:
            file.seek(begin)
            return file.read(-1 if end is None else end - begin)

    def make_directory(self, path: str) -> None:
        """Creates a directory and its parents, if missing."""
        os.makedirs(path, exist_ok=True)

    def create(self, path: str) -> Any:
        """Creates an empty file; returns a handle for `write`, `sync` and `close`."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, file: Any, data: memoryview) -> int:
        """Writes bytes; returns how many were written, which may be fewer than given."""
        return os.write(file, data)

    def sync(self, file: Any) -> None:
        """Makes a file's content survive a power failure, but not its name."""
        os.fsync(file)

    def close(self, file: Any) -> None:
        """Closes a file that `create` opened."""
        os.close(file)

    def sync_directory(self, path: str) -> None:
        """Makes created, changed and removed names in a directory survive a power failure."""
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def rename(self, source: str, target: str) -> None:
        """Renames a file or directory."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """Removes a file."""
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        """Removes an empty directory."""
        os.rmdir(path)


def write_all(files: Files, file: Any, data: bytes | memoryview) -> None:
    """Writes all of `data`, even if each `write` takes only a part."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[files.write(file, rest) :]


def write_file(files: Files, path: str, data: bytes) -> None:
    """Writes a small file, and makes its content durable."""
    file = files.create(path)
    try:
        write_all(files, file, data)
        files.sync(file)
    finally:
        files.close(file)


def remove_tree(files: Files, path: str) -> None:
    """Removes a directory and its content."""
    for name in files.names(path):
        entry = os.path.join(path, name)
        if files.is_directory(entry):
            remove_tree(files, entry)
        else:
            files.unlink(entry)
    files.remove_directory(path)
