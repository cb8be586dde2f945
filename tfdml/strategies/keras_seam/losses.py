"""Exact means: each loss term's numerator over the denominator of the global batch.

Keras divides a replica's loss by the replica's own count and then by the number of replicas; the
sum over the replicas is a mean of means, wrong when the shares differ. Here the factor that Keras
takes from the number of replicas is taken from the share instead, inside the gradient tape.

A term counts as follows, with its sum over the replicas being what one replica would compute:

| term | factor on the replica's value |
|---|---|
| mean over the batch (`sum_over_batch_size`, `mean`) | rows / global rows |
| mean over a mask, or over sample weights (`mean_with_sample_weight`) | own count / global count |
| `sum`, `None` | 1 |
| a scalar from the loss function | rows / global rows: it is taken for a mean over its rows |
| `add_loss`, regularisers, activity losses | rows / global rows: the factors add up to 1 |

and with 0 for a padded share.
"""

from collections.abc import Callable

import tensorflow as tf
from keras import ops
from keras.src.losses import loss as keras_loss

from tfdml.strategies.parameter_server.step_scope import current_step
from tfdml.strategies.share import Share

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def scale_for_share(value: tf.Tensor, share: Share) -> tf.Tensor:
    """Returns a replica's mean as its part of the global mean."""
    return value * share.fraction(value.dtype)


def unscale_for_share(value: tf.Tensor, share: Share, by_rows: bool) -> tf.Tensor:
    """Returns a replica's part of a global mean so that a tracker's mean restores the mean.

    Args:
        value: The replica's part; the parts of all replicas add up to the mean.
        share: The replica's share.
        by_rows: Whether the tracker multiplies by the rows that the replica computed; the sums
            over all replicas are then `mean * global_rows` and `global_rows`. Else it counts 1
            for each replica, and the sums are `mean * working` and `working`.
    """
    parts = share.global_rows / share.computed_rows if by_rows else share.working_replicas
    return value * tf.cast(parts, value.dtype)


def reduce_for_share(
    keras_reduce: Callable, share: Share, values, sample_weight, mask, reduction, dtype
) -> tf.Tensor:
    """Reduces a replica's loss values to its part of the global loss.

    Args:
        keras_reduce: Keras's `reduce_weighted_values`, which scales means with `scale_for_share`.
        share: The replica's share.
        values: Loss values, shape `[rows, ...]`, or a scalar.
        sample_weight: Weights that broadcast to `values`, or None.
        mask: Which values count, or None.
        reduction: Keras's name of the reduction.
        dtype: The dtype of the computation.

    Returns:
        The replica's part; the parts of all replicas add up to the global loss.
    """
    reduction = keras_loss.standardize_reduction(reduction)
    values = ops.convert_to_tensor(values, dtype=dtype)
    own_count = reduction == "mean_with_sample_weight" and sample_weight is not None
    if reduction in _MEANS and (mask is not None or own_count):
        return _mean_by_count(keras_reduce, share, values, sample_weight, mask, reduction, dtype)
    loss = keras_reduce(values, sample_weight, mask, reduction, dtype)
    if reduction not in _MEANS:
        return loss * share.present(loss.dtype)
    scalar = values.shape.rank == 0 and (sample_weight is None or not ops.ndim(sample_weight))
    return scale_for_share(loss, share) if scalar else loss


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
    return tf.math.divide_no_nan(numerator * share.present(numerator.dtype), global_count)
