"""Cases run by ranks: all-reduces of Horovod itself, alone and fused."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from tfdml.collectives.horovod import HorovodCollective

# Without elements; of one message to all; of a block, and of several. Alone, an element is at
# another place of the buffer than fused with others.
LENGTHS = (0, 1, 2, 3, 5, 511, 2049, 70_001, 1_000_003, 3)
OPERATIONS = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}


def values(rank: int, length: int, dtype: str) -> np.ndarray:
    """Returns one rank's elements, whose sum depends on the order of additions if it can."""
    rng = np.random.default_rng([rank, length])
    if np.issubdtype(dtype, np.integer):
        return rng.integers(0, 20, length).astype(dtype)
    scales = 10.0 ** rng.integers(-2, 2, length)
    return (rng.standard_normal(length) * scales).astype(dtype)


def alone_and_fused() -> dict[str, list[np.ndarray]]:
    """Sums float32 tensors one after the other, together, and together in the opposite order."""
    rank = HorovodCollective().rank
    own = [tf.constant(values(rank, length, "float32")) for length in LENGTHS]
    return {
        "alone": [
            hvd.allreduce(tensor, op=hvd.Sum, name=f"alone.{i}").numpy()
            for i, tensor in enumerate(own)
        ],
        "together": [
            tensor.numpy() for tensor in hvd.grouped_allreduce(own, op=hvd.Sum, name="together")
        ],
        "backwards": [
            tensor.numpy()
            for tensor in hvd.grouped_allreduce(own[::-1], op=hvd.Sum, name="backwards")[::-1]
        ],
    }


def reduced(dtype: str, operation: str) -> list[np.ndarray]:
    """Reduces tensors of one message and of a block."""
    rank = HorovodCollective().rank
    return [
        hvd.allreduce(
            tf.constant(values(rank, length, dtype)),
            op=OPERATIONS[operation],
            name=f"{operation}.{dtype}.{length}",
        ).numpy()
        for length in (7, 30_001)
    ]
