"""Ending this process at once because another rank cannot go on."""

import contextlib
import os
import sys
import threading

import psutil

EXIT_CODE = 70
# A process that was asked to end and has saved its state: start it again (`EX_TEMPFAIL`).
PREEMPTED_EXIT_CODE = 75


def end_now() -> None:
    """Ends this process and those it has started, whatever its main thread does.

    A main thread that waits in a collective operation can be reached by no exception.
    """
    for stream in (sys.stdout, sys.stderr):
        # Another thread may hold the stream for ever.
        flusher = threading.Thread(target=stream.flush, daemon=True)
        flusher.start()
        flusher.join(0.5)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(EXIT_CODE)
