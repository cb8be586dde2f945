"""Position in the training data of a `fit`, for resuming within an epoch.

Keras counts the epochs and steps of a `fit`, but starts every epoch with its first batch. There are
three ways to start within an epoch: a dataset cut by the user, a callback that lets steps pass
without training, or an iterator that starts later. This module uses the iterator: the trainer's
epoch iterator starts at the next step, so callbacks, progress bar and logs see the step numbers
that they would have seen, and no empty step runs. Earlier data are not read if that can be avoided.
"""

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator

from tfdml.strategies.input.device_prefetch import DevicePrefetcher
from tfdml.strategies.input.feed import Feed
from tfdml.strategies.keras_seam.data.array_data import ArrayOrder
from tfdml.strategies.keras_seam.data.data_source import OneByOne, batch_spec
from tfdml.strategies.parameter_server.remote_datasets import ShippedDataset


class Pipeline(Protocol):
    """Dataset that knows its own position, such as `tfdml.data.TFRecordPipeline`."""

    batch_size: int

    def state_in_epoch(self) -> dict[str, Any]:
        """Returns the dataset's position in the epoch that `fit` trains."""

    def restore(self, state: dict[str, Any]) -> None:
        """Moves the dataset to a position."""


class DataPosition:
    """Position in the training data of one `fit`, updated as batches are used.

    | data | how a position is restored |
    |---|---|
    | arrays | by their order, from a seed and the number of the pass; used batches are dropped |
    | pipelines of `tfdml.data` | by their own position |
    | other data | earlier passes are started again, used batches read and dropped |
    | read by workers of parameter servers | each worker drops its part of the batches |

    Args:
        model: The model being trained.
        x: The data given to `fit`.
        state: State from which to resume; None for the beginning.
        accepts_changes: Whether to begin the epoch again if the data have changed, instead of
            refusing them.

    Attributes:
        changes: Accepted changes of the data, in words.
    """

    def __init__(
        self,
        model: keras.Model,
        x: Any,
        state: dict[str, Any] | None,
        accepts_changes: bool = False,
    ):
        self.pipeline: Pipeline | None = x if _is_pipeline(x) else None
        self.order: ArrayOrder | None = None
        self._model = model
        self._state = state or {}
        self._first = self._state.get("step", 0)
        self._passes = self._state.get("passes", 0)  # Iterators made in this `fit` so far.
        self._taken = self._state.get("taken", 0)  # Batches read from the last one.
        self._resumes = bool(state)
        self._accepts_changes = accepts_changes
        self.changes: list[str] = []
        self._iterator: TFEpochIterator | None = None
        # Keras's logs of an epoch are those of its last step, which may precede the resumption.
        self.logs: dict[str, float] = self._state.get("logs", {})
        if self.pipeline is not None and state:
            self._check("batch_size", self.pipeline.batch_size)
            try:
                if not self.changes:
                    self.pipeline.restore(self._state["pipeline"])
            except ValueError as error:
                if not accepts_changes:
                    raise
                self.changes.append(str(error))

    def used(self, logs: dict[str, Any] | None) -> None:
        """Notes the logs of a step."""
        numbers = {k: v for k, v in (logs or {}).items() if np.ndim(v) == 0}
        self.logs = {name: float(value) for name, value in numbers.items()}

    def state(self, step: int) -> dict[str, Any]:
        """Returns the position as JSON-serializable values.

        Args:
            step: Number of batches of the epoch that have been used; 0 between epochs.
        """
        between = step == 0 and (self._iterator is None or self._iterator._current_iterator is None)
        state = {
            **self._facts(),
            "step": step,
            "passes": self._passes,
            "taken": 0 if between else self._taken,
            "logs": self.logs if step else {},
        }
        if self.pipeline is not None:
            state |= {
                "pipeline": self.pipeline.state_in_epoch(),
                "batch_size": self.pipeline.batch_size,
            }
        if self.order is not None:
            state["seed"] = self.order.seed
        return state

    def array_order(self, draw: Any) -> ArrayOrder:
        """Returns the order of arrays: the resumed one, or one with a seed from `draw`."""
        seed = self._state["seed"] if "seed" in self._state else draw()
        self.order = ArrayOrder(seed)
        return self.order

    def attach(self, iterator: TFEpochIterator) -> None:
        """Attaches Keras's iterator of the training data, and checks that it fits the state."""
        self._iterator = iterator
        # Keras creates a metric's variables in its first step; here they are needed before.
        with self._model.distribute_strategy.scope():
            self._model._symbolic_build(data_batch=batch_spec(iterator._distributed_dataset))
        for name, value in self._facts().items():
            self._check(name, value)
        if self.changes:
            # The epoch begins again, with a pass that no earlier one has made.
            self._first = self._taken = 0
            self._resumes = False
            self.logs = {}

    def _facts(self) -> dict[str, Any]:
        """Returns the facts about the data that must be the same when training resumes."""
        adapter = self._iterator.data_adapter
        return {
            "batches": adapter.num_batches,
            "steps_per_epoch": self._iterator.steps_per_epoch,
            "samples": getattr(adapter, "_num_samples", None),
        }

    def _check(self, name: str, value: Any) -> None:
        before = self._state.get(name, value)
        if before == value:
            return
        if not self._accepts_changes:
            raise ValueError(
                f"The data must be those that the checkpoint was saved with. Received: {name} "
                f"{value}, before {before}. Change it back, use another directory, or begin the "
                f'epoch again with on_change="accept".'
            )
        self.changes.append(f"data of {name} {value}, before {before}")

    # -- The steps of an epoch -----------------------------------------------------------------

    def steps(self) -> Iterator[tuple[int, int, Iterator]]:
        """Yields the first and the last step of each execution, and the data's iterator.

        Replaces `EpochIterator._enumerate_iterator` and keeps its rules: with `steps_per_epoch`, an
        iterator continues in the next epoch until its data have ended.
        """
        own = self._iterator
        own.data_adapter.on_epoch_begin()
        limit = own.steps_per_epoch or own._num_batches
        first, self._first = self._first, 0
        if own._current_iterator is None or not own.steps_per_epoch:
            self._open(first)
        for step in itertools.count(first, own.steps_per_execution):
            if limit and step >= limit:
                break
            if own._num_batches and self._taken >= own._num_batches:
                own._interrupted_warning()
                break
            self._taken += own.steps_per_execution
            own._steps_seen = self._taken
            yield step, step + own.steps_per_execution - 1, own._current_iterator
        if not own.steps_per_epoch or (own._num_batches and self._taken >= own._num_batches):
            own._current_iterator = None
        own.data_adapter.on_epoch_end()

    def _open(self, first: int) -> None:
        """Starts a pass over the data; the first pass after resuming starts at the position."""
        own, resumes, self._resumes = self._iterator, self._resumes, False
        # With `steps_per_epoch`, a pass may continue across epochs.
        within = self._taken if resumes else 0
        if not resumes or not within:
            self._passes += 1
        if self.order is not None:
            self.order.passes = self._passes - 1
        elif self.pipeline is None and resumes:
            self._replay_earlier_passes()
        self._taken = within
        data = own._get_iterator()
        if isinstance(data, ShippedDataset):
            own._current_iterator = data.after(within)
            return
        own._current_iterator = iter(data)
        if self.pipeline is None:
            for _ in range(within):
                next(own._current_iterator)

    def _replay_earlier_passes(self) -> None:
        """Repeats the earlier passes' starts for data that count them, as `shuffle` does."""
        data = self._iterator._distributed_dataset
        if isinstance(data, DevicePrefetcher):
            data = data.dataset
        if isinstance(data, Feed | OneByOne):
            data = data.dataset
        if isinstance(data, tf.data.Dataset):
            for _ in range(self._passes - 1):
                iter(data)
        python_data = getattr(self._iterator.data_adapter, "py_dataset", None)
        if python_data is not None:
            for _ in range(self._passes - 1):
                python_data.on_epoch_end()


def _is_pipeline(x: Any) -> bool:
    return isinstance(x, tf.data.Dataset) and hasattr(x, "restore") and hasattr(x, "batch_size")
