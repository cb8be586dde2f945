"""Checks deep gradient compression: its formula in NumPy, its warm-up, and supported optimizers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.compression import numpy_codecs
from tests.compression import training_cases as cases
from tests.compression.aggregate import aggregate
from tests.strategies.compare import assert_close, assert_same_bits
from tfdml.collectives.simulated import run_ranks
from tfdml.compression import DeepGradientCompression
from tfdml.compression.exchange.compressed_aggregator import CompressedAggregator
from tfdml.compression.exchange.two_phase import chunk_length

SHAPE, RATIO, STEPS = (50, 80), 0.05, 4


def gradient(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=SHAPE).astype("float32")


def largest(rows: np.ndarray, count: int) -> np.ndarray:
    """Returns the flat indices of the largest values of each row."""
    indices = np.argsort(-np.abs(rows), axis=1)[:, :count]
    return (indices + np.arange(len(rows))[:, None] * rows.shape[1]).reshape(-1)


def expected(size: int, nesterov: bool, clip: float | None) -> tuple[list[np.ndarray], list]:
    """Returns the sums of each step, and the ranks at the end."""
    length = SHAPE[0] * SHAPE[1]
    chunk = chunk_length(length, size, 8)
    count = int(np.ceil(RATIO * chunk))
    assert size * chunk == length, "Nothing is padded here."
    share = None if clip is None else clip / np.sqrt(size)
    ranks = [numpy_codecs.DeepGradient(SHAPE, 0.9, nesterov, share) for _ in range(size)]
    server, sums = np.zeros((size, chunk), "float32"), []
    for step in range(STEPS):
        total = server
        for number, rank in enumerate(ranks):
            waiting = rank.gather(gradient(number, step))
            indices = largest(waiting.reshape(size, chunk), count)
            total = total + rank.send(indices).reshape(size, chunk)
        sent = np.zeros_like(total)
        indices = largest(total, count)
        sent.flat[indices] = total.flat[indices]
        server = total - sent
        sums.append(sent.reshape(SHAPE))
    return sums, ranks


@pytest.mark.parametrize(
    ("size", "nesterov", "clip"), [(2, False, None), (2, True, 30.0), (4, False, 30.0)]
)
def test_deep_gradient_compression_matches_its_formula(size, nesterov, clip):
    compressor = DeepGradientCompression(RATIO, 0.9, nesterov, clip_norm=clip)

    def rank(collective):
        aggregator = CompressedAggregator(collective, compressor)
        sums = [
            aggregate(aggregator, [tf.constant(gradient(collective.rank, s))], ["w"], "g")[0]
            for s in range(STEPS)
        ]
        return sums, {name: v.numpy() for name, v in aggregator.state.items()}

    wanted, ranks = expected(size, nesterov, clip)
    for (sums, state), one in zip(run_ranks(size, rank), ranks, strict=True):
        for total, step in zip(sums, wanted, strict=True):
            np.testing.assert_allclose(total, step, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state["velocity/w"], one.speed, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state["residual/w"], one.gathered, rtol=1e-4, atol=1e-5)


def test_uncompressed_gradients_get_momentum_after_the_sum():
    def rank(collective):
        aggregator = CompressedAggregator(collective, DeepGradientCompression(RATIO, 0.9))
        rows = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([collective.rank]), [4, 3])
        return [
            [tf.convert_to_tensor(t).numpy() for t in aggregate(aggregator,
                [tf.constant([1.0, 2.0]), rows], ["b", "e"], "g")]
            for _ in range(2)
        ]  # fmt: skip

    touched = np.array([[1.0], [1.0], [0.0], [0.0]]) * np.ones((4, 3))
    for first, second in run_ranks(2, rank):
        np.testing.assert_allclose(first[0], [2.0, 4.0])
        np.testing.assert_allclose(second[0], [3.8, 7.6], rtol=1e-6)
        np.testing.assert_allclose(first[1], touched)
        np.testing.assert_allclose(second[1], 1.9 * touched, rtol=1e-6)


def test_warm_up_sends_less_each_step_without_retracing():
    codec = DeepGradientCompression(0.001, warmup_epochs=4, steps_per_epoch=10)
    traces = []

    @tf.function
    def encode(values, seed):
        traces.append(1)
        return codec.encode(values, seed)

    rows = tf.random.stateless_normal([2, 8000], [1, 2])
    counts = [encode(rows, tf.constant([step, 7])).shape[1] // 8 for step in (0, 10, 20, 40, 99)]
    assert len(traces) == 1
    ratios = 0.25 * (0.001 / 0.25) ** np.array([0, 0.25, 0.5, 1, 1])
    np.testing.assert_allclose(counts, np.ceil(8000 * ratios), atol=1)
    # A quarter of the numbers, and the largest of them.
    decoded = codec.decode(encode(rows, tf.constant([0, 7])), 8000).numpy()
    cut = np.sort(np.abs(rows), axis=1)[:, -2000]
    np.testing.assert_array_equal(decoded, np.where(np.abs(rows) >= cut[:, None], rows, 0))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_nonfinite_values_are_sent(bad):
    rows = np.zeros((2, 8000), "float32")
    rows[1, 5000] = bad
    codec = DeepGradientCompression(0.001)
    seed = tf.constant([0, 1])
    decoded = codec.decode(codec.encode(tf.constant(rows), seed), 8000).numpy()
    assert np.isfinite(decoded[0]).all()
    assert not np.isfinite(decoded[1, 5000])


def test_unrepresentative_sample_sends_fewer_values():
    """The threshold is then 0 or too high: wrong or surplus values are never sent."""
    rows = np.zeros((1, 200_000), "float32")
    rows[0, 3] = 5.0
    codec = DeepGradientCompression(0.001)
    payload = codec.encode(tf.constant(rows), tf.constant([0, 1]))
    assert payload.shape == (1, 8 * 200)
    np.testing.assert_array_equal(codec.decode(payload, 200_000), rows)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ratio_1_equals_momentum(ranks, size):
    """At ratio 1 nothing waits, and training equals SGD with momentum on one process."""
    (plain,) = ranks.run_sizes((1,), cases.train, None)[1]
    results = ranks(size).run(cases.train, DeepGradientCompression(1.0, 0.9, masking=False))
    assert_same_bits(results)
    assert_close(plain["weights"], results[0]["weights"], rtol=1e-4, atol=1e-5)


def test_training_converges(ranks):
    results = ranks(2).run(
        cases.train, DeepGradientCompression(0.05, warmup_epochs=2, steps_per_epoch=5)
    )
    assert_same_bits(results)
    loss = results[0]["history"]["loss"]
    assert loss[-1] < 0.95 * loss[0]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: keras.optimizers.Adam(), "must be used with keras.optimizers.SGD"),
        (lambda: keras.optimizers.SGD(0.1), "must be the optimizer's. Received: momentum=0.9"),
        (lambda: keras.optimizers.SGD(0.1, 0.9, nesterov=True), "nesterov=True. Give both"),
    ],
)
def test_other_optimizers_are_refused(optimizer, message):
    with pytest.raises(ValueError, match=message):
        DeepGradientCompression().check_optimizer(optimizer())


def test_wrong_optimizer_is_refused_in_training(ranks):
    with pytest.raises(AssertionError, match="must be the optimizer's. Received: momentum=0.5"):
        ranks(2).run(cases.train, DeepGradientCompression(0.05, momentum=0.5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 0}, "`ratio` must be the part that is sent"),
        ({"momentum": 1.0}, "`momentum` must be the optimizer's, from 0"),
        ({"warmup_epochs": -1}, "`warmup_epochs` must be a number of epochs"),
        ({"warmup_epochs": 4}, "`steps_per_epoch` must be a positive integer"),
        ({"clip_norm": 0.0}, "`clip_norm` must be positive"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        DeepGradientCompression(**arguments)


def test_deep_gradient_compression_is_serialisable():
    codec = DeepGradientCompression(0.01, 0.5, True, 2, 100, 3.0, False)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(codec))
    assert repr(again) == repr(codec)
