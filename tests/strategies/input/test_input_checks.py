"""Checks the detection of pipelines with random numbers that differ between processes."""

import keras
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tests.strategies.start import start_cases as cases
from tfdml.strategies.input.input_checks import draws_without_seed

NUMBERS = tf.data.Dataset.range(4)


@pytest.fixture(autouse=True)
def _nobody_has_set_a_seed():
    before, context.context()._seed = context.context()._seed, None
    yield
    context.context()._seed = before


@tf.function
def _in_a_branch(a):
    return tf.cond(a > 1, lambda: tf.random.uniform([]), lambda: 0.0)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: NUMBERS.map(lambda a: tf.random.normal([2])), "RandomStandardNormal without a"),
        (lambda: NUMBERS.map(_in_a_branch), "RandomUniform without a seed"),
        (
            lambda: NUMBERS.flat_map(lambda a: NUMBERS.map(lambda b: tf.random.normal([2]))),
            "in the function of a FlatMap stage",
        ),
        (lambda: NUMBERS.shuffle(4), "`Dataset.shuffle` without"),
        (lambda: tf.data.Dataset.list_files("/etc/h*"), "`Dataset.shuffle` without"),
        (lambda: tf.data.Dataset.random().take(3), "`Dataset.random` without"),
        (lambda: NUMBERS.map(lambda a: tf.random.normal([2], seed=3)), None),
        (lambda: NUMBERS.map(lambda a: tf.random.stateless_normal([2], [1, a])), None),
        (lambda: NUMBERS.shuffle(4, seed=1).batch(2).map(lambda a: a + 1).prefetch(1), None),
        (lambda: tf.data.Dataset.list_files("/etc/h*", shuffle=False), None),
    ],
)
def test_unseeded_random_operations_are_named(make, named):
    found = draws_without_seed(make())
    assert found is None if named is None else named in found


def test_random_layer_is_named():
    noise = keras.layers.GaussianNoise(0.1)
    noisy = NUMBERS.map(lambda a: noise(tf.cast([a], "float32"), training=True))
    assert "a generator's state in the function of a Map stage" in draws_without_seed(noisy)


@pytest.mark.parametrize("noise", ["operation", "layer"])
def test_rank_0_reads_unseeded_random_data(ranks, noise):
    first, second = ranks(2).run(cases.noisy_data, noise)
    assert first["loss"] == second["loss"]
    assert "so rank 0 alone reads it" in first["warned"]
    assert "in the function of a Map stage" in first["warned"]
