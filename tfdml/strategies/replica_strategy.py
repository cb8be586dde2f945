"""Base class of tfdml's synchronous strategies."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.collectives.objects import call_on_rank_0
from tfdml.collectives.observed_collective import ObservedCollective
from tfdml.runtime.guard.guard import get_guard
from tfdml.strategies import keras_seam, tensorflow_seam
from tfdml.strategies.alone import check_started_alone, note_strategy
from tfdml.strategies.arguments import ReplicaOptions, check_number_of_parts
from tfdml.strategies.mesh import Mesh
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.strategies.replicas.global_step import GlobalStep


class ReplicaStrategy(tf.distribute.Strategy):
    """Synchronous strategy that mirrors variables on the devices of one or several processes.

    Args:
        collective: Collective that exchanges tensors between the processes.
        devices: This process's devices, one per replica, or a group of them for each replica if
            there is a pipeline.
        options: Checked options from the subclass's constructor.
    """

    # `MirroredExtended` numbers TensorFlow's own collectives from here.
    _collective_key_base = 0

    def __init__(
        self,
        collective: Collective,
        devices: Sequence[str] | Sequence[Sequence[str]],
        options: ReplicaOptions,
    ):
        processes, local = collective.size, len(devices)
        what = f"processes ({processes}) times devices of each ({local})"
        check_number_of_parts(options.batch_split, processes * local, what)
        keras_seam.install()
        tensorflow_seam.install()
        hooks = keras_seam.replica_hooks()
        options = hooks.strategy_options(options)
        if options.gradient_aggregation is not None:
            options.gradient_aggregation.check_ranks(processes if processes > 1 else local)
        guard = None
        if collective.size == 1:
            check_started_alone(type(self).__name__)
        else:
            guard = get_guard(collective, options.silence_limit)
            collective = ObservedCollective(collective, guard.listeners)
        super().__init__(ReplicaExtended(self, collective, devices, options, guard))
        self.extended.keras_hooks = hooks
        note_strategy(self)

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self.extended.collective.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.extended.collective.size

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and messages."""
        return self.extended.collective.topology.is_chief

    @property
    def mesh(self) -> Mesh:
        """The numbers of replicas, of stages of each, and of parts of divided state."""
        groups, sharding = self.extended.device_groups, self.extended.options.sharding
        stages = len(groups[0]) if groups else 1
        return Mesh(self.num_replicas_in_sync, stages, self.size if sharding else 1)

    @property
    def batch_weights(self) -> tuple[int, ...] | None:
        """Weights by which rows of a batch are dealt to the replicas now; None for equal parts."""
        return self.extended.batch_split.weights

    def call_on_chief(self, function: Callable[[], Any]) -> Any:
        """Calls a function on rank 0, and returns its result, or raises its error, on all ranks.

        For decisions that must be alike: what a search tries next, a name for the run, whether a
        file exists. All ranks call this together, outside of steps.

        ```python
        run = strategy.call_on_chief(lambda: f"run-{time.time():.0f}")
        ```

        Args:
            function: Function without arguments, which other ranks do not call. They get a copy of
                what it returns, by `pickle`.

        Raises:
            RuntimeError: If it is called in a step.
            TypeError: If the result cannot be pickled.
            Exception: What `function` has raised.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                "`call_on_chief` must be called outside of steps, because it calls Python. "
                "Received: a call while a graph is traced. Call it before, or in a callback."
            )
        with self.extended.collective_call("call_on_chief"):
            return call_on_rank_0(self.extended.collective, function, "call_on_chief")

    def run(self, fn, args=(), kwargs=None, options=None) -> Any:
        """Runs `fn` on each replica; see `tf.distribute.Strategy.run`."""
        # Keras takes every step through `run`. A `GlobalStep` is called once for all replicas; it
        # calls `run` itself for the part that each replica does alone.
        if isinstance(fn, GlobalStep):
            with self.extended.making_graph(fn.name):
                return fn(*args)
        return super().run(fn, args=args, kwargs=kwargs, options=options)
