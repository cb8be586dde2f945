"""Parts of a divided optimizer in an elastic job: copies on other ranks, and their return."""

import pickle
from collections.abc import Iterable, Mapping

import numpy as np

# A rank's parts of variables, by name.
Parts = dict[str, np.ndarray]
# Bytes of a message: Horovod counts them as 32-bit integers.
_MOST_BYTES = 1 << 28


def parts_of_previous(own: Parts, rank: int, size: int) -> Parts:
    """Sends this rank's parts to the next rank, and returns the previous one's; a collective call.

    Args:
        own: This rank's parts.
        rank: This rank.
        size: The number of ranks.
    """
    import horovod.tensorflow as hvd
    import tensorflow as tf

    message = np.frombuffer(pickle.dumps(own), np.uint8)
    lengths = hvd.allgather_object(len(message), name="elastic_copy_lengths")
    received = []
    for begin in range(0, max(lengths), _MOST_BYTES):
        chunk = message[begin : begin + _MOST_BYTES]
        splits = np.zeros(size, np.int32)
        splits[(rank + 1) % size] = len(chunk)
        arrived, _ = hvd.alltoall(
            tf.constant(chunk), splits=tf.constant(splits), name="elastic_copies"
        )
        received.append(arrived.numpy().tobytes())
    return pickle.loads(b"".join(received))


class SentParts(Mapping):
    """A former rank's parts, each of which the rank that holds it sends when all ask for it.

    All ranks must ask for the same names in the same order.

    Args:
        held: The parts, if this rank holds them.
        root: The rank that holds them.
        names: Their names.
    """

    def __init__(self, held: Parts | None, root: int, names: Iterable[str]):
        self._held, self._root = held, root
        self._names = list(names)

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a part; a collective call if there is one of this name."""
        import horovod.tensorflow as hvd

        if name not in self._names:
            raise KeyError(name)
        sends = hvd.rank() == self._root
        return hvd.broadcast_object(
            self._held[name] if sends else None, self._root, name="elastic_part"
        )

    def __iter__(self):
        """Iterates over the names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Returns the number of parts."""
        return len(self._names)
