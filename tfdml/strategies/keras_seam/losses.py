"""Loss values: what a replica computes of a loss is its estimate of the whole batch's.

One rule for `compile`'s losses and for a `train_step` of the user's own: within a replica, a scalar
is the replica's estimate of what one process would compute from the global batch, and the mean of
the estimates, weighted by the replicas' rows, is that value. So what a replica logs or tracks is a
loss, not a part of one. The weight enters where the gradient is taken (see `gradients`).

| value | the replica's estimate |
|---|---|
| mean over the batch, by Keras or the user's own | the mean over the replica's rows |
| mean over a mask, or by sample weights | own sum / global count / fraction of the rows |
| sum by a Keras loss, or of an added loss with axes | own sum / fraction of the rows |
| any other scalar: `add_loss`, regularisers, a loss function's | as it is |

Values with axes, such as a loss of each row, are no estimates: those of all replicas are the whole
batch's together.
"""

from collections.abc import Callable

import tensorflow as tf
from keras import ops
from keras.src.losses import loss as keras_loss

from tfdml.strategies.parameter_server.step_scope import current_step
from tfdml.strategies.share import Share

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def estimate_from_sum(own: tf.Tensor, share: Share) -> tf.Tensor:
    """Returns a replica's estimate of a global sum from the sum over its own rows."""
    return tf.math.divide_no_nan(own, share.fraction(own.dtype))


def reduce_to_estimate(
    keras_reduce: Callable, share: Share, values, sample_weight, mask, reduction, dtype
) -> tf.Tensor:
    """Reduces a replica's loss values to its estimate of the global loss.

    Args:
        keras_reduce: Keras's `reduce_weighted_values`.
        share: The replica's share.
        values: Loss values, shape `[rows, ...]`, or a scalar.
        sample_weight: Weights that broadcast to `values`, or None.
        mask: Which values count, or None.
        reduction: Keras's name of the reduction.
        dtype: The dtype of the computation.

    Returns:
        The estimate; the values themselves where nothing is reduced.
    """
    reduction = keras_loss.standardize_reduction(reduction)
    values = ops.convert_to_tensor(values, dtype=dtype)
    own_count = reduction == "mean_with_sample_weight" and sample_weight is not None
    if reduction in _MEANS and (mask is not None or own_count):
        return _mean_by_count(keras_reduce, share, values, sample_weight, mask, reduction, dtype)
    loss = keras_reduce(values, sample_weight, mask, reduction, dtype)
    if reduction == "sum" and values.shape.rank != 0:
        return estimate_from_sum(loss, share)
    return loss


def _mean_by_count(keras_reduce, share, values, sample_weight, mask, reduction, dtype):
    """A mean whose denominator depends on the data: the counts are summed over the replicas."""
    numerator = keras_reduce(values, sample_weight, mask, "sum", dtype)
    if reduction == "mean_with_sample_weight":
        weights = sample_weight
        if weights is not None:
            weights = ops.convert_to_tensor(weights, dtype=values.dtype)
        if mask is not None:
            mask = ops.convert_to_tensor(mask, dtype=values.dtype)
        weights = keras_loss.apply_mask(weights, mask, values.dtype, "sum")
        count = ops.sum(weights)
    else:
        # Keras counts the values that the mask leaves; one mask entry may stand for several.
        per_entry = tf.size(values) / tf.size(mask)
        count = ops.sum(ops.cast(mask, values.dtype)) * tf.cast(per_entry, values.dtype)
    count = tf.stop_gradient(count * share.present(count.dtype))
    step = current_step()
    if step is not None:
        global_count = step.sum_over_shares(count)
    else:
        replica = tf.distribute.get_replica_context()
        global_count = replica.all_reduce(tf.distribute.ReduceOp.SUM, count)
    return estimate_from_sum(tf.math.divide_no_nan(numerator, global_count), share)
