"""Position of a pipeline: a few numbers, counted as batches are used, not as they are read."""

import dataclasses
from typing import Any

import keras

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Position:
    """Position in the order of a data set.

    Attributes:
        epoch: Number of the epoch.
        sample: Number of its samples that have been used.
    """

    epoch: int = 0
    sample: int = 0


def to_state(position: Position, recipe: dict[str, Any]) -> dict[str, Any]:
    """Returns a position and the recipe of its order: a few 100 bytes of JSON-serialisable data."""
    return {"version": VERSION, **dataclasses.asdict(position), **recipe}


def from_state(state: dict[str, Any] | None, recipe: dict[str, Any]) -> Position:
    """Returns the position in a state.

    Args:
        state: Result of `to_state`; None for the beginning.
        recipe: Data and options that determine the present order.

    Raises:
        ValueError: If the order has changed, so that the position would mean other samples.
    """
    if state is None:
        return Position()
    try:
        if state["version"] > VERSION:
            raise ValueError(f"`state` must be of version {VERSION}. Received: {state['version']}.")
        differ = {k: (state[k], v) for k, v in recipe.items() if state[k] != v}
        position = Position(int(state["epoch"]), int(state["sample"]))
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"`state` must be the state of a pipeline. Received: {state!r}."
        ) from error
    if differ:
        differences = ", ".join(f"{k}: {was!r}, now {now!r}" for k, (was, now) in differ.items())
        raise ValueError(
            f"`state` must be of a pipeline with the same data and order. Received: {differences}. "
            f"Resume with the former arguments, or leave `state` out to start from the first "
            f"sample."
        )
    return position


class PositionCallback(keras.callbacks.Callback):
    """Reports to a pipeline which epoch `fit` trains and how many batches it has used.

    Args:
        pipeline: Pipeline that `fit` reads.
    """

    def __init__(self, pipeline: Any):
        super().__init__()
        self.pipeline = pipeline
        # First step of the epoch that was read; not 0 if `fit` was resumed within the epoch.
        self._first: int | None = None

    def get_state(self) -> dict[str, Any]:
        """Returns an empty state: the position belongs to the pipeline's state."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """See `get_state`."""

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Makes the pipeline read the epoch that `fit` trains."""
        self.pipeline.begin_epoch(epoch)
        self._first = None

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Notes the first batch that is read."""
        if self._first is None:
            self._first = batch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Reports all batches up to this one as used, several with `steps_per_execution`."""
        self.pipeline.used(batch + 1 - self._first)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Moves the pipeline to the first sample of the next epoch."""
        self.pipeline.begin_epoch(epoch + 1)
