"""Checks that a rank's rows begin with the values that they have in a table made as a whole."""

from unittest import mock

import keras
import numpy as np
import pytest

from tfdml.collectives.row_deal import RowDeal
from tfdml.strategies.keras_seam import initial_rows
from tfdml.strategies.keras_seam.initial_rows import OwnRows, with_seed

kinds = keras.initializers
INITIALIZERS = {
    "uniform": lambda: kinds.RandomUniform(seed=3),
    "normal": lambda: kinds.RandomNormal(0.1, 0.7, seed=4),
    "truncated": lambda: kinds.TruncatedNormal(0.1, 0.5, seed=5),
    "glorot_uniform": lambda: kinds.GlorotUniform(seed=6),
    "he_normal": lambda: kinds.HeNormal(seed=7),
    "fan_out": lambda: kinds.VarianceScaling(2.0, "fan_out", "untruncated_normal", seed=8),
    "orthogonal": lambda: kinds.Orthogonal(seed=1),
    "zeros": kinds.Zeros,
    "constant": lambda: kinds.Constant(2.0),
    "generator": lambda: kinds.RandomUniform(seed=keras.random.SeedGenerator(9)),
    "function": lambda: (
        lambda shape, dtype: keras.ops.reshape(
            keras.ops.arange(shape[0] * shape[1], dtype=dtype), shape
        )
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", INITIALIZERS)
def test_same_bits_as_in_the_whole_table(name, dtype):
    if name in ("orthogonal", "function") and dtype == "bfloat16":
        pytest.skip("Keras cannot make the whole table.")
    for shape in ((37, 6), (64, 5), (101, 7)):
        whole = np.asarray(INITIALIZERS[name]()(shape, dtype))
        for ranks in (2, 3):
            deal = RowDeal(shape, ranks)
            # Several blocks.
            with mock.patch.object(initial_rows, "BLOCK", 100):
                for rank in range(ranks):
                    own = OwnRows(INITIALIZERS[name](), deal, rank)(deal.part_shape(rank), dtype)
                    assert np.asarray(own).tobytes() == deal.part_of(whole, rank).tobytes()


def test_only_a_block_is_made_at_a_time():
    deal, drawn = RowDeal((1000, 8), 2), []
    uniform = initial_rows._uniform

    def noting(low: float, high: float):
        draw = uniform(low, high)
        return lambda shape, *rest: drawn.append(shape[0] * shape[1]) or draw(shape, *rest)

    with mock.patch.multiple(initial_rows, BLOCK=400, _uniform=noting):
        OwnRows(kinds.RandomUniform(seed=1), deal, 1)(deal.part_shape(1), "float32")
    assert sum(drawn) == 8000
    assert max(drawn) <= 400


def test_another_seed_gives_other_values_and_leaves_the_initializer():
    given = kinds.RandomNormal(seed=1)
    other = with_seed(given, 2)
    assert not np.allclose(given((4, 4)), other((4, 4)))
    np.testing.assert_array_equal(other((4, 4)), kinds.RandomNormal(seed=2)((4, 4)))
    assert with_seed(kinds.Zeros(), 2) is not None
