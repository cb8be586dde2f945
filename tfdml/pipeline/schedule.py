"""Order in which a stage of a pipeline works on microbatches.

References:
    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    arXiv:1811.06965.
    Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
    section 3.2 (1F1B).
"""

from typing import Literal, NamedTuple

SCHEDULES = ("1f1b", "gpipe")


class Task(NamedTuple):
    """One stage's work on one microbatch.

    Attributes:
        kind: Whether it is the forward or the backward pass.
        microbatch: Number of the microbatch.
    """

    kind: Literal["forward", "backward"]
    microbatch: int


def max_in_flight(stage: int, num_stages: int, num_microbatches: int, schedule: str) -> int:
    """Returns the most microbatches whose activations a stage keeps at a time.

    Args:
        stage: Number of the stage.
        num_stages: The number of stages.
        num_microbatches: The number of microbatches.
        schedule: "1f1b" or "gpipe".
    """
    if schedule == "gpipe":
        return num_microbatches
    return min(num_stages - stage, num_microbatches)


def stage_order(stage: int, num_stages: int, num_microbatches: int, schedule: str) -> list[Task]:
    """Returns the tasks of a stage, in order.

    By "gpipe", all forward passes come first. By "1f1b", a stage begins with as many forward passes
    as stages follow it; then it makes one forward and one backward pass in turn, so that it keeps
    the activations of few microbatches. Both take the same time.

    Args:
        stage: Number of the stage.
        num_stages: The number of stages.
        num_microbatches: The number of microbatches.
        schedule: "1f1b" or "gpipe".
    """
    ahead = max_in_flight(stage, num_stages, num_microbatches, schedule)
    tasks = [Task("forward", number) for number in range(ahead)]
    for number in range(num_microbatches):
        tasks.append(Task("backward", number))
        if number + ahead < num_microbatches:
            tasks.append(Task("forward", number + ahead))
    return tasks
