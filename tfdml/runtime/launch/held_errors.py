"""Lines of a process, in which errors of TensorFlow and Horovod come after tfdml's message.

When a rank dies, TensorFlow and Horovod of the others report a broken connection in pages that do
not name it; the guard names it in the same moment.
"""

import re
import threading
from collections.abc import Callable

HOLD_SECONDS = 1.0
_ERROR = re.compile(
    r"(?:\[[\d,]+\]<stderr>:)?(?:"
    r"[EW]\d{4} \d\d:\d\d:[\d.]+ +\d+ \S+\.cc:\d+\] "
    r"|\[?\d{4}-\d\d-\d\d \d\d:\d\d:[\d. ]+: [EW] \S+\.cc:\d+\]"
    r")"
)
# Lines that TensorFlow adds to such an error.
_MORE = re.compile(r"(?:\[[\d,]+\]<stderr>:)?(?:Additional GRPC error|:[A-Z_]+:|This could happen)")


class HeldErrors:
    """Shows lines at once, but errors of TensorFlow and Horovod after `HOLD_SECONDS`.

    Args:
        show: Callable that shows one line.
    """

    def __init__(self, show: Callable[[str], None]):
        self._show = show
        self._lock = threading.Lock()
        self._held: list[str] = []
        self._after_error = False

    def take(self, line: str) -> None:
        """Shows a line, or holds it."""
        with self._lock:
            more = self._after_error and _MORE.match(line)
            self._after_error = bool(more or _ERROR.match(line))
            if not self._after_error:
                self._show(line)
                return
            self._held.append(line)
            if len(self._held) == 1:
                timer = threading.Timer(HOLD_SECONDS, self.release)
                timer.daemon = True
                timer.start()

    def release(self) -> None:
        """Shows the lines that are held."""
        with self._lock:
            held, self._held = self._held, []
            for line in held:
                self._show(line)
