"""Checks the noise scale against the published formulas on every rank, and its side effects."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.callbacks.test_optimizer_log import written
from tests.harness import rank_job
from tests.strategies.cases import InScope, compiled, data
from tfdml.callbacks import GradientNoiseScale, OptimizerLog

ROWS, BATCH, DECAY = 48, 12, 0.5


def least_squares(strategy, optimizer=None, **options):
    """Linear model whose gradients NumPy can compute."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, use_bias=False)])
        optimizer = optimizer() if optimizer else keras.optimizers.SGD(0.05)
        model.compile(optimizer, "mse", **options)
        model.set_weights([np.full((4, 1), 0.5, "float32")])
    return model


def problem() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    return x, (x @ [[1.0], [2.0], [3.0], [4.0]] + rng.normal(size=(ROWS, 1))).astype("float32")


def expected_of_unequal_parts(fractions, batch: int) -> tuple[float, float]:
    """Returns signal and noise of the last batch, for parts of any size."""
    x, y = (a.astype("float64") for a in problem())
    w = np.full((4, 1), 0.5)
    for start in range(0, ROWS, batch):
        rows = np.arange(start, min(start + batch, ROWS))
        cuts = np.ceil(np.cumsum(fractions[:-1]) * len(rows)).astype(int)
        squares = norms = 0.0
        whole = 2 * x[rows].T @ (x[rows] @ w - y[rows]) / len(rows)
        for part in np.split(rows, cuts):
            own = 2 * x[part].T @ (x[part] @ w - y[part]) / len(rows)
            squares, norms = squares + (len(part) / len(rows)) ** 2, norms + (own**2).sum()
        signal = ((whole**2).sum() - norms) / (1 - squares)
        noise = ((whole**2).sum() - signal) * len(rows)
        w = w - 0.05 * whole
    return signal, noise


def expected(replicas: int, batch: int, steps: int = 1) -> tuple[float, float, float]:
    """Returns signal, noise and scale by the paper's formulas, in float64."""
    x, y = (a.astype("float64") for a in problem())
    w = np.full((4, 1), 0.5)

    def gradient(rows):
        return 2 * x[rows].T @ (x[rows] @ w - y[rows]) / len(rows)

    signal = noise = weight = 0.0
    for start in range(0, ROWS, batch * steps):
        micro = [np.arange(s, s + batch) for s in range(start, start + batch * steps, batch)]
        parts = [np.array_split(rows, replicas) for rows in micro]
        each = [np.mean([gradient(p[r]) for p in parts], 0) for r in range(replicas)]
        whole = np.mean([gradient(rows) for rows in micro], 0)
        big, small = batch * steps, batch * steps / replicas
        big_square, small_square = (whole**2).sum(), np.mean([(g**2).sum() for g in each])
        g2 = (big * big_square - small * small_square) / (big - small)
        s = (small_square - big_square) / (1 / small - 1 / big)
        signal, noise = DECAY * signal + (1 - DECAY) * g2, DECAY * noise + (1 - DECAY) * s
        weight = DECAY * weight + (1 - DECAY)
        w = w - 0.05 * whole
    return signal / weight, noise / weight, noise / signal


def watch(
    batch: int = BATCH,
    optimizer=None,
    devices: int = 1,
    log_dir: str | None = None,
    compression: str | None = None,
    batch_split: list[int] | None = None,
    decay: float = DECAY,
):
    """Trains an epoch; returns the estimate, its entry in the logs, and the weights."""
    strategy = rank_job.strategy(devices, compression=compression, batch_split=batch_split)
    model = least_squares(strategy, optimizer)
    noise = GradientNoiseScale(decay)
    logs = [OptimizerLog(f"{log_dir}/{rank_job.rank()}")] if log_dir else []
    history = model.fit(
        *problem(), batch_size=batch, shuffle=False, verbose=0, callbacks=[noise, *logs]
    ).history
    estimate = noise.estimate()
    found = None if estimate is None else (estimate.steps, estimate.signal, estimate.noise)
    return {
        "estimate": found,
        "log": history.get("gradient_noise_scale"),
        "suggested": noise.suggested_batch_size(),
        "weights": model.get_weights()[0],
    }


@pytest.mark.parametrize(
    ("kind", "ranks_", "devices", "compression"),
    [
        ("horovod", 2, 1, None),
        ("mirrored", 3, 3, None),
        ("mirrored", 3, 3, "int8"),  # Four weights are too few to be compressed.
        ("horovod", 2, 2, None),
    ],
)
def test_estimate_matches_the_papers_formulas(ranks, kind, ranks_, devices, compression):
    results = ranks(ranks_, kind).run(watch, BATCH, None, devices, None, compression)
    replicas = devices if kind == "mirrored" else ranks_ * devices
    signal, noise, scale = expected(replicas, BATCH)
    for result in results:
        assert result["estimate"][0] == ROWS // BATCH
        np.testing.assert_allclose(result["estimate"][1:], (signal, noise), rtol=1e-4)
        np.testing.assert_allclose(result["log"], [scale], rtol=1e-4)
        assert result["suggested"] == 2 ** round(np.log2(max(scale, 1)))
        assert result["estimate"] == results[0]["estimate"]


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=2.0**10)


