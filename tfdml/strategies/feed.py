"""Data that processes read apart: portions of global batches, agreed on before each step.

How data are read follows from what they are:

| data | mode | who reads |
|---|---|---|
| arrays, `tf.data` of known length | replicated, without a feed | all ranks; each keeps its rows |
| `tf.data` of unknown length | replicated | all ranks; each keeps its rows |
| `tf.data` with `AutoShardPolicy.OFF` | sharded | each rank its own part of every batch |
| generators, `PyDataset`, data loaders, | scatter | rank 0 alone; it sends the batches |
| `tf.data` shuffled without a seed | | |
"""

import abc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.runtime.errors import OtherRankError
from tfdml.strategies.share import Portion, Splitter, count_rows, take_rows

# What a process announces before each step: the size of its batch, or one of these.
_ENDED, _FAILED = 0, -1


class Feed(abc.ABC):
    """An iterable of this process's portions; all processes yield equally many.

    Args:
        dataset: This process's pipeline.
        collective: What the processes agree by.
        splitter: What splits global batches over the replicas.
        num_batches: The number of batches of this process's pipeline, None if unknown.

    Attributes:
        num_batches: The number of portions that all processes yield, None if unknown.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        collective: Collective,
        splitter: Splitter,
        num_batches: int | None,
    ):
        self._dataset = dataset
        self._collective = collective
        self._splitter = splitter
        known = self._announce(-1 if num_batches is None else num_batches, "length")
        self.num_batches = self._agree_on_length(known)

    @property
    def element_spec(self) -> Any:
        """What the pipeline yields: batches, or portions of them."""
        return self._dataset.element_spec

    def __iter__(self) -> Iterator[Portion]:
        """Yields this process's portions of the global batches.

        Raises:
            OtherRankError: If another process's data raised.
            RuntimeError: If another process's data ended too early.
            Exception: What this process's own data raised.
        """
        batches = self._open()
        number = 0
        while True:
            batch, error = None, None
            try:
                batch = next(batches, None)
                own = _ENDED if batch is None else self._count(batch)
            except Exception as raised:  # noqa: BLE001 (raised again, once all processes know)
                own, error = _FAILED, raised
            rows = self._announce(own, "batch")
            if error is not None:
                raise error
            self._check(rows, number)
            if not any(rows):
                return
            yield self._portion(batch, rows)
            number += 1

    def _announce(self, value: int, what: str) -> list[int]:
        """Tells all processes a number; returns everybody's, by rank."""
        own = tf.constant([value], tf.int64)
        return self._collective.all_gather(own, f"feed/{what}").numpy().tolist()

    def _open(self) -> Iterator:
        return iter(self._dataset)

    def _count(self, batch: Any) -> int:
        return int(count_rows(batch))

    def _check(self, rows: Sequence[int], number: int) -> None:
        """Raises where the processes' announcements do not go together."""
        if _FAILED in rows:
            raise OtherRankError(
                f"The data must not fail on any rank. Received: an error on rank "
                f"{rows.index(_FAILED)} instead of batch {number}, so rank "
                f"{self._collective.rank} ends too. Rank {rows.index(_FAILED)} says what it was."
            )

    @abc.abstractmethod
    def _agree_on_length(self, known: Sequence[int]) -> int | None:
        """Returns the number of portions, given the processes' numbers of batches (-1: unknown)."""

    @abc.abstractmethod
    def _portion(self, batch: Any, rows: Sequence[int]) -> Portion:
        """Returns this process's portion, given its own batch and everybody's rows."""


class ReplicatedFeed(Feed):
    """All processes read the same batches; their pipelines yield portions of them."""

    def _count(self, batch: Portion) -> int:
        return int(batch.global_rows)

    def _check(self, rows: Sequence[int], number: int) -> None:
        super()._check(rows, number)
        ended = [rank for rank, r in enumerate(rows) if r == _ENDED]
        if ended and len(ended) < len(rows):
            raise RuntimeError(
                f"The data must have equally many batches on all {len(rows)} ranks, because every "
                f"rank reads all of them. Received: the end of the data on rank "
                f"{', '.join(map(str, ended))} after {number} batches, and another batch on the "
                f"other ranks (this is rank {self._collective.rank})."
            )

    def _agree_on_length(self, known: Sequence[int]) -> int | None:
        return None if min(known) < 0 else max(known)

    def _portion(self, batch: Portion, rows: Sequence[int]) -> Portion:
        return batch


