"""The interface to what moves tensors between processes: four operations, each with a name."""

import abc
import contextlib
from collections.abc import Sequence

import tensorflow as tf

from tfdml.topology import Topology


class Collective(abc.ABC):
    """Collective operations among the processes of a job.

    Every process must call the same operations, with the same names, dtypes and (but for the
    first axis of `all_gather`) shapes. The name is what pairs the calls of the processes, so the
    order in which tensors become ready may differ between them; one name may be in flight once.

    All operations work in a `tf.function` and eagerly. None is differentiable: what is exchanged
    is gradients, counts and results, never activations inside a tape.

    Attributes:
        topology: This process's place in the job.
        branches: Whether operations may stand in one branch of a graph (`tf.cond`).
    """

    branches = True

    def __init__(self, topology: Topology):
        self.topology = topology

    @property
    def rank(self) -> int:
        """This process among all, from 0."""
        return self.topology.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.topology.size

    @property
    def beside_steps(self) -> "Collective":
        """What a second thread may use while a step runs: it needs no order among the two."""
        return self

    def on(self, device: str | None) -> "Collective":
        """Returns the collective in which a device of this process takes part.

        Its peers are the devices of the same number of the other processes. Exchanges of different
        devices wait for nothing of each other.

        Args:
            device: One of this process's devices, None for the present one. Where operations run
                on the device of their tensors, this collective serves them all.
        """
        del device
        return self

    def waiting(self, what: str) -> contextlib.AbstractContextManager:
        """While this is entered, this process waits for the others; a guard may watch."""
        del what
        return contextlib.nullcontext()

    @abc.abstractmethod
    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each tensor over all processes, as one group.

        Args:
            tensors: Tensors of one numeric dtype, any shapes.
            name: The group's name.

        Returns:
            The sums, in the order of `tensors`: the same bits on every process.
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
            tensor: A tensor of any dtype but string, shape `[size, ...]`, alike on all processes.
            name: The operation's name.

        Returns:
            A tensor of the same shape, whose row i process i has sent.
        """

    @abc.abstractmethod
    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Gives every process the tensor of process `root`.

        Args:
            tensor: A tensor of any dtype but string; the same dtype and shape on every process.
            name: The operation's name.
            root: The rank whose value counts.

        Returns:
            The tensor of process `root`.
        """


class LocalCollective(Collective):
    """The collective of a job of one process: every operation returns what it was given."""

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

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Gives every process the tensor of `root`; see `Collective`."""
        return tensor
