"""Checks the loss scale's bounds and state, and wrong arguments."""

import keras
import numpy as np
import pytest

from tfdml.mixed_precision import LossScaleOptimizer


def _stepped(optimizer, gradients: list[float]) -> keras.Variable:
    variable = keras.Variable([1.0])
    for gradient in gradients:
        optimizer.apply([keras.ops.convert_to_tensor([gradient])], [variable])
    return variable


def test_the_scale_grows_to_its_maximum_and_shrinks_to_its_minimum():
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(),
        initial_scale=8.0,
        dynamic_growth_steps=2,
        minimum_scale=4.0,
        maximum_scale=16.0,
    )
    scales = []
    variable = keras.Variable([1.0])
    for gradient in [0.0] * 6 + [np.inf, np.nan, np.inf]:
        optimizer.apply([keras.ops.convert_to_tensor([gradient])], [variable])
        scales.append(float(optimizer.dynamic_scale.numpy()))
    assert scales == [8, 16, 16, 16, 16, 16, 8, 4, 4]
    assert variable.numpy() == [1.0]


def test_finite_step_resets_the_count_of_skipped_steps():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(), max_skipped_steps=2)
    _stepped(optimizer, [np.inf, np.inf, 0.0, np.inf, np.inf])
    assert int(optimizer.skipped_steps.numpy()) == 2
    with pytest.raises(Exception, match="the model diverged, not the scale"):
        _stepped(optimizer, [np.inf])


def test_gradients_are_unscaled():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)
    assert _stepped(optimizer, [4.0]).numpy() == [0.5]


def test_optimizer_is_saved_with_the_model_and_restored(tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    made = LossScaleOptimizer(keras.optimizers.Adam(), 2.0**12, 7, 2.0, 2.0**14, 5)
    model.compile(made, "mse")
    x = np.ones((4, 3), "float32")
    model.train_on_batch(x, np.full([4, 1], np.inf, "float32"))
    model.train_on_batch(x, np.full([4, 1], np.nan, "float32"))
    path = tmp_path / "model.keras"
    model.save(path)
    optimizer = keras.saving.load_model(path).optimizer
    assert isinstance(optimizer, LossScaleOptimizer)
    assert optimizer.get_config() == made.get_config()
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**10
    assert int(optimizer.skipped_steps.numpy()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial_scale": 0.5}, "`initial_scale` must lie between"),
        ({"minimum_scale": 0.0}, "`initial_scale` must lie between"),
        ({"maximum_scale": 8.0}, "`initial_scale` must lie between"),
        ({"dynamic_growth_steps": 0}, "`dynamic_growth_steps` must be a positive integer"),
        ({"max_skipped_steps": 0}, "`max_skipped_steps` must be a positive integer"),
        ({"clipnorm": 1.0}, "clipnorm"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LossScaleOptimizer(keras.optimizers.SGD(), **arguments)


def test_optimizer_is_not_wrapped_twice():
    inner = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="must not scale the loss itself"):
        LossScaleOptimizer(inner)
