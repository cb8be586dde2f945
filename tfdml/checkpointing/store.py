"""Checkpoints in a store (`gs://`, `s3://`, `hdfs://`, ...), whose objects appear whole.

The store needs no other guarantee: it may lack directories, and a rename may stop half-way.
"""

import contextlib
import errno
import tempfile
from collections.abc import Callable
from typing import Any

import fsspec
import tenacity

from tfdml.checkpointing.files import Files, remove_tree

# Errors that do not go away by waiting.
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG}
_MISTAKES = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ImportError,
    AttributeError,
    TypeError,
    ValueError,
)


def open_files(path: str, say: Callable[[str], None] = print) -> Files:
    """Returns the file system of a directory, local or in a store.

    Args:
        path: Path of the directory, or a URL in a store whose fsspec plug-in is installed.
        say: Function called with messages for the user.
    """
    return StoreFiles(path, say) if "://" in path else Files()


class StoreFiles(Files):
    """Object store, accessed through fsspec. Operations are retried if an error may be temporary.

    A file is written beside training to this machine's temporary directory, and uploaded to the
    store in one piece when it is made durable.

    Args:
        url: URL of the directory.
        say: Function called with messages for the user.
        patience: Seconds for which an operation is retried.

    Raises:
        ValueError: If the store is unknown, or its plug-in is not installed.
    """

    renames_whole = False
    look_every = 1.0

    def __init__(self, url: str, say: Callable[[str], None] = print, patience: float = 120.0):
        try:
            self._store, _ = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"`directory` must be local, or in a store whose plug-in is installed. Received: "
                f"{url!r}; {error}. Install the fsspec plug-in of the store (gcsfs for gs://, s3fs "
                f"for s3://)."
            ) from error
        self._say = say
        self._retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            wait=tenacity.wait_random_exponential(multiplier=min(1.0, patience / 100), max=20.0),
            stop=tenacity.stop_after_delay(patience),
            before_sleep=self._tell,
            reraise=True,
        )

    def _tell(self, state: tenacity.RetryCallState) -> None:
        self._say(
            f"WARNING: {state.fn.__name__} in the store failed, and will be retried: "
            f"{state.outcome.exception()!r}"
        )

    def _do(self, operation: Callable, *args: Any, **options: Any) -> Any:
        """Runs an operation of the store, with retries, and returns its result.

        Raises:
            OSError: If it still fails.
        """
        try:
            return self._retrying(operation, *args, **options)
        except Exception as error:
            if isinstance(error, OSError) or not _may_pass(error):
                raise
            raise OSError(f"{type(error).__name__}: {error}") from error

    def _path_in_store(self, url: str) -> str:
        return self._store._strip_protocol(url)

    # -- Reading -------------------------------------------------------------------------------

    def names(self, path: str) -> list[str]:
        """See `Files`."""
        self._store.invalidate_cache()
        try:
            found = self._do(self._store.ls, self._path_in_store(path), detail=False)
        except FileNotFoundError:  # In many stores a directory without objects does not exist.
            return []
        own = self._path_in_store(path).rstrip("/")
        names = {name.rstrip("/") for name in found} - {own}
        return sorted(name.rsplit("/", 1)[-1] for name in names)

    def exists(self, path: str) -> bool:
        """See `Files`."""
        self._store.invalidate_cache()
        return self._do(self._store.exists, self._path_in_store(path))

    def is_directory(self, path: str) -> bool:
        """See `Files`."""
        return self._do(self._store.isdir, self._path_in_store(path))

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """See `Files`."""
        place = {} if (begin, end) == (0, None) else {"start": begin, "end": end}
        return self._do(self._store.cat_file, self._path_in_store(path), **place)

    # -- Writing -------------------------------------------------------------------------------

    def make_directory(self, path: str) -> None:
        """See `Files`; a store may have no directories."""
        self._do(self._store.makedirs, self._path_in_store(path), exist_ok=True)

    def create(self, path: str) -> Any:
        """See `Files`; nothing is in the store before `sync`."""
        return path, tempfile.NamedTemporaryFile(buffering=0)

    def write(self, file: Any, data: memoryview) -> int:
        """See `Files`."""
        return file[1].write(data)

    def sync(self, file: Any) -> None:
        """See `Files`; uploads the file to the store."""
        self._do(self._store.put_file, file[1].name, self._path_in_store(file[0]))

    def close(self, file: Any) -> None:
        """See `Files`."""
        file[1].close()

    def sync_directory(self, path: str) -> None:
        """See `Files`; objects in a store are durable already."""

    def rename(self, source: str, target: str) -> None:
        """See `Files`; copies, and then removes: it may stop half-way."""
        self._copy(source, target)
        if self.is_directory(source):
            remove_tree(self, source)
        else:
            self.unlink(source)

    def _copy(self, source: str, target: str) -> None:
        if not self.is_directory(source):
            self._do(self._store.cp_file, self._path_in_store(source), self._path_in_store(target))
            return
        self.make_directory(target)
        for name in self.names(source):
            self._copy(f"{source}/{name}", f"{target}/{name}")

    def unlink(self, path: str) -> None:
        """See `Files`."""
        # It may be a retry, after a first attempt that succeeded without a response.
        with contextlib.suppress(FileNotFoundError):
            self._do(self._store.rm_file, self._path_in_store(path))

    def remove_directory(self, path: str) -> None:
        """See `Files`; in many stores an empty directory does not exist anyway."""
        if self.exists(path):
            self._do(self._store.rmdir, self._path_in_store(path))


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, _MISTAKES) or not isinstance(error, Exception):
        return False
    return getattr(error, "errno", None) not in _LASTING
