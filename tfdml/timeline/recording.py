"""Recording of a rank's steps, and the spans that follow from it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdml.timeline.rank_timeline import Kind, Span

# Marks of a step, and how those of an exchange and a bucket begin and end.
BATCH, GRADIENTS, SUMS = "batch", "gradients", "sums"
BEGIN, END = "begin", "end"
READY, DONE = "ready", "done"


class Execution(NamedTuple):
    """One call of the train function.

    Attributes:
        first_step: Number of its first batch in the `fit`, from 1.
        slots: The first slot of its steps in the marks, and the one after the last.
        begin: When it was called, in seconds since 1970.
        end: When it returned.
    """

    first_step: int
    slots: tuple[int, int]
    begin: float
    end: float


@dataclasses.dataclass
class Recording:
    """Recording of a rank's steps.

    Attributes:
        executions: Calls of the train function.
        marks: Times of each mark by slot, 0 where a step did not come there: float64.
        exchanges: Details of each exchange, by its name.
        spans: Spans of the main thread and of the writer of checkpoints.
    """

    executions: list[Execution]
    marks: Mapping[str, np.ndarray]
    exchanges: Mapping[str, Mapping[str, Any]]
    spans: Sequence[Span]

    def all_spans(self) -> list[Span]:
        """Returns all spans of the rank, by their beginnings."""
        spans = list(self.spans)
        for execution in self.executions:
            spans += self._of_loop(execution)
            first, end = execution.slots
            for slot in range(first, end):
                step = execution.first_step + slot - first
                spans += self._exchanges(slot, step)
                spans += self._codecs(slot, step)
        return sorted(spans, key=lambda span: (span.begin, -span.end))

    def _at(self, mark: str, slot: int) -> float | None:
        """Returns when a step was at a mark, None if it was not."""
        times = self.marks.get(mark)
        return float(times[slot]) if times is not None and times[slot] else None

    def _of_loop(self, execution: Execution) -> list[Span]:
        """Returns the main thread's spans of a call of the train function."""
        first, end = execution.slots
        # A synchronization of local updates is within the call, after the last step's update.
        rests = [s.begin for s in self.spans if s.kind == Kind.REST and s.begin >= execution.begin]
        updated = min([*rests, execution.end])
        spans, before = [], execution.begin
        for slot in range(first, end):
            step = execution.first_step + slot - first
            batch, gradients, sums = (self._at(m, slot) for m in (BATCH, GRADIENTS, SUMS))
            after = self._at(BATCH, slot + 1) if slot + 1 < end else updated
            # Within an execution of several steps, a batch is waited for after the update.
            times = [(Kind.DATA, before, batch)] if slot == first else []
            # A step that only accumulates gradients exchanges none.
            times += [(Kind.COMPUTE, batch, gradients or after), (Kind.REST, gradients, sums)]
            times += [(Kind.UPDATE, sums, after)]
            spans += [
                Span(kind, "", begin, finish, step)
                for kind, begin, finish in times
                if begin is not None and finish is not None
            ]
        return spans

    def _exchanges(self, slot: int, step: int) -> list[Span]:
        spans = []
        for name, details in self.exchanges.items():
            begin, end = (self._at(f"{name}:{point}", slot) for point in (BEGIN, END))
            if begin is not None and end is not None:
                spans.append(Span(Kind.EXCHANGE, name, begin, end, step, dict(details)))
        return spans

    def _codecs(self, slot: int, step: int) -> list[Span]:
        """Returns what codecs did before, between and after the exchanges of each bucket."""
        spans = []
        for mark in self.marks:
            bucket, _, point = mark.rpartition(":")
            if point != READY:
                continue
            ready, done = self._at(mark, slot), self._at(f"{bucket}:{DONE}", slot)
            own = [s for s in self._exchanges(slot, step) if f"{s.name}/".startswith(f"{bucket}/")]
            if ready is None or done is None or not own:
                continue
            own.sort(key=lambda span: span.begin)
            bounds = [ready, *(time for s in own for time in (s.begin, s.end)), done]
            kinds = [Kind.ENCODE, *[Kind.ADD] * (len(own) - 1), Kind.DECODE]
            spans += [
                Span(kind, bucket, begin, end, step)
                for kind, begin, end in zip(kinds, bounds[::2], bounds[1::2], strict=True)
                if end > begin
            ]
        return spans
