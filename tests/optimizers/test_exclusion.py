"""Checks which variables are excluded from decay and adaptation, by the paths of Keras's layers."""

import keras
import numpy as np
import pytest
from keras import layers

from tfdml.optimizers import BIASES_AND_SCALES, LAMB
from tfdml.optimizers.exclusion import Exclusion


@pytest.fixture(scope="module")
def model():
    inputs = layers.Input((6, 8))
    x = layers.Dense(8, name="debiasing")(inputs)
    x = layers.MultiHeadAttention(2, 4)(x, x)
    x = layers.LayerNormalization()(x)
    x = layers.RMSNormalization()(x)
    x = layers.GroupNormalization(2)(x)
    x = layers.BatchNormalization()(x)
    x = layers.Bidirectional(layers.GRU(4))(x)
    return keras.Model(inputs, x)


def test_the_rule_on_the_paths_of_keras_layers(model):
    rule = Exclusion("exclude", BIASES_AND_SCALES)
    excluded = {v.path for v in model.trainable_variables if rule.excludes(v)}
    # One-dimensional weights of these layers are biases, scales or offsets; a GRU's bias has two.
    flat = {
        v.path for v in model.trainable_variables if len(v.shape) == 1 or v.path.endswith("/bias")
    }
    assert excluded == flat
    assert {p.rpartition("/")[2] for p in excluded} == {"bias", "gamma", "beta", "scale"}
    assert "debiasing/kernel" not in excluded


@pytest.mark.parametrize(
    ("path", "excluded"),
    [
        ("bias", True),
        ("head/output_bias", True),
        ("dense/bias/part_3", True),
        ("dense/kernel/part_3", False),
        ("relative_position_bias_table", False),
        ("gamma_net/kernel", False),
        ("upscale", False),
    ],
)
def test_the_rule_on_other_paths(path, excluded):
    class Variable:
        pass

    variable = Variable()
    variable.path = path
    assert Exclusion("exclude", BIASES_AND_SCALES).excludes(variable) == excluded


def decaying(optimizer, model) -> set[str]:
    """Returns the variables that shrink when gradients are 0."""
    before = [v.numpy() for v in model.trainable_variables]
    optimizer.apply([v * 0 for v in model.trainable_variables], model.trainable_variables)
    return {
        v.path.partition("/")[2]
        for v, b in zip(model.trainable_variables, before, strict=True)
        if not np.array_equal(v.numpy(), b)
    }


@pytest.mark.parametrize("how", ["argument", "method", "variables", "nothing"])
def test_user_patterns_and_keras_method(how):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [layers.Input((3,)), layers.Dense(2, name="a"), layers.Dense(2, name="b")]
    )
    for v in model.trainable_variables:
        v.assign(v + 1)
    patterns = ["(^|/)a/"] if how == "argument" else []
    optimizer = LAMB(0.1, weight_decay=0.1, exclude_from_weight_decay=patterns)
    if how == "method":
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    if how == "variables":
        optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel])
    wanted = {
        "argument": {"b/kernel", "b/bias"},
        "method": {"a/kernel", "b/kernel"},
        "variables": {"a/bias", "b/kernel", "b/bias"},
        "nothing": {"a/kernel", "a/bias", "b/kernel", "b/bias"},
    }[how]
    assert decaying(optimizer, model) == wanted
