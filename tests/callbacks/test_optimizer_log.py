"""Checks the contents of TensorBoard's files: the rate and trust ratios, written by rank 0."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness import rank_job
from tests.strategies.cases import InScope, compiled, data
from tfdml.callbacks import OptimizerLog
from tfdml.optimizers import LARS
from tfdml.schedules import LinearWarmup


def written(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the scalars in a directory: steps and values by name."""
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0}).Reload()
    return {
        tag: [(e.step, float(tf.make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def train(directory: str, update_freq: int | str, optimizer=None) -> list[float]:
    """Trains two epochs of three batches; returns the trust ratios of the last update."""
    if optimizer is None:
        optimizer = InScope(LARS, LinearWarmup(0.4, 4), exclude_from_layer_adaptation=["bias"])
    model = compiled(rank_job.strategy(), optimizer=optimizer)
    x, y = data(24)
    log = OptimizerLog(Path(directory, str(rank_job.rank())), update_freq)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[log])
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return inner.keep_trust_ratios().read().tolist() if isinstance(inner, LARS) else []


def test_rate_and_ratios_after_each_epoch(ranks, tmp_path):
    (ratios,) = ranks(1).run(train, str(tmp_path), "epoch")
    scalars = written(tmp_path / "0")
    assert scalars["optimizer/learning_rate"] == [(3, pytest.approx(0.3)), (6, pytest.approx(0.4))]
    assert len(ratios) == 2
    for name in ("min", "median", "max"):
        step, value = scalars[f"optimizer/trust_ratio/{name}"][-1]
        assert (step, value) == (6, pytest.approx(getattr(np, name)(ratios)))
    assert ratios[0] != ratios[1]
    assert 0 < min(ratios) < 1


def test_batch_frequency_is_written_by_rank_0_only(ranks, tmp_path):
    first, second = ranks(2).run(train, str(tmp_path), 2)
    assert first == second
    assert [s for s, _ in written(tmp_path / "0")["optimizer/trust_ratio/max"]] == [2, 4, 6]
    assert not (tmp_path / "1").exists()


def test_several_devices_of_one_process(ranks, tmp_path):
    (found,) = ranks(2, "mirrored").run(train, str(tmp_path / "two"), "epoch")
    (wanted,) = ranks(1).run(train, str(tmp_path / "one"), "epoch")
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_another_optimizer_and_no_strategy(tmp_path):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.5), "mse")
    model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[OptimizerLog(tmp_path)])
    assert written(tmp_path) == {"optimizer/learning_rate": [(1, 0.5)]}


def test_model_built_by_its_first_batch(tmp_path):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(LARS(0.5), "mse")
    model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[OptimizerLog(tmp_path)])
    assert "optimizer/trust_ratio/median" in written(tmp_path)


@pytest.mark.parametrize("update_freq", ["batch", 0, True])
def test_wrong_arguments(update_freq):
    with pytest.raises(ValueError, match='`update_freq` must be "epoch" or a positive number'):
        OptimizerLog("logs", update_freq)
