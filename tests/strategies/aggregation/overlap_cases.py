"""Cases run by ranks: gradients are exchanged while others are still computed."""

import contextlib
import threading
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.harness import rank_job
from tfdml.collectives import aggregator
from tfdml.collectives.buckets import FIRST_BUCKET_BYTES


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
    seconds: float, awaiting_all: bool = False, devices: int = 1
) -> list[bool]:
    """Blocks the backward pass before the first layer until the last layer's sums have arrived.

    Args:
        seconds: Longest time that it is blocked.
        awaiting_all: Whether the exchange is made to wait for all gradients.
        devices: Number of replicas of a process.

    Returns:
        For each step, whether the sums arrived while the backward pass was blocked.
    """
    event = threading.Event()
    held = Held(event, seconds)
    strategy = rank_job.strategy(devices=devices)
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
    return list(held.came)  # Keras has wrapped the list.


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
