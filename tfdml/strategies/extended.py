"""What `tf.distribute` asks of a strategy: mirrored local devices, and a collective between them.

This is the one module that knows the insides of `tf.distribute` (TensorFlow 2.21).
"""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
    cross_device_ops,
    distribute_utils,
    input_util,
    values,
)
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended

from tfdml.collectives.aggregator import sum_gradients
from tfdml.collectives.collective import Collective
from tfdml.compression import Compressor
from tfdml.compression.aggregator import CompressedAggregator
from tfdml.compression.auto_aggregator import AutoAggregator, aggregator_of
from tfdml.runtime.guard import Guard
from tfdml.strategies.accumulation import Accumulator
from tfdml.strategies.agreement import check_pipeline
from tfdml.strategies.noise_scale import NoiseScale
from tfdml.strategies.share import Portion, Share, Splitter, unpacked
from tfdml.strategies.step_clock import StepClock
from tfdml.strategies.stop_vote import StopVote

_TO_FIRST_DEVICE = cross_device_ops.ReductionToOneDevice()


class ReplicaExtended(MirroredExtended):
    """Local devices mirrored by TensorFlow; processes kept alike by a `Collective`.

    Replicas are numbered by process, then by device. Every process creates the same variables in
    the same order; their initial values come from rank 0.

    Args:
        strategy: The strategy that this extends.
        devices: This process's devices.
        collective: What exchanges tensors with the other processes.
        compressor: What makes gradients smaller between processes.
        guard: What ends the job where a process cannot go on; None for a process alone.
        check_desync: Steps between two comparisons of all weights; 0 for none.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        devices: Sequence[str],
        collective: Collective,
        compressor: Compressor | None = None,
        guard: Guard | None = None,
        check_desync: int = 0,
    ):
        self.collective = collective
        self.guard = guard
        self.check_desync = check_desync
        self.compressor = compressor
        # One process alone sends nothing.
        self.aggregator: CompressedAggregator | AutoAggregator | None = None
        if compressor is not None and collective.size > 1:
            self.aggregator = aggregator_of(collective, compressor)
        # What a `StepMonitor` and a `GradientNoiseScale` read, where there is one.
        self.clock: StepClock | None = None
        self.noise_scale: NoiseScale | None = None
        # By which ranks ask all to stop, where there is a callback that does.
        self.vote: StopVote | None = None
        # Variables whose value is the whole job's already: reading them exchanges nothing.
        self._in_step = weakref.WeakValueDictionary()
        self._shares: list[Share] | None = None
        self._global_steps = False
        self.accumulator: Accumulator | None = None
        # The same between steps: of the model that was set up last.
        self.gathering: Accumulator | None = None
        self._names: dict[str, Iterator[int]] = {}
        super().__init__(strategy, devices)

    # -- Who the replicas are ------------------------------------------------------------------

    @property
    def options(self) -> dict[str, Any]:
        """What must be alike on all processes."""
        return {
            "strategy": type(self._container_strategy()).__name__,
            "devices": self.num_local_replicas,
            "check_desync": self.check_desync,
            "compression": repr(self.compressor),
        }

    @property
    def num_local_replicas(self) -> int:
        """The number of replicas of this process."""
        return len(self._devices)

    @property
    def _num_replicas_in_sync(self) -> int:
        return self.collective.size * self.num_local_replicas

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self.collective.rank * self.num_local_replicas + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group % self.num_local_replicas

    @property
    def observers(self) -> list[StepClock | NoiseScale | StopVote]:
        """What watches a train step: told when it begins, and what the ranks' slots add up to."""
        return [o for o in (self.clock, self.noise_scale, self.vote) if o is not None]

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each process runs a graph of its own; see `tf.distribute`."""
        return self.collective.size > 1

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints."""
        return self.collective.topology.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries."""
        return self.collective.topology.is_chief

    def _use_merge_call(self) -> bool:
        return True

    # -- What the guard is told ----------------------------------------------------------------

    def collective_call(self, name: str) -> contextlib.AbstractContextManager:
        """While this is entered, this process is in a call that all processes make."""
        return self.guard.call(name) if self.guard else contextlib.nullcontext()

    @contextlib.contextmanager
    def collective_step(self, name: str, steps: int) -> Iterator[None]:
        """While this is entered, this process is in a step that all processes take together."""
        if self.guard is None:
            yield
            return
        with self.guard.place.waiting(name):
            yield
        self.guard.place.step += steps

    # -- Variables -----------------------------------------------------------------------------

    def _get_variable_creator_initial_value(self, replica_id, device, primary_var, **kwargs):
        """Returns a function that makes replica `replica_id`'s value: rank 0's, for the first."""
        if replica_id > 0 or self.collective.size == 1:
            return super()._get_variable_creator_initial_value(
                replica_id, device, primary_var, **kwargs
            )
        value, dtype = kwargs["initial_value"], kwargs.get("dtype")
        name = self.unique_name("initial_value")

        def initial_value() -> tf.Tensor:
            own = tf.convert_to_tensor(value() if callable(value) else value, dtype=dtype)
            with self.making_variable(f"{kwargs.get('name')} {own.shape} {own.dtype.name}"):
                return self.collective.broadcast(own, name)

        return initial_value

    @contextlib.contextmanager
    def making_variable(self, variable: str) -> Iterator[None]:
        """While this is entered, all processes make this variable; says so if they do not."""
        try:
            with self.guard.place.waiting(f"making the variable {variable}"):
                yield
        except tf.errors.OpError as error:
            raise ValueError(
                f"Variables must be the same ones on all {self.collective.size} ranks, made in one "
                f"order. Received on rank {self.collective.rank}: {variable}, and from the "
                f"exchange: {error.message} Build the same model on all ranks."
            ) from error

    def keep_in_step(self, variables: Sequence[values.DistributedVariable]) -> None:
        """Declares that these sync-on-read variables hold the whole job's value on every process.

        The value is the sum (or mean) over this process's devices alone; to read it is then no
        collective, and can be done by one process.
        """
        self._in_step.update((id(v), v) for v in variables)

    # -- Reductions ----------------------------------------------------------------------------

    def unique_name(self, kind: str) -> str:
        """Returns `kind_K`, with K counting the calls of a graph's making: alike on all processes.

        Executed eagerly, operations follow one another, and one name serves them all.
        """
        if tf.executing_eagerly():
            return kind
        return f"{kind}_{next(self._names.setdefault(kind, itertools.count()))}"

    def _reduce_to(self, reduce_op, value, destinations, options):
        if self._in_step.get(id(value)) is value:
            return super()._reduce_to(reduce_op, value, destinations, options)

        def reduce_one(v):
            if distribute_utils.is_mirrored(v) and reduce_op == tf.distribute.ReduceOp.MEAN:
                return v
            return self._reduce_all([v], reduce_op, [destinations])[0]

        return tf.nest.map_structure(reduce_one, value)

    def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
        batch, destinations = zip(*value_destination_pairs, strict=True)
        return self._reduce_all(batch, reduce_op, destinations)

    def _reduce_all(self, batch: Sequence, reduce_op, destinations: Sequence) -> list:
        """Reduces each value over all replicas and puts the result on its destinations."""
        sums = sum_gradients(
            self.collective, [self._local_sum(v) for v in batch], self.unique_name("reduce")
        )
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            sums = [_divide(total, self._num_replicas_in_sync) for total in sums]
        return [self._broadcast_to(t, d) for t, d in zip(sums, destinations, strict=True)]

    def _local_sum(self, value):
        """Returns the sum over this process's replicas, on the first device."""
        if isinstance(value, values.DistributedValues):
            return _TO_FIRST_DEVICE.reduce(
                tf.distribute.ReduceOp.SUM, value, destinations=self._devices[0]
            )
        if isinstance(value, tf.IndexedSlices):
            return value
        # A plain value is the same on each of this process's replicas.
        value = tf.convert_to_tensor(value)
        return value * tf.cast(self.num_local_replicas, value.dtype)

    def sum_gradients(
        self,
        label: str,
        gradients: Sequence,
        names: Sequence[str],
        rates: Callable[[], tuple[tf.Tensor | None, tf.Tensor]],
    ) -> list:
        """Sums gradients over all replicas; called in replica context, by every replica.

        Args:
            label: What the exchange is called.
            gradients: This replica's gradients, in the order of the layers; None where a variable
                has none.
            names: Their variables' paths.
            rates: Returns the loss scale (None for 1) and the learning rate.

        Returns:
            The sums, None where there was none.
        """
        places = [i for i, g in enumerate(gradients) if g is not None]

        def merge(strategy, *per_replica):
            local = [self._local_sum(v) for v in per_replica]
            exchange = functools.partial(sum_gradients, self.collective, local, label)
            if self.aggregator is not None:
                paths = [names[i] for i in places]
                exchange = functools.partial(
                    self.aggregator.sum_gradients, local, paths, label, *rates()
                )
            sums = exchange() if self.clock is None else self.clock.timed(local, exchange)
            if self.noise_scale is not None and self._shares is not None:
                parts = [strategy.experimental_local_results(v) for v in per_replica]
                rows = self._shares[0].global_rows * self._steps_of_update
                self.noise_scale.observe(parts, sums, rates()[0], rows)
            return [self._on_all_devices(total) for total in sums]

        replica = tf.distribute.get_replica_context()
        sums = replica.merge_call(merge, args=[gradients[i] for i in places]) if places else []
        result = [None] * len(gradients)
        for i, total in zip(places, sums, strict=True):
            result[i] = total
        return result

    @property
    def _steps_of_update(self) -> int:
        """The steps whose gradients an update is made of."""
        return 1 if self.accumulator is None else self.accumulator.steps

    def overwrite_where(self, due, variables: Sequence, values: Sequence) -> None:
        """Assigns `values` to mirrored variables if `due`; called in replica context, by all."""

        def merge(strategy, due):
            for variable, value in zip(variables, values, strict=True):
                strategy.extended.update(
                    variable, lambda v, new, due: v.assign(tf.where(due, new, v)), (value, due)
                )

        tf.distribute.get_replica_context().merge_call(merge, args=(due,))

    def _on_all_devices(self, tensor):
        """Returns `tensor` copied to each of this process's devices."""
        copies = []
        for device in self._devices:
            with tf.device(device):
                copies.append(tf.nest.map_structure(tf.identity, tensor, expand_composites=True))
        return distribute_utils.regroup(copies, wrap_class=values.Mirrored)

    def _gather_to_implementation(self, value, destinations, axis, options):
        del options
        local = tf.concat(self._container_strategy().experimental_local_results(value), axis)
        # Only axis 0 can be gathered: bring `axis` there and back.
        order = [axis, *(i for i in range(local.shape.rank) if i != axis)]
        gathered = self.collective.all_gather(
            tf.transpose(local, order), self.unique_name("gather")
        )
        inverse = [order.index(i) for i in range(len(order))]
        return self._broadcast_to(tf.transpose(gathered, inverse), destinations)

    # -- Batches -------------------------------------------------------------------------------

    @property
    def splitter(self) -> Splitter:
        """What splits global batches over the replicas."""
        first = self._get_replica_id_in_sync_group(0)
        return Splitter(first, self.num_local_replicas, self._num_replicas_in_sync)

    def portion_of(self, batch: Any) -> Portion:
        """Returns this process's portion of a global batch, where it is not one already."""
        if isinstance(batch, Portion):
            return batch
        with tf.device(self._input_workers_devices[0][0]):
            return self.splitter.split(batch)

    def replica_values(self, parts: Sequence[Any]) -> Any:
        """Returns structures, one for each of this process's replicas, as `strategy.run` takes."""
        return distribute_utils.regroup(tuple(parts))

    @contextlib.contextmanager
    def working_on(
        self, shares: list[Share], accumulator: Accumulator | None = None
    ) -> Iterator[None]:
        """While this is entered, `current_share` in a replica is that replica's share.

        Args:
            shares: The shares of this process's replicas.
            accumulator: What the model's optimizer gathers gradients in, if it does.
        """
        self._shares, self.accumulator = shares, accumulator
        try:
            yield
        finally:
            self._shares = self.accumulator = None

    def current_share(self) -> Share | None:
        """Returns the calling replica's share; None outside a global step of Keras."""
        replica = tf.distribute.get_replica_context()
        if self._shares is None or replica is None:
            return None
        return self._shares[replica._local_replica_id]

    def split_element(self, *element) -> Portion:
        """Returns this process's portion of a dataset's element, a global batch."""
        return self.splitter.split(unpacked(element))

    @contextlib.contextmanager
    def global_steps(self) -> Iterator[None]:
        """While this is entered, datasets are left whole: a `GlobalStep` takes portions."""
        before, self._global_steps = self._global_steps, True
        try:
            yield
        finally:
            self._global_steps = before

    def _experimental_distribute_dataset(self, dataset, options):
        """Gives each replica its rows of every global batch (or all, see `global_steps`)."""
        if self._global_steps:
            return dataset
        check_pipeline(dataset, self.collective)
        if self.collective.size > 1:
            dataset = dataset.map(
                lambda *batch: self.splitter.own_rows(unpacked(batch)),
                num_parallel_calls=tf.data.AUTOTUNE,
            )
        return input_util.get_distributed_dataset(
            dataset,
            self._input_workers_with_options(options),
            self._container_strategy(),
            num_replicas_in_sync=self.num_local_replicas,
            options=options,
        )

    def _distribute_datasets_from_function(self, dataset_fn: Callable, options):
        def with_global_context(context: tf.distribute.InputContext) -> tf.data.Dataset:
            del context
            return dataset_fn(
                tf.distribute.InputContext(
                    num_input_pipelines=self.collective.size,
                    input_pipeline_id=self.collective.rank,
                    num_replicas_in_sync=self._num_replicas_in_sync,
                )
            )

        return super()._distribute_datasets_from_function(with_global_context, options)

    def _experimental_distribute_values_from_function(self, value_fn: Callable):
        contexts = [
            tf.distribute.experimental.ValueContext(
                self._get_replica_id_in_sync_group(i), self._num_replicas_in_sync
            )
            for i in range(self.num_local_replicas)
        ]
        return distribute_utils.regroup([value_fn(c) for c in contexts], always_wrap=True)


def _divide(total, count: int):
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(total.values / count, total.indices, total.dense_shape)
    return total / count
