"""Progress lines for output that is not a terminal: one per epoch, more within long epochs."""

import sys
import time
from typing import Any

import keras
from keras.src.utils import io_utils

# Seconds between two lines within an epoch.
INTERVAL = 10.0


class LineProgress(keras.callbacks.ProgbarLogger):
    """Callback that prints a line at the end of each epoch, and about every 10 s within it.

    A progress bar redraws its line, and in a log file or a launcher's pipe each redraw is a new
    line. Keras does not add its own bar if it finds a `ProgbarLogger`.
    """

    # Keras need not wait for each batch, because the logs are read only every 10 s.
    async_safe = True

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the clock."""
        self._begin(f"Epoch {epoch + 1}/{self.epochs}")

    def on_train_batch_end(self, batch, logs=None):
        """Prints a line if it is time."""
        self._steps = batch + 1
        self._say("step", self._steps, self.target, logs)

    def on_test_begin(self, logs=None):
        """Starts the clock, or notes the end of the epoch's steps if `fit` validates."""
        if self._called_in_fit:
            self._trained = time.monotonic()
        else:
            self._begin("Evaluation")

    def on_test_batch_end(self, batch, logs=None):
        """Prints a line if it is time."""
        if self._called_in_fit:
            self._say("validation step", batch + 1, None, logs)
        else:
            self.on_train_batch_end(batch, logs)

    def on_predict_begin(self, logs=None):
        """Starts the clock."""
        self._begin("Prediction")

    def on_predict_batch_end(self, batch, logs=None):
        """Prints a line if it is time, without the predictions."""
        self.on_train_batch_end(batch)

    def on_epoch_end(self, epoch, logs=None):
        """Prints the epoch's line."""
        self._end(logs)
        if self.target is None:
            self.target = self._steps

    def on_test_end(self, logs=None):
        """Prints the line of a call of `evaluate`."""
        if not self._called_in_fit:
            self._end(logs)

    def on_predict_end(self, logs=None):
        """Prints the line of a call of `predict`."""
        self._end(None)

    def _begin(self, label: str) -> None:
        self._label, self._steps, self._trained = label, 0, None
        self._began = self._said = time.monotonic()

    def _say(self, unit: str, number: int, target: int | None, logs: dict | None) -> None:
        now = time.monotonic()
        # The epoch's line comes right after its last step.
        if now - self._said < INTERVAL or number == target:
            return
        self._said = now
        elapsed = now - self._began
        text = f"{self._label}, {unit} {number}"
        if target is not None and target >= number:
            text += f"/{target}, {_duration(elapsed / number * (target - number))} left"
        self._print(f"{text}: {_duration(elapsed)}", logs)

    def _end(self, logs: dict | None) -> None:
        now = time.monotonic()
        text = f"{self._label}: {_duration(now - self._began)}"
        if self._steps:
            step = ((self._trained or now) - self._began) / self._steps
            text += f", {1000 * step:.3g} ms/step"
        self._print(text, logs)

    def _print(self, text: str, logs: dict | None) -> None:
        shown = [f"{name}: {_number(value)}" for name, value in (logs or {}).items()]
        io_utils.print_msg(" - ".join([text, *shown]))


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def _number(value: Any) -> str:
    """Formats a metric's value as Keras's progress bar does."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return f"{number:.4f}" if abs(number) > 1e-3 or number == 0 else f"{number:.4e}"


def with_progress(callbacks: Any, verbose: Any) -> Any:
    """Adds a `LineProgress` to the callbacks if the output is not a terminal.

    Args:
        callbacks: The callbacks given to `fit`, `evaluate` or `predict`. A `CallbackList`, which
            `fit` passes to `evaluate`, is returned unchanged.
        verbose: The `verbose` argument of the same call. Nothing is added unless it is "auto".
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    callbacks = keras.tree.flatten(callbacks) if callbacks else []
    own = any(isinstance(callback, keras.callbacks.ProgbarLogger) for callback in callbacks)
    if verbose != "auto" or own or sys.stdout.isatty():
        return callbacks
    return [*callbacks, LineProgress()]
