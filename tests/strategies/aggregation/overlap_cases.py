"""Cases run by ranks: gradients are exchanged while others are still computed."""

import contextlib
import threading
import time
from collections.abc import Callable
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.harness import rank_job
from tfdml.collectives import aggregator
from tfdml.collectives.buckets import FIRST_BUCKET_BYTES
from tfdml.timeline.recording import BEGIN, END, GRADIENTS, Recording


class Held(layers.Layer):
    """Layer whose backward pass blocks until an event is set, or for some seconds.

    Only the first replica of a process blocks: each that waits occupies one of TensorFlow's few
    threads.
    """

    def __init__(self, event: threading.Event, seconds: float):
        super().__init__()
        self.came: list[bool] = []
        self._event, self._seconds = event, seconds

    def call(self, inputs):
        """Returns `inputs`."""
        replica = tf.distribute.get_replica_context()
        if replica is not None and replica._local_replica_id:
            return tf.identity(inputs)

        def wait(gradient: np.ndarray) -> np.ndarray:
            self.came.append(self._event.wait(self._seconds))
            return gradient

        @tf.custom_gradient
        def hold(x):
            def backward(gradient):
                held = tf.numpy_function(wait, [gradient], gradient.dtype, stateful=False)
                return tf.ensure_shape(held, gradient.shape)

            return tf.identity(x), backward

        return hold(inputs)


class TimedEvent(threading.Event):
    """Event that knows when it was set, in seconds since 1970."""

    set_at = 0.0

    def set(self) -> None:
        """Sets it."""
        self.set_at = time.time()
        super().set()


def _tells(collective, event: threading.Event) -> contextlib.AbstractContextManager:
    """Sets an event when the first bucket of gradients has been summed over the ranks."""
    sum_over_ranks = collective.all_reduce

    def all_reduce(tensors, name):
        sums = sum_over_ranks(tensors, name)
        if not name.endswith("/bucket_0"):
            return sums

        def tell(total: np.ndarray) -> np.ndarray:
            event.set()
            return total

        signalled = tf.numpy_function(tell, [sums[0]], sums[0].dtype, stateful=False)
        return [tf.ensure_shape(signalled, sums[0].shape), *sums[1:]]

    return mock.patch.object(collective, "all_reduce", all_reduce)


def _awaiting_all() -> contextlib.AbstractContextManager:
    """Removes the overlap: no gradient is exchanged before all have been computed."""
    start_at_once = aggregator.sum_in_buckets

    def sum_in_buckets(collective, gradients, *rest, **options):
        with tf.control_dependencies(list(gradients)):
            return start_at_once(collective, [tf.identity(g) for g in gradients], *rest, **options)

    return mock.patch.object(aggregator, "sum_in_buckets", sum_in_buckets)


def exchanged_while_the_first_layer_waits(
    seconds: float, awaiting_all: bool = False, devices: int = 1, record: Callable | None = None
) -> list[bool]:
    """Blocks the backward pass before the first layer until the last layer's sums have arrived.

    Args:
        seconds: Longest time that it is blocked.
        awaiting_all: Whether the exchange is made to wait for all gradients.
        devices: Number of replicas of a process.
        record: Function that is called with a recording of the steps, and with the times at which
            the last layer's sums had arrived. By default nothing is recorded.

    Returns:
        For each step, whether the sums arrived while the backward pass was blocked.
    """
    event = TimedEvent()
    held = Held(event, seconds)
    strategy = rank_job.strategy(devices=devices)
    arrivals: list[float] = []
    if record is not None:
        close = lambda recording: record(recording, arrivals)  # noqa: E731
        strategy.extended.recorder.choose(1, 2, on_open=int, on_close=close)
    width = int((FIRST_BUCKET_BYTES / 4) ** 0.5)  # The last kernel fills the first bucket.
    with strategy.scope():
        model = keras.Sequential(
            [layers.Input((6,)), layers.Dense(width), held, layers.Dense(width)]
        )
        model.compile("sgd", "mse")
    x = np.ones((4, 6), "float32")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_tells(strategy.extended.collective, event))
        if awaiting_all:
            stack.enter_context(_awaiting_all())
        for _ in range(2):
            event.clear()
            model.train_on_batch(x, np.ones((4, width), "float32"))
            arrivals.append(event.set_at)
    strategy.extended.recorder.close()
    return list(held.came)  # Keras has wrapped the list.


def recorded_while_the_first_layer_waits(seconds: float) -> list[dict[str, float]]:
    """Does the same with a timeline.

    Returns:
        For each step the times: when the first bucket's exchange began and ended, when its sums had
        arrived, when the second one began, and when all gradients were computed.
    """
    steps = []

    def record(recording: Recording, arrivals: list[float]) -> None:
        marks = recording.marks
        for slot, arrived in enumerate(arrivals):
            first, second = (f"gradients/sgd/bucket_{i}" for i in range(2))
            times = {
                "first begins": marks[f"{first}:{BEGIN}"][slot],
                "first ends": marks[f"{first}:{END}"][slot],
                "has arrived": arrived,
                "second begins": marks[f"{second}:{BEGIN}"][slot],
                "computed": marks[GRADIENTS][slot],
            }
            steps.append({name: float(time) for name, time in times.items()})

    came = exchanged_while_the_first_layer_waits(seconds, record=record)
    if came != [True, True]:
        raise RuntimeError("The sums must arrive while the backward pass is blocked.")
    return steps


def exchanges_of_a_step(options: dict) -> list[str]:
    """Returns the names of the gradient exchanges in a step of four layers of 1,024 values.

    Args:
        options: Arguments of the strategy.
    """
    strategy = rank_job.strategy(**options)
    names = []
    with strategy.scope():
        model = keras.Sequential(
            [layers.Input((32,)), *(layers.Dense(32, use_bias=False) for _ in range(4))]
        )
        model.compile("sgd", "mse")
    collective = strategy.extended.collective

    def noting(operation: str) -> contextlib.AbstractContextManager:
        original = getattr(collective, operation)

        def noted(tensors, name):
            if name.startswith("gradients/sgd/"):
                names.append(name.removeprefix("gradients/sgd/"))
            return original(tensors, name)

        return mock.patch.object(collective, operation, noted)

    with noting("all_reduce"), noting("all_to_all"):
        model.train_on_batch(np.ones((4, 32), "float32"), np.ones((4, 32), "float32"))
    return names


class TellingSGD(keras.optimizers.SGD):
    """Optimizer with a part of its update that needs no gradient, and sets an event."""

    def __init__(self, event: threading.Event):
        super().__init__(0.1)
        self._event = event

    def update_step(self, gradient, variable, learning_rate):
        """Updates `variable` as `SGD` does."""

        def tell(value: np.ndarray) -> np.ndarray:
            self._event.set()
            return value

        value = tf.convert_to_tensor(variable)
        signalled = tf.numpy_function(tell, [value], value.dtype, stateful=False)
        super().update_step(gradient, variable, learning_rate)
        self.assign_add(variable, 0.0 * tf.ensure_shape(signalled, value.shape))


def updating_while_the_backward_pass_waits(seconds: float) -> list[bool]:
    """Blocks the backward pass; returns for each step whether part of the update was done then."""
    event = threading.Event()
    held = Held(event, seconds)
    with rank_job.strategy().scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(3), held])
        model.compile(TellingSGD(event), "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 3)), batch_size=4, verbose=0)
    if not event.is_set():
        raise ValueError("the update has not signalled")
    return list(held.came)
