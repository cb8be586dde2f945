"""Ending this process at once because another rank cannot go on."""

import contextlib
import os
import sys
import threading

import psutil

EXIT_CODE = 70
# A process that was asked to end and has saved its state: start it again (`EX_TEMPFAIL`).
PREEMPTED_EXIT_CODE = 75
# How long a process that has failed gets to end in its own way.
EXIT_SECONDS = 5.0


def end_after(seconds: float, code: int = EXIT_CODE) -> None:
    """Ends this process after a time, if it has not ended in its own way by then.

    What is registered for the end of a program, TensorFlow's threads too, may wait for others.

    Args:
        seconds: How long the process gets.
        code: The exit code.
    """
    timer = threading.Timer(seconds, end_now, [code])
    timer.daemon = True
    timer.start()


def end_now(code: int = EXIT_CODE) -> None:
    """Ends this process and those it has started, whatever its main thread does.

    A main thread that waits in a collective operation can be reached by no exception.

    Args:
        code: The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        # Another thread may hold the stream for ever.
        flusher = threading.Thread(target=stream.flush, daemon=True)
        flusher.start()
        flusher.join(0.5)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(code)
