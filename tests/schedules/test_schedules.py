"""Checks learning rates at every step: warm-up, the schedule after it, and MLPerf's program."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdml.schedules import LinearWarmup, Scaled, polynomial_decay, scale_learning_rate

decays = keras.optimizers.schedules


def rates(schedule, steps) -> np.ndarray:
    return np.array([float(schedule(tf.constant(s, tf.int64))) for s in steps])


def test_linear_warm_up_to_a_number():
    found = rates(LinearWarmup(0.8, 4, start=0.4), range(7))
    np.testing.assert_allclose(found, [0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8], rtol=1e-6)


@pytest.mark.parametrize(
    "schedule",
    [
        decays.ExponentialDecay(0.5, 3, 0.9),
        decays.CosineDecay(0.5, 10),
        decays.PiecewiseConstantDecay([2, 5], [0.5, 0.05, 0.005]),
        LinearWarmup(0.5, 3, start=0.1),
    ],
    ids=lambda s: type(s).__name__,
)
def test_schedule_starts_from_its_beginning_after_warm_up(schedule):
    first = float(schedule(tf.constant(0, tf.int64)))
    found = rates(LinearWarmup(schedule, 5), range(20))
    np.testing.assert_allclose(found[:5], np.arange(5) / 5 * first, rtol=1e-6)
    np.testing.assert_allclose(found[5:], rates(schedule, range(15)), rtol=1e-6)


def test_no_warm_up_equals_the_target():
    schedule = decays.CosineDecay(0.5, 10)
    assert rates(LinearWarmup(0.8, 0), [0, 1]) == pytest.approx([0.8, 0.8])
    found = rates(LinearWarmup(schedule, 0), range(12))
    np.testing.assert_array_equal(found, rates(schedule, range(12)))


def test_polynomial_decay_equals_mlperf():
    """`lars_util.py`: `plr step / w_steps`, then `tf.train.polynomial_decay` to 0.0001."""
    peak, warm, total = 7.4, 5, 30
    wanted = []
    for step in range(40):
        x = min(max(step - warm, 1), total - warm + 1) / (total - warm + 1)
        poly = (peak - 0.0001) * (1 - x) ** 2 + 0.0001
        wanted.append(peak * step / warm if step <= warm else poly)
    found = rates(polynomial_decay(peak, total, warm), range(40))
    np.testing.assert_allclose(found, wanted, rtol=2e-5)


def test_scaling_rules():
    assert scale_learning_rate(0.1, 16) == pytest.approx(1.6)
    assert scale_learning_rate(0.1, 16, "sqrt") == pytest.approx(0.4)
    assert scale_learning_rate(0.1, 16, "none") == 0.1
    assert isinstance(scale_learning_rate(1, 2), float)
    schedule = decays.ExponentialDecay(0.5, 3, 0.9)
    found = rates(scale_learning_rate(schedule, 4, "sqrt"), range(5))
    np.testing.assert_allclose(found, 2 * rates(schedule, range(5)), rtol=1e-6)


def test_schedules_compose_and_serialise():
    schedule = LinearWarmup(Scaled(polynomial_decay(2.0, 20, 4), 1.5), 3, start=0.01)
    saved = keras.saving.serialize_keras_object(schedule)
    again = keras.saving.deserialize_keras_object(saved)
    np.testing.assert_array_equal(rates(again, range(30)), rates(schedule, range(30)))
    assert again.get_config() == schedule.get_config()


def test_rate_follows_the_steps_in_an_xla_compiled_update():
    variable = keras.Variable([0.0], name="kernel")
    optimizer = keras.optimizers.SGD(LinearWarmup(decays.ExponentialDecay(1.0, 1, 0.5), 2))
    optimizer.build([variable])

    @tf.function(jit_compile=True)
    def step():
        optimizer.apply([tf.constant([-1.0])], [variable])

    seen = [0.0]
    for _ in range(5):
        step()
        seen.append(float(variable[0]))
    np.testing.assert_allclose(np.diff(seen), [0, 0.5, 1, 0.5, 0.25], rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearWarmup("fast", 3), "`target` must be a rate"),
        (lambda: LinearWarmup(-0.1, 3), "`target` must be a rate"),
        (lambda: LinearWarmup(0.1, -3), "`warmup_steps` must be a whole number"),
        (lambda: LinearWarmup(0.1, 2.5), "`warmup_steps` must be a whole number"),
        (lambda: LinearWarmup(0.1, 2, start=-1), "`start` must be a rate"),
        (lambda: scale_learning_rate(0.1, 0), "`replicas` must be a positive whole number"),
        (lambda: scale_learning_rate(0.1, 2, "cubic"), "`rule` must be one of 'linear', 'sqrt'"),
        (lambda: scale_learning_rate("0.1", 2), "`lr` must be a rate"),
        (lambda: polynomial_decay(0.1, 5, 5), "`total_steps` must be more than `warmup_steps`"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
