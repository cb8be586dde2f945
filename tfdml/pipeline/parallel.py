"""`tfdml.PipelineParallel`: how a strategy divides a model's layers over a group of devices."""

import dataclasses
from collections.abc import Sequence

import keras

from tfdml.pipeline.pipeline_plan import PipelinePlan
from tfdml.pipeline.plan import make_plan
from tfdml.pipeline.schedule import SCHEDULES


@dataclasses.dataclass(frozen=True)
class PipelineParallel:
    """Divides a model's layers into stages, each on a device of its own, that work in turns.

    A step divides a replica's rows into microbatches. While a stage works on one, the stage before
    it works on the next one. Losses, metrics, gradients and weights are those of one device.

    ```python
    strategy = tfdml.MirroredStrategy(
        devices=[["GPU:0", "GPU:1"], ["GPU:2", "GPU:3"]],  # Two replicas of two stages each.
        pipeline=tfdml.PipelineParallel(num_microbatches=8),
    )
    ```

    Args:
        num_microbatches: Number of microbatches of a step. A stage is idle for about
            `(p - 1) / (m + p - 1)` of a step, with p stages and m microbatches; 4 p are enough.
        schedule: "1f1b", by which stage s of p keeps the activations of at most `p - s`
            microbatches; or "gpipe", by which it keeps those of all.
        stages: Names of the layers of each stage, such as `[["embed", "block_0"], ["block_1",
            "head"]]`. Layers without weights may be left out. None divides the model where the
            slowest stage becomes as fast as possible, by the measured times of its layers.
        memory_limits: Bytes that each stage may need for its weights, slots and activations, in
            the order of the devices of a group; None for no limits.

    Raises:
        ValueError: If an argument is wrong.

    References:
        Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
        Parallelism", arXiv:1811.06965.
        Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019.
    """

    num_microbatches: int = 8
    schedule: str = "1f1b"
    stages: Sequence[Sequence[str]] | None = None
    memory_limits: Sequence[int] | None = None

    def __post_init__(self) -> None:
        number = self.num_microbatches
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(
                f"`num_microbatches` must be a positive integer. Received: "
                f"num_microbatches={number!r}. Use for example 8."
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"`schedule` must be one of {', '.join(map(repr, SCHEDULES))}. Received: "
                f"schedule={self.schedule!r}. Use '1f1b', which keeps fewer activations."
            )
        if self.stages is not None:
            _check_stages(self.stages)
            object.__setattr__(self, "stages", tuple(map(tuple, self.stages)))
        if self.memory_limits is not None:
            _check_limits(self.memory_limits)
            object.__setattr__(self, "memory_limits", tuple(self.memory_limits))

    def plan(
        self, model: keras.Model, batch_size: int, *, num_stages: int | None = None
    ) -> PipelinePlan:
        """Returns the stages of a model, with their predicted times and memory.

        Printed, it is a table with advice; `plan.plot()` draws the schedule. Layers are timed on
        this machine's default device. Nothing of the model is changed.

        Args:
            model: A functional or Sequential model, built; compiled if slots count.
            batch_size: Rows of a global batch.
            num_stages: The number of stages; by default that of the model's strategy, or of
                `stages`.

        Raises:
            ValueError: If the number of stages is not known, or the model cannot be divided.
        """
        groups = getattr(model.distribute_strategy.extended, "device_groups", None) or [[]]
        known = num_stages or len(groups[0]) or len(self.stages or ())
        if not known:
            raise ValueError(
                "`num_stages` must be given for a model that was not made in the scope of a "
                "strategy with `pipeline`. Received: num_stages=None. Pass the number of devices "
                "of a group."
            )
        replicas = getattr(model.distribute_strategy, "num_replicas_in_sync", 1)
        return make_plan(
            model,
            batch_size // replicas if groups[0] else batch_size,
            num_stages=known,
            num_microbatches=self.num_microbatches,
            schedule=self.schedule,
            stages=self.stages,
            memory_limits=self.memory_limits,
        )


def _check_stages(stages: Sequence[Sequence[str]]) -> None:
    is_list = isinstance(stages, Sequence) and not isinstance(stages, str)
    for stage in stages if is_list and stages else [None]:
        names = isinstance(stage, Sequence) and not isinstance(stage, str) and stage
        if not names or not all(isinstance(name, str) for name in stage):
            raise ValueError(
                f"`stages` must be a list of lists of layer names, one list for each stage, or "
                f"None. Received: stages={stages!r}. Use for example [['embed'], ['head']]."
            )


def _check_limits(limits: Sequence[int]) -> None:
    is_list = isinstance(limits, Sequence) and not isinstance(limits, str) and limits
    numbers = limits if is_list else [None]
    if not all(isinstance(n, int | float) and not isinstance(n, bool) and n > 0 for n in numbers):
        raise ValueError(
            f"`memory_limits` must be positive numbers of bytes, one for each stage, or None. "
            f"Received: memory_limits={limits!r}. Use for example [16e9, 16e9] for 16 GB each."
        )
