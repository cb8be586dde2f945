"""Current activity of this process, for the message that explains why a job has ended."""

import contextlib
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass
class Activity:
    """Activity of the main thread, which writes it; the guard's thread reads it.

    Attributes:
        call: Current call of `fit`, `evaluate` or `predict`; None outside.
        calls: Number of such calls begun.
        epoch: Epoch of a `fit`, from 0.
        step: Steps done in this epoch.
        waits_for: Operation in which the process waits for the others; None if in none.
        progress: Counter that grows with every activity.
        tracing: Step whose graph is being traced; None if none is.
        failed: Whether an exception has left a call or the program.
        callback: Running callback and the name of its method; None outside of callbacks.
        collectives: Collectives in the last graph of each step: the tensors of each operation, by
            its name. Those of other graphs are under "".
        collectives_noted: Counter that grows with every entry in `collectives`.
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
        """Marks the start of a call."""
        self.call, self.epoch, self.step = call, None, 0
        self.calls += 1
        self.progress += 1
        self.failed = False

    def end(self) -> None:
        """Marks the end of the call."""
        self.call = None
        self.progress += 1

    @contextlib.contextmanager
    def within(self, call: str) -> Iterator[None]:
        """Context manager: this process is in a call nested in another, such as `evaluate`."""
        outer, self.call = self.call, f"{self.call}, {call}"
        try:
            yield
        finally:
            self.call = outer

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Context manager: this process waits for the others in `what`; the outermost counts."""
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
        """Context manager: a step's graph is being traced; forgets its previous collectives."""
        self.tracing = step
        self.collectives[step] = {}
        self.collectives_noted += 1
        try:
            yield
        finally:
            self.tracing = None

    def note_collective(self, operation: str, tensors: str) -> None:
        """Records a collective of a graph and the tensors that it exchanges."""
        self.collectives.setdefault(self.tracing or "", {})[operation] = tensors
        self.collectives_noted += 1

    def describe(self) -> str:
        """Returns text such as "fit, epoch 2, step 17, in callback Saver.on_epoch_end"."""
        parts = []
        if self.call is None:
            parts.append("outside of fit, evaluate and predict")
        else:
            parts.append(self.call)
            if self.epoch is not None:
                parts.append(f"epoch {self.epoch}")
            parts.append(f"step {self.step}")
        # Inspecting the main thread's frames from another thread is not safe while it runs.
        if self.callback:
            callback, method = self.callback
            parts.append(f"in callback {type(callback).__name__}.{method}")
        if self.waits_for:
            parts.append(f"waiting in {self.waits_for}")
        return ", ".join(parts)