class ShardedFeed(Feed):
    """Each process reads its own part of every global batch; its pipeline yields its shares.

    A process whose data has ended before the others' takes part with padded shares.
    """

    _padding: Any = None

    def _check(self, rows: Sequence[int], number: int) -> None:
        super()._check(rows, number)
        if number == 0 and _ENDED in rows:
            raise RuntimeError(
                f"The data must have rows on every rank, because each reads its own part. "
                f"Received: no batch on rank {rows.index(_ENDED)}. Use at most as many ranks as "
                f"there are parts (files), or drop AutoShardPolicy.OFF: then every rank reads all."
            )

    def _agree_on_length(self, known: Sequence[int]) -> int | None:
        return None if min(known) < 0 else max(known)

    def _portion(self, batch: Any, rows: Sequence[int]) -> Portion:
        if batch is None:
            batch = self._padding
        elif self._padding is None:
            self._padding = take_rows(batch, tf.constant(0, tf.int64), tf.constant(1, tf.int64))
        own = rows[self._collective.rank]
        local = self._splitter.local_replicas
        parts = Splitter(0, local, local).portion(
            tf.constant(max(own, 1), tf.int64), lambda begin, end: take_rows(batch, begin, end)
        )
        present = parts.rows if own else tf.zeros_like(parts.rows)
        return parts._replace(
            rows=present,
            global_rows=tf.constant(sum(rows), tf.int64),
            working_replicas=tf.constant(sum(min(r, local) for r in rows), tf.int64),
        )


def own_share(dataset: tf.data.Dataset, splitter: Splitter) -> tf.data.Dataset:
    """Returns a process's part of the data in batches of its share of a global batch.

    Args:
        dataset: The process's part, batched by the global batch size.
        splitter: What splits global batches over the replicas.

    Raises:
        ValueError: If the batch size is not known, or smaller than the number of processes.
    """
    batch_size = int(tf.raw_ops.ComputeBatchSize(input_dataset=dataset._variant_tensor))
    first, last = splitter.first_replica, splitter.first_replica + splitter.local_replicas - 1
    begin, _ = splitter.bounds(first, batch_size)
    _, end = splitter.bounds(last, batch_size)
    if batch_size < 0 or end == begin:
        processes = splitter.num_replicas // splitter.local_replicas
        raise ValueError(
            f"With AutoShardPolicy.OFF the dataset must end in `batch(n)`, with n the global batch "
            f"size and at least the number of processes, {processes}. Received: "
            f"{'no batch size that can be seen' if batch_size < 0 else f'batch({batch_size})'}."
        )
    return dataset.rebatch(end - begin)


class ScatterFeed(Feed):
    """Rank 0 reads; the others are sent its batches, and do not look at their own data."""

    _packed = b""

    def _open(self) -> Iterator:
        return super()._open() if self._collective.topology.is_chief else iter(())

    def _count(self, batch: Any) -> int:
        self._packed = _pack(without_optionals(batch))
        return len(self._packed)

    def _agree_on_length(self, known: Sequence[int]) -> int | None:
        return known[0] if known[0] >= 0 else None

    def _portion(self, batch: Any, rows: Sequence[int]) -> Portion:
        # Eight bytes at a time: that is what every transport carries as it is.
        length = rows[0]
        own = self._packed if batch is not None else bytes(length)
        words = tf.constant(np.frombuffer(own + bytes(-length % 8), np.int64))
        data = self._collective.broadcast(words, "feed/data").numpy().tobytes()[:length]
        return self._splitter.split(_unpack(data, without_optionals(self.element_spec)))


def _pack(batch: Any) -> bytes:
    """Returns the bytes of a structure of tensors."""
    flat = tf.nest.flatten(batch, expand_composites=True)
    tensors = [tf.io.serialize_tensor(t) for t in flat if t is not None]
    return tf.io.serialize_tensor(tf.stack(tensors)).numpy()


def _unpack(data: bytes, spec: Any) -> Any:
    """Returns the structure of tensors that `_pack` was given; `spec` is its description."""
    flat = tf.nest.flatten(spec, expand_composites=True)
    parts = iter(tf.unstack(tf.io.parse_tensor(data, tf.string)))
    tensors = [None if s is None else tf.io.parse_tensor(next(parts), s.dtype) for s in flat]
    return tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)


def without_optionals(structure: Any) -> Any:
    """Returns a structure with None for the empty optionals that stand for it in a pipeline."""

    def leaf(value):
        return None if isinstance(value, tf.experimental.Optional | tf.OptionalSpec) else value

    return tf.nest.map_structure(leaf, structure)
