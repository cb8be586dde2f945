"""Events noted by graphs as they run, with the time, and without Python.

A graph stages an event's number in one of TensorFlow's buffers; a thread of Python takes the events
out later. No operation of the graph waits for that, nor for another event.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

# The buffer, one for this process, without limits: a graph never waits for it.
_BUFFER = {"capacity": 0, "memory_limit": 0, "container": "", "shared_name": "tfdml_events"}
_DTYPES = [tf.int64, tf.float64]
# Events that are taken at once: a call of TensorFlow costs as much as about 100 of them.
BATCH = 256


def stage_event(number: int, after: Sequence[tf.Tensor | tf.Operation]) -> tf.Operation | None:
    """Adds an operation to the graph that notes an event each time it runs.

    Args:
        number: The event's number.
        after: Tensors or operations that are computed before.

    Returns:
        The operation; None if the graph being made is not that of a function, which alone runs
        operations that nothing else needs.
    """
    graph = tf.compat.v1.get_default_graph()
    manager = graph.experimental_acd_manager
    if manager is None:
        return None
    # Tensors from outside of a function exist before it runs.
    after = [tensor for tensor in after if getattr(tensor, "graph", None) is graph]
    if len(after) > 2:
        after = [tf.group(*after)]  # One message to the processor from each other device.
    with tf.device("CPU:0"):
        event = tf.constant(number, tf.int64)
        with tf.control_dependencies(after):
            time = tf.raw_ops.Timestamp()
        staged = tf.raw_ops.Stage(values=[event, time], **_BUFFER)
    # A function would run these one after another in the order in which they were made, and so the
    # exchanges between them, which run at the same time.
    manager.run_independently(time.op)
    manager.run_independently(staged)
    return staged


def count_events() -> int:
    """Returns the number of events that wait to be taken."""
    with tf.device("CPU:0"):
        return int(tf.raw_ops.StageSize(dtypes=_DTYPES, **_BUFFER))


def take_events(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Takes the oldest events.

    Args:
        count: Number of events, at most `count_events()`: more would be waited for.

    Returns:
        Their numbers, int64; their times in seconds since the epoch, float64; in the order noted.
    """
    batches = [_taking(BATCH)() for _ in range(count // BATCH)]
    batches += [_taking(1)() for _ in range(count % BATCH)]
    numbers = [batch[0].numpy() for batch in batches]
    times = [batch[1].numpy() for batch in batches]
    return np.concatenate(numbers or [[]]).astype(np.int64), np.concatenate(times or [[]])


@functools.cache
def _taking(count: int) -> Callable[[], tuple[tf.Tensor, tf.Tensor]]:
    """Returns a function that takes this many events."""

    @tf.function(autograph=False)
    def take() -> tuple[tf.Tensor, tf.Tensor]:
        # One after another, as a function runs operations with effects.
        with tf.device("CPU:0"):
            taken = [tf.raw_ops.Unstage(dtypes=_DTYPES, **_BUFFER) for _ in range(count)]
            numbers, times = zip(*taken, strict=True)
            return tf.stack(numbers), tf.stack(times)

    return take
