"""Cases run by ranks: all-gathers and all-to-alls of Horovod itself, of all sizes of parts."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from tfdml.collectives.horovod import HorovodCollective

COLUMNS = 3
# Rows of the parts: none; of one message that has been announced before; of one that has not, since
# it is larger than two megabytes. All ranks' parts are small, or some, or none.
PARTS = [(0, 1, 5, 2), (40, 0, 190_001, 7), (200_003, 180_001, 220_007, 190_003)]


def part(sender: int, receiver: int, rows: int) -> np.ndarray:
    """Returns what one rank sends to another: float32, shape `[rows, 3]`."""
    rng = np.random.default_rng([sender, receiver, rows])
    return rng.standard_normal((rows, COLUMNS)).astype("float32")


def gathered() -> list[np.ndarray]:
    """Gathers parts of the sizes in `PARTS`, one after the other, and then together."""
    rank = HorovodCollective().rank
    own = [tf.constant(part(rank, 0, rows[rank])) for rows in PARTS]
    alone = [hvd.allgather(tensor, name=f"alone.{i}") for i, tensor in enumerate(own)]
    together = hvd.grouped_allgather(own, name="together")
    return [tensor.numpy() for tensor in [*alone, *together]]


def rows_between(sender: int, receiver: int, number: int) -> int:
    """Returns the number of rows that one rank sends to another in an all-to-all of `exchanged`."""
    sizes = PARTS[number]
    return sizes[(sender + 2 * receiver) % len(sizes)]


def exchanged() -> list[tuple[np.ndarray, list[int]]]:
    """Sends parts of the sizes in `PARTS` to all ranks; returns rows and how many came from each.

    Two more all-to-alls have a vector without columns, and columns without numbers.
    """
    collective = HorovodCollective()
    rank, size = collective.rank, collective.size
    results = []
    for number in range(len(PARTS)):
        parts = [part(rank, to, rows_between(rank, to, number)) for to in range(size)]
        rows, counts = hvd.alltoall(
            tf.constant(np.concatenate(parts)), [len(p) for p in parts], name=f"rows.{number}"
        )
        results.append((rows.numpy(), counts.numpy().tolist()))
    vector = tf.range(size, dtype=tf.int64) + size * rank
    empty = tf.zeros([size, 0])
    for name, tensor in {"vector": vector, "empty": empty}.items():
        rows, counts = hvd.alltoall(tensor, [1] * size, name=name)
        results.append((rows.numpy(), counts.numpy().tolist()))
    return results
