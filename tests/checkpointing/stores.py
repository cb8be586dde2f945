"""Object stores for tests: one on this machine's disk, and others that stop or fail."""

import os
import secrets
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tests.checkpointing.faulty_files import Crash
from tfdml.checkpointing import StoreFiles


class Bucket(LocalFileSystem):
    """Store whose objects appear whole; it has neither renames nor empty directories."""

    protocol = "bucket"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("bucket://"))

    def makedirs(self, path, exist_ok=False):
        pass

    def put_file(self, path1, path2, **options):
        target = Path(self._strip_protocol(path2))
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.parent.with_name(f".{target.parent.name}-{secrets.token_hex(4)}")
        partial.write_bytes(Path(path1).read_bytes())
        os.replace(partial, target)

    def cp_file(self, path1, path2, **options):
        self.put_file(self._strip_protocol(path1), path2)

    def rm_file(self, path):
        entry = Path(self._strip_protocol(path))
        entry.unlink()
        try:
            while True:
                entry = entry.parent
                entry.rmdir()
        except OSError:
            pass

    def mv(self, path1, path2, **options):
        raise NotImplementedError("a store has no rename")

    def ls(self, path, detail=False, **options):
        found = super().ls(path, detail=True, **options)
        found = [f for f in found if not os.path.basename(f["name"]).startswith(".")]
        return found if detail else [f["name"] for f in found]


fsspec.register_implementation("bucket", Bucket, clobber=True)


class CrashingStore(StoreFiles):
    """Store that stops before its `stop_at`-th change.

    Copied objects appear one by one.
    """

    def __init__(self, url: str, stop_at: int | None = None):
        super().__init__(url)
        self.look_every = 0.01
        self.count, self._stop_at = 0, stop_at

    def _change(self) -> None:
        if self.count == self._stop_at:
            raise Crash
        self.count += 1

    def sync(self, file):
        self._change()
        super().sync(file)

    def unlink(self, path):
        self._change()
        super().unlink(path)

    def _copy(self, source, target):
        if not self.is_directory(source):
            self._change()
        super()._copy(source, target)


class FailingStore(StoreFiles):
    """Raises an error from the next operations of the store.

    Args:
        url: URL of the store.
        error: Error to raise.
        times: Number of operations that fail.
    """

    def __init__(self, url: str, error: Exception, times: int, patience: float):
        self.messages: list[str] = []
        super().__init__(url, self.messages.append, patience)
        self.tried, self._error, self._left = 0, error, times
        put = self._store.put_file
        self._put = put

    def sync(self, file):
        def put_file(*arguments):
            self.tried += 1
            if self._left > 0:
                self._left -= 1
                raise self._error
            return self._put(*arguments)

        self._do(put_file, file[1].name, self._path_in_store(file[0]))
