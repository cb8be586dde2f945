"""What this process is doing, in words: for the message that says where a job has ended."""

import contextlib
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass
class Place:
    """Where the main thread is; written by it, read by the guard's thread.

    Attributes:
        call: The call of `fit`, `evaluate` or `predict` that it is in, None outside.
        calls: How many such calls have begun.
        epoch: The epoch of a `fit`, from 0.
        step: Steps done in this epoch.
        waits_for: What it waits for together with the other processes, None while it does not.
        progress: Grows with everything that is done.
        tracing: The step whose graph is being made, None while none is.
        failed: Whether an exception has left a call, or the program.
        callback: The callback that runs, and its method; None outside of callbacks.
        collectives: What the last graph of each step exchanges: the name of each operation, and of
            what. What other graphs exchange is under "".
        collectives_noted: Grows with everything that is noted in `collectives`.
    """

    call: str | None = None
    calls: int = 0
    epoch: int | None = None
    step: int = 0
    waits_for: str | None = None
    progress: int = 0
    tracing: str | None = None
    failed: bool = False
    callback: tuple[object, str] | None = None
    collectives: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    collectives_noted: int = 0

    def begin(self, call: str) -> None:
        """Enters a call."""
        self.call, self.epoch, self.step = call, None, 0
        self.calls += 1
        self.progress += 1
        self.failed = False

    def end(self) -> None:
        """Leaves it."""
        self.call = None
        self.progress += 1

    @contextlib.contextmanager
    def within(self, call: str) -> Iterator[None]:
        """While this is entered, the process is in a call that another one makes."""
        outer, self.call = self.call, f"{self.call}, {call}"
        try:
            yield
        finally:
            self.call = outer

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """While this is entered, the process waits for the others; the outermost says for what."""
        before = self.waits_for
        self.waits_for = before or what
        self.progress += 1
        try:
            yield
        finally:
            self.waits_for = before
            self.progress += 1

    @contextlib.contextmanager
    def making_graph(self, step: str) -> Iterator[None]:
        """While this is entered, a step's graph is being made, in the place of its last one."""
        self.tracing = step
        self.collectives[step] = {}
        self.collectives_noted += 1
        try:
            yield
        finally:
            self.tracing = None

    def note_collective(self, operation: str, tensors: str) -> None:
        """Notes what a graph exchanges."""
        self.collectives.setdefault(self.tracing or "", {})[operation] = tensors
        self.collectives_noted += 1

    def describe(self) -> str:
        """Returns it in words, such as "fit, epoch 2, step 17, in callback Saver.on_epoch_end"."""
        parts = []
        if self.call is None:
            parts.append("outside of fit, evaluate and predict")
        else:
            parts.append(self.call)
            if self.epoch is not None:
                parts.append(f"epoch {self.epoch}")
            parts.append(f"step {self.step}")
        # Looking at the main thread's frames instead, from here, is not safe while it runs.
        if self.callback:
            callback, method = self.callback
            parts.append(f"in callback {type(callback).__name__}.{method}")
        if self.waits_for:
            parts.append(f"waiting in {self.waits_for}")
        return ", ".join(parts)
