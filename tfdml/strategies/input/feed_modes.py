"""Feeds for the different kinds of data.

| data | mode | who reads |
|---|---|---|
| arrays, `tf.data` of known length | replicated, without a feed | all ranks; each keeps its rows |
| `tf.data` of unknown length | replicated | all ranks; each keeps its rows |
| `tf.data` with `AutoShardPolicy.OFF` | sharded; no feed if every | each rank its own |
| | rank's number of rows is known | part of every batch |
| generators, `PyDataset`, data loaders, | scatter | only rank 0, which sends the batches |
| `tf.data` shuffled without a seed | | |
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.strategies.input.feed import ENDED, Feed
from tfdml.strategies.input.local_batch import LocalBatch, take_rows, without_optionals


class ReplicatedFeed(Feed):
    """Feed for pipelines in which all processes read the same batches and take their own rows."""

    def _count(self, batch: LocalBatch) -> int:
        return int(batch.global_rows)

    def _problem(self, rows: Sequence[int], number: int) -> RuntimeError | None:
        ended = [rank for rank, r in enumerate(rows) if r == ENDED]
        if ended and len(ended) < len(rows):
            return super()._problem(rows, number) or RuntimeError(
                f"The data must have the same number of batches on all {len(rows)} ranks, because "
                f"every rank reads all of them. Received: the end of the data on rank "
                f"{', '.join(map(str, ended))} after {number} batches, and one more batch on the "
                f"other ranks (this is rank {self._collective.rank})."
            )
        return super()._problem(rows, number)

    def _agree_on_length(self, known: Sequence[int]) -> int | None:
        return None if min(known) < 0 else max(known)

    def _local_batches(
        self, batches: Sequence[LocalBatch], rows: Sequence[Sequence[int]], name: str
    ) -> list[LocalBatch]:
        return list(batches)


class ShardedFeed(Feed):
    """Feed in which each process reads its own part of every global batch; see `sharded_batches`.

    A process whose data end before the others' takes part with padded shares.
    """

    _padding: Any = None

    def _problem(self, rows: Sequence[int], number: int) -> RuntimeError | None:
        if number == 0 and ENDED in rows:
            return super()._problem(rows, number) or RuntimeError(
                f"The data must have rows on every rank, because each reads its own part. "
                f"Received: no batch on rank {rows.index(ENDED)}. Use at most as many ranks as "
                f"there are parts (files), or drop AutoShardPolicy.OFF: then every rank reads all."
            )
        return super()._problem(rows, number)

    def _agree_on_length(self, known: Sequence[int]) -> int | None:
        return None if min(known) < 0 else max(known)

    def _count(self, batch: LocalBatch) -> int:
        return int(batch.global_rows)

    def _local_batches(
        self, batches: Sequence[LocalBatch | None], rows: Sequence[Sequence[int]], name: str
    ) -> list[LocalBatch]:
        return [self._local_batch(*pair) for pair in zip(batches, rows, strict=True)]

    def _local_batch(self, own: LocalBatch | None, rows: Sequence[int]) -> LocalBatch:
        if own is None:
            own = self._padding
        elif self._padding is None:
            parts = tuple(take_rows(part, 0, 1) for part in own.parts)
            self._padding = own._replace(parts=parts, rows=tf.zeros_like(own.rows))
        return own._replace(global_rows=tf.constant(sum(rows), tf.int64))


class ScatterFeed(Feed):
    """Feed in which rank 0 reads and sends its batches to the others, which ignore their data."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._packed: list[bytes] = []

    def _open(self) -> Iterator:
        return super()._open() if self._collective.topology.is_chief else iter(())

    def _count(self, batch: Any) -> int:
        self._packed.append(_pack(without_optionals(batch)))
        return len(self._packed[-1])

    def _agree_on_length(self, known: Sequence[int]) -> int | None:
        return known[0] if known[0] >= 0 else None

    def _local_batches(
        self, batches: Sequence[Any], rows: Sequence[Sequence[int]], name: str
    ) -> list[LocalBatch]:
        if not rows:
            return []
        ends = np.cumsum([announced[0] for announced in rows])
        own = b"".join(self._packed[: len(rows)]) or bytes(ends[-1])
        self._packed.clear()
        # As int64, which every transport carries unchanged.
        words = tf.constant(np.frombuffer(own + bytes(-len(own) % 8), np.int64))
        sent = (
            self._collective.concurrent_with_steps.broadcast(words, f"{name}/data")
            .numpy()
            .tobytes()
        )
        spec = without_optionals(self.element_spec)
        pieces = zip([0, *ends[:-1]], ends, strict=True)
        return [self._splitter.split(_unpack(sent[begin:end], spec)) for begin, end in pieces]


def _pack(batch: Any) -> bytes:
    """Serializes a structure of tensors to bytes."""
    flat = tf.nest.flatten(batch, expand_composites=True)
    tensors = [tf.io.serialize_tensor(t) for t in flat if t is not None]
    return tf.io.serialize_tensor(tf.stack(tensors)).numpy()


def _unpack(data: bytes, spec: Any) -> Any:
    """Returns the structure of tensors that `_pack` serialized; `spec` describes it."""
    flat = tf.nest.flatten(spec, expand_composites=True)
    parts = iter(tf.unstack(tf.io.parse_tensor(data, tf.string)))
    tensors = [None if s is None else tf.io.parse_tensor(next(parts), s.dtype) for s in flat]
    return tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)
