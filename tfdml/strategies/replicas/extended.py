"""Extended part of the synchronous strategies: mirrored local devices, linked by a collective.

This module and `batch_extended` depend on internals of `tf.distribute` (TensorFlow 2.20, 2.21).
"""

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import (
    cross_device_ops,
    device_util,
    distribute_utils,
    values,
)
from tensorflow.python.framework.func_graph import FuncGraph

from tfdml.collectives.aggregator import GradientAggregator, dense_buckets, sum_in_buckets
from tfdml.collectives.buckets import spread
from tfdml.collectives.collective import Collective, LocalCollective
from tfdml.collectives.hosts import Hosts, gather_hosts
from tfdml.collectives.sparse_gradients import add_up_rows
from tfdml.compression import Compressor
from tfdml.local_updates import LocalUpdates
from tfdml.pipeline.device_groups import replica_devices
from tfdml.runtime.descriptions import without_pages
from tfdml.runtime.guard.guard import Guard
from tfdml.runtime.plain_words import in_plain_words
from tfdml.runtime.timing.time_recorder import TimeRecorder
from tfdml.strategies.aggregation.aggregator_choice import AggregatorChoice
from tfdml.strategies.arguments import ReplicaOptions
from tfdml.strategies.fit_session import leave_sessions
from tfdml.strategies.replicas.batch_extended import BatchExtended
from tfdml.strategies.replicas.control_dependencies import after_arguments

_TO_ONE_DEVICE = cross_device_ops.ReductionToOneDevice()


