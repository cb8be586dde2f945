"""Rows of a global batch that a worker reads, and the end of an epoch."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from tfdml.data.order import Order
from tfdml.row_split import LocalReplicas

ENDS = ("exact", "drop", "pad")


def process_replicas(strategy: Any) -> LocalReplicas:
    """Returns this process's replicas in a strategy's job.

    Args:
        strategy: Strategy of the job; one without `rank` and `size` has a single process, and one
            without `batch_weights` deals rows equally.
    """
    replicas = strategy.num_replicas_in_sync
    size = getattr(strategy, "size", 1)
    local = replicas // size
    weights = getattr(strategy, "batch_weights", None)
    return LocalReplicas(getattr(strategy, "rank", 0) * local, local, replicas, weights)


class Rows(NamedTuple):
    """Rows of a global batch that belong to one worker.

    Attributes:
        ids: Ids of the records: int64, `[rows]`.
        weights: 0 for padding rows of the last batch, else 1: float32, `[rows]`.
        positions: Positions of the records in the order of the epoch: int64, `[rows]`.
    """

    ids: np.ndarray
    weights: np.ndarray
    positions: np.ndarray


@dataclasses.dataclass(frozen=True)
class Batches:
    """Division of an epoch into global batches.

    Attributes:
        batch_size: Number of rows in a global batch.
        end: Handling of records that do not fill the last batch: "exact" makes a smaller batch,
            "drop" leaves them out of this epoch, "pad" fills the batch with rows of weight 0.
    """

    batch_size: int
    end: str = "exact"

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ValueError(
                f"`batch_size` must be a positive integer. Received: "
                f"batch_size={self.batch_size!r}."
            )
        if self.end not in ENDS:
            raise ValueError(f"`end` must be one of {ENDS}. Received: end={self.end!r}.")

    def steps(self, records: int) -> int:
        """Returns the number of global batches in `records` records."""
        if self.end == "drop":
            return records // self.batch_size
        return -(-records // self.batch_size)

    def own_steps(self, records: int, worker: LocalReplicas) -> int:
        """Returns the number of global batches in which a worker has rows: at most one fewer."""
        steps, remainder = self.steps(records), records % self.batch_size
        short = self.end == "exact" and remainder
        own = worker.count(remainder if short else self.batch_size)
        return steps - 1 if steps and not own and short else steps

    def rows(self, order: Order, first: int, step: int, worker: LocalReplicas) -> Rows:
        """Returns a worker's rows of one global batch; see `span`."""
        return self.span(order, first, step, step + 1, worker)

    def span(self, order: Order, first: int, begin: int, end: int, worker: LocalReplicas) -> Rows:
        """Returns a worker's rows of consecutive global batches, one batch after the other.

        The rows of a batch are sorted by id, so a worker's rows lie together: each worker reads
        only about its share of the blocks of a window, not all.

        Args:
            order: Order of the epoch.
            first: Position in the epoch at which batch 0 begins.
            begin: First batch.
            end: End of the batches, exclusive.
            worker: Replicas of the worker.
        """
        size = self.batch_size
        position = first + begin * size
        ids = order.ids(position, first + end * size)
        batch = np.arange(len(ids)) // size
        by_id = np.argsort(batch * (int(ids.max(initial=0)) + 1) + ids, kind="stable")
        ids, positions = ids[by_id], position + by_id
        weights = np.ones(len(ids), np.float32)
        remainder = len(ids) % size
        if self.end == "pad" and remainder:
            ids, positions = (
                np.append(v, np.resize(v[-remainder:], size - remainder)) for v in (ids, positions)
            )
            weights = np.append(weights, np.zeros(size - remainder, np.float32))
            remainder = 0
        if worker.is_alone:
            return Rows(ids, weights, positions)
        whole, short = worker.rows(size), worker.rows(remainder)
        last = len(ids) - remainder
        return Rows(
            *(
                np.append(v[:last].reshape(-1, size)[:, whole], v[last:][short])
                for v in (ids, weights, positions)
            )
        )
