"""Collective between some of Horovod's ranks, over the connections of all."""

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.topology import Topology

# Sends consecutive rows of a tensor to each rank of the job, as many as the list says, and returns
# the rows received, in the order of the ranks.
SendRows = Callable[[tf.Tensor, Sequence[tf.Tensor | int], str], tf.Tensor]


class HorovodSubgroup(Collective):
    """Collective in which the members of a subgroup send rows to one another alone.

    Every operation is an all-to-all of the whole job, in which ranks of other subgroups get no
    rows. A process set of Horovod would need connections of its own, which ignore
    `HOROVOD_GLOO_IFACE`, and a negotiation of its own in every cycle, a thousand times a second
    even if nothing is exchanged.

    Args:
        rank: This process's rank in the job.
        size: The number of processes of the job.
        members: The subgroup's ranks, in ascending order.
        send_rows: Function that exchanges rows between all processes of the job.
    """

    def __init__(self, rank: int, size: int, members: Sequence[int], send_rows: SendRows):
        super().__init__(Topology(members.index(rank), len(members)))
        self._members = [other in members for other in range(size)]
        self._send_rows = send_rows

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each tensor over the subgroup, in the order of the ranks; see `Collective`."""
        flat = tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)
        length = tf.size(flat)
        chunk = -(-length // self.size)
        rows = tf.reshape(tf.pad(flat, [[0, self.size * chunk - length]]), [self.size, chunk])
        received = self.all_to_all(rows, f"{name}/to_owner")
        own = functools.reduce(tf.add, [received[i] for i in range(self.size)])
        total = self.all_gather(own, f"{name}/to_all")[:length]
        parts = tf.split(total, [tf.size(t) for t in tensors], num=len(tensors))
        return [
            tf.ensure_shape(tf.reshape(part, tf.shape(t)), t.shape)
            for part, t in zip(parts, tensors, strict=True)
        ]

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Concatenates the members' tensors along axis 0; see `Collective`."""
        received = self._send(tf.concat([tensor] * self.size, 0), tf.size(tensor), name)
        gathered = tf.reshape(received, tf.concat([[-1], tf.shape(tensor)[1:]], 0))
        return tf.ensure_shape(gathered, [None, *tensor.shape.as_list()[1:]])

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sends row i of the tensor to the subgroup's member i; see `Collective`."""
        received = self._send(tensor, tf.size(tensor) // self.size, name)
        return tf.ensure_shape(tf.reshape(received, tf.shape(tensor)), tensor.shape)

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Sends the tensor of member `root` to all members; see `Collective`."""
        own = tf.reshape(tensor, [-1])
        sent = tf.concat([own] * self.size, 0) if self.rank == root else own[:0]
        received = self._send(sent, tf.size(sent) // self.size, name)
        return tf.ensure_shape(tf.reshape(received, tf.shape(tensor)), tensor.shape)

    def _send(self, tensor: tf.Tensor, count: tf.Tensor, name: str) -> tf.Tensor:
        """Sends each member `count` of the tensor's numbers; returns what they send.

        Horovod compares all but the first axis on all ranks, and subgroups may send other shapes.
        """
        counts = [count if is_member else 0 for is_member in self._members]
        return self._send_rows(tf.reshape(tensor, [-1]), counts, name)
