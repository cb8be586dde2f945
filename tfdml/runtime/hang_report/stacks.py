"""Stacks of all threads of a process, as `faulthandler` writes them, and where its program is.

A process is asked for them by a line in its file, which one of its threads notices. A process whose
interpreter is locked cannot notice, nor run a handler of signals in Python: `faulthandler` has one
in C, which writes to the file that is open. This handler must not run while Python does: it reads
frames that change meanwhile, of which Python 3.11 dies once in about 1,000 times.
"""

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# The signal on which a process writes its stacks.
SIGNAL = signal.SIGUSR1
# The line that asks a process for its stacks.
_REQUEST = b"asked\n"
_MAIN = "main thread: "
_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+) ")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_PACKAGE = Path(__file__).resolve().parents[2]
_PATHS = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")]
# Directories of code that is not the program's: libraries, and this package.
_LIBRARIES = tuple(f"{directory}/" for directory in (*_PATHS, _PACKAGE))
# Directories that files of libraries are named in.
_ROOTS = tuple(f"{directory}/" for directory in (*_PATHS, _PACKAGE.parent))


class StackFrame(NamedTuple):
    """A frame of a thread's stack."""

    file: str
    line: int
    function: str


class StackFile:
    """File to which this process adds its threads' stacks when asked, in Python or by `SIGNAL`.

    A program's own handler of the signal, set before, is called too; one that it sets later
    replaces this one.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        # An earlier process of this rank, in a job that was restarted, may still have its own.
        path.unlink(missing_ok=True)
        # Unbuffered: the handler in C writes past Python's buffers.
        self._file = path.open("ab", buffering=0)
        with contextlib.suppress(OSError):  # Some file systems have no locks.
            fcntl.flock(self._file, fcntl.LOCK_SH)
        # The first line, because the handler in C does not say which thread is the main one.
        self._file.write(f"{_MAIN}0x{threading.main_thread().ident:016x}\n".encode())
        self._seen = os.fstat(self._file.fileno()).st_size
        # The default action, if it followed, would end the process.
        chain = signal.getsignal(SIGNAL) not in (signal.SIG_DFL, None)
        faulthandler.register(SIGNAL, file=self._file, all_threads=True, chain=chain)

    def was_asked(self) -> bool:
        """Returns whether stacks were asked for since the last call, or since `dump`; adds them."""
        with self._lock:
            if self._size() <= self._seen:
                return False
            self._add()
            return True

    def dump(self) -> str:
        """Adds the stacks now, and returns them; "" once the file is removed."""
        with self._lock:
            return "" if self._file.closed else read_from(self.path, self._add())

    def _add(self) -> int:
        """Adds the stacks, while no other thread runs Python; returns where they begin."""
        before = self._size()
        faulthandler.dump_traceback(file=self._file, all_threads=True)
        self._seen = self._size()
        return before

    def remove(self) -> None:
        """Deletes the file, and gives the signal back."""
        with self._lock:
            faulthandler.unregister(SIGNAL)
            self._file.close()
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _size(self) -> int:
        return self._seen if self._file.closed else os.fstat(self._file.fileno()).st_size


def request(path: Path) -> int:
    """Asks the process of a `StackFile` for its stacks; returns where they will begin."""
    with path.open("ab", buffering=0) as file:
        file.write(_REQUEST)
        return file.tell()


def is_in_use(path: Path) -> bool:
    """Returns whether the process of a `StackFile` runs."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def read_from(path: Path, offset: int) -> str:
    """Returns what a file has from an offset on."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def main_thread_of(path: Path) -> str:
    """Returns the main thread's number in a `StackFile`; "" if there is none."""
    try:
        with path.open(errors="replace") as file:
            first = file.readline()
    except FileNotFoundError:
        return ""
    return first.removeprefix(_MAIN).strip() if first.startswith(_MAIN) else ""


def main_frames(stacks: str, main_thread: str) -> list[StackFrame]:
    """Returns the main thread's frames, innermost first, in the last stacks of a text.

    Args:
        stacks: Text that `faulthandler` has written.
        main_thread: The main thread's number, such as "0x00007f3c".
    """
    frames: list[StackFrame] = []
    within = False
    for line in stacks.splitlines():
        if thread := _THREAD.match(line):
            within = thread[1] == main_thread
            frames = [] if within else frames
        elif within and (frame := _FRAME.match(line)):
            frames.append(StackFrame(frame[1], int(frame[2]), frame[3]))
    return frames


def describe_place(frames: Sequence[StackFrame]) -> str:
    """Returns where a thread is in the program's own code: "in on_batch_end at train.py:31".

    Args:
        frames: Its frames, innermost first. Those of libraries are passed over.

    Returns:
        The text, "" if it is not in the program's code.
    """
    own = (f for f in frames if not f.file.startswith((*_LIBRARIES, "<frozen")))
    frame = next(own, None)
    return f"in {frame.function} at {Path(frame.file).name}:{frame.line}" if frame else ""


def describe_library(frames: Sequence[StackFrame]) -> str:
    """Returns where a thread is in a library: "fit at keras/src/trainers/trainer.py:397".

    Args:
        frames: Its frames, innermost first.

    Returns:
        The text, "" if its innermost frame is in the program's own code.
    """
    if not frames or not frames[0].file.startswith(_LIBRARIES):
        return ""
    file, line, function = frames[0]
    root = next(root for root in _ROOTS if file.startswith(root))
    return f"{function} at {file.removeprefix(root)}:{line}"
