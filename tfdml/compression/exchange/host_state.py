"""State of a rank between steps where gradients are summed by hosts, and its conversion."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdml.collectives.hosts import Hosts
from tfdml.compression.error_feedback import State
from tfdml.compression.exchange.host_part import HostPart
from tfdml.compression.exchange.kept_state import KeptState
from tfdml.compression.exchange.redistribution import (
    HOST_PART,
    HOSTS,
    OF_SLICE,
    OWNER_RESIDUAL,
    WAY,
)


class HostState:
    """State of a rank's slices and chunks.

    State of a job with other hosts, or with gradients summed at once, is converted: nothing that
    was not sent is lost.

    Args:
        kept: The aggregator's state.
        hosts: Hosts and their ranks.
        rank: This rank.
    """

    def __init__(self, kept: KeptState, hosts: Hosts, rank: int):
        self._kept, self._hosts = kept, hosts
        self._index = hosts.local_index(rank)
        self._host = hosts.by_rank[rank]

    def way(self, label: str, choose: Callable[[], bool]) -> bool:
        """Returns whether an optimizer's gradients are summed by hosts.

        A restored job continues as it was, because the order of additions is part of its numbers.

        Args:
            label: Name of the optimizer's exchanges.
            choose: Function that decides; called where no restored job has decided.
        """
        name = f"{WAY}{label}"
        self._kept.value(HOSTS, lambda: tf.constant(self._hosts.by_rank))

        def start() -> tf.Tensor:
            is_known = name in self._kept.variables or self._kept.restored(name) is not None
            return tf.constant(0 if is_known else int(choose()))

        with tf.init_scope():
            return bool(self._kept.value(name, start).numpy())

    def slice_state(
        self, name: str, part: HostPart, init: Callable[..., State]
    ) -> dict[str, tf.Variable]:
        """Returns the state of this rank's slice of a part; empty tensors if it owns none.

        Args:
            name: Name of the part.
            part: Division of the part over the ranks.
            init: Function of a slice's shape that returns the first values, by name.
        """
        self._kept.value(f"{HOST_PART}{name}", lambda: tf.constant(part.packed()))
        length = part.slice_length if self._index < part.owners else 0
        own = slice(self._index * part.slice_length, self._index * part.slice_length + length)

        def converted(key: str) -> np.ndarray:
            whole = np.zeros(part.owners * part.slice_length, np.float32)
            shares = [self._kept.restored(f"{key}/{gradient}") for gradient in part.names]
            if all(share is not None for share in shares):
                # Ranks have equal shares of what was not sent; a host has those of its ranks.
                ranks = len(self._hosts.by_rank)
                values = np.concatenate([share.reshape(-1) for share in shares])
                whole[: part.length] = values * (ranks / self._hosts.count)
            return whole[own]

        with tf.init_scope():
            first = init([length])
        return {
            key: self._kept.value(
                f"{key}/{name}{OF_SLICE}", lambda value=value: value, lambda key=key: converted(key)
            )
            for key, value in first.items()
        }

    def residual(self, name: str, part: HostPart) -> dict[str, tf.Variable]:
        """Returns the residual of the chunk that this rank owns of a part; empty if it owns none.

        Args:
            name: Name of the part.
            part: Division of the part over the ranks.
        """
        length = part.chunk if self._index < part.owners else 0
        first = part.chunk_number(self._host, self._index) * part.chunk

        def converted() -> np.ndarray:
            whole = np.zeros(part.hosts * part.owners * part.chunk, np.float32)
            before = self._kept.restored_owner_residual(f"{OWNER_RESIDUAL}{name}")
            if before is not None and len(before) == part.length:
                whole[: part.length] = before
            return whole[first : first + length]

        full = f"{OWNER_RESIDUAL}{name}{OF_SLICE}"
        return {"residual": self._kept.value(full, lambda: tf.zeros([length]), converted)}
