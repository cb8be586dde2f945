"""Extended part of the parameter server strategy: placement of variables, tasks on workers.

Like `strategies/replicas/extended.py`, this module depends on internals of `tf.distribute`
(TensorFlow 2.20 and 2.21).
"""

import copy
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.coordinator.cluster_coordinator import Closure
from tensorflow.python.distribute.parameter_server_strategy_v2 import (
    ParameterServerStrategyV2Extended,
)
from tensorflow.python.eager.context import context

from tfdml.collectives.unmanaged_variable import unmanaged_variable
from tfdml.runtime.servers.server_task import SERVER, WORKER
from tfdml.strategies.parameter_server.initial_value import InitialValue
from tfdml.strategies.parameter_server.step.step_scope import current_step

CHIEF_DEVICE = "/job:chief/replica:0/task:0/device:CPU:0"


class ParameterServerExtended(ParameterServerStrategyV2Extended):
    """Places each variable on the server that has the fewest bytes so far.

    Metrics' variables stay on the chief, because a step returns its contributions to them.

    Args:
        strategy: The strategy that this extends.
        cluster_resolver: Resolver that describes the cluster.
        partitioner: Function that returns the number of parts of a variable; None to split none.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
        partitioner: Callable | None,
    ):
        super().__init__(strategy, cluster_resolver, None)
        self.partitioner = partitioner
        # Otherwise TensorFlow warns of functions that its coordinator's `schedule` did not trace.
        self._allow_run_without_coordinator = True
        self.bytes_on = [0] * self._num_ps
        # Every variable on a server, or part of one, slots included.
        self._on_servers: list[weakref.ref] = []
        # The noted values of scalars on servers, by the variable's identity; on the chief.
        self._scalars: dict[int, np.ndarray] = {}
        # The name, server, shape and dtype of every variable.
        self.placed: list[tuple[str, int, tf.TensorShape, tf.DType]] = []

    def _create_variable(self, next_creator: Callable, **kwargs: Any):
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            kwargs["synchronization"] = tf.VariableSynchronization.AUTO
            with tf.device(None), tf.device(CHIEF_DEVICE):
                return next_creator(**{**kwargs, "aggregation": tf.VariableAggregation.NONE})
        if isinstance(kwargs.get("initial_value"), InitialValue):
            # Without them TensorFlow makes the whole value on the chief, and cuts it there.
            value = kwargs["initial_value"]
            kwargs["shape"], kwargs["dtype"] = value.shape, value.dtype
        # Counters and statistics are not split, because they are updated as a whole.
        parted = self.partitioner is not None and kwargs.get("trainable") is not False
        self._variable_partitioner = self._parts if parted else None
        made = super()._create_variable(next_creator, **kwargs)
        self._on_servers += map(weakref.ref, getattr(made, "variables", [made]))
        return made

    def _parts(self, shape: tf.TensorShape, dtype: tf.DType) -> list[int]:
        """Calls the partitioner and checks its result."""
        parts = self.partitioner(shape=shape, dtype=dtype)
        usable = isinstance(parts, list | tuple) and len(parts) == shape.rank
        if not usable or parts[0] < 1 or any(p != 1 for p in parts[1:]):
            raise ValueError(
                f"`variable_partitioner` must return a number of parts for the first axis, and 1 "
                f"for each other axis. Received: {parts!r} for a variable of shape "
                f"{tuple(shape)}. Use one of `tf.distribute.experimental.partitioners`."
            )
        return parts

    def _create_variable_round_robin(self, next_creator: Callable, **kwargs: Any):
        """Replaces TensorFlow's method, which balances only the number of variables.

        An initial value is made on the server, so that the chief never has a large one.
        """
        value, dtype = kwargs["initial_value"], kwargs.get("dtype")
        server = min(range(self._num_ps), key=self.bytes_on.__getitem__)
        own_device = f"/job:ps/task:{server}/device:CPU:0"
        made_on = own_device if callable(value) else CHIEF_DEVICE
        with tf.init_scope(), tf.device(None), tf.device(made_on):
            value = tf.convert_to_tensor(value() if callable(value) else value, dtype=dtype)
        self.bytes_on[server] += value.shape.num_elements() * value.dtype.size
        self.placed.append((kwargs.get("name") or "variable", server, value.shape, value.dtype))
        with tf.device(None), tf.device(own_device):
            return next_creator(**{**kwargs, "initial_value": value})

    def variables_on(self, servers: Collection[int]) -> list[tf.Variable]:
        """Returns the variables on some servers."""
        existing = [v for v in (reference() for reference in self._on_servers) if v is not None]
        places = [tf.DeviceSpec.from_string(v.device) for v in existing]
        return [
            v
            for v, place in zip(existing, places, strict=True)
            if place.job == SERVER and place.task in servers
        ]

    def gone_variables(self) -> list[tf.Variable]:
        """Returns the variables whose servers have been connected again, which have no memory.

        Raises:
            tf.errors.OpError: If a server is lost.
        """
        return [v for v in self.variables_on(range(self._num_ps)) if _is_gone(v)]

    def note_scalars(self) -> None:
        """Notes the values of scalars, with which `make_again` makes them.

        A learning rate is part of an optimizer's configuration, to which a checkpoint must fit.
        """
        scalars = [v for v in self.variables_on(range(self._num_ps)) if v.shape.rank == 0]
        self._scalars = {id(v): v.numpy() for v in scalars}

    def reset_scalars(self, variables: Collection[tf.Variable]) -> None:
        """Gives scalars the values that were noted last.

        Args:
            variables: Variables; those that are no scalars on servers stay as they are.

        Raises:
            tf.errors.OpError: If a server is lost.
        """
        wanted = {id(v.handle) for v in variables}
        for variable in self.variables_on(range(self._num_ps)):
            if id(variable) in self._scalars and id(variable.handle) in wanted:
                variable.assign(self._scalars[id(variable)])

    def make_again(self, variables: Iterable[tf.Variable]) -> None:
        """Gives variables new memory on servers that have been started again.

        Scalars have the values that were noted last, others are filled with zeros.

        Functions that were traced before do not know it.

        Args:
            variables: The variables.

        Raises:
            tf.errors.OpError: If a server is lost.
        """
        for variable in variables:
            with tf.device(None), tf.device(variable.device):
                zeros = tf.zeros(variable.shape, variable.dtype)
                made = unmanaged_variable(self._scalars.get(id(variable), zeros))
            # TensorFlow wraps a variable to say how it is aggregated, and whether it is cached.
            while hasattr(variable, "_v"):
                variable = variable._v
            variable._handle = made.handle

    def batch_reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value_destination_pairs: Any, options: Any = None
    ) -> list:
        """Returns the values unchanged: a worker is a single replica, so nothing is reduced."""
        del reduce_op, options
        _refuse_in_share("all_reduce")
        return [value for value, _ in value_destination_pairs]

    def _batch_gather_to(self, value_destination_pairs, axis, options=None) -> list:
        del axis, options
        _refuse_in_share("all_gather")
        return [value for value, _ in value_destination_pairs]

    def _call_for_each_replica(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs `fn` in place: a worker is a single replica, in which updates may branch."""
        with tf.distribute.ReplicaContext(self._container_strategy(), 0):
            return fn(*args, **kwargs)


