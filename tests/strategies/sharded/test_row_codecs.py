"""Checks the encodings of table rows on the way between ranks."""

import numpy as np
import pytest
import tensorflow as tf

import tfdml
from tests.strategies.sharded import table_cases as cases
from tfdml.strategies.sharded.row_codecs import ROW_CODECS

WIDTH = 6
# Of a number, relative to itself or to its row's largest; and the bytes of a row.
ERRORS = {"bfloat16": 2.0**-8, "int8": 0.5 / 127}
BYTES = {"bfloat16": 2 * WIDTH, "int8": WIDTH + 4}


def _through(name: str, rows: np.ndarray) -> np.ndarray:
    codec = ROW_CODECS[name]
    rows = tf.constant(rows)
    return codec.decode(codec.encode(rows), rows.dtype).numpy()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ERRORS)
def test_rows_are_rounded_to_the_nearest(name, dtype):
    rows = np.random.default_rng(0).normal(0, 10, (50, WIDTH)).astype(dtype)
    rows[7] = 0
    result = _through(name, rows)
    of = np.abs(rows) if name == "bfloat16" else np.abs(rows).max(1, keepdims=True)
    slack = 1e-3 if dtype == "float16" else 1e-6
    assert (np.abs(result - rows) <= of * (ERRORS[name] + slack)).all()
    assert result.dtype == dtype
    assert not result[7].any()


@pytest.mark.parametrize("name", ERRORS)
def test_a_number_that_is_not_finite_is_seen(name):
    rows = np.ones((4, WIDTH), "float32")
    rows[1, 2], rows[2, 0], rows[3, 5] = np.inf, np.nan, -np.inf
    result = _through(name, rows)
    assert np.isfinite(result).all(1).tolist() == [True, False, False, False]


@pytest.mark.parametrize("name", ERRORS)
def test_bytes_of_a_row(name):
    encoded = ROW_CODECS[name].encode(tf.ones([3, WIDTH]))
    assert encoded.shape[1] * encoded.dtype.size == BYTES[name]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ERRORS)
def test_replicas_compute_with_rounded_rows(ranks, name, size):
    results = ranks(size).run(cases.trained, name)
    users, items, *dense = results[0]["weights"]
    rounded = [_through(name, users), _through(name, items), *dense]
    (expected,) = ranks(1).run(cases.predicted, rounded)
    for result in results:
        np.testing.assert_allclose(result["predicted"], expected, rtol=1e-5, atol=1e-6)
        for own, first in zip(result["weights"], results[0]["weights"], strict=True):
            np.testing.assert_array_equal(own, first)


@pytest.mark.parametrize("kind", [pytest.param("multi_worker", marks=pytest.mark.slow), "horovod"])
@pytest.mark.parametrize("name", ERRORS)
def test_training_ends_near_that_with_exact_rows(ranks, name, kind):
    exact = ranks(2, kind).run(cases.trained, "dealt", "row_wise_adagrad")[0]
    result = ranks(2, kind).run(cases.trained, name, "row_wise_adagrad")[0]
    gap = np.abs(result["predicted"] - exact["predicted"]).max()
    assert 0 < gap < 0.05
    assert abs(result["history"]["loss"][-1] / exact["history"]["loss"][-1] - 1) < 0.02


def test_ids_are_sent_as_they_are(ranks):
    for dtypes in ranks(2).run(cases.exchanges, "plain", "int8"):
        found = {name.split("_")[1]: dtype for name, dtype in dtypes.items()}
        assert found == {"ids": tf.int32, "rows": tf.uint8, "gradients": tf.uint8}


@pytest.mark.slow
@pytest.mark.parametrize("name", ERRORS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, name):
    assert ranks(2).run(cases.overflowing, name) == [(32.0, 0)] * 2


def test_refused_values():
    with pytest.raises(ValueError, match="`row_codec` must be one of None, 'bfloat16', 'int8'"):
        tfdml.Sharding(embeddings=True, row_codec="int4")
    with pytest.raises(ValueError, match="`row_codec` must be None without `embeddings=True`"):
        tfdml.Sharding(row_codec="int8")
