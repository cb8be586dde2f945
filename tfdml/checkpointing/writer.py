"""Writing in the background: a thread that does one piece of work at a time."""

import threading
from collections.abc import Callable


class Writer:
    """Runs one piece of work at a time beside the caller; `submit` and `wait` raise its errors.

    The program does not exit before the running work has ended.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, work: Callable[[], None]) -> None:
        """Starts `work`, once the previous work has ended.

        Raises:
            BaseException: Error of the previous work.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name="tfdml-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is being written.

        Raises:
            BaseException: Error of the last work, raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (raised again by `wait`)
            self._error = error