def _is_gone(variable: tf.Variable) -> bool:
    try:
        tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
    except tf.errors.InvalidArgumentError:  # TensorFlow no longer knows the device.
        return True
    return False


def update_when_workers_are_back(
    coordinator: tf.distribute.coordinator.ClusterCoordinator, wait_for_workers: Callable[[], None]
) -> None:
    """Has TensorFlow connect to a worker that has failed only when no worker is lost any more.

    It would wait for lost workers all the same, but with a lock that `connect_again` needs.

    Args:
        coordinator: TensorFlow's coordinator.
        wait_for_workers: Function that returns when no worker is lost.
    """
    handler = coordinator._cluster.failure_handler
    set_due = handler._cluster_due_for_update_or_finish.set

    def set_due_later() -> None:
        wait_for_workers()
        set_due()

    def begin() -> None:
        if handler._should_preemption_thread_run:
            threading.Thread(target=set_due_later, name="tfdml-workers-back", daemon=True).start()
        else:
            # TensorFlow stops. At the end of the program no thread would start any more.
            set_due()

    handler._cluster_due_for_update_or_finish.set = begin


def connect_again(
    coordinator: tf.distribute.coordinator.ClusterCoordinator,
    lost_workers: Collection[int],
    seconds: float,
) -> bool:
    """Connects TensorFlow to the servers that have been started again.

    Args:
        coordinator: TensorFlow's coordinator.
        lost_workers: Workers without which the cluster goes on until they are back.
        seconds: Seconds to wait; TensorFlow waits for a task that is lost meanwhile.

    Returns:
        Whether it is connected.

    Raises:
        tf.errors.OpError: If a task is lost meanwhile.
    """
    handler = coordinator._cluster.failure_handler
    server_def = copy.deepcopy(handler._server_def)
    for job in server_def.cluster.job:
        for worker in lost_workers if job.name == WORKER else ():
            del job.tasks[worker]
    errors: list[Exception] = []

    def update() -> None:
        try:
            with handler._cluster_update_lock:
                context().update_server_def(server_def)
                # A coordinator that is made later counts on all workers.
                context()._server_def = handler._server_def
        except Exception as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    # Nothing else ends TensorFlow's wait; a daemon does not hold up the end of the process.
    updating = threading.Thread(target=update, name="tfdml-connect-again", daemon=True)
    updating.start()
    updating.join(seconds)
    if errors:
        raise errors[0]
    return not updating.is_alive()


