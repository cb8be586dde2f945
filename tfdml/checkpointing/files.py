"""What a checkpoint does to the disk: every operation goes through one object.

So a test can count them, stop at each one, let it fail, or drop what was not made durable; and a
store of objects can take the disk's place.
"""

import os
from pathlib import Path
from typing import Any


class Files:
    """This machine's file system. Of the operations that change it, `rename` alone is atomic.

    Attributes:
        renames_whole: Whether a directory gets another name at once, with all that is in it.
        look_every: Seconds until it is worth looking for a file again.
    """

    renames_whole = True
    look_every = 0.05

    def names(self, path: str) -> list[str]:
        """Returns the sorted names of what is in a directory."""
        return sorted(os.listdir(path))

    def exists(self, path: str) -> bool:
        """Returns whether there is such a file or directory."""
        return os.path.exists(path)

    def is_directory(self, path: str) -> bool:
        """Returns whether there is such a directory."""
        return os.path.isdir(path) and not os.path.islink(path)

    def read(self, path: str) -> bytes:
        """Returns all of a file."""
        return Path(path).read_bytes()

    def make_directory(self, path: str) -> None:
        """Makes a directory, with those above it, if it is not there."""
        os.makedirs(path, exist_ok=True)

    def create(self, path: str) -> Any:
        """Makes an empty file; returns what `write`, `sync` and `close` take."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, file: Any, data: memoryview) -> int:
        """Writes bytes; returns how many, which may be fewer than there are."""
        return os.write(file, data)

    def sync(self, file: Any) -> None:
        """Makes what was written outlive a power failure; the file's name it does not."""
        os.fsync(file)

    def close(self, file: Any) -> None:
        """Closes a file that was made."""
        os.close(file)

    def sync_directory(self, path: str) -> None:
        """Makes the names in a directory outlive a power failure: made, changed or removed."""
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def rename(self, source: str, target: str) -> None:
        """Gives a file or directory another name."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """Removes a file."""
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        """Removes an empty directory."""
        os.rmdir(path)


def write_all(files: Files, file: Any, data: bytes | memoryview) -> None:
    """Writes all of `data`, however few bytes go at once."""
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
    """Removes a directory and all that is in it."""
    for name in files.names(path):
        entry = os.path.join(path, name)
        if files.is_directory(entry):
            remove_tree(files, entry)
        else:
            files.unlink(entry)
    files.remove_directory(path)
