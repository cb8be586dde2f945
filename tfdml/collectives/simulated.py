"""Simulated ranks, one thread each in one process, for tests that need no real processes."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.topology import Topology

T = TypeVar("T")


class _Rendezvous:
    """Exchange where each rank deposits its part and reads all parts, one operation at a time."""

    def __init__(self, size: int, timeout: float):
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.parts: list = [None] * size
        self.names: list = [None] * size

    def exchange(self, rank: int, name: str, part) -> list:
        """Returns the parts of all ranks, in their order."""
        self.parts[rank], self.names[rank] = part, name
        self.barrier.wait()
        parts, names = list(self.parts), list(self.names)
        self.barrier.wait()  # No rank deposits a new part before all have read the old ones.
        if len(set(names)) > 1:
            raise RuntimeError(f"All ranks must call the same collective. Received: names={names}.")
        return parts


class SimulatedCollective(Collective):
    """Collective of one simulated rank; eager mode only. Created by `run_ranks`."""

    def __init__(self, topology: Topology, rendezvous: _Rendezvous, members: Sequence[int]):
        super().__init__(topology)
        self._rendezvous = rendezvous
        # The subgroup's ranks in the job; each waits for the whole job.
        self._members = members

    def subgroup(self, ranks: Sequence[int]) -> Collective:
        """Returns the collective between some of the ranks; see `Collective`."""
        members = [self._members[rank] for rank in ranks]
        return SimulatedCollective(
            Topology(list(ranks).index(self.rank), len(ranks)), self._rendezvous, members
        )

    def _exchange(self, name: str, part) -> list:
        """Returns the parts of all members, in their order."""
        parts = self._rendezvous.exchange(self._members[self.rank], name, part)
        return [parts[member] for member in self._members]

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each tensor over all processes; see `Collective`."""
        parts = self._exchange(name, [t.numpy() for t in tensors])
        return [
            tf.constant(np.sum(group, axis=0, dtype=group[0].dtype))
            for group in zip(*parts, strict=True)
        ]

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Concatenates the processes' tensors; see `Collective`."""
        return tf.concat(self._exchange(name, tensor), axis=0)

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sends row i to process i; see `Collective`."""
        parts = self._exchange(name, tensor)
        return tf.stack([part[self.rank] for part in parts])

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Sends the tensor of `root` to every process; see `Collective`."""
        return self._exchange(name, tensor)[root]


def run_ranks(size: int, fn: Callable[[Collective], T], timeout: float = 30.0) -> list[T]:
    """Runs `fn(collective)` on `size` simulated ranks at once.

    Args:
        size: The number of ranks.
        fn: Function that each rank runs, with its own collective.
        timeout: Seconds that a rank waits for the others in one operation.

    Returns:
        The ranks' results, in rank order.

    Raises:
        Exception: The first failing rank's exception; `threading.BrokenBarrierError` if a rank
            timed out.
    """
    rendezvous = _Rendezvous(size, timeout)

    def run(rank: int) -> T:
        try:
            topology = Topology(rank, size, rank, size, "simulated")
            return fn(SimulatedCollective(topology, rendezvous, range(size)))
        except BaseException:
            rendezvous.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [e for e in (f.exception() for f in futures) if e is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [f.result() for f in futures]