def _refuse_in_share(operation: str) -> None:
    """Raises an error if workers share a batch: they cannot exchange anything during a step."""
    step = current_step()
    if step is not None and step.share is not None:
        raise ValueError(
            f"A step of synchronous parameter servers must not exchange anything between its "
            f"workers, because each takes a share when it is free. Received: `{operation}` in "
            f"replica context. Use another strategy, or `synchronous=False`."
        )


class Shares:
    """Arguments of a step's tasks, one for each worker's share of a batch.

    Args:
        arguments: Each worker's arguments.
    """

    def __init__(self, arguments: Sequence[tuple]):
        self._left = dict(enumerate(arguments))
        self._lock = threading.Lock()

    def take(self, worker: int) -> tuple[int, tuple]:
        """Returns the number and the arguments of a worker's share, or of the first one left."""
        with self._lock:
            number = worker if worker in self._left else next(iter(self._left))
            return number, self._left.pop(number)


class WorkerTask(Closure):
    """Call of a function on the first free worker; it can be cancelled before it starts.

    If its worker dies, a task goes to another one; it may then have run partly already.

    Args:
        function: A concrete function.
        coordinator: TensorFlow's coordinator.
        args: Arguments of the function; a `PerWorkerValues` is replaced by the worker's own value.
        finished: Callback that receives the task when it has ended, in the worker's thread.
        shares: If given, the task's arguments are taken from them by the worker that runs it.

    Attributes:
        value: The function's result, on the chief; None if it returns nothing.
        error: The error that ended the task, or None.
        worker: Index of the worker that ran it last.
        share: Number of the share that it works on, once a worker has taken it.
        seconds: Duration of its last run, with the way of its arguments and its result.
    """

    def __init__(
        self,
        function: Callable,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        args: tuple,
        finished: Callable[["WorkerTask"], None],
        shares: Shares | None = None,
    ):
        self._queue = coordinator._cluster.closure_queue
        super().__init__(function, self._queue._cancellation_mgr, args=args)
        self._finished = finished
        self._shares = shares
        self.share: int | None = None
        self.seconds = self._began = 0.0
        self._result: Any = None
        self.cancelled = False
        self.value: Any = None
        self.error: Exception | None = None
        self.worker: int | None = None

    @property
    def is_done(self) -> bool:
        """Whether the task has ended."""
        return self.value is not None or self.error is not None

    def schedule(self) -> "WorkerTask":
        """Schedules the task on the first free worker; returns the task."""
        self._queue.put(self)
        return self

    def execute_on(self, worker: Any) -> None:
        """Runs on a worker; called in its thread."""
        # The thread uses its worker's executor. On the shared one, TensorFlow would make it wait
        # for pending answers of all workers, even of a stopped one.
        context().executor = worker.executor
        if not self.cancelled:
            self.worker, self._began = worker.worker_index, time.perf_counter()
            if self._shares is not None and self.share is None:
                self.share, self._args = self._shares.take(self.worker)
            super().execute_on(worker)

    # -- Methods by which TensorFlow treats the task as its own `RemoteValue` ------------------

    def maybe_call_with_output_remote_value(self, method: Callable) -> Any:
        """Calls a method that sets or gets the result; called by TensorFlow."""
        return method(self)

    def _set_values(self, result: Any) -> None:
        self._result = result

    def _set_error(self, error: Exception) -> None:
        self.error = error
        self._finished(self)

    def get(self) -> None:
        """Copies the result to the chief, in the worker's thread; fails here if it is lost."""
        if not self.cancelled and self._result is not None:
            with tf.device(CHIEF_DEVICE):
                self.value = tf.nest.map_structure(
                    tf.identity, self._result, expand_composites=True
                )
            self._result = None
        self.seconds = time.perf_counter() - self._began
        self._finished(self)
