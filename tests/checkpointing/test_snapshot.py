"""Checks that the state written in the background is of one moment, while training continues."""

import keras
import numpy as np
import pytest

from tests.checkpointing import cases
from tests.harness import rank_job


def states(optimizer: str, jit: bool, compression: str | None) -> dict[str, list[bool]]:
    """Trains, reads the state, trains on; returns the state that was read, before and after."""
    from tfdml.callbacks.checkpoint.model_state import ModelState
    from tfdml.strategies.replicas.rank_state import RankState

    keras.utils.set_random_seed(2)
    with rank_job.strategy(compression=compression).scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Embedding(50, 32),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(3),
            ]
        )
        model.compile(cases.made(optimizer), "mse", metrics=["mae"], jit_compile=jit)
    numbers = np.random.default_rng(7)
    x, y = numbers.integers(0, 50, (80, 6)), numbers.normal(size=(80, 3)).astype("float32")
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    state, ranks = ModelState(model), RankState(model)
    now = {**state.read(), **ranks.local_state()}
    before = {name: value.copy() for name, value in now.items()}
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    after = {**state.read(), **ranks.local_state()}
    moved = [name for name in now if not np.array_equal(after[name], before[name])]
    overwritten = [name for name in now if not np.array_equal(now[name], before[name])]
    return {"moved": moved, "overwritten": overwritten}


@pytest.mark.parametrize(
    ("size", "optimizer", "jit", "compression"),
    [
        (1, "adam", True, None),
        (1, "adam", False, None),
        pytest.param(1, "accumulating", False, None, marks=pytest.mark.slow),
        pytest.param(1, "scaled", True, None, marks=pytest.mark.slow),
        pytest.param(2, "accumulating", False, "powersgd", marks=pytest.mark.slow),
    ],
)
def test_snapshot_is_not_changed_by_later_steps(ranks, size, optimizer, jit, compression):
    for found in ranks(size).run(states, optimizer, jit, compression):
        assert found["overwritten"] == []
        kinds = {name.split("/")[0] for name in found["moved"]}
        assert {"model", "optimizer"} <= kinds
        assert len(found["moved"]) > 8
