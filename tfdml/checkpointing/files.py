"""What a checkpoint does to the disk: every operation that changes it goes through one object.

So a test can count them, stop at each one, let it fail, or drop what was not made durable.
"""

import os


class Files:
    """Operations that change this machine's file system; none of them is atomic but `rename`."""

    def make_directory(self, path: str) -> None:
        """Makes a directory, with those above it, if it is not there."""
        os.makedirs(path, exist_ok=True)

    def create(self, path: str) -> int:
        """Makes an empty file; returns its descriptor, which `close` takes."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, file: int, data: memoryview) -> int:
        """Writes bytes; returns how many, which may be fewer than there are."""
        return os.write(file, data)

    def sync(self, file: int) -> None:
        """Makes what was written outlive a power failure; the file's name it does not."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """Closes a descriptor."""
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


def write_all(files: Files, file: int, data: bytes | memoryview) -> None:
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
    for entry in sorted(os.scandir(path), key=lambda e: e.name):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(files, entry.path)
        else:
            files.unlink(entry.path)
    files.remove_directory(path)
