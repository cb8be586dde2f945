"""Datasets that workers read themselves, sent to them once as a graph."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdml.strategies.input.input_checks import shuffles_without_seed

_IGNORE_EXTERNAL_STATE = 1
# Operations that call back into the Python process that created the dataset.
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_LARGEST = 1 << 31
# More parallel calls of a function of a pipeline than a worker has cores.
_MOST_CALLS = 1 << 16


class ShippedDataset:
    """Dataset on every worker; iterating over it creates an iterator on each worker.

    Together, the workers use each batch once per pass: worker w reads every batch, and keeps those
    whose number is w modulo the number of workers. A dataset that shuffles without a seed has a
    different order on each worker, and each keeps all batches. Passes repeat without end.

    Args:
        source: The dataset, or a function that returns it, with an `InputContext` or no argument.
            A function's dataset is only repeated without end, not sharded.
        coordinator: TensorFlow's coordinator.
        workers: Number of workers.

    Raises:
        ValueError: If the dataset cannot be sent.
    """

    def __init__(
        self,
        source: tf.data.Dataset | Callable,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        workers: int,
    ):
        self._coordinator = coordinator
        self._workers = workers
        if isinstance(source, tf.data.Dataset):
            make = _from_graph(source, workers)
        else:
            make = functools.partial(_call, source, workers)

        def batches(worker: tf.Tensor, skipped: tf.Tensor) -> tf.data.Dataset:
            made = make(worker).skip(skipped).prefetch(tf.data.AUTOTUNE)
            return made.with_options(_without_autotuner())

        number = tf.TensorSpec([], tf.int64)
        self._make = tf.function(batches).get_concrete_function(number, number)
        _check_graph(self._make.graph.as_graph_def())
        self.element_spec = self._make.structured_outputs.element_spec

    def __iter__(self) -> Iterator:
        """Returns an endless iterator on every worker, recreated on a worker that comes back."""
        return self.after(0)

    def after(self, batches: int) -> "RemoteIterators":
        """Returns iterators that start after some batches have been used.

        How many each worker used is unknown, so each skips an equal number.

        Args:
            batches: Number of batches that all workers together have used.
        """
        skipped = tf.constant(batches // self._workers, tf.int64)

        def iterator(worker: int) -> Iterator:
            return iter(self._make(tf.constant(worker, tf.int64), skipped))

        spec = tf.data.IteratorSpec(self.element_spec)
        return RemoteIterators(on_each_worker(self._coordinator, iterator, spec))


def _without_autotuner() -> tf.data.Options:
    """Returns options by which `AUTOTUNE` means all cores of the worker from the beginning.

    The autotuner sleeps for up to a minute at a time and sometimes misses the signal to stop (see
    `open_iterator`). A worker that frees an iterator waits for it and answers nothing meanwhile, so
    the chief stood still, without heartbeats: after 3 of 18 calls of `fit`, and after 5 of 10 in
    which a worker was killed and restarted.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    # TensorFlow takes at most as many as the worker has cores.
    options.autotune.initial_parallelism = _MOST_CALLS
    return options


def on_each_worker(
    coordinator: tf.distribute.coordinator.ClusterCoordinator, make: Callable, spec: tf.TypeSpec
) -> tf.distribute.experimental.coordinator.PerWorkerValues:
    """Creates a value on every worker, and again on a worker that comes back.

    Args:
        coordinator: TensorFlow's coordinator.
        make: Function of the worker's index, called with the worker's device as the default.
        spec: Type spec of the value.
    """
    values = []
    for worker in coordinator._cluster.workers:
        value = worker.create_resource(functools.partial(make, worker.worker_index))
        value._type_spec = spec
        values.append(value)
    return tf.distribute.experimental.coordinator.PerWorkerValues(tuple(values))


