"""Differences between runs that are no errors, and are removed."""

import keras
import pytest

from tfdml.strategies.keras_seam.recording import repeatable


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("mixed_bfloat16", "float32"),
        ("mixed_float16", "float32"),
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_mixed_precision_computes_in_the_dtype_of_variables(policy, dtype):
    (make,) = [
        make
        for owner, name, make in repeatable.replacements(None)
        if (owner, name) == (keras.DTypePolicy, "compute_dtype")
    ]
    compute_dtype = make(keras.DTypePolicy.compute_dtype.fget)
    assert compute_dtype(keras.DTypePolicy(policy)) == dtype


def test_what_is_left_out_of_a_model_is_said():
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(1, dtype="mixed_float16"),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    assert repeatable.left_out_of_model(model) == ["rounding of mixed_float16"]
