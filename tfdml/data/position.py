"""Where a pipeline is: a few numbers, counted where batches are used, not where they are read."""

import dataclasses
from typing import Any

import keras

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Position:
    """A place in the order of a data set.

    Attributes:
        epoch: The epoch.
        sample: How many of its samples have been used.
    """

    epoch: int = 0
    sample: int = 0


def to_state(position: Position, recipe: dict[str, Any]) -> dict[str, Any]:
    """Returns a position with what its order is made of; JSON can hold it, in a few 100 bytes."""
    return {"version": VERSION, **dataclasses.asdict(position), **recipe}


def from_state(state: dict[str, Any] | None, recipe: dict[str, Any]) -> Position:
    """Returns the position of a state.

    Args:
        state: What `to_state` returned; None for the beginning.
        recipe: What the order is made of now.

    Raises:
        ValueError: If the order is another one now, so a position in it would mean other samples.
    """
    if state is None:
        return Position()
    try:
        if state["version"] > VERSION:
            raise ValueError(f"`state` must be of version {VERSION}. Received: {state['version']}.")
        differ = {k: (state[k], v) for k, v in recipe.items() if state[k] != v}
        position = Position(int(state["epoch"]), int(state["sample"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"`state` must be a pipeline's. Received: {state!r}.") from error
    if differ:
        said = ", ".join(f"{k}: {was!r}, now {now!r}" for k, (was, now) in differ.items())
        raise ValueError(
            f"`state` must be of a pipeline with the same data and order. Received: {said}. "
            f"Resume with the former arguments, or leave `state` out to begin anew."
        )
    return position


class PositionCallback(keras.callbacks.Callback):
    """Tells a pipeline which epoch `fit` trains, and how many batches it has used.

    Args:
        pipeline: The pipeline.
    """

    def __init__(self, pipeline: Any):
        super().__init__()
        self._pipeline = pipeline
        # The epoch's step with which its reading has begun; not 0 where `fit` has been resumed.
        self._first: int | None = None

    def get_state(self) -> dict[str, Any]:
        """Nothing of its own is state: the position is the pipeline's."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """See `get_state`."""

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """The epoch that `fit` calls so is the one that is read."""
        self._pipeline.begin_epoch(epoch)
        self._first = None

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Notes the first batch that is read."""
        if self._first is None:
            self._first = batch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """All batches up to this one have been used, with `steps_per_execution` several at once."""
        self._pipeline.used(batch + 1 - self._first)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """The next one begins at its first sample."""
        self._pipeline.begin_epoch(epoch + 1)
