"""Hosts of a job: which ranks share a machine, and so exchange without its network link."""

import dataclasses
import functools
import hashlib
from collections.abc import Hashable, Sequence
from pathlib import Path

import tensorflow as tf

from tfdml import topology
from tfdml.collectives.collective import Collective


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The job's ranks by host.

    Each host has as many *owners* as the host with the fewest ranks has ranks: the first ones of
    its ranks. The owners with the same index on all hosts are *peers*.

    Attributes:
        ranks: The ranks of each host, in ascending order; hosts in the order of their first ranks.
    """

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, identities: Sequence[Hashable]) -> "Hosts":
        """Groups ranks by host.

        Args:
            identities: Identity of each rank's host, in the order of the ranks.
        """
        found: dict[Hashable, list[int]] = {}
        for rank, identity in enumerate(identities):
            found.setdefault(identity, []).append(rank)
        return cls(tuple(map(tuple, found.values())))

    @property
    def count(self) -> int:
        """The number of hosts."""
        return len(self.ranks)

    @property
    def owners(self) -> int:
        """The number of owners on each host."""
        return min(map(len, self.ranks))

    @property
    def are_even(self) -> bool:
        """Whether all hosts have the same number of ranks, so that every rank is an owner."""
        return all(len(own) == self.owners for own in self.ranks)

    @property
    def have_two_levels(self) -> bool:
        """Whether there are several hosts, and one of them has several ranks."""
        return self.count > 1 and any(len(own) > 1 for own in self.ranks)

    @property
    def by_rank(self) -> list[int]:
        """The index of each rank's host, in the order of the ranks."""
        pairs = [(rank, host) for host, own in enumerate(self.ranks) for rank in own]
        return [host for _, host in sorted(pairs)]

    def local_ranks(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of a rank's host.

        Args:
            rank: A rank of the job.
        """
        return self.ranks[self.by_rank[rank]]

    def local_index(self, rank: int) -> int:
        """Returns a rank's index among the ranks of its host.

        Args:
            rank: A rank of the job.
        """
        return self.local_ranks(rank).index(rank)

    def peers(self, rank: int) -> tuple[int, ...]:
        """Returns the peers of an owner, itself included; of any other rank, the rank alone.

        Args:
            rank: A rank of the job.
        """
        index = self.local_index(rank)
        return (rank,) if index >= self.owners else tuple(own[index] for own in self.ranks)


def gather_hosts(collective: Collective) -> Hosts:
    """Returns the job's hosts; all processes call this.

    Processes share a host if they share a machine and its network, and the launcher reaches them
    under one name.

    Args:
        collective: Collective between the processes.
    """
    if collective.size == 1:
        return Hosts(((0,),))
    name = topology.own_host() or ""
    own = _digest(f"{machine()} {name}")
    gathered = collective.all_gather(tf.constant([own], tf.int64), "hosts")
    return Hosts.of(gathered.numpy().tolist())


@functools.cache
def machine() -> int:
    """Returns a number that is equal on processes that share a loopback interface."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    network = Path("/proc/self/ns/net").stat().st_ino
    return _digest(f"{boot} {network}")


def _digest(text: str) -> int:
    """Returns 63 bits of a text's SHA-256, which an int64 can hold."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
