"""`ParameterServerStrategy`: `model.fit` with variables on servers and steps on workers."""

from collections.abc import Callable

import tensorflow as tf

from tfdml.compression import Compressor
from tfdml.runtime.gpus import hide_all
from tfdml.runtime.meeting import bounded
from tfdml.runtime.server_task import SERVER, WORKER
from tfdml.strategies import arguments, keras_seam, tensorflow_seam
from tfdml.strategies.alone import note_strategy
from tfdml.strategies.keras_seam import parameter_servers
from tfdml.strategies.parameter_server import checks
from tfdml.strategies.parameter_server.connection import chief_task, connect
from tfdml.strategies.parameter_server.extended import ParameterServerExtended
from tfdml.strategies.parameter_server.placement import placement_table
from tfdml.strategies.parameter_server.pushing import check_compressor
from tfdml.strategies.parameter_server.shipping import on_each_worker

# All have come by then: TensorFlow only has to connect.
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

    The script runs on the chief alone; workers and servers run `tfdml serve`. Each is told the
    cluster and its role by `TF_CONFIG`, or all are started by `tfdml launch --workers 2 --ps 2`.

    **Asynchronous**, as by default, each worker takes whole steps of its own on variables that
    others change meanwhile. A dataset, or a function that makes one, is sent to the workers, which
    read it for themselves: without a seed each in an order of its own, else each its own batches.
    No update is lost: additions, those to rows of an embedding too, are done on the servers one
    after another, and a step counts once in the metrics, which the chief adds up. What is not
    promised here: the result of one process, the same result twice, and that a step whose worker
    died, and that another one took again, has not been applied in part the first time. What is
    assigned, not added to, is the last writer's: moving statistics of `BatchNormalization`, the
    momentum of `SGD`, the averages of `RMSprop`. `Adam` and `Adagrad` add. A step has one loss
    scale, whatever other workers make of it meanwhile.

    **Synchronous**, the chief reads batches, sends each worker its share, and applies the sum of
    the gradients: the result is that of one process, and a lost worker changes nothing. All
    gradients pass through the chief.

    In both, `evaluate` and `predict` send each batch to one worker: every sample is counted once,
    and all rows come back in order. A lost worker is tolerated and may come back. A lost server
    ends `fit` with an error that names it.

    Args:
        cluster_resolver: What describes the cluster; `TF_CONFIG` by default.
        variable_partitioner: How many parts a trainable variable is split into, along its first
            axis: one of `tf.distribute.experimental.partitioners`. None keeps all whole. Variables
            and parts go to the server that has the fewest bytes, an optimizer's slots with them.
        synchronous: Whether a step is taken by all workers together.
        backup_workers: How many of the slowest workers a synchronous step does not wait for. Their
            rows are left out of it.
        max_staleness: The most updates of others that may come between an asynchronous step's
            beginning and its end; None for no bound. 0 lets one worker work at a time.
        compression: How gradients are encoded on their way from a worker to the servers, or to the
            chief in synchronous training, such as `Float16()`. Codecs that keep what they leave
            out for the next step cannot be used.
        start_limit: Seconds to wait for the workers and servers to start.
        silence_limit: Seconds after which a process that nothing is heard of is taken for lost. One
            that dies is noticed at once.

    Raises:
        ValueError: If an argument is wrong, the cluster lacks a role, or this process is not its
            chief.
        OSError: If the chief's port is taken.
        TimeoutError: If a worker or server has not come in time; it is named.

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
        silence_limit: float = 60.0,
        start_limit: float = 300.0,
    ):
        checks.check_arguments(synchronous, backup_workers, max_staleness, variable_partitioner)
        given = arguments.check(None, compression, silence_limit=silence_limit).compression
        compressor = check_compressor(given)
        arguments.check_seconds("start_limit", start_limit)
        keras_seam.install()
        parameter_servers.install()
        tensorflow_seam.install()
        hide_all()
        self.connection = connect(chief_task(cluster_resolver), start_limit, silence_limit)
        self.synchronous = synchronous
        self.backup_workers = backup_workers
        self.max_staleness = max_staleness
        self.compressor = compressor
        super().__init__(self.connection.resolver)
        # TensorFlow's constructor makes an extension of its own, and has no argument for another.
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
        # Each worker's own number, there: what its random numbers follow from.
        self.streams = on_each_worker(
            self.coordinator, lambda i: tf.constant(i, tf.int64), tf.TensorSpec([], tf.int64)
        )

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        """Connects TensorFlow to the cluster, once in a process; called by its constructor."""
        cluster = self.connection.task.cluster
        self._num_workers, self._num_ps = len(cluster[WORKER]), len(cluster[SERVER])
        if not self.connection.connected:
            with bounded(_CONNECT_SECONDS):
                super()._connect_to_cluster(coordinator_name)
            self.connection.connected = True

    @property
    def rank(self) -> int:
        """The chief's: 0."""
        return 0

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._num_workers

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and messages: always, for it runs the script."""
        return True

    @property
    def placement(self) -> str:
        """Which variable, or part of one, is on which server, and their sizes; to be printed."""
        return placement_table(self.extended.placed, self._num_ps)
