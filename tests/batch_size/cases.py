"""Cases run by ranks: searches for a batch size."""

import os
import signal

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tests.harness import rank_job
from tfdml.batch_size.find import _setting

WIDTH = 4


def build() -> keras.Model:
    """Returns a small model."""
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def build_wide() -> keras.Model:
    """Returns a model of rows of 1 MB."""
    model = keras.Sequential([keras.Input((1 << 18,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def batches(most: int, end: str):
    """Returns a function that makes batches, and runs out of memory above `most` rows.

    Args:
        most: Rows that fit.
        end: The event that follows: "killed" by the kernel, "resources", "allocation" or "error".
    """

    def make(rows: int) -> tuple:
        if rows > most:
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif end == "resources":
                tf.zeros((1 << 60,), tf.int8)
            elif end == "allocation":
                np.ones(1 << 60, np.int8)
            else:
                raise KeyError("no such column")
        return np.ones((rows, WIDTH), np.float32), np.ones((rows, 1), np.float32)

    return make


def found(ends: list[tuple[int, str]], margin: float, start: int, limit: int) -> int:
    """Returns the batch size that this rank finds.

    Args:
        ends: For each rank, the rows that fit, and what happens above; see `batches`.
        margin, start, limit: Arguments of the search.
    """
    strategy = rank_job.strategy()
    data = batches(*ends[strategy.rank])
    return tfdml.find_batch_size(build, data, strategy, margin=margin, start=start, limit=limit)


def found_in_memory(megabytes: list[int]) -> int:
    """Returns the batch size of rows of 1 MB that this rank finds in its part of these bytes."""
    strategy = rank_job.strategy()
    row = np.ones((1, 1 << 18), np.float32), np.ones((1, 1), np.float32)
    limit = megabytes[strategy.rank] << 20
    return tfdml.find_batch_size(build_wide, row, strategy, limit=1024, memory_limit=limit)


def gradient_copies(compression: str | None) -> int:
    """Returns the copies of gradients that a trial holds for exchanges with other ranks."""
    strategy = rank_job.strategy(compression=compression)
    return _setting(strategy, b"", None).gradient_copies


def found_with_sharding() -> None:
    """Searches under a strategy that divides optimizer state."""
    strategy = rank_job.strategy(sharding=tfdml.Sharding(optimizer_state=True))
    tfdml.find_batch_size(build, batches(1000, "killed"), strategy, limit=64)