class ReplicaExtended(BatchExtended):
    """Mirrors variables on local devices, and keeps processes in sync by a `Collective`.

    Every process creates the same variables in the same order; their initial values come from
    rank 0.

    Args:
        strategy: The strategy that this extends.
        collective: Collective that exchanges tensors with the other processes.
        devices: This process's devices, or a group of them for each replica if there is a
            pipeline.
        options: The strategy's options.
        guard: Guard that ends the job if a process cannot continue; None for a single process.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        collective: Collective,
        devices: Sequence[str] | Sequence[Sequence[str]],
        options: ReplicaOptions,
        guard: Guard | None = None,
    ):
        self.guard = guard
        self.recorder = TimeRecorder() if guard is None else guard.recorder
        self.options = options
        # The hooks that `keras_seam` calls; the strategy's constructor sets them.
        self.keras_hooks: Any = None
        self._aggregators: weakref.WeakKeyDictionary[keras.Optimizer, GradientAggregator]
        self._aggregators = weakref.WeakKeyDictionary()
        # The job's collective while a local step is being traced or run eagerly; see `locally`.
        self._of_job: Collective | None = None
        # Each optimizer's parts, if its state is divided among the ranks.
        self.optimizer_parts: weakref.WeakKeyDictionary[keras.Optimizer, Any]
        self.optimizer_parts = weakref.WeakKeyDictionary()
        # The number of variables that an optimizer had before its slots were made.
        self.variables_before_slots: weakref.WeakKeyDictionary[keras.Optimizer, int]
        self.variables_before_slots = weakref.WeakKeyDictionary()
        # Rank 0's requests for parts, while it saves a model; see `keras_seam.rank_files`.
        self.part_requests: Any = None
        # Context manager around the replicas' part of a step, and the exchanges of its lookups in
        # tables that are dealt to the ranks; see `sharded.late_exchanges`.
        self.around_step: Callable = contextlib.nullcontext
        self.late_exchanges: Any = None
        self._makes_own_variables = False
        # Whether the ranks are not connected yet, see `join`; until then no rank may train.
        self.must_join = self._is_elastic = False
        # Variables that already hold the whole job's value: reading them exchanges nothing.
        self._in_step = weakref.WeakValueDictionary()
        # Number of names given to exchanges of each kind, by the graph being traced.
        self._named: weakref.WeakKeyDictionary[tf.Graph, collections.Counter[str]]
        self._named = weakref.WeakKeyDictionary()
        super().__init__(strategy, collective, replica_devices(devices), options.batch_split)
        # If there is a pipeline: the devices of each replica's stages, a replica's rows of a batch
        # if known, and each model's graph with the stage of each call.
        self.device_groups = [] if options.pipeline is None else _resolved(devices)
        self.rows_of_group: int | None = None
        self.stages: weakref.WeakKeyDictionary[keras.Model, Any] = weakref.WeakKeyDictionary()
        self.aggregator_choice = AggregatorChoice(self._devices, guard.listeners if guard else ())
        self.aggregator_choice.hosts = gather_hosts(collective)

    def join(self, collective: Collective) -> None:
        """Continues with other processes; functions traced before must be retraced.

        Variables created later start from each process's own values, because a process that has
        just joined creates them earlier than the others.
        """
        self.collective, self.must_join, self._is_elastic = collective, False, True
        self.aggregator_choice.hosts = gather_hosts(collective)
        self.share_equally()
        self._aggregators.clear()
        # The ranks cut models together.
        self.stages.clear()
        leave_sessions(self._container_strategy())

    def whole_variables(self, optimizer: keras.Optimizer) -> list[keras.Variable]:
        """Returns the variables that an optimizer trains, without division into parts.

        Args:
            optimizer: A built optimizer, without a loss scale around it.
        """
        parts = self.optimizer_parts.get(optimizer)
        return optimizer._trainable_variables if parts is None else parts.wholes

    @property
    def compressor(self) -> Compressor | None:
        """The compressor of the gradients, or None."""
        return self.options.compression

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed; a single process or device has nothing to send."""
        return self.aggregator_choice.compresses(self.collective, self.options)

    def get_aggregator(self, optimizer: keras.Optimizer) -> GradientAggregator:
        """Returns an optimizer's own aggregator, created on first use.

        A local step's aggregator keeps nothing.
        """
        if self.is_local:
            return self.aggregator_choice.make_local(self.collective, self.options)
        if optimizer not in self._aggregators:
            self._aggregators[optimizer] = self.aggregator_choice.make(
                self.collective, self.options
            )
        return self._aggregators[optimizer]

    def current_weight(self) -> tf.Tensor | None:
        """Returns the calling replica's part of the batch's rows, if a rule compares gradients.

        Outside of a step of Keras all replicas have equal parts.

        Returns:
            float64, shape `[]`; None without `gradient_aggregation`.
        """
        if self.options.gradient_aggregation is None:
            return None
        share = self.current_share()
        if share is None:
            return tf.constant(1 / self._num_replicas_in_sync, tf.float64)
        return share.fraction(tf.float64)

    # -- Local updates -------------------------------------------------------------------------

    @property
    def local_updates(self) -> LocalUpdates | None:
        """The method of local updates, None if each step is synchronous."""
        method = self.options.local_updates
        if method is None or (self.local_groups.count == 1 and method.is_plain_on_one_process):
            return None
        return method

    @property
    def local_groups(self) -> Hosts:
        """The ranks by the local steps that they take together: each rank, or each host's ranks."""
        hosts = self.aggregator_choice.hosts
        if self.options.local_updates.synchronous_hosts:
            return hosts
        return Hosts.of(range(len(hosts.by_rank)))

    @contextlib.contextmanager
    def locally(self) -> Iterator[None]:
        """Context manager: this rank takes a local step, alone or with those of its local group.

        The group is a job of its own, which exchanges nothing with other ranks.
        """
        job = self.collective
        own = self.local_groups.local_ranks(job.rank)
        self.collective = LocalCollective() if len(own) == 1 else job.subgroup(own)
        self._of_job = job
        try:
            yield
        finally:
            self.collective, self._of_job = job, None

    @property
    def is_local(self) -> bool:
        """Whether a local step is being traced or run eagerly; see `locally`."""
        return self._of_job is not None

    @property
    def works_on_shares(self) -> bool:
        """Whether replicas work on shares, which may have no rows."""
        options = self.options
        is_divided = self._num_replicas_in_sync > 1 or options.pipeline is not None
        return is_divided or options.gradient_aggregation is not None or self.is_local

    def number_of_replica(self, replica_id: int) -> int:
        """Returns the number of one of this process's replicas in the whole job.

        Args:
            replica_id: Number of the replica in this process.
        """
        of_job = self._of_job or self.collective
        return of_job.rank * self.num_local_replicas + replica_id

    # -- Properties ----------------------------------------------------------------------------

    @property
    def must_match(self) -> dict[str, Any]:
        """The properties that must be the same on all processes, by name."""
        return {
            "strategy": type(self._container_strategy()).__name__,
            "devices": self.num_local_replicas,
            "devices of a group": len(self.device_groups[0]) if self.device_groups else 1,
            **{name: repr(value) for name, value in self.options.must_match.items()},
        }

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each process runs its own graph; see `tf.distribute`."""
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

    # -- Reports to the guard ------------------------------------------------------------------

    def collective_call(
        self, name: str, in_step: bool = False
    ) -> contextlib.AbstractContextManager:
        """Context manager: this process is in a call that all processes make.

        Args:
            name: Name of the call.
            in_step: Whether a step that is being traced may make it: then the step is named.
        """
        if in_step and not tf.executing_eagerly():
            return contextlib.nullcontext()
        if self.must_join:
            raise RuntimeError(
                f"`{name}` must be called in a function that `tfdml.elastic.run` calls, because "
                f"`horovodrun` was started with --min-np. Received: a call outside of it."
            )
        return self.guard.call(name) if self.guard else contextlib.nullcontext()

    @contextlib.contextmanager
    def collective_step(self, name: str, steps: int) -> Iterator[None]:
        """Context manager: this process is in a step that all processes take together."""
        if self.guard is None:
            yield
            return
        with in_plain_words(), self.guard.activity.waiting(name):
            yield
        self.guard.activity.step += steps

    def making_graph(self, step: str) -> contextlib.AbstractContextManager:
        """Context manager: the graph of a step is being traced, unless the step runs eagerly."""
        if self.guard is None or tf.executing_eagerly():
            return contextlib.nullcontext()
        return self.guard.activity.making_graph(step)

    # -- Variables -----------------------------------------------------------------------------

    def _create_variable(self, next_creator, **kwargs):
        """Creates a mirrored variable; weights of a pipeline's model on the host at first.

        One device may not have the memory for all stages' weights. The model's first step moves
        them to the devices of their stages.
        """
        is_weight = kwargs.get("trainable") and kwargs.get("colocate_with") is None
        if self.device_groups and is_weight:
            host = device_util.resolve("CPU:0")
            kwargs["colocate_with"] = _Places((host,) * self.num_local_replicas)
        return super()._create_variable(next_creator, **kwargs)

    def _get_variable_creator_initial_value(self, replica_id, device, primary_var, **kwargs):
        """Returns the initial value of replica `replica_id`; the first replica's is rank 0's.

        A metric's value is the sum over its replicas, so the first replica of rank 0 gets all of
        it and the others get 0.
        """
        value, dtype = kwargs["initial_value"], kwargs.get("dtype")
        summed = kwargs.get("aggregation") == tf.VariableAggregation.SUM
        on_read = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        if summed and on_read:
            if self._get_replica_id_in_sync_group(replica_id) == 0:
                return value
            start = value if replica_id == 0 else primary_var.read_value
            return lambda: tf.zeros_like(
                tf.convert_to_tensor(start() if callable(start) else start, dtype=dtype)
            )
        if replica_id > 0 or self.collective.size == 1 or self.makes_own_variables:
            return super()._get_variable_creator_initial_value(
                replica_id, device, primary_var, **kwargs
            )
        name = self.unique_name("initial_value")

        def initial_value() -> tf.Tensor:
            own = tf.convert_to_tensor(value() if callable(value) else value, dtype=dtype)
            with self.making_variable(f"{kwargs.get('name')} {own.shape} {own.dtype.name}"):
                return self.collective.broadcast(own, name)

        return initial_value

    @property
    def makes_own_variables(self) -> bool:
        """Whether new variables keep the values that this rank gives them."""
        return self._is_elastic or self._makes_own_variables

    @contextlib.contextmanager
    def making_own_variables(self) -> Iterator[None]:
        """Context manager: new variables belong to this rank, which gives them their values."""
        before, self._makes_own_variables = self._makes_own_variables, True
        try:
            yield
        finally:
            self._makes_own_variables = before

    @contextlib.contextmanager
    def making_variable(self, variable: str) -> Iterator[None]:
        """Context manager: all processes create this variable; a mismatch is explained."""
        try:
            with self.guard.activity.waiting(f"making the variable {variable}"):
                yield
        except tf.errors.OpError as error:
            self.guard.wait_for_verdict(error)
            raise ValueError(
                f"Variables must be the same on all {self.collective.size} ranks, made "
                f"in the same order. Received on rank {self.collective.rank}: {variable}, and from "
                f"the exchange: {without_pages(error.message)} Build the same model on all ranks."
            ) from None

    def keep_in_step(self, variables: Sequence[values.DistributedVariable]) -> None:
        """Declares that these sync-on-read variables hold the whole job's value on every process.

        The value is the sum (or mean) over this process's devices alone. Reading it is then not a
        collective, so a single process can do it.
        """
        self._in_step.update((id(v), v) for v in variables)

    def assign_whole(self, variable: values.SyncOnReadVariable, value: tf.Tensor) -> None:
        """Assigns the whole job's value to a variable whose value is the sum over its replicas.

        All processes call this, outside of replicas. TensorFlow would divide the value by the
        number of replicas, which gives wrong results for integers.
        """
        here = self._in_step.get(id(variable)) is variable or self.collective.rank == 0
        for number, component in enumerate(variable.values):
            component.assign(value if here and number == 0 else tf.zeros_like(value))

    # -- Reductions ----------------------------------------------------------------------------

    def unique_name(self, kind: str) -> str:
        """Returns `kind_K`, with K counting the calls in a graph; the same on all processes.

        Each graph has its own count, because one process may retrace a step while another, whose
        share has the same size as before, does not. Eager operations run one after another, so
        they all use the same name.
        """
        if tf.executing_eagerly():
            return kind
        counts = self._named.setdefault(_outermost_graph(), collections.Counter())
        counts[kind] += 1
        return f"{kind}_{counts[kind] - 1}"

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
        """Reduces each value over all replicas and copies the result to its destinations."""
        buckets = dense_buckets([_first_part(v) for v in batch])
        devices = spread(buckets, len(batch), self._devices)
        own = [self.local_sum(v, device) for v, device in zip(batch, devices, strict=True)]
        sums = sum_in_buckets(self.collective, own, self.unique_name("reduce"), devices=devices)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            sums = [_divide(total, self._num_replicas_in_sync) for total in sums]
        return [self._broadcast_to(t, d) for t, d in zip(sums, destinations, strict=True)]

    def local_sum(self, value, device: str):
        """Returns the sum over this process's replicas, on one of their devices."""
        if isinstance(value, values.DistributedValues):
            total = _TO_ONE_DEVICE.reduce(tf.distribute.ReduceOp.SUM, value, destinations=device)
            with tf.device(device):
                return add_up_rows(total) if self.num_local_replicas > 1 else total
        if isinstance(value, tf.IndexedSlices):
            return value
        # A plain value is the same on each of this process's replicas.
        value = tf.convert_to_tensor(value)
        return value * tf.cast(self.num_local_replicas, value.dtype)

    def _update(self, var, fn: Callable, args: tuple, kwargs: dict, group: bool):
        """Updates a variable; no part of the update runs before the gradient's sum has arrived.

        Otherwise parts that do not need the gradient, such as the decay of momentum, would run
        before the forward pass and delay the exchange.
        """
        return super()._update(var, after_arguments(fn), args, kwargs, group)

    def largest(self, name: str, own: Sequence[tf.Tensor]) -> list:
        """Returns the element-wise maximum over replicas; all call this, in replica context.

        Args:
            name: Name of the exchange.
            own: This replica's values, with known shapes and the same dtype.
        """
        if not own:
            return []

        def merge(_, *per_replica):
            here = [
                tf.reshape(tf.reduce_max(tf.stack(self.parts_of(v)), 0), [-1]) for v in per_replica
            ]
            here = tf.concat(here, 0)[tf.newaxis]
            if self.collective.size > 1:
                here = self.collective.all_gather(here, name)
            sizes = [v.shape.num_elements() for v in own]
            largest = tf.split(tf.reduce_max(here, 0), sizes)
            shaped = [tf.reshape(v, o.shape) for v, o in zip(largest, own, strict=True)]
            return [self.on_all_devices(v) for v in shaped]

        return list(tf.distribute.get_replica_context().merge_call(merge, args=tuple(own)))

    def overwrite_where(self, due, variables: Sequence, values: Sequence) -> None:
        """Assigns `values` to mirrored variables if `due`; all call this, in replica context."""

        def merge(strategy, due):
            for variable, value in zip(variables, values, strict=True):
                strategy.extended.update(
                    variable, lambda v, new, due: v.assign(tf.where(due, new, v)), (value, due)
                )

        tf.distribute.get_replica_context().merge_call(merge, args=(due,))

    def on_all_devices(self, tensor):
        """Returns `tensor` copied to each of this process's replicas' devices."""
        return self.copied_to(tensor, self._devices)

    def copied_to(self, tensor, devices: Sequence[str]):
        """Returns `tensor` copied to one device of each of this process's replicas."""
        copies = []
        for device in devices:
            with tf.device(device):
                copies.append(tf.nest.map_structure(tf.identity, tensor, expand_composites=True))
        return distribute_utils.regroup(copies, wrap_class=values.Mirrored)

    def _gather_to_implementation(self, value, destinations, axis, options):
        del options
        local = tf.concat(self._container_strategy().experimental_local_results(value), axis)
        # Only axis 0 can be gathered: move `axis` there and back.
        order = [axis, *(i for i in range(local.shape.rank) if i != axis)]
        gathered = self.collective.all_gather(
            tf.transpose(local, order), self.unique_name("gather")
        )
        inverse = [order.index(i) for i in range(len(order))]
        return self._broadcast_to(tf.transpose(gathered, inverse), destinations)


class _Places:
    """Devices of a variable, as TensorFlow takes them from another variable."""

    def __init__(self, devices: tuple[str, ...]):
        self._devices = devices


def _resolved(groups: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Returns groups of devices with their full names."""
    return [tuple(map(device_util.resolve, group)) for group in groups]


def _outermost_graph() -> tf.Graph:
    """Returns the outermost graph being traced: that of the function that was called eagerly."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(getattr(graph, "outer_graph", None), FuncGraph):
        graph = graph.outer_graph
    return graph


def _first_part(value):
    """Returns the first part of a value, for its dtype and shape."""
    if isinstance(value, values.DistributedValues):
        return value.values[0]
    return value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)


def _divide(total, count: int):
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(total.values / count, total.indices, total.dense_shape)
    return total / count
