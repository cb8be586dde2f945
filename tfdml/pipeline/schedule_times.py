"""When each stage of a pipeline works, if passes take given times."""

import dataclasses
from collections.abc import Sequence

from tfdml.pipeline.schedule import Task, stage_order


@dataclasses.dataclass(frozen=True)
class WorkSpan:
    """One stage's work on one microbatch.

    Attributes:
        task: The pass and the microbatch.
        begin: Seconds since the beginning of the step.
        end: The same.
    """

    task: Task
    begin: float
    end: float


def schedule_times(
    forward: Sequence[float], backward: Sequence[float], num_microbatches: int, schedule: str
) -> list[list[WorkSpan]]:
    """Returns the work of each stage, in order.

    A stage begins a task when it has finished the one before, and the result that it needs is
    there: the stage before has passed the microbatch on, or, for a backward pass, the stage after.
    Sending takes no time.

    Args:
        forward: Seconds of each stage's forward pass of a microbatch.
        backward: Seconds of its backward pass.
        num_microbatches: The number of microbatches.
        schedule: "1f1b" or "gpipe".
    """
    count = len(forward)
    orders = [stage_order(s, count, num_microbatches, schedule) for s in range(count)]
    spans: list[list[WorkSpan]] = [[] for _ in range(count)]
    ends: dict[tuple[int, Task], float] = {}
    waiting = True
    while waiting:
        waiting = False
        for stage, order in enumerate(orders):
            for task in order[len(spans[stage]) :]:
                is_forward = task.kind == "forward"
                source = stage - 1 if is_forward else stage + 1
                is_there = ends.get((source, task)) if 0 <= source < count else 0.0
                if is_there is None:
                    waiting = True
                    break
                free = spans[stage][-1].end if spans[stage] else 0.0
                begin = max(free, is_there)
                end = begin + (forward if is_forward else backward)[stage]
                spans[stage].append(WorkSpan(task, begin, end))
                ends[stage, task] = end
    return spans
