"""Immediate exit of this process after a failure of the job."""

import contextlib
import faulthandler
import os
import sys
import threading

import psutil

EXIT_CODE = 70
# Preempted after saving its state: the process can be started again (`EX_TEMPFAIL`).
PREEMPTED_EXIT_CODE = 75
# Seconds that a failed process gets to exit normally.
EXIT_SECONDS = 5.0
# The same for a rank that raised, once the others know.
SHUTDOWN_SECONDS = 1.3


def end_after(seconds: float, code: int = EXIT_CODE) -> None:
    """Ends this process after a delay, unless it has exited normally by then.

    Exit handlers and TensorFlow's threads may wait for other ranks.

    Args:
        seconds: Delay in seconds.
        code: Exit code.
    """
    timer = threading.Timer(seconds, end_now, [code])
    timer.daemon = True
    timer.start()


def end_despite_tensorflow(seconds: float) -> None:
    """Ends this process after a delay with exit code 1, even while the interpreter shuts down.

    TensorFlow then waits for ranks that are gone, and threads of Python run no more.

    Args:
        seconds: Delay in seconds.
    """
    with contextlib.suppress(OSError, ValueError):  # Standard error may be closed.
        faulthandler.dump_traceback_later(seconds, exit=True, file=os.open(os.devnull, os.O_WRONLY))


def end_now(code: int = EXIT_CODE) -> None:
    """Ends this process and its descendants, whatever its main thread is doing.

    No exception reaches a main thread that is blocked in a collective operation.

    Args:
        code: Exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        # Another thread may hold the stream's lock forever.
        flusher = threading.Thread(target=stream.flush, daemon=True)
        flusher.start()
        flusher.join(0.5)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(code)
