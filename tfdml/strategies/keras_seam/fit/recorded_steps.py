"""Train function of which chosen steps run in a graph of their own, which records times."""

from collections.abc import Callable
from typing import Any

import keras

from tfdml.runtime.timing.time_recorder import TimeRecorder


class RecordedSteps:
    """A model's train function; the steps that its strategy's recorder has chosen are recorded.

    Recorded steps compute the same in another graph, so the graph of all other steps is not
    touched. It is dropped after the last recorded step.

    Args:
        model: The model.
        recorder: TimeRecorder of this process.
        make: Function that makes a train function, whose graphs are not traced yet. Its
            `executions_to_trace` are those after which all of them are; by default one.
    """

    def __init__(self, model: keras.Model, recorder: TimeRecorder, make: Callable[[], Callable]):
        self._model, self._recorder, self._make = model, recorder, make
        self._plain = make()
        self._recorded: Callable | None = None

    def __call__(self, iterator: Any) -> Any:
        """Runs the steps of an execution on the iterator's next batches; returns Keras's logs."""
        steps = self._model.steps_per_execution
        to_trace = getattr(self._plain, "executions_to_trace", 1)
        if not self._recorder.begins_with(steps, to_trace):
            self._recorded = None
            logs = self._plain(iterator)
            self._recorder.skip(steps)
            return logs
        if self._recorded is None:
            self._recorded = self._make()
        with self._recorder.execution(steps):
            return self._recorded(iterator)
