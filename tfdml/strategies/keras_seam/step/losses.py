"""Loss values: each replica computes an estimate of the global batch's loss.

One rule holds for `compile`'s losses and for a user's own `train_step`: within a replica, a scalar
is the replica's estimate of the value that one process would compute from the global batch. The
mean of the estimates, weighted by the replicas' rows, is that value. So a replica logs and tracks a
loss, not a part of one. The weight is applied where the gradient is taken (see `gradients`).

| value | the replica's estimate |
|---|---|
| mean over the batch, by Keras or the user's own | the mean over the replica's rows |
| mean over a mask, or by sample weights | own sum / global count / fraction of the rows |
| sum by a Keras loss, or of an added loss with axes | own sum / fraction of the rows |
| any other scalar: `add_loss`, regularizers, a loss function's | unchanged |

Values with axes, such as per-example losses, are not estimates: together, those of all replicas are
the global batch's.
"""

from collections.abc import Callable

import tensorflow as tf
from keras import ops
from keras.src.losses import loss as keras_loss

from tfdml.strategies.input.local_batch import ShareInfo
from tfdml.strategies.parameter_server.step.step_scope import current_step
from tfdml.strategies.traced import traced

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def estimate_from_sum(own: tf.Tensor, share: ShareInfo) -> tf.Tensor:
    """Returns a replica's estimate of a global sum from the sum over its own rows."""
    return tf.math.divide_no_nan(own, share.fraction(own.dtype))


def reduce_to_estimate(
    keras_reduce: Callable, share: ShareInfo, values, sample_weight, mask, reduction, dtype
) -> tf.Tensor:
    """Reduces a replica's loss values to its estimate of the global loss.

    Args:
        keras_reduce: Keras's `reduce_weighted_values`.
        share: The replica's share.
        values: Loss values of shape `[rows, ...]`, or a scalar.
        sample_weight: Weights that broadcast to `values`, or None.
        mask: Mask of the values that count, or None.
        reduction: Keras's name of the reduction.
        dtype: Dtype of the computation.

    Returns:
        The estimate; without a reduction, the values.
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


def _mask_origin(layers: list[str]) -> str:
    return f" The mask comes from {' and '.join(map(repr, layers))}." if layers else ""


def _mean_by_count(keras_reduce, share, values, sample_weight, mask, reduction, dtype):
    """Estimates a mean whose denominator depends on the data, by summing counts over replicas."""
    if traced().stages is not None:
        raise ValueError(
            "A loss must not be a mean over a mask, or over sample weights, in a pipeline: its "
            "denominator for the whole batch is not known when the first microbatch's gradient is "
            f"taken. Received: {'a mask' if mask is not None else 'sample weights'}, with "
            f"reduction={reduction!r}.{_mask_origin(traced().stages.mask_layers)} Count first, in "
            "the data: pass sample_weight = mask / mean(mask over the batch), with the reduction "
            "'sum_over_batch_size', and end the mask before the output."
        )
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
        # Keras counts the unmasked values; one mask entry may cover several values.
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
