"""What all of tfdml's synchronous strategies share."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdml.collectives.buckets import BUCKET_BYTES
from tfdml.collectives.collective import Collective
from tfdml.compression import Compressor
from tfdml.runtime.guard import guard_of
from tfdml.runtime.watched import WatchedCollective
from tfdml.strategies import keras_seam
from tfdml.strategies.extended import ReplicaExtended
from tfdml.strategies.step import GlobalStep


class ReplicaStrategy(tf.distribute.Strategy):
    """Synchronous training on mirrored devices of one or several processes.

    Args:
        collective: What exchanges tensors between the processes.
        devices: This process's devices.
        compressor: What makes gradients smaller between processes.
        silence_limit: Seconds of silence after which another process is taken for lost.
        check_desync: Steps between two comparisons of all weights; 0 for none.
        bucket_bytes: Bytes of gradients that go together.
    """

    # `MirroredExtended` numbers TensorFlow's own collectives from here.
    _collective_key_base = 0

    def __init__(
        self,
        collective: Collective,
        devices: Sequence[str],
        compressor: Compressor | None = None,
        silence_limit: float = 60.0,
        check_desync: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        keras_seam.install()
        guard = None
        if collective.size > 1:
            guard = guard_of(collective, silence_limit)
            collective = WatchedCollective(collective, guard.place)
        rest = (compressor, guard, check_desync, bucket_bytes)
        super().__init__(ReplicaExtended(self, devices, collective, *rest))

    @property
    def rank(self) -> int:
        """This process among all, from 0."""
        return self.extended.collective.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.extended.collective.size

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes files and messages."""
        return self.extended.collective.topology.is_chief

    def run(self, fn, args=(), kwargs=None, options=None) -> Any:
        """Runs `fn` on each replica; see `tf.distribute.Strategy.run`."""
        if isinstance(fn, GlobalStep):
            return fn(*args)
        return super().run(fn, args=args, kwargs=kwargs, options=options)
