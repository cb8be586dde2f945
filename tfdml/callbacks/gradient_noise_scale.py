"""Gradient noise scale during training, and the batch size that it suggests."""

import math

import keras
from rich.console import Console

from tfdml.strategies.fit_session import get_session
from tfdml.strategies.keras_seam.fit.log_order import AddsToLogs
from tfdml.strategies.observers.noise_scale import NoiseEstimate, NoiseScale


class GradientNoiseScale(AddsToLogs):
    """Estimates the gradient noise scale while training, and suggests a global batch size.

    ```python
    model.fit(dataset, callbacks=[tfdml.callbacks.GradientNoiseScale()])
    ```

    Batches far below the noise scale train about twice as fast for twice the rows; batches far
    above it only cost more. At the noise scale, training takes twice the steps and twice the rows
    of either extreme. It grows while a model learns: its last value holds for the end of training.

    The value is in the epoch's logs as `gradient_noise_scale`, in rows, and in TensorBoard if an
    `OptimizerLog` is there. It needs a strategy of tfdml on two replicas or more; elsewhere it does
    nothing.

    Reference:
        McCandlish et al., An Empirical Model of Large-Batch Training
        (https://arxiv.org/abs/1812.06162).

    Args:
        decay: Decay rate of the moving averages: 0 for the last step alone, towards 1 for steadier
            and slower estimates. The default averages over some 100 steps.

    Raises:
        ValueError: If `decay` is not from 0 to below 1, or the strategy has `local_updates` or
            `gradient_aggregation`.
    """

    def __init__(self, decay: float = 0.99):
        super().__init__()
        if not 0 <= decay < 1:
            raise ValueError(f"`decay` must be from 0 to below 1. Received: decay={decay!r}.")
        self._decay = decay
        self._scale: NoiseScale | None = None

    def set_model(self, model: keras.Model) -> None:
        """Makes the model's train step record the gradients' norms."""
        super().set_model(model)
        extended = getattr(model.distribute_strategy, "extended", None)
        replicas = model.distribute_strategy.num_replicas_in_sync
        if replicas == 1 or not hasattr(extended, "collective"):
            return
        if extended.local_updates is not None:
            raise ValueError(
                "`GradientNoiseScale` must not be used with `local_updates`, because it compares "
                "each rank's gradient with the sum over ranks, and a local step has no sum. "
                f"Received: local_updates={extended.local_updates!r}. Estimate the noise scale in "
                "a synchronous training, or leave the callback out."
            )
        if extended.options.gradient_aggregation is not None:
            raise ValueError(
                "`GradientNoiseScale` must not be used with `gradient_aggregation`, because it "
                "compares each rank's gradient with their mean, which a rule does not compute. "
                f"Received: gradient_aggregation={extended.options.gradient_aggregation!r}. Leave "
                "one of them out."
            )
        session = get_session(model)
        if self._scale is None or session.observer(NoiseScale) is not self._scale:
            self._scale = NoiseScale(self._decay)
            session.attach(self._scale)

    def estimate(self) -> NoiseEstimate | None:
        """Returns the estimate so far, the same on all ranks; None on one replica."""
        return None if self._scale is None else self._scale.read()

    def suggested_batch_size(self) -> int | None:
        """Returns the power of two nearest to the noise scale; None if there is no estimate."""
        estimate = self.estimate()
        if estimate is None or not math.isfinite(estimate.scale):
            return None
        return 2 ** round(math.log2(max(estimate.scale, 1.0)))

    def on_epoch_end(self, epoch, logs=None):
        """Adds the value to the epoch's logs."""
        estimate = self.estimate()
        if estimate is not None and logs is not None:
            logs["gradient_noise_scale"] = estimate.scale

    def on_train_end(self, logs=None):
        """Prints on rank 0 the batch size that the last estimate suggests."""
        suggested = self.suggested_batch_size()
        if suggested is None or not self.model.distribute_strategy.extended.should_save_summary:
            return
        Console(highlight=False).print(
            f"Gradient noise scale: {self.estimate().scale:,.0f} rows. A global batch of about "
            f"{suggested:,} is a fair trade of steps for rows; far larger batches save few steps."
        )
