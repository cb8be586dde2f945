"""Interface of the collective operations between processes: four operations, each call named."""

import abc
import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdml.topology import Topology


class Collective(abc.ABC):
    """Collective operations among the processes of a job.

    Every process must call the same operations, with the same names, dtypes and shapes (except for
    the first axis of `all_gather`). Calls are paired by name, so the order in which tensors become
    ready may differ between processes; a name may be in flight only once.

    All operations work in a `tf.function` and eagerly. None is differentiable: they exchange
    gradients, counts and results, never activations inside a tape.

    Attributes:
        topology: This process's rank and the size of the job.
        branches: Whether operations may be called in one branch of a graph (`tf.cond`).
        crosses_processes: Whether the ranks are processes, not devices of one.
    """

    branches = True
    crosses_processes = True

    def __init__(self, topology: Topology):
        self.topology = topology

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        return self.topology.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.topology.size

    @property
    def concurrent_with_steps(self) -> "Collective":
        """Collective for a second thread while a step runs, in any order with the step's."""
        return self

    @property
    def in_any_order(self) -> "Collective | None":
        """Collective whose operations in a graph need not run in the order in which they were made.

        None if this one's operations must.
        """
        return self

    def on(self, device: str | None) -> "Collective":
        """Returns the collective in which a device of this process takes part.

        Its peers are the devices with the same index of the other processes. Exchanges of different
        devices do not wait for each other.

        Args:
            device: One of this process's devices, None for the current one. Where operations run on
                the device of their tensors, this collective serves all devices.
        """
        del device
        return self

    def subgroup(self, ranks: Sequence[int]) -> "Collective":
        """Returns the collective between some of the processes.

        Subgroups divide the job, and all processes of the job call their operations together: each
        calls that of its own subgroup, under the same name. A rank in a subgroup is its index in
        `ranks`.

        Args:
            ranks: Ranks of the subgroup's processes, this one's included, in ascending order.

        Raises:
            ValueError: If these are not all ranks, and the collective cannot be divided.
        """
        if list(ranks) == list(range(self.size)):
            return self
        raise ValueError(
            f"`ranks` must be all {self.size} ranks, because a {type(self).__name__} cannot be "
            f"divided. Received: ranks={list(ranks)}."
        )

    def waiting(self, what: str) -> contextlib.AbstractContextManager:
        """Context manager: this process waits for the others in `what`, which a guard may watch."""
        del what
        return contextlib.nullcontext()

    def noted(self, tensors: Sequence[Any], mark: str) -> list:
        """Returns the same tensors; where a step is recorded, notes when all of them exist.

        Args:
            tensors: Tensors of a step's graph, sparse ones included.
            mark: Name of the time.
        """
        del mark
        return list(tensors)

    @abc.abstractmethod
    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each tensor over all processes, as one group.

        Args:
            tensors: Tensors of one numeric dtype, of any shapes.
            name: The group's name.

        Returns:
            The sums, in the order of `tensors`, bitwise identical on all processes.
        """

    @abc.abstractmethod
    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Concatenates the processes' tensors along axis 0, in the order of the ranks.

        Args:
            tensor: A tensor of any dtype but string, shape `[n, ...]`; `n` may differ between
                processes and be 0.
            name: The operation's name.

        Returns:
            A tensor of shape `[sum of n, ...]`, the same on every process.
        """

    @abc.abstractmethod
    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sends row i of the tensor to process i.

        Args:
            tensor: A tensor of any dtype but string, shape `[size, ...]`; the same dtype and shape
                on every process.
            name: The operation's name.

        Returns:
            A tensor of the same shape, whose row i was sent by process i.
        """

    def all_to_all_rows(self, tensor: tf.Tensor, counts: Sequence[int], name: str) -> tf.Tensor:
        """Sends consecutive rows of the tensor to each process.

        Args:
            tensor: A tensor of any dtype but string, shape `[sum of counts, ...]`.
            counts: The number of rows for each process, the same on every process, not all 0.
            name: The operation's name.

        Returns:
            A tensor of shape `[size, counts[rank], ...]`, whose row i was sent by process i.
        """
        most, rest = max(counts), [[0, 0]] * (tensor.shape.rank - 1)
        rows = [
            tf.pad(part, [[0, most - count], *rest])
            for part, count in zip(tf.split(tensor, list(counts)), counts, strict=True)
        ]
        return self.all_to_all(tf.stack(rows), name)[:, : counts[self.rank]]

    def all_to_all_ragged(
        self, tensor: tf.Tensor, counts: tf.Tensor, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends consecutive rows to each process, as many as only this process knows.

        Args:
            tensor: A tensor of any dtype but string, shape `[sum of counts, ...]`.
            counts: The number of rows for each process: int32, shape `[size]`.
            name: The operation's name.

        Returns:
            The rows received, in the order of the ranks: shape `[n, ...]`; and how many came from
            each process: int32, shape `[size]`.
        """
        table = self.all_gather_rows(counts, [self.size] * self.size, f"{name}/counts")
        table = tf.reshape(table, [self.size, self.size])
        # Empty rows cannot be exchanged.
        most = tf.maximum(tf.reduce_max(table), 1)
        places = tf.cast(tf.where(tf.sequence_mask(counts, most)), tf.int32)
        shape = tf.concat([[self.size, most], tf.shape(tensor)[1:]], 0)
        rows = self.all_to_all(tf.scatter_nd(places, tensor, shape), name)
        received = table[:, self.rank]
        rows = tf.boolean_mask(rows, tf.sequence_mask(received, most))
        return tf.ensure_shape(rows, [None, *tensor.shape.as_list()[1:]]), received

    def all_gather_rows(self, tensor: tf.Tensor, counts: Sequence[int], name: str) -> tf.Tensor:
        """Concatenates the processes' tensors; every process knows how many rows each one has.

        Args:
            tensor: A tensor of any dtype but string, shape `[counts[rank], ...]`.
            counts: The number of rows of each process, not all 0.
            name: The operation's name.

        Returns:
            A tensor of shape `[sum of counts, ...]`, the same on every process.
        """
        gathered = self.all_gather(tensor, name)
        return tf.ensure_shape(gathered, [sum(counts), *tensor.shape.as_list()[1:]])

    @abc.abstractmethod
    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Sends the tensor of process `root` to every process.

        Args:
            tensor: A tensor of any dtype but string; the same dtype and shape on every process.
            name: The operation's name.
            root: The rank whose tensor is sent.

        Returns:
            The tensor of process `root`.
        """


class LocalCollective(Collective):
    """Collective of a job with one process: every operation returns its input."""

    def __init__(self) -> None:
        super().__init__(Topology())

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each tensor over all processes; see `Collective`."""
        return list(tensors)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Concatenates the processes' tensors; see `Collective`."""
        return tensor

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sends row i to process i; see `Collective`."""
        return tensor

    def all_to_all_rows(self, tensor: tf.Tensor, counts: Sequence[int], name: str) -> tf.Tensor:
        """Sends consecutive rows to each process; see `Collective`."""
        return tensor[tf.newaxis]

    def all_to_all_ragged(
        self, tensor: tf.Tensor, counts: tf.Tensor, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends consecutive rows to each process; see `Collective`."""
        return tensor, counts

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Sends the tensor of `root` to every process; see `Collective`."""
        return tensor
