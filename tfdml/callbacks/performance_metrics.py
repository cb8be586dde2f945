"""Numbers of training's speed in each epoch's logs, so that every logger has them."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.callbacks.performance.flops import training_flops
from tfdml.callbacks.performance.hardware import gpu_peak_bytes, peak_flops, process_bytes
from tfdml.callbacks.performance.job_numbers import times_of_job, times_of_rank
from tfdml.callbacks.performance.job_times import JobTimes, RankSums
from tfdml.callbacks.performance.reader import make_reader
from tfdml.callbacks.performance.server_times import ServerTimes
from tfdml.strategies import keras_seam
from tfdml.strategies.fit_session import get_session
from tfdml.strategies.keras_seam.fit.log_order import HIDDEN_PREFIX, AddsToLogs
from tfdml.strategies.observers.gradient_watch import GradientWatch
from tfdml.strategies.replicas.rank_state import RankState


class PerformanceMetrics(AddsToLogs):
    """Adds numbers of training's speed to each epoch's logs, under names that begin with `perf/`.

    ```python
    model.fit(dataset, callbacks=[tfdml.callbacks.PerformanceMetrics()])
    ```

    TensorBoard, MLflow, Weights & Biases, `CSVLogger` and `History` get them like a metric; lines
    of progress leave them out. Every epoch has the same names, and all ranks have the same values,
    which are the whole job's: a mean over ranks, and the minimum and maximum where ranks differ.
    Which names there are follows from the strategy, its options, the optimizer and the hardware;
    the page on monitoring lists them. A number that cannot be had has no name, instead of being 0.

    Times are read inside the step, on the CPU's clock of each rank; clocks of different ranks are
    not compared. GPU work is only queued at these points. The first step of a `fit` is left out,
    because it is traced.

    Args:
        window: Steps from one norm of the gradients to the next. It needs all gradients read once
            more, so most steps leave it out; the other numbers are of all steps.
        flops_per_sample: Floating-point operations of a training step for one row, in which a
            multiplication and an addition are two. None to count the products of matrices and the
            convolutions in the graph of the forward pass, times three for training; a subclassed
            model, or one with loops such as recurrent layers, cannot be counted: then
            `perf/flops_utilization` is left out.
        peak_flops: Floating-point operations per second that one device can do. None for those of
            a table, by the name of each process's first GPU and the model's dtype; if a process has
            no GPU, or one that the table lacks, `perf/flops_utilization` is left out.
        directory: Directory for each rank's own numbers: every epoch adds a line of JSON to
            `rank_0.jsonl`, `rank_1.jsonl` and so on. None to write none.

    Raises:
        ValueError: If an argument is wrong.
    """

    def __init__(
        self,
        window: int = 100,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
        *,
        directory: str | Path | None = None,
    ):
        super().__init__()
        if type(window) is not int or window < 1:
            raise ValueError(
                f"`window` must be a positive number of steps. Received: window={window!r}."
            )
        for name, value in (("flops_per_sample", flops_per_sample), ("peak_flops", peak_flops)):
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise ValueError(
                    f"`{name}` must be a positive number or None. Received: {name}={value!r}."
                )
        keras_seam.install()
        self._window = window
        self._given_flops, self._given_peak = flops_per_sample, peak_flops
        self._directory = None if directory is None else Path(directory)
        self._times: JobTimes | ServerTimes | None = None
        self._watch: GradientWatch | None = None
        self._peak: float | None = None
        self._flops: float | None = None

    def set_model(self, model: keras.Model) -> None:
        """Adds observers to the model's train step."""
        super().set_model(model)
        self._ranks = RankState(model)
        self._times, self._watch = make_reader(model), None
        if not isinstance(self._times, JobTimes):
            return
        session = get_session(model)
        self._watch = session.observer(GradientWatch)
        if self._watch is None or self._watch.every != self._window:
            self._watch = GradientWatch(self._ranks.size, self._window)
            session.attach(self._watch)

    def on_train_begin(self, logs=None):
        """Counts the first step apart, which may be traced."""
        self._peak, self._flops = self._mean_peak(), self._given_flops
        if self._peak is not None and self._flops is None:
            self._flops = training_flops(self.model)
        if self._times is not None:
            self._times.begin_fit()
        self._ended = time.perf_counter()
        self._stall = get_session(self.model).checkpoint_stall

    def on_epoch_begin(self, epoch, logs=None):
        """Begins the epoch's sums."""
        self._updates = self._read_updates()
        if self._times is not None:
            self._times.begin_epoch()
        if self._watch is not None:
            self._watch.begin_epoch()
            self._before = self._watch.read()

    def on_epoch_end(self, epoch, logs=None):
        """Gathers all ranks' numbers, and adds the job's to the logs."""
        own = self._own_numbers()
        times, rows = [], [list(own.values())]
        if self._times is not None:
            times, rows = self._times.gather(rows[0])
        by_rank = [dict(zip(own, row, strict=True)) for row in rows]
        if logs is not None:
            numbers = self._job_numbers(epoch, times, by_rank)
            logs |= {f"{HIDDEN_PREFIX}{name}": value for name, value in numbers.items()}
        if self._directory is not None:
            self._write(epoch, times, own)

    def get_state(self) -> dict[str, Any]:
        """Returns nothing: checkpoints keep no times of an earlier process."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores nothing; see `get_state`."""

    def _mean_peak(self) -> float | None:
        """Returns the mean of the ranks' peak FLOP/s; None on all if one of them is unknown."""
        own = self._given_peak or peak_flops(self.model) or math.nan
        peaks = self._ranks.collective.all_gather(
            tf.constant([own], tf.float64), "performance/peak"
        )
        mean = float(np.mean(peaks))
        return None if math.isnan(mean) else mean

    def _own_numbers(self) -> dict[str, float]:
        """Returns what this process measures beside the times of its steps, by name."""
        now, stall = time.perf_counter(), get_session(self.model).checkpoint_stall
        own = {"epoch_s": now - self._ended, "checkpoint_stall_s": stall - self._stall}
        self._ended, self._stall = now, stall
        memory, gpu_peak = process_bytes(), gpu_peak_bytes()
        if memory is not None:
            own["memory_gb"] = memory / 1e9
        if gpu_peak is not None:
            own["gpu_peak_gb"] = gpu_peak / 1e9
        if self._loss_scale() is not None and self._times is not None:
            own["skipped_steps"] = self._times.steps - (self._read_updates() - self._updates)
        if self._watch is not None:
            read, steps = self._watch.read(), max(self._times.steps, 1)
            own["grad_norm"] = read.norm
            own["bytes_sent"] = (read.sent - self._before.sent) / steps
            own["uncompressed_bytes"] = (read.uncompressed - self._before.uncompressed) / steps
        if self._has_residuals():
            own["squared_residual"] = self._ranks.squared_residual()
        return own

    def _job_numbers(
        self, epoch: int, times: Sequence[RankSums], by_rank: Sequence[dict[str, float]]
    ) -> dict[str, float]:
        """Returns the job's numbers by name.

        Args:
            epoch: Index of the epoch.
            times: Each rank's times; empty if steps are not timed.
            by_rank: Each process's `_own_numbers`.
        """
        numbers = times_of_job(times) if times else {}
        of = lambda name: [own[name] for own in by_rank]  # noqa: E731
        if self._peak and self._flops and times:
            # Of servers, TensorFlow's number of replicas is that of one worker.
            devices = max(self.model.distribute_strategy.num_replicas_in_sync, len(times))
            done = self._flops * numbers["samples_per_sec"]
            numbers["flops_utilization"] = done / (self._peak * devices)
        if self._watch is not None:
            numbers |= self._of_gradients(by_rank)
        if self._loss_scale() is not None:
            numbers["loss_scale"] = self._loss_scale()
        for name in ("skipped_steps", "checkpoint_stall_s"):
            if name in by_rank[0]:
                numbers[name] = max(of(name))
        for name in ("memory_gb", "gpu_peak_gb"):
            if name in by_rank[0]:
                numbers |= {name: float(np.mean(of(name))), f"{name}_max": max(of(name))}
        # Rank 0's, because all ranks must have the same.
        numbers["eta_s"] = by_rank[0]["epoch_s"] * (self.params["epochs"] - epoch - 1)
        return numbers

    def _of_gradients(self, by_rank: Sequence[dict[str, float]]) -> dict[str, float]:
        """Returns the numbers of the gradients and of their exchange, by name."""
        sent, plain = (
            float(np.mean([own[name] for own in by_rank]))
            for name in ("bytes_sent", "uncompressed_bytes")
        )
        norm = by_rank[0]["grad_norm"]
        numbers = {"grad_norm": norm, "bytes_sent": sent}
        if getattr(self.model.distribute_strategy.extended, "compressor", None) is not None:
            numbers["compression_ratio"] = plain / sent if sent else math.nan
        if self._has_residuals():
            left = math.sqrt(sum(own["squared_residual"] for own in by_rank))
            numbers["compression_error"] = left / norm if norm else math.nan
        return numbers

    def _has_residuals(self) -> bool:
        """Returns whether the strategy's compressor keeps what it leaves out."""
        compressor = getattr(self.model.distribute_strategy.extended, "compressor", None)
        return self._watch is not None and compressor is not None and compressor.biased

    def _loss_scale(self) -> float | None:
        scale = getattr(self.model.optimizer, "dynamic_scale", None)
        return None if scale is None else float(keras.ops.convert_to_numpy(scale))

    def _read_updates(self) -> int:
        """Returns the optimizer's count of steps, without those that overflowed."""
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        if optimizer is None:
            return 0
        return int(keras.ops.convert_to_numpy(optimizer.iterations))

    def _write(self, epoch: int, times: Sequence[RankSums], own: dict[str, float]) -> None:
        """Adds a line to this rank's file; the chief of servers adds one for each worker."""
        self._directory.mkdir(parents=True, exist_ok=True)
        is_chief_of_servers = len(times) > self._ranks.size
        ranks = times if is_chief_of_servers else times[self._ranks.rank :][:1]
        lines = {
            f"rank_{rank.rank}": {
                "host": rank.host,
                "share": rank.share,
                "steps": rank.sums.steps,
                "rows": rank.sums.rows,
                **times_of_rank(rank),
            }
            for rank in ranks
        }
        process = "chief" if is_chief_of_servers else f"rank_{self._ranks.rank}"
        lines[process] = {**lines.get(process, {}), **own}
        for name, numbers in lines.items():
            with open(self._directory / f"{name}.jsonl", "a") as file:
                file.write(json.dumps({"epoch": epoch, **numbers}) + "\n")
