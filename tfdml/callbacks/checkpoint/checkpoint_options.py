"""Options of a `FaultTolerantCheckpoint`: when to save, how, and what to keep."""

import dataclasses
import datetime

from tfdml.callbacks.checkpoint.best_epoch import BestEpoch


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Options of a `FaultTolerantCheckpoint`; see its arguments.

    Attributes:
        save_freq: Interval of checkpoints: `"epoch"`, a number of steps, or a time.
        max_to_keep: Number of checkpoints to keep.
        asynchronous: Whether training continues while a checkpoint is written.
        raises: Whether a failed write ends training.
        best: Metric by which the best epoch is kept in addition.
        accepts_changes: Whether a `fit` resumes with another optimizer, learning rate or data.
    """

    save_freq: str | int | datetime.timedelta
    max_to_keep: int
    asynchronous: bool
    raises: bool
    best: BestEpoch
    accepts_changes: bool
