"""`KerasTrainer`: a training function on Ray Train's workers, and their parts of Ray's datasets."""

from collections.abc import Callable, Mapping
from typing import Any

from ray.train import DataConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from tfdml.integrations.ray.backend import KerasConfig


class KerasTrainer(DataParallelTrainer):
    """Runs a training function with a tfdml strategy on each of Ray Train's workers.

    They are the ranks of the `MultiWorkerMirroredStrategy` that the function makes, or of its
    `HorovodStrategy` with `KerasConfig(horovod=True)`. Keras is Keras 3. With
    `ReportCheckpointCallback`, `fit` continues within the epoch if Ray starts the workers again,
    after a failure or with another number of them.

    Args:
        train_loop_per_worker: Function that each worker calls, without an argument or with
            `train_loop_config`.
        keras_config: Which strategy the function makes; by default `KerasConfig()`.
        dataset_config: How Ray's `datasets` are split; by default `WholeDataConfig()`.
        **options: Other arguments of Ray's `DataParallelTrainer`, such as `train_loop_config`,
            `scaling_config`, `run_config` and `datasets`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        keras_config: KerasConfig | None = None,
        dataset_config: DataConfig | None = None,
        **options: Any,
    ):
        super().__init__(
            train_loop_per_worker,
            backend_config=keras_config or KerasConfig(),
            dataset_config=dataset_config or WholeDataConfig(),
            **options,
        )


class WholeDataConfig(DataConfig):
    """Splits Ray's datasets among the workers by whole blocks, in the same order each time.

    Ray's own configuration leaves out rows until all workers have as many. Here a worker may have
    more, and `fit` trains on all of them.
    """

    def configure(
        self, datasets: Mapping[str, Any], world_size: int, *_: Any, **more: Any
    ) -> list[dict[str, Any]]:
        """Returns the parts of each worker, by the datasets' names."""
        parts: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            own = dataset.copy(dataset)
            own.context.execution_options = self._resolve_execution_options(name)
            own.context.execution_options.preserve_order = True
            for part, split in zip(
                parts, own.streaming_split(world_size, equal=False), strict=True
            ):
                part[name] = split
        return parts
