"""Files, local or in a store (`gs://`, `s3://`, `hdfs://`, ...): ranged reads, whole writes."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

PARTIAL = ".partial"


def is_local(path: str) -> bool:
    """Returns whether a path is on this machine's file system."""
    return "://" not in str(path)


# Package or software that a store needs.
_PLUG_INS = {
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "s3": "s3fs",
    "s3a": "s3fs",
    "hdfs": "Hadoop's libhdfs and a Java runtime, with JAVA_HOME and CLASSPATH set",
}


def _store(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError, OSError) as error:
        scheme = path.split("://", 1)[0]
        plug_in = _PLUG_INS.get(scheme, f"the fsspec plug-in of {scheme}://")
        # fsspec's own message on a plug-in that is not there says the same.
        why = "" if isinstance(error, ImportError) else f"; {error}"
        raise ValueError(
            f"`path` must be local, or of a store whose plug-in is installed. Received: {path!r}"
            f"{why}. Install {plug_in}."
        ) from error


def local_copy(path: str) -> str:
    """Returns a local path of a file; a file in a store is copied for this process."""
    if is_local(path):
        return path
    _store(path)
    return fsspec.open_local(f"simplecache::{path}", mode="rb")


def join(directory: str, name: str) -> str:
    """Returns the path of a file in a directory."""
    return os.path.join(directory, name) if is_local(directory) else f"{directory}/{name}"


def open_read(path: str) -> BinaryIO:
    """Opens a file for reading bytes."""
    if is_local(path):
        return open(path, "rb")
    fs, inner_path = _store(path)
    return fs.open(inner_path, "rb")


def read_bytes(path: str) -> bytes:
    """Returns the content of a file."""
    with open_read(path) as file:
        return file.read()


def read_range(path: str, offset: int, length: int) -> bytes:
    """Returns `length` bytes from `offset`; fewer at the end of the file."""
    if is_local(path):
        with open(path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), length, offset)
    fs, inner_path = _store(path)
    return fs.cat_file(inner_path, start=offset, end=offset + length)


def size(path: str) -> int:
    """Returns the size of a file in bytes."""
    if is_local(path):
        return os.path.getsize(path)
    fs, inner_path = _store(path)
    return fs.size(inner_path)


def exists(path: str) -> bool:
    """Returns whether a file or directory exists."""
    if is_local(path):
        return os.path.exists(path)
    fs, inner_path = _store(path)
    return fs.exists(inner_path)


def names_in(directory: str) -> list[str]:
    """Returns the sorted names in a directory; an empty list if it does not exist."""
    if is_local(directory):
        return sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    fs, inner_path = _store(directory)
    if not fs.isdir(inner_path):
        return []
    return sorted(p.rstrip("/").rsplit("/", 1)[-1] for p in fs.ls(inner_path, detail=False))


def make_directory(directory: str) -> None:
    """Creates a directory if it does not exist."""
    if is_local(directory):
        os.makedirs(directory, exist_ok=True)
    else:
        fs, inner_path = _store(directory)
        fs.makedirs(inner_path, exist_ok=True)


def remove(path: str) -> None:
    """Removes a file if it exists."""
    if is_local(path):
        Path(path).unlink(missing_ok=True)
    else:
        fs, inner_path = _store(path)
        if fs.exists(inner_path):
            fs.rm(inner_path)


@contextmanager
def writing(path: str) -> Iterator[BinaryIO]:
    """Context manager: opens a file that appears under its name whole or not at all.

    A local file is written beside its final path, flushed to the disk and renamed. A file for a
    store is written to a temporary file and uploaded in one piece.
    """
    if not is_local(path):
        fs, inner_path = _store(path)
        with tempfile.NamedTemporaryFile() as file:
            yield file
            file.flush()
            fs.put_file(file.name, inner_path)
        return
    # A process that was killed may still be writing: the next one must not share its file.
    partial = f"{path}.{os.getpid()}{PARTIAL}"
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    sync_directory(os.path.dirname(path))


def sync_directory(directory: str) -> None:
    """Makes renames in a local directory survive a power failure."""
    descriptor = os.open(directory or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: str, data: bytes) -> None:
    """Writes a file that appears whole or not at all."""
    with writing(path) as file:
        file.write(data)


def fingerprint(path: str) -> list[Any]:
    """Returns values that change when a file does: its size, and its time or the store's key."""
    if is_local(path):
        stat = os.stat(path)
        return [stat.st_size, stat.st_mtime_ns]
    fs, inner_path = _store(path)
    return [fs.size(inner_path), fs.ukey(inner_path)]