def test_loss_scale_is_divided_out(ranks):
    (result, _) = ranks(2).run(watch, BATCH, scaled)
    np.testing.assert_allclose(result["estimate"][1:], expected(2, BATCH)[:2], rtol=1e-4)


def accumulating():
    return keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)


def test_accumulated_gradients_count_as_larger_batches(ranks):
    (result, _) = ranks(2).run(watch, BATCH, accumulating)
    assert result["estimate"][0] == ROWS // BATCH // 2
    np.testing.assert_allclose(result["estimate"][1:], expected(2, BATCH, 2)[:2], rtol=1e-4)


def overflowing() -> tuple:
    """Trains some steps, of which one has an infinite loss on one rank."""
    x, y = problem()
    x[0] = 1e30
    model = least_squares(rank_job.strategy(), scaled)
    noise = GradientNoiseScale(DECAY)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[noise])
    return noise.estimate().steps, noise.estimate().scale


def test_overflowing_steps_are_left_out(ranks):
    results = ranks(2).run(overflowing)
    assert results[0] == results[1]
    assert results[0][0] == ROWS // BATCH - 1
    assert np.isfinite(results[0][1])


@pytest.mark.parametrize(
    ("batch", "batch_split"),
    [(13, None), (12, [3, 1]), (13, [2, 1])],  # Of 13 rows: 13, 13, 13 and 9.
)
def test_unequal_parts_are_weighed(ranks, batch, batch_split):
    (result, _) = ranks(2).run(watch, batch, None, 1, None, None, batch_split, 0.0)
    weights = np.array(batch_split or [1, 1])
    wanted = expected_of_unequal_parts(weights / weights.sum(), batch)
    assert result["estimate"][0] == 4
    np.testing.assert_allclose(result["estimate"][1:], wanted, rtol=1e-4)


def test_batches_of_one_row_are_left_out(ranks):
    (result, _) = ranks(2).run(watch, 1)
    assert result["estimate"] == (0, 0.0, 0.0)
    assert np.isnan(result["log"]).all()
    assert result["suggested"] is None


def embedding() -> tuple[float, int]:
    """Model with sparse gradients in which samples share rows."""
    strategy = rank_job.strategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Embedding(5, 3), keras.layers.Flatten()])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        model.build((None, 2))
    noise = GradientNoiseScale(0.0)
    model.set_weights([np.arange(15.0).reshape(5, 3)])
    x = np.array([[0, 0], [0, 1], [2, 2], [3, 2]])
    model.fit(x, np.zeros((4, 6)), batch_size=4, shuffle=False, verbose=0, callbacks=[noise])
    weights = tf.Variable(np.arange(15.0).reshape(5, 3))

    def square(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(weights, x[rows]) ** 2)
        return float(tf.reduce_sum(tf.convert_to_tensor(tape.gradient(loss, weights)) ** 2))

    big, small = square(slice(0, 4)), (square(slice(0, 2)) + square(slice(2, 4))) / 2
    return noise.estimate().signal, 2 * big - small


def test_sparse_gradients(ranks):
    for found, wanted in ranks(2).run(embedding):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_noise_scale_is_logged_to_tensorboard(ranks, tmp_path):
    (result, _) = ranks(2).run(watch, BATCH, None, 1, str(tmp_path))
    ((step, value),) = written(tmp_path / "0")["optimizer/gradient_noise_scale"]
    assert (step, value) == (ROWS // BATCH, pytest.approx(result["log"][0]))


def test_training_is_not_changed(ranks):
    (watched, _) = ranks(2).run(watch)
    (alone,) = ranks(1).run(watch)
    assert alone["estimate"] is None
    assert alone["log"] is None
    np.testing.assert_allclose(watched["weights"], alone["weights"], rtol=1e-6)


def with_dropout():
    model = compiled(
        rank_job.strategy(), "stateful", optimizer=InScope(keras.optimizers.Adam, 0.01)
    )
    noise = GradientNoiseScale()
    model.fit(*data(32), batch_size=8, epochs=2, verbose=0, callbacks=[noise])
    return noise.estimate().steps


def test_other_models(ranks):
    assert ranks(2).run(with_dropout) == [8, 8]


@pytest.mark.parametrize("decay", [1.0, -0.1])
def test_wrong_arguments(decay):
    with pytest.raises(ValueError, match="`decay` must be from 0 to below 1"):
        GradientNoiseScale(decay)
