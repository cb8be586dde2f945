"""Wrapper that runs a callback on rank 0 alone, for loggers that support only one process.

Known loggers need no wrapper: `strategies/keras_seam/fit/callbacks.py` keeps them to rank 0.
"""

import functools
from typing import Any

import keras

# These change the model, or take part in collective operations: every rank must run them.
_FOR_ALL = (
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TerminateOnNaN,
)


class ChiefOnly(keras.callbacks.Callback):
    """Callback that passes all calls on to another callback, on rank 0 only.

    ```python
    model.fit(x, y, callbacks=[tfdml.callbacks.ChiefOnly(MyLogger())])
    ```

    For callbacks that only read and write elsewhere. The loggers of Keras, TensorBoard, MLflow,
    Weights & Biases, Comet, ClearML, Aim, Neptune, Trackio and SwanLab do not need it: they run on
    rank 0 alone by themselves. Without a strategy of several processes the callback runs.

    Args:
        callback: The callback. It must not change the model or call functions that all ranks must
            call, such as `evaluate` and `predict`.

    Raises:
        ValueError: If `callback` is one that all ranks must run.
    """

    def __init__(self, callback: keras.callbacks.Callback):
        super().__init__()
        if not isinstance(callback, keras.callbacks.Callback):
            raise ValueError(
                f"`callback` must be a Keras callback. Received: {callback!r} of type "
                f"{type(callback).__name__}."
            )
        if isinstance(callback, _FOR_ALL) or type(callback).__module__.startswith("tfdml."):
            raise ValueError(
                f"`callback` must only observe training, as a logger does. Received: "
                f"{type(callback).__name__}, which must run on all ranks. Pass it to `fit` itself."
            )
        self.callback = callback
        self.async_safe = getattr(callback, "async_safe", False)
        self._is_active = True
        for name in filter(_is_hook, dir(callback)):
            # Keras waits for every batch if a callback overrides a batch method.
            if not hasattr(getattr(callback, name), "_is_default"):
                setattr(self, name, functools.partial(self._pass_on, name))

    def set_model(self, model: keras.Model) -> None:
        """Determines whether this is rank 0, and passes the model on."""
        super().set_model(model)
        self._is_active = getattr(model.distribute_strategy, "is_chief", True)
        if self._is_active:
            self.callback.set_model(model)

    def set_params(self, params: dict[str, Any]) -> None:
        """Passes the parameters on."""
        super().set_params(params)
        self.callback.set_params(params)

    def _pass_on(self, name: str, *args: Any, **kwargs: Any) -> None:
        if self._is_active:
            getattr(self.callback, name)(*args, **kwargs)


def _is_hook(name: str) -> bool:
    return name.startswith("on_") and hasattr(keras.callbacks.Callback, name)
