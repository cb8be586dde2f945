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
    r"|ERROR:tensorflow:Worker /job:)"
)
# Lines that TensorFlow adds to such an error.
_DETAILS = re.compile(
    r"(?:\[[\d,]+\]<stderr>:)?(?:Additional GRPC error|:[A-Z_]+:|This could happen)"
)
# Report of the chief's Python on the executor of a worker that has died, and its last line.
_IGNORED = re.compile(r"Exception ignored in: <function Executor\.__del__")
_TRACEBACK = re.compile(r"Traceback \(| {2}|tensorflow\.python\.framework\.errors_impl\.")
_LAST = re.compile(r"tensorflow\.python\.framework\.errors_impl\.")


class HeldErrors:
    """Shows lines at once, but errors of TensorFlow and Horovod after `HOLD_SECONDS`.

    Args:
        show: Callable that shows one line.
    """

    def __init__(self, show: Callable[[str], None]):
        self._show = show
        self._lock = threading.Lock()
        self._held: list[str] = []
        self._more: re.Pattern | None = None

    def take(self, line: str) -> None:
        """Shows a line, or holds it."""
        with self._lock:
            self._more = self._belonging(line)
            if self._more is None:
                self._show(line)
                return
            self._held.append(line)
            if len(self._held) == 1:
                timer = threading.Timer(HOLD_SECONDS, self.release)
                timer.daemon = True
                timer.start()

    def _belonging(self, line: str) -> re.Pattern | None:
        """Returns the pattern of lines that belong to an error that this line is of, or None."""
        if _ERROR.match(line):
            return _DETAILS
        if _IGNORED.match(line):
            return _TRACEBACK
        if self._more is None or not self._more.match(line):
            return None
        return _DETAILS if _LAST.match(line) else self._more

    def release(self) -> None:
        """Shows the lines that are held."""
        with self._lock:
            held, self._held = self._held, []
            for line in held:
                self._show(line)
