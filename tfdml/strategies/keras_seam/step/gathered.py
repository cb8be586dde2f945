"""`all_gather` of all replicas' rows in a step, for losses over pairs of the global batch."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdml.strategies.input.local_batch import ShareInfo
from tfdml.strategies.keras_seam.current import current_share
from tfdml.strategies.keras_seam.replacing import Replacement


def _all_gather(original: Callable) -> Callable:
    """Wraps `ReplicaContext.all_gather` so that in a step it drops the rows of padded shares."""

    @tf.autograph.experimental.do_not_convert
    def all_gather(self, value, axis, options=None):
        share = current_share()
        if share is None:
            return original(self, value, axis, options)

        def gathered(tensor: Any) -> tf.Tensor:
            tensor = tf.convert_to_tensor(tensor)
            return _gathered(original, self, _unpadded(tensor, axis, share), axis, options)

        return tf.nest.map_structure(gathered, value)

    return all_gather


def _unpadded(tensor: tf.Tensor, axis: int, share: ShareInfo) -> tf.Tensor:
    return _slice(tensor, axis, 0, tf.shape(tensor)[axis] * share.present(tf.int32))


def _slice(tensor: tf.Tensor, axis: int, begin: Any, size: Any) -> tf.Tensor:
    return tf.gather(tensor, begin + tf.range(size), axis=axis)


def _gathered(
    gather: Callable, replica: tf.distribute.ReplicaContext, own: tf.Tensor, axis: int, options: Any
) -> tf.Tensor:
    """Gathers with a custom gradient.

    TensorFlow's own gradient gathers the sizes by `all_gather`, which drops padding here.
    """

    @tf.custom_gradient
    def gathered(own: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            # The gradient of all replicas' losses with respect to the gathered rows.
            total = replica.all_reduce(tf.distribute.ReduceOp.SUM, upstream)
            number, index = replica.num_replicas_in_sync, replica.replica_id_in_sync_group
            sizes = tf.one_hot(index, number, tf.shape(own)[axis], 0, dtype=tf.int32)
            sizes = replica.all_reduce(tf.distribute.ReduceOp.SUM, sizes)
            return _slice(total, axis, tf.reduce_sum(sizes[:index]), tf.shape(own)[axis])

        return gather(replica, own, axis, options), gradient

    return gathered(own)


REPLACEMENTS: list[Replacement] = [
    (tf.distribute.ReplicaContext, "all_gather", _all_gather),
]
