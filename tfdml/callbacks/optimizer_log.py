"""TensorBoard log of an optimizer: learning rate and the layers' trust ratios."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.strategies.fit_session import get_session
from tfdml.strategies.observers.noise_scale import NoiseScale


class OptimizerLog(keras.callbacks.Callback):
    """Writes the learning rate and the trust ratios' minimum, median and maximum to TensorBoard.

    ```python
    model.fit(dataset, callbacks=[tfdml.callbacks.OptimizerLog("logs")])
    ```

    The learning rate of any optimizer is logged; trust ratios are those of the last update of
    `tfdml.optimizers.LARS` and `LAMB`, for the variables that adapt. They stay on the device until
    they are written. With a `GradientNoiseScale` callback, its value is logged too. On several
    processes rank 0 writes.

    Args:
        log_dir: Directory for event files; may be that of `keras.callbacks.TensorBoard`.
        update_freq: "epoch", or a number of batches, which makes Keras wait for each batch.

    Raises:
        ValueError: If an argument is wrong.
    """

    def __init__(self, log_dir: str | Path, update_freq: int | str = "epoch"):
        super().__init__()
        counts = isinstance(update_freq, int) and not isinstance(update_freq, bool)
        if update_freq != "epoch" and not (counts and update_freq > 0):
            raise ValueError(
                '`update_freq` must be "epoch" or a positive number of batches. Received: '
                f"update_freq={update_freq!r}."
            )
        self._log_dir = str(log_dir)
        self._every = update_freq if counts else None
        self._batches = 0
        self._ratios = self._writer = None
        if counts:
            # Keras waits for every batch if a callback has this method.
            self.on_train_batch_end = self._after_batch

    def set_model(self, model: keras.Model) -> None:
        """Makes the optimizer record its trust ratios from now on."""
        super().set_model(model)
        optimizer = self._optimizer()
        if hasattr(optimizer, "keep_trust_ratios") and self._ratios is None:
            self._ratios = optimizer.keep_trust_ratios()
            get_session(model).trace_again()

    def on_train_begin(self, logs=None):
        """Opens the event file."""
        # `should_save_summary` of a strategy says whether this process writes.
        strategy = self.model.distribute_strategy
        if strategy is None or strategy.extended.should_save_summary:
            self._writer = tf.summary.create_file_writer(self._log_dir)

    def on_epoch_end(self, epoch, logs=None):
        """Writes, if `update_freq` is "epoch"."""
        if self._every is None:
            self._write()

    def on_train_end(self, logs=None):
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _after_batch(self, batch, logs=None) -> None:
        self._batches += 1
        if self._batches % self._every == 0:
            self._write()

    def _optimizer(self) -> keras.Optimizer:
        """Returns the optimizer that updates the weights, without loss scaling."""
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)

    def _write(self) -> None:
        if self._writer is None:
            return
        optimizer = self._optimizer()
        values = {"learning_rate": _number(optimizer.learning_rate)}
        ratios = self._ratios.read() if self._ratios is not None else np.zeros(0)
        if ratios.size:
            values |= {
                "trust_ratio/min": ratios.min(),
                "trust_ratio/median": np.median(ratios),
                "trust_ratio/max": ratios.max(),
            }
        noise_scale = get_session(self.model).observer(NoiseScale)
        if noise_scale is not None:
            values["gradient_noise_scale"] = noise_scale.read().scale
        step = int(_number(optimizer.iterations))
        with self._writer.as_default():
            for name, value in values.items():
                tf.summary.scalar(f"optimizer/{name}", value, step)
        self._writer.flush()


def _number(value: Any) -> float:
    """Returns the value of a scalar, which may be a strategy's variable."""
    return float(keras.ops.convert_to_numpy(value))
