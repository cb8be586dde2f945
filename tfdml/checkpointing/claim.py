"""Ownership of a directory of checkpoints: one job at a time."""

import atexit
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

import filelock
import psutil

from tfdml.checkpointing.files import Files, write_file

NAME = "lock"


class DirectoryInUse(RuntimeError):
    """Another job writes to the directory."""


class Claim(Protocol):
    """Exclusive right of a process to a directory."""

    def take(self) -> None:
        """Takes the directory; raises `DirectoryInUse` if a running process has it."""

    def check(self) -> None:
        """Raises `DirectoryInUse` if another process has taken it since."""

    def release(self) -> None:
        """Gives the directory up."""


def make_claim(path: str, files: Files, say: Callable[[str], None]) -> Claim:
    """Returns a claim of the kind that fits a directory: a lock on a disk, a lease in a store."""
    return LockFile(path) if files.renames_whole else Lease(path, files, say)


def _refusal(path: str, owner: str) -> DirectoryInUse:
    return DirectoryInUse(
        f"`directory` must be used by one job at a time. Received: {path}, which {owner} "
        f"uses. End that job, or choose another directory."
    )


class LockFile:
    """Claim by a file that the operating system locks as long as the process lives.

    Args:
        path: Path of the directory.
    """

    def __init__(self, path: str):
        self._path = path
        self._lock = filelock.FileLock(os.path.join(path, NAME), thread_local=False)

    def take(self) -> None:
        """See `Claim`."""
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout as error:
            with open(self._lock.lock_file, encoding="utf-8") as file:
                raise _refusal(self._path, file.read() or "another process") from error
        with open(self._lock.lock_file, "w", encoding="utf-8") as file:
            file.write(f"process {os.getpid()} on {socket.gethostname()}")

    def check(self) -> None:
        """See `Claim`."""

    def release(self) -> None:
        """See `Claim`."""
        self._lock.release()


# Seconds that writing a claim may take, in which it cannot be read.
_WRITING_SECONDS = 2.0


class Lease:
    """Claim by an object that its owner keeps rewriting; if it does not change, the owner is dead.

    It compares two readings by its own clock, because the clocks of machines differ.

    Args:
        path: Path of the directory.
        files: File system of the directory.
        say: Function called with messages for the user.
        seconds: Time without a change, in seconds, after which an owner counts as dead.
    """

    def __init__(self, path: str, files: Files, say: Callable[[str], None], seconds: float = 30.0):
        self._path, self._files, self._say, self._seconds = path, files, say, seconds
        self._object = os.path.join(path, NAME)
        self._own = {
            "token": secrets.token_hex(8),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started": psutil.Process().create_time(),
        }
        self._count = 0
        self._over = threading.Event()

    def take(self) -> None:
        """See `Claim`."""
        before = self._read()
        if before is not None and not self._is_gone(before):
            self._await_a_change(before)
        self._write()
        # Of two jobs that begin at once, the one that has written last keeps the directory.
        time.sleep(min(self._files.look_every, self._seconds / 3))
        self.check()
        threading.Thread(target=self._renew, name="tfdml-lease", daemon=True).start()
        atexit.register(self.release)

    def check(self) -> None:
        """See `Claim`."""
        deadline = time.monotonic() + _WRITING_SECONDS
        # This process's own thread may be writing it.
        while (now := self._read()) == {} and time.monotonic() < deadline:
            time.sleep(0.05)
        if now is None or now.get("token") != self._own["token"]:
            owner = "nobody" if now is None else _in_words(now)
            raise _refusal(self._path, owner)

    def release(self) -> None:
        """See `Claim`."""
        atexit.unregister(self.release)
        if not self._over.is_set():
            self._over.set()
            now = self._read()
            if now is not None and now.get("token") == self._own["token"]:
                self._files.unlink(self._object)

    def _await_a_change(self, before: dict) -> None:
        self._say(
            f"{_in_words(before)} last claimed {self._path}. Checking whether it still runs takes "
            f"{self._seconds:.0f} s."
        )
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._seconds / 10))
            now = self._read()
            if now is None:
                return
            if now != before:
                raise _refusal(self._path, _in_words(now or before))

    def _is_gone(self, owner: dict) -> bool:
        """Returns whether the owner was a process of this machine that has ended."""
        if owner.get("host") != self._own["host"]:
            return False
        try:
            return psutil.Process(owner["process"]).create_time() != owner["started"]
        except psutil.NoSuchProcess:
            return True

    def _renew(self) -> None:
        while not self._over.wait(self._seconds / 5):
            try:
                self.check()
                self._write()
            except (OSError, DirectoryInUse):
                # The next save finds out and reports it.
                continue

    def _read(self) -> dict | None:
        """Returns the owner; None if there is none, {} while it is being written."""
        try:
            return json.loads(self._files.read(self._object))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}

    def _write(self) -> None:
        self._count += 1
        content = json.dumps({**self._own, "count": self._count})
        write_file(self._files, self._object, content.encode())


def _in_words(owner: dict) -> str:
    return f"process {owner['process']} on {owner['host']}" if owner else "another process"
