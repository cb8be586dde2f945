"""`ParameterServerStrategy`: `model.fit` with variables on servers and steps on workers."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdml.aggregation import RobustRule
from tfdml.compression import Compressor
from tfdml.runtime.gpus import hide_all
from tfdml.runtime.rendezvous import exit_after
from tfdml.runtime.servers.server_task import SERVER, WORKER
from tfdml.strategies import arguments, keras_seam, tensorflow_seam
from tfdml.strategies.alone import note_strategy
from tfdml.strategies.batch_split import BatchSplit
from tfdml.strategies.keras_seam import parameter_servers
from tfdml.strategies.parameter_server.chief.share_clock import ShareClock
from tfdml.strategies.parameter_server.chief.worker_clock import WorkerClock
from tfdml.strategies.parameter_server.cluster import checks
from tfdml.strategies.parameter_server.cluster.connection import chief_task, connect
from tfdml.strategies.parameter_server.cluster.placement import placement_table
from tfdml.strategies.parameter_server.extended import (
    ParameterServerExtended,
    update_when_workers_are_back,
)
from tfdml.strategies.parameter_server.remote_datasets import on_each_worker
from tfdml.strategies.parameter_server.step.gradient_encoding import check_compressor

# All tasks have started by then, so TensorFlow only has to connect.
_CONNECT_SECONDS = 120.0


class ParameterServerStrategy(tf.distribute.experimental.ParameterServerStrategy):
    """Training on parameter servers and workers, in a strategy scope.

    ```python
    strategy = tfdml.ParameterServerStrategy()
    with strategy.scope():
        model = build()
        model.compile("adam", "binary_crossentropy", metrics=["AUC"])
    model.fit(dataset, epochs=10, steps_per_epoch=1000)
    ```

    The script runs only on the chief; workers and servers run `tfdml serve`. Each gets the cluster
    and its role from `TF_CONFIG`, or `tfdml launch --workers 2 --ps 2` starts them all.

    **Asynchronous** (the default): each worker takes its own whole steps on variables that other
    workers change meanwhile. A dataset, or a function that returns one, is sent to the workers,
    which read it themselves: without a seed, each reads all data in its own order; otherwise each
    reads its own batches. No update is lost: additions, including those to rows of an embedding,
    run on the servers one after another, and a step counts once in the metrics, which the chief
    sums. Three things are not guaranteed: the result of one process, reproducible results, and that
    a step which is repeated because its worker died was not partly applied the first time. For
    values that are assigned, not added to, the last writer wins: moving statistics of
    `BatchNormalization`, the momentum of `SGD`, the averages of `RMSprop`. `Adam` and `Adagrad`
    add. A step uses the same loss scale throughout, even if other workers change it.

    **Synchronous**: the chief reads batches, sends each worker its share, and applies the sum of
    the gradients. The result is that of one process, and losing a worker changes nothing. All
    gradients pass through the chief.

    In both modes, `evaluate` and `predict` send each batch to one worker: every sample is counted
    once, and all rows come back in order. A lost worker is tolerated and may come back. A lost
    server ends `fit` with an error that names it; or, with `restart_limit` and a
    `FaultTolerantCheckpoint`, `fit` waits until the server has been started again, restores all
    variables from the newest checkpoint, and takes the steps since then again.

    Args:
        cluster_resolver: Resolver that describes the cluster; reads `TF_CONFIG` by default.
        variable_partitioner: Function that splits trainable variables along their first axis: one
            of `tf.distribute.experimental.partitioners`. None splits none. Each variable or part,
            with its optimizer slots, goes to the server that has the fewest bytes.
        synchronous: Whether all workers take each step together.
        backup_workers: Number of stragglers for which a synchronous step does not wait. Their rows
            are left out of the step.
        max_staleness: Maximum number of other workers' updates between the start and the end of an
            asynchronous step; None for no bound. With 0, one worker works at a time.
        compression: Compressor of gradients sent from a worker to the servers, or to the chief in
            synchronous training, such as `Float16()`. Codecs with error feedback cannot be used.
        batch_split: Parts of every batch that the workers work on in synchronous training: a
            positive number for each worker, such as `[3, 1]`; or "auto", which measures each
            worker's time per row and gives faster ones more rows, in new parts from the next epoch
            on. None for equal parts. Asynchronous workers take whole batches, each at its own
            pace.
        gradient_aggregation: Rule by which the chief combines the workers' gradients in synchronous
            training, so that a few wrong ones do little:
            `tfdml.aggregation.TrimmedMean(num_byzantine=1)`. Rules that keep something from step to
            step, such as `CenteredClipping`, cannot be used. None for the mean.
        start_limit: Seconds to wait for the workers and servers to start.
        silence_limit: Seconds without a sign of life after which a process is taken for lost. A
            process that dies is noticed at once.
        restart_limit: Seconds to wait for a lost server to be started again, as `tfdml launch`
            does; 0 for none.

    Raises:
        ValueError: If an argument is wrong, the cluster lacks a role, or this process is not its
            chief.
        OSError: If the chief's port is taken.
        TimeoutError: If a worker or server does not start in time; it is named.

    Reference:
        Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014. Ho
        et al., "More effective distributed ML via a stale synchronous parallel parameter server",
        NIPS 2013. Chen et al., "Revisiting distributed synchronous SGD", arXiv:1604.00981.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        variable_partitioner: Callable | None = None,
        *,
        synchronous: bool = False,
        backup_workers: int = 0,
        max_staleness: int | None = None,
        compression: Compressor | str | None = None,
        batch_split: Sequence[float] | str | None = None,
        gradient_aggregation: RobustRule | None = None,
        silence_limit: float = 60.0,
        start_limit: float = 300.0,
        restart_limit: float = 0.0,
    ):
        checks.check_arguments(
            synchronous, backup_workers, max_staleness, variable_partitioner, batch_split
        )
        options = arguments.check(
            None,
            compression,
            silence_limit=silence_limit,
            batch_split=batch_split,
            gradient_aggregation=gradient_aggregation,
        )
        checks.check_gradient_aggregation(synchronous, gradient_aggregation)
        compressor = check_compressor(options.compression)
        arguments.check_seconds("start_limit", start_limit)
        if restart_limit:
            arguments.check_seconds("restart_limit", restart_limit)
        keras_seam.install()
        parameter_servers.install()
        tensorflow_seam.install()
        hide_all()
        task = chief_task(cluster_resolver)
        workers = len(task.cluster[WORKER])
        arguments.check_number_of_parts(options.batch_split, workers, f"workers ({workers})")
        if gradient_aggregation is not None:
            gradient_aggregation.check_ranks(workers - backup_workers)
        self.gradient_aggregation = gradient_aggregation
        self.batch_split = BatchSplit(options.batch_split, workers)
        self.share_clock = ShareClock(workers)
        self.worker_clock = WorkerClock(workers)
        self.connection = connect(task, start_limit, silence_limit)
        self.synchronous = synchronous
        self.backup_workers = backup_workers
        self.max_staleness = max_staleness
        self.restart_limit = restart_limit
        self.compressor = compressor
        super().__init__(self.connection.resolver)
        # TensorFlow's constructor creates its own extension and has no argument for another one.
        extended = ParameterServerExtended(self, self.connection.resolver, variable_partitioner)
        extended.keras_hooks = parameter_servers.ServerHooks()
        tf.distribute.Strategy.__init__(self, extended)
        note_strategy(self)
        if backup_workers >= self.size:
            raise ValueError(
                f"`backup_workers` must be fewer than there are workers. Received: "
                f"backup_workers={backup_workers}, {self.size} workers."
            )
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self)
        update_when_workers_are_back(self.coordinator, self.connection.link.wait_for_workers)
        # Each worker's index, stored on the worker: it selects the worker's random stream.
        self.streams = on_each_worker(
            self.coordinator, lambda i: tf.constant(i, tf.int64), tf.TensorSpec([], tf.int64)
        )

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        """Connects TensorFlow to the cluster, once per process; called by its constructor."""
        cluster = self.connection.task.cluster
        self._num_workers, self._num_ps = len(cluster[WORKER]), len(cluster[SERVER])
        if not self.connection.connected:
            with exit_after(_CONNECT_SECONDS):
                super()._connect_to_cluster(coordinator_name)
            self.connection.connected = True

    @property
    def rank(self) -> int:
        """The rank of the chief, 0."""
        return 0

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._num_workers

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and messages; always True, because it is the chief."""
        return True

    def call_on_chief(self, function: Callable[[], Any]) -> Any:
        """Returns what a function returns; see `tfdml.HorovodStrategy.call_on_chief`.

        The program runs on the chief alone.
        """
        return function()

    @property
    def placement(self) -> str:
        """A printable table of the server and the size of each variable or part."""
        return placement_table(self.extended.placed, self._num_ps)
