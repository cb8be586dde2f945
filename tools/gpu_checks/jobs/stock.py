"""Hand-written loops as peers of the strategies for which Keras's own `fit` does not run."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from tools.gpu_checks.jobs import placement


@dataclasses.dataclass
class Peer:
    """Parts of a training loop.

    Attributes:
        rank: Rank of this process.
        size: Number of processes.
        variables: Weights: kernels and biases, layer by layer.
        step: Callable that trains on this process's rows of a batch.
    """

    rank: int
    size: int
    variables: list
    step: Callable[[Any, Any], None]


def implementation(kind: str, cards: int):
    """Returns the workers' communication method: NCCL rejects two ranks on one card."""
    import tensorflow as tf

    names = tf.distribute.experimental.CommunicationImplementation
    return names.NCCL if kind == "gpu" and cards > 1 else names.RING


def gradients(variables: list, x, y) -> list:
    """Returns the gradients of the mean loss of some rows."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        for kernel, bias in zip(variables[:-2:2], variables[1:-2:2], strict=True):
            x = tf.nn.relu(x @ kernel + bias)
        logits = x @ variables[-2] + variables[-1]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        loss = tf.reduce_mean(losses)
    return tape.gradient(loss, variables)


def horovod(kind: str, cards: int, weights: list, rate: float) -> Peer:
    """Returns a loop over Horovod's grouped all-reduce."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    variables = [tf.Variable(w) for w in weights]

    @tf.function
    def step(x, y):
        sums = hvd.grouped_allreduce(gradients(variables, x, y), op=hvd.Average)
        for variable, gradient in zip(variables, sums, strict=True):
            variable.assign_sub(rate * gradient)

    return Peer(hvd.rank(), hvd.size(), variables, step)


def multi_worker(kind: str, cards: int, weights: list, rate: float) -> Peer:
    """Returns a loop under `tf.distribute.MultiWorkerMirroredStrategy`."""
    import tensorflow as tf

    options = tf.distribute.experimental.CommunicationOptions(
        implementation=implementation(kind, cards)
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        variables = [tf.Variable(w) for w in weights]

    def in_replica(x, y):
        context = tf.distribute.get_replica_context()
        means = context.all_reduce("mean", gradients(variables, x, y), options)
        for variable, gradient in zip(variables, means, strict=True):
            variable.assign_sub(rate * gradient)

    step = tf.function(lambda x, y: strategy.run(in_replica, (x, y)))
    return Peer(placement.local_rank(), strategy.num_replicas_in_sync, variables, step)


def by_hand(peer: Peer, x, y, rows: int) -> tuple[list, float]:
    """Trains two epochs; returns the weights and the seconds of the second one."""
    import tensorflow as tf

    # Every `size`-th row of each global batch: the mean of the ranks' means is that of all rows.
    x, y = (a.reshape(-1, rows, *a.shape[1:])[:, peer.rank :: peer.size] for a in (x, y))
    batches = tf.data.Dataset.from_tensor_slices((x, y)).prefetch(tf.data.AUTOTUNE)
    for _ in range(2):
        began = time.perf_counter()
        for own in batches:
            peer.step(*own)
        weights = [v.numpy() for v in peer.variables]
        seconds = time.perf_counter() - began
    return weights, seconds