class RemoteIterators:
    """Iterators on every worker, whose elements the chief does not see.

    Args:
        values: The iterators as TensorFlow's per-worker values.
    """

    def __init__(self, values: tf.distribute.experimental.coordinator.PerWorkerValues):
        self.values = values

    def __iter__(self) -> "RemoteIterators":
        return self

    def __next__(self) -> None:
        raise TypeError("The chief must not iterate over this dataset: only the workers read it.")


def _from_graph(dataset: tf.data.Dataset, workers: int) -> Callable:
    """Returns a function that recreates the dataset from its graph."""
    spec = dataset.element_spec
    graph = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(on_renamed_device(dataset)),
        external_state_policy=_IGNORE_EXTERNAL_STATE,
        strip_device_assignment=True,
    )
    serialized = graph.numpy()
    _check_graph(tf.compat.v1.GraphDef.FromString(serialized))
    if len(serialized) >= _LARGEST - (1 << 20):
        raise ValueError(
            f"The data must be smaller than 2 GiB to be sent to the workers. Received: "
            f"{len(serialized) >> 20} MiB. Write them to files, which the workers read."
        )
    policy = dataset.options().experimental_distribute.auto_shard_policy
    keep_all = policy == tf.data.experimental.AutoShardPolicy.OFF or shuffles_without_seed(dataset)

    def make(worker: tf.Tensor) -> tf.data.Dataset:
        # Captured, not a constant: else TensorFlow would create the dataset when it optimizes the
        # graph.
        made = _GraphDataset(graph, spec).repeat()
        if not keep_all:
            made = made.shard(workers, worker)
        return made

    return make


def _call(dataset_fn: Callable, workers: int, worker: tf.Tensor) -> tf.data.Dataset:
    arguments = []
    if inspect.signature(dataset_fn).parameters:
        arguments.append(tf.distribute.InputContext(workers, worker, workers))
    made = dataset_fn(*arguments)
    if not isinstance(made, tf.data.Dataset):
        raise ValueError(
            f"A function given as data must return a `tf.data.Dataset`. Received: {made!r}."
        )
    return made.repeat()


def as_dataset(source: Any) -> Any:
    """Returns the data that the chief reads; calls a function to create its dataset."""
    if not callable(source) or isinstance(source, type):
        return source
    arguments = []
    if inspect.signature(source).parameters:
        arguments.append(tf.distribute.InputContext())
    return source(*arguments)


def on_renamed_device(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Moves a dataset to the current name of this process's device.

    Connecting to the cluster renames the devices. TensorFlow cannot create an iterator of a dataset
    that was made before, because it looks for a device with the old name.
    """
    variant = tf.identity(tf.data.experimental.to_variant(dataset))
    renamed = tf.data.experimental.from_variant(variant, dataset.element_spec)
    # The original dataset owns the pipeline's Python functions, so keep it alive.
    renamed._tfdml_made_from = dataset
    return renamed


class _GraphDataset(tf.data.Dataset):
    """Dataset that a graph describes."""

    def __init__(self, graph: tf.Tensor, spec: Any):
        self._spec = spec
        super().__init__(tf.raw_ops.DatasetFromGraph(graph_def=graph))

    def _inputs(self) -> list:
        return []

    @property
    def element_spec(self) -> Any:
        """The type spec of an element."""
        return self._spec


# Advice in error messages about data that workers cannot read themselves.
HOW_TO_READ = (
    "Read files with TensorFlow's own datasets, such as `tf.data.TFRecordDataset`, or set "
    "`synchronous=True`, where the chief reads, with `tfdml.data.read_tfrecords` too."
)


def _check_graph(graph: tf.compat.v1.GraphDef) -> None:
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    calls = sorted({node.op for node in nodes} & _PYTHON)
    if calls:
        raise ValueError(
            f"The data must be a `tf.data` pipeline of TensorFlow's own operations, because the "
            f"workers read it for themselves and Python runs only on the chief. Received: a "
            f"pipeline with {', '.join(calls)}, as `from_generator`, `py_function` and "
            f"`numpy_function` make it. {HOW_TO_READ}"
        )
