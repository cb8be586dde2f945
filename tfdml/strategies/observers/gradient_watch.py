"""Norm of the exchanged gradients, and the bytes that exchanging them takes."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdml.collectives.sparse_gradients import add_up_rows, values_of
from tfdml.collectives.unmanaged_variable import unmanaged_variable


@dataclasses.dataclass(frozen=True)
class GradientNumbers:
    """Numbers of the steps so far.

    Attributes:
        norm: L2 norm of the gradient when it was last taken, without the loss scale and before
            clipping; NaN before.
        sent: Bytes that this rank has sent for gradients.
        uncompressed: Bytes that it would have sent for them without compression.
    """

    norm: float
    sent: float
    uncompressed: float


class GradientWatch:
    """Observer of the gradients' norm, every some steps, and of the bytes that this rank sends.

    The norm needs all gradients read once more, which is why most steps leave it out. A step that
    overflowed has none: the next one takes it. With divided optimizer state a rank knows its parts
    of the sums alone, so the ranks add up their squared norms in the message that carries the
    metrics. With local updates the norm is the root mean square over ranks of their own gradients',
    in the last step of a round in which it is due.

    Args:
        size: The number of ranks.
        every: The number of steps from one norm to the next.
    """

    def __init__(self, size: int, every: int):
        self.every = every
        self._size = size
        with tf.init_scope(), tf.device("CPU:0"):
            zeros = lambda *shape: unmanaged_variable(tf.zeros(shape, tf.float64))  # noqa: E731
            self._own = zeros(1)  # This rank's part of the squared norm in this step.
            self._norm = unmanaged_variable(tf.constant(math.nan, tf.float64))
            # Steps since the norm was last taken, this one included.
            self._since = unmanaged_variable(tf.constant(every, tf.int64))
            self._bytes = zeros(2)  # Sent, and what they would be without compression.

    def begin_epoch(self) -> None:
        """Makes the next step take the norm, so that each epoch has one."""
        self._since.assign(self.every)

    def begin(self) -> None:
        """Does nothing; see `begin_step`."""

    def begin_step(self) -> None:
        """Notes that a step begins, in its graph; with local updates there are several a round."""
        self._own.assign([0.0])
        self._since.assign_add(1)

    def note_bytes(self, sent: tf.Tensor | float, uncompressed: tf.Tensor | float) -> None:
        """Notes the bytes that this rank sends in an exchange of gradients.

        Args:
            sent: Bytes that are sent.
            uncompressed: Bytes that would be sent without compression.
        """
        both = [tf.cast(value, tf.float64) for value in (sent, uncompressed)]
        self._bytes.assign_add(tf.stack(both))

    def is_due(self) -> tf.Tensor:
        """Returns whether this step takes the norm: bool, shape `[]`."""
        return self._since.read_value() >= self.every

    def squared_norm(
        self,
        common: Sequence,
        own: Sequence,
        loss_scale: tf.Tensor | None,
        is_due: tf.Tensor,
    ) -> tf.Tensor:
        """Returns this rank's part of an update's squared norm, 0 if it is not due: shape `[]`.

        Args:
            common: Sums of gradients over all replicas, the same on all ranks.
            own: Sums that only this rank has.
            loss_scale: Loss scale that multiplies the gradients; None for 1.
            is_due: Whether to compute it: bool, shape `[]`.
        """

        def compute(common: Sequence, own: Sequence, scale: tf.Tensor) -> tf.Tensor:
            squared = _squared_norm(common) / self._size + _squared_norm(own)
            return squared / tf.cast(scale, tf.float64) ** 2

        scale = tf.constant(1.0) if loss_scale is None else loss_scale
        return _number_if(is_due, compute, [list(common), list(own), scale])

    def note_squared_norm(self, squared: tf.Tensor) -> None:
        """Adds an update's squared norm to the step's, which has several with several optimizers.

        Args:
            squared: This rank's part: float64, shape `[]`.
        """
        self._own.assign_add(tf.reshape(squared, [1]))

    def slots(self) -> tf.Tensor:
        """Returns this rank's part of the squared norm: float32, shape `[1]`."""
        return tf.cast(self._own.read_value(), tf.float32)

    def add(self, total: tf.Tensor) -> None:
        """Records the squared norm, if this step has taken it: float32, shape `[1]`."""
        squared = tf.cast(total[0], tf.float64)
        is_taken = (squared > 0) & tf.math.is_finite(squared)
        self._norm.assign(tf.where(is_taken, tf.sqrt(squared), self._norm.read_value()))
        since = self._since.read_value()
        self._since.assign(tf.where(is_taken, tf.zeros_like(since), since))

    def read(self) -> GradientNumbers:
        """Returns this rank's numbers so far; the norm is the same on all ranks."""
        return GradientNumbers(float(self._norm.numpy()), *self._bytes.numpy().tolist())


def _number_if(condition: tf.Tensor, compute: Callable, arguments: list) -> tf.Tensor:
    """Returns `compute(*arguments)` if the condition holds, else 0: float64, shape `[]`.

    `tf.cond` would become a switch for each tensor that it uses, of which every step would run all:
    that costs more than all else here. This is a single operation.
    """
    if tf.executing_eagerly():
        return compute(*arguments) if condition else tf.zeros([], tf.float64)
    flat = tf.nest.flatten(arguments, expand_composites=True)

    def of_flat(*tensors: tf.Tensor) -> tf.Tensor:
        return compute(*tf.nest.pack_sequence_as(arguments, tensors, expand_composites=True))

    def zero(*_: tf.Tensor) -> tf.Tensor:
        return tf.zeros([], tf.float64)

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in flat]
    branches = [
        tf.function(branch, autograph=False).get_concrete_function(*specs)
        for branch in (of_flat, zero)
    ]
    (number,) = tf.raw_ops.StatelessIf(
        cond=condition,
        input=flat,
        Tout=[tf.float64],
        then_branch=branches[0],
        else_branch=branches[1],
    )
    return tf.ensure_shape(number, [])


def _squared_norm(gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
    """Returns the squared norm of several gradients together: float64, shape `[]`."""
    values = [tf.cast(values_of(add_up_rows(g)), tf.float32) for g in gradients]
    squares = [2 * tf.nn.l2_loss(value) for value in values]
    zero = tf.zeros([], tf.float64)
    return tf.add_n([tf.cast(s, tf.float64) for s in squares]) if squares else zero
