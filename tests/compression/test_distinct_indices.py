"""Checks drawn indices: distinct, within their limit, and those of TensorFlow's shuffle."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tfdml.compression.codecs import distinct_indices as module
from tfdml.compression.codecs.distinct_indices import distinct_indices

SEEDS = ([0, 0], [123456789, 7], [-5, 2**31 - 1])


def drawn(count: int, length: int, seed: list[int]) -> np.ndarray:
    run = tf.function(lambda seed: distinct_indices(count, length, seed))
    return run(tf.constant(seed, tf.int32)).numpy()


@pytest.mark.parametrize("length", [module._SHORT, 2**16, 70_000, 2**18, 2**20 - 1, 2**24])
@pytest.mark.parametrize("seed", SEEDS)
def test_they_are_tensorflows(length, seed):
    count = math.ceil(0.01 * length)
    shuffled = tf.random.experimental.index_shuffle(tf.range(count), seed, length - 1)
    found = drawn(count, length, seed)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, shuffled)


@pytest.mark.parametrize("length", [1, 2, 1000, module._SHORT - 1, module._SHORT, 2**16 + 1])
def test_all_of_them_are_a_permutation(length):
    """Also where TensorFlow's shuffle draws one index twice: 2**16 + 1."""
    found = drawn(length, length, SEEDS[1])
    np.testing.assert_array_equal(np.sort(found), np.arange(length))
    if length > 2:
        assert (found != np.arange(length)).any()


def test_another_seed_draws_others():
    first, second = (drawn(1000, 2**20, seed) for seed in ([3, 1], [3, 2]))
    assert len(set(first) & set(second)) < 50
