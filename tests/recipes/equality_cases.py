"""Cases run by ranks: recipes that train under the job's strategy, in float64."""

from collections.abc import Callable

import keras
import numpy as np

from tests.harness import rank_job
from tests.recipes.cases import recipe
from tests.strategies.architectures.cases import in_float64

ROWS = 100
BATCH = 24  # The last batch of an epoch has 4 rows.


def _outcome(train: Callable, *arguments: object) -> dict:
    """Trains for two epochs; returns what must be the same for any number of processes."""
    with in_float64():
        keras.utils.set_random_seed(0)
        keras.config.disable_interactive_logging()
        model, history = train(rank_job.strategy(), *arguments)
        return {"history": history, "weights": [np.asarray(w) for w in model.weights]}


def detection() -> dict:
    """Trains on pictures of digits; a fifth as many validate."""
    digits = recipe("images").from_digits()
    return _outcome(recipe("detection").train, digits, ROWS, 2, BATCH)


def gan() -> dict:
    """Trains on digits, with noise in the data."""
    digits = recipe("images").from_digits()
    return _outcome(recipe("gan").train, digits.x[:ROWS], 2, BATCH, 3)


def time_series() -> dict:
    """Trains on two series of unequal length."""
    module = recipe("time_series")
    rng = np.random.default_rng(0)
    hours = (250, 230)
    series = [rng.normal(size=(n, len(module.COLUMNS))).astype("float32") for n in hours]
    return _outcome(module.fit, series, 2, BATCH, 3)
