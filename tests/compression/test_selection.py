"""Checks that exactly the largest values are chosen, for any distribution and method."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tfdml.compression.codecs import selection

LENGTH, COUNT = 40_000, 400


def numbers(kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    row = rng.normal(size=LENGTH).astype("float32")
    return {
        "normal": row,
        "sorted": np.sort(row),
        "few values": rng.integers(-3, 4, LENGTH).astype("float32"),
        "zeros": np.zeros(LENGTH, "float32"),
        "one": np.eye(1, LENGTH, 77, dtype="float32")[0],
        "denormal": row * np.float32(1e-41),
        "huge": row * np.float32(5e37),
        "not finite": np.where(row > 2.5, np.nan, np.where(row < -2.5, -np.inf, row)),
        "in columns": np.where(np.arange(LENGTH) % 200 == 3, 50 * row, row),
    }[kind]


KINDS = ("normal", "sorted", "few values", "zeros", "one", "denormal", "huge", "not finite")


def chosen(row: np.ndarray, count: int, most: int) -> np.ndarray:
    return tf.function(selection.largest)(tf.constant(row), tf.constant(count), most).numpy()


@pytest.mark.parametrize(("count", "most"), [(COUNT, COUNT), (COUNT, 2 * COUNT), (1, COUNT)])
@pytest.mark.parametrize("kind", [*KINDS, "in columns"])
def test_selected_values_are_the_largest(kind, count, most):
    row = numbers(kind)
    indices = chosen(row, count, most)
    assert len(set(indices)) == count
    sizes = np.where(np.isfinite(row), np.abs(row), np.inf)
    np.testing.assert_array_equal(np.sort(sizes[indices]), np.sort(sizes)[-count:])


def test_sample_spares_sorting_all_values():
    with mock.patch.object(selection, "_of_all", lambda row, count: -tf.ones([count], tf.int32)):
        assert (chosen(numbers("normal"), COUNT, COUNT) >= 0).all()
        # Nearly all are zeros, so nearly all pass.
        assert (chosen(numbers("one"), COUNT, COUNT) == -1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_selection_stays_on_a_gpu(kind):
    """TensorFlow has no `top_k` of integers there, and copies them to the host."""
    row, top_k, dtypes = numbers(kind), tf.math.top_k, []

    def noted(values, *args, **kwargs):
        dtypes.append(values.dtype)
        return top_k(values, *args, **kwargs)

    with (
        mock.patch.object(tf.config, "list_logical_devices", lambda kind: [kind]),
        mock.patch.object(selection, "_columns_with", side_effect=AssertionError),
        mock.patch.object(tf.math, "top_k", noted),
    ):
        indices = selection.largest(tf.constant(row), COUNT, COUNT).numpy()
    assert dtypes == [tf.float32]
    assert len(set(indices)) == COUNT
    sizes = np.where(np.isfinite(row), np.abs(row), np.inf)
    np.testing.assert_array_equal(np.sort(sizes[indices]), np.sort(sizes)[-COUNT:])


def test_rows_are_restored_and_added():
    rows = np.stack([numbers("normal"), numbers("sorted"), numbers("few values")])
    payload = selection.encoded_largest(tf.constant(rows), COUNT, COUNT)
    assert payload.shape == (3, 8 * COUNT)
    decoded = selection.decoded_rows(payload, LENGTH).numpy()
    assert ((decoded != 0).sum(1) == COUNT).all()
    np.testing.assert_array_equal(decoded[decoded != 0], rows[decoded != 0])
    total = selection.decoded_sum(payload, LENGTH).numpy()
    np.testing.assert_array_equal(total, decoded[0] + decoded[1] + decoded[2])
