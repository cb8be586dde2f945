"""Checks that our optimizers behave as those of Keras 3: saved, clipped, averaged, scaled, etc."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.strategies.cases import data, dense_model
from tfdml.optimizers import LAMB, LARS, LazyAdam, RowWiseAdagrad
from tfdml.schedules import LinearWarmup

# LazyAdam refuses accumulation.
ACCUMULATE = {
    "lamb": lambda **o: LAMB(weight_decay=0.01, **o),
    "lars": lambda **o: LARS(weight_decay=0.01, **o),
    "row_wise_adagrad": RowWiseAdagrad,
}
MAKE = ACCUMULATE | {"lazy_adam": LazyAdam}
ALL = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(optimizer, **options) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = dense_model()
    model.compile(optimizer, LOSS, **options)
    return model


def fitted(model, epochs=2) -> list[np.ndarray]:
    x, y = data(32)
    model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return [v.numpy() for v in model.trainable_variables]


def assert_all_close(found, wanted, **tolerance):
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.parametrize(
    "optimizer",
    [
        LAMB(0.02, 0.8, 0.9, 1e-4, 0.1, ["x"], ["y"], False, 1.0, 2.0, use_ema=True, name="n"),
        LARS(LinearWarmup(0.1, 5), 0.8, 0.01, 0.1, True, False, "separate", 1e-3, [], ["y"],
             gradient_accumulation_steps=2),
        LARS(0.1, momentum_correction=True),
        RowWiseAdagrad(0.1, 0.2, 1e-3, weight_decay=0.1, clipnorm=1.0, name="n"),
        LazyAdam(0.1, 0.8, 0.9, 1e-4, True, global_clipnorm=1.0),
    ],
    ids=["lamb", "lars", "corrected", "row_wise_adagrad", "lazy_adam"],
)  # fmt: skip
def test_configuration_round_trips(optimizer):
    saved = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(saved)
    assert again.get_config() == optimizer.get_config()
    assert vars(again).keys() == vars(optimizer).keys()
    for name in (
        "beta_1",
        "momentum",
        "nesterov",
        "trust_denominator",
        "bias_correction",
        "initial_accumulator_value",
        "epsilon",
        "amsgrad",
    ):
        assert getattr(again, name, None) == getattr(optimizer, name, None)


@ALL
def test_saved_model_resumes_training(make, tmp_path):
    model = compiled(make(learning_rate=LinearWarmup(0.05, 6), use_ema=True))
    fitted(model, 1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert_all_close(fitted(loaded), fitted(model), rtol=0, atol=0)


@ALL
def test_a_tensorflow_checkpoint_restores_the_slots(make, tmp_path):
    model = compiled(make())
    fitted(model)
    path = tf.train.Checkpoint(optimizer=model.optimizer).save(tmp_path / "c")
    wanted = [v.numpy() for v in model.optimizer.variables]
    for v in model.optimizer.variables:
        v.assign(v * 0)
    tf.train.Checkpoint(optimizer=model.optimizer).restore(path)
    assert_all_close([v.numpy() for v in model.optimizer.variables], wanted, rtol=0, atol=0)


@ALL
@pytest.mark.parametrize(
    ("option", "clip"),
    [
        ({"clipnorm": 0.1}, lambda gs: [tf.clip_by_norm(g, 0.1) for g in gs]),
        ({"global_clipnorm": 0.1}, lambda gs: tf.clip_by_global_norm(gs, 0.1)[0]),
        ({"clipvalue": 0.01}, lambda gs: [tf.clip_by_value(g, -0.01, 0.01) for g in gs]),
        ({"loss_scale_factor": 8.0}, lambda gs: [g / 8.0 for g in gs]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_clipping_is_before_the_update(make, option, clip):
    """A row that occurs twice in a sparse gradient counts once."""
    rng = np.random.default_rng(0)
    table, matrix = rng.normal(size=(5, 3)), rng.normal(size=(3, 3))
    found, wanted = [
        [keras.Variable(v, dtype="float32", name="kernel") for v in (table, matrix)]
        for _ in range(2)
    ]
    ours, plain = make(**option), make()
    for _ in range(3):
        rows = tf.constant(rng.normal(size=(4, 3)), tf.float32)
        indices = tf.constant([1, 3, 1, 1])
        dense = tf.constant(rng.normal(size=(3, 3)), tf.float32)
        ours.apply([tf.IndexedSlices(rows, indices, tf.constant([5, 3])), dense], found)
        whole = tf.math.unsorted_segment_sum(rows, indices, 5)
        plain.apply(clip([whole, dense]), wanted)
    assert_all_close([v.numpy() for v in found], [v.numpy() for v in wanted], rtol=1e-5)


@ALL
def test_embedding_trains_like_a_dense_matrix(make):
    """The same model with dense gradients: one-hot rows times the matrix."""
    x = np.random.default_rng(0).integers(0, 7, (32, 5))
    y = (x.sum(1) % 3).astype("int64")
    results = []
    for first in (layers.Embedding(7, 4), layers.Dense(4, use_bias=False)):
        keras.utils.set_random_seed(1)
        dense = isinstance(first, layers.Dense)
        model = keras.Sequential([first, layers.GlobalAveragePooling1D(), layers.Dense(3)])
        inputs = keras.ops.one_hot(x, 7) if dense else x
        model.build(inputs.shape)
        for i, v in enumerate(model.trainable_variables):
            v.assign(np.random.default_rng(i).normal(size=v.shape))
        model.compile(make(learning_rate=0.1), LOSS)
        model.fit(inputs, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
        results.append([v.numpy() for v in model.trainable_variables])
    assert_all_close(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", ACCUMULATE.values(), ids=ACCUMULATE)
def test_accumulated_gradients_equal_one_batch(make):
    x, y = data(32)
    models = [compiled(make()), compiled(make(gradient_accumulation_steps=4))]
    for model, rows in zip(models, (32, 8), strict=True):
        # Without the regulariser, whose gradient does not depend on the batch.
        model.fit(x, y, batch_size=rows, epochs=3, shuffle=False, verbose=0)
    weights = [[v.numpy() for v in m.trainable_variables] for m in models]
    assert_all_close(*weights, rtol=1e-4, atol=1e-6)


@ALL
def test_the_moving_average_ends_up_in_the_weights(make):
    variable = keras.Variable([1.0, 2.0], name="kernel")
    optimizer = make(use_ema=True, ema_momentum=0.5)
    seen = []
    for _ in range(3):
        optimizer.apply([tf.constant([0.1, -0.2])], [variable])
        seen.append(variable.numpy())
    optimizer.finalize_variable_values([variable])
    wanted = 0.5 * (0.5 * seen[0] + 0.5 * seen[1]) + 0.5 * seen[2]
    np.testing.assert_allclose(variable.numpy(), wanted, rtol=1e-6)


@ALL
def test_mixed_precision_skips_an_overflow_and_learns(make):
    x, y = data(32)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(make(learning_rate=0.02))
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert all(v.dtype == "float32" for v in model.trainable_variables)
        before = [v.numpy() for v in model.trainable_variables]
        model.train_on_batch(x * np.float32(np.inf), y)
        assert_all_close([v.numpy() for v in model.trainable_variables], before, rtol=0)
        history = model.fit(x, y, batch_size=8, epochs=8, verbose=0).history["loss"]
    finally:
        keras.config.set_dtype_policy("float32")
    assert history[-1] < history[0]


@ALL
def test_learning_rate_can_be_set(make):
    variable = keras.Variable([1.0, 2.0], name="kernel")
    optimizer = make(learning_rate=0.5)
    optimizer.learning_rate = 0.0
    optimizer.apply([tf.constant([0.1, -0.2])], [variable])
    np.testing.assert_array_equal(variable.numpy(), [1.0, 2.0])


def test_trust_ratios_are_recorded_on_request():
    variables = [keras.Variable([3.0, 4.0], name=n) for n in ("a_kernel", "a_bias", "b_kernel")]
    optimizer = LARS(0.1, trust_coefficient=0.01)
    optimizer.build(variables)
    count = len(optimizer.variables)
    ratios = optimizer.keep_trust_ratios()
    assert len(optimizer.variables) == count, "Nothing more is saved."
    assert optimizer.keep_trust_ratios() is ratios

    @tf.function
    def step(*gradients):
        optimizer.apply(list(gradients), variables)

    step(*(tf.constant(g) for g in ([0.0, 0.1], [1.0, 1.0], [0.3, 0.4])))
    assert ratios.paths == ["a_kernel", "b_kernel"]
    np.testing.assert_allclose(ratios.read(), [0.01 * 5 / 0.1, 0.01 * 5 / 0.5], rtol=1e-5)
