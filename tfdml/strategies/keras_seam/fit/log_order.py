"""Order of callbacks that write and read an epoch's logs, and what lines of progress leave out."""

import functools
from typing import Any

import keras

# Names in the logs that begin with it are for loggers: a line of progress has no room for them.
HIDDEN_PREFIX = "perf/"


class AddsToLogs(keras.callbacks.Callback):
    """Callback that adds numbers to an epoch's logs: it runs before those that read them."""


def in_log_order(callbacks: list[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Returns a call's callbacks with those that add to logs first, otherwise in the same order.

    Lines of progress among them leave out what is for loggers alone.
    """
    if not any(isinstance(callback, AddsToLogs) for callback in callbacks):
        return callbacks
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ProgbarLogger):
            callback.on_epoch_end = functools.partial(_show_epoch_end, callback)
    return sorted(callbacks, key=lambda callback: not isinstance(callback, AddsToLogs))


def _show_epoch_end(
    progress: keras.callbacks.ProgbarLogger, epoch: int, logs: dict[str, Any] | None = None
) -> None:
    shown = {k: v for k, v in (logs or {}).items() if not k.startswith(HIDDEN_PREFIX)}
    type(progress).on_epoch_end(progress, epoch, shown)
