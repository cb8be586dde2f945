"""Writing beside training: state is copied to buffers of its own, and a thread does the rest."""

import threading
from collections.abc import Callable, Mapping

import numpy as np


class HostCopy:
    """Copies of tensors in the host's memory, in buffers that are used again and again."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def of(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns copies of `tensors`; those that the last call has returned are overwritten."""
        before, self._buffers = self._buffers, {}
        for name, value in tensors.items():
            buffer = before.pop(name, None)
            if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                buffer = np.empty(value.shape, value.dtype)
            np.copyto(buffer, value)
            self._buffers[name] = buffer
        return dict(self._buffers)


class Writer:
    """Runs one piece of work at a time beside the caller; its errors are raised where one waits.

    The end of the program waits for what is being written.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Starts `work`, once the piece before it has ended.

        Raises:
            BaseException: What that one has raised.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name="tfdml-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is being written.

        Raises:
            BaseException: What the last piece of work has raised, once.
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
