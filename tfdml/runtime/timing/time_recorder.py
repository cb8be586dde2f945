"""TimeRecorder of a process's timeline: open for some steps of a `fit`, closed otherwise."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdml.runtime import host_clock
from tfdml.runtime.timing.marks import Marks
from tfdml.timeline.rank_timeline import Span
from tfdml.timeline.recording import BATCH, Execution, Recording

_NOT_RECORDED = contextlib.nullcontext()


@dataclasses.dataclass
class _Chosen:
    """Steps that are to be recorded, and what has been recorded of them.

    Attributes:
        first: Number of the first batch in the `fit`, from 1.
        last: Number of the last one.
        on_open: Function that is called before the first execution that is recorded.
        on_close: Function that is called with the recording after the last one.
        batch: Number of the next batch.
        marks: Times within the steps; None before the first of them.
        executions: Calls of the train function.
        spans: Spans outside of the steps' graphs.
        running: Those that have not ended yet.
        exchanges: Details of each exchange in the steps' graphs, by its name.
    """

    first: int
    last: int
    on_open: Callable[[], None]
    on_close: Callable[[Recording], None]
    batch: int = 1
    marks: Marks | None = None
    executions: list[Execution] = dataclasses.field(default_factory=list)
    spans: list[Span] = dataclasses.field(default_factory=list)
    running: dict[object, Span] = dataclasses.field(default_factory=dict)
    exchanges: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


class TimeRecorder:
    """Records when the chosen steps of a `fit`, and what happens between them, begin and end.

    A process has one. Chosen steps run in graphs of their own, in which `is_in_step` holds while
    they are traced. Executions before them run in these graphs, too: they trace and optimize them,
    and are not kept. Outside of these steps nothing is recorded, and graphs have no marks.
    """

    def __init__(self) -> None:
        self._chosen: _Chosen | None = None
        self._is_open = self._is_in_step = False

    # -- Which steps ---------------------------------------------------------------------------

    def choose(
        self,
        first: int,
        last: int,
        on_open: Callable[[], None],
        on_close: Callable[[Recording], None],
    ) -> None:
        """Chooses the steps that are recorded; counts from the next step on.

        Args:
            first: Number of the first batch, from 1.
            last: Number of the last batch.
            on_open: Function that is called before the first execution that is recorded.
            on_close: Function that is called with the recording, before the step after the last
                one, or by `close`.
        """
        self._chosen, self._is_open = _Chosen(first, last, on_open, on_close), False

    def drop(self) -> None:
        """Ends the recording without passing it on, as of a `fit` that has failed."""
        self._chosen, self._is_open = None, False

    def close(self) -> None:
        """Ends the recording, and passes on what there is; does nothing if there is none."""
        chosen = self._chosen
        self.drop()
        if chosen is None or chosen.marks is None:
            return
        before = [e for e in chosen.executions if e.first_step + _steps(e) <= chosen.first]
        kept = chosen.executions[len(before) :]
        if kept:
            running = [s._replace(end=host_clock.now()) for s in list(chosen.running.values())]
            # A callback before the first step may have made it late.
            begin = before[-1].end if before else kept[0].begin
            spans = [s for s in [*chosen.spans, *running] if s.begin >= begin]
            chosen.on_close(Recording(kept, chosen.marks.read(), chosen.exchanges, spans))

    def begins_with(self, steps: int, to_trace: int = 1) -> bool:
        """Returns whether the next execution of the train function is recorded.

        Args:
            steps: The number of steps of an execution.
            to_trace: The number of executions that trace all graphs: so many are recorded before
                the chosen ones.
        """
        chosen = self._chosen
        if chosen is None:
            return False
        if chosen.batch > chosen.last:
            self.close()
        elif not self._is_open and chosen.batch + (1 + to_trace) * steps > chosen.first:
            chosen.on_open()
            self._is_open = True
        return self._is_open

    def skip(self, steps: int) -> None:
        """Counts an execution that was not recorded.

        Args:
            steps: Its number of steps.
        """
        if self._chosen is not None:
            self._chosen.batch += steps

    @contextlib.contextmanager
    def execution(self, steps: int) -> Iterator[None]:
        """Context manager: the train function runs, on chosen steps.

        Args:
            steps: Its number of steps, or more if the data end before.
        """
        chosen = self._chosen
        if chosen.marks is None:
            # With the rest of the last execution.
            chosen.marks = Marks(chosen.last - chosen.batch + 1 + steps)
        begun, begin = chosen.marks.steps, host_clock.now()
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False
        end, done = host_clock.now(), chosen.marks.steps
        chosen.executions.append(Execution(chosen.batch, (begun, done), begin, end))
        chosen.batch += steps

    # -- What happens --------------------------------------------------------------------------

    @property
    def is_in_step(self) -> bool:
        """Whether marks are made: in a graph that is traced, or a step that runs eagerly."""
        return self._is_in_step

    def begin_step(self, batch: Any) -> Any:
        """Notes in a step's graph when its batch has arrived, and returns it, for use after that.

        Args:
            batch: The batch: a structure of tensors and None.
        """
        if not self._is_in_step:
            return batch
        tensors = [t for t in tf.nest.flatten(batch, expand_composites=True) if t is not None]
        with tf.control_dependencies(tensors):
            self._chosen.marks.begin_step()
        passed = iter(self._chosen.marks.passing(BATCH, tensors))
        return tf.nest.map_structure(
            lambda t: None if t is None else next(passed), batch, expand_composites=True
        )

    def note(self, mark: str, tensors: Sequence[Any]) -> list:
        """Notes in a step's graph when tensors exist; does nothing elsewhere.

        Args:
            mark: Name of the time; of several in a step the last is kept.
            tensors: The tensors.

        Returns:
            The time, for others to come after it; nothing elsewhere.
        """
        return [self._chosen.marks.note(mark, tensors)] if self._is_in_step else []

    def passing(self, mark: str, tensors: Sequence[Any]) -> list:
        """Notes the same, and returns tensors that are used no earlier than that."""
        return self._chosen.marks.passing(mark, tensors) if self._is_in_step else list(tensors)

    def describe_exchange(self, name: str, **details: Any) -> None:
        """Records what is known of an exchange in a step's graph.

        Args:
            name: Name of the exchange.
            **details: Its `operation`, `bytes` and `ranks`; unknown ones are None.
        """
        self._chosen.exchanges[name] = details

    def span(self, kind: str, *words: str) -> contextlib.AbstractContextManager:
        """Context manager: something happens outside of the steps' graphs.

        Args:
            kind: Kind of the span; see `tfdml.timeline.rank_timeline.Kind`.
            *words: Its name, to be joined by dots.
        """
        return self._span(kind, words) if self._is_open else _NOT_RECORDED

    @contextlib.contextmanager
    def _span(self, kind: str, words: Sequence[str]) -> Iterator[None]:
        chosen, begin = self._chosen, host_clock.now()
        # A write of a checkpoint may outlast the recording.
        key = object()
        chosen.running[key] = Span(kind, ".".join(words), begin, begin)
        try:
            yield
        finally:
            chosen.spans.append(chosen.running.pop(key)._replace(end=host_clock.now()))


def _steps(execution: Execution) -> int:
    return execution.slots[1] - execution.slots[0]
