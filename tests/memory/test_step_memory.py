"""Checks the parts of a step's memory against numbers that can be worked out by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdml
from tests.memory.networks import HIDDEN, ROWS, SCALARS, WEIGHTS, WIDTH, network, of


def test_parts_of_a_small_network():
    found = of(network())
    assert found.weights == WEIGHTS
    assert found.gradients == WEIGHTS
    assert found.slots == 2 * WEIGHTS + SCALARS
    assert found.exchange == found.residuals == 0
    # When the hidden layer's gradient exists: the batch, the hidden layer's output, its gradient,
    # and the gradient of the network's output.
    batch, hidden, output = 4 * ROWS * WIDTH, 4 * ROWS * HIDDEN, 4 * ROWS
    assert found.activations == batch + 2 * hidden + output
    # The last layer's gradients are there at that moment, too.
    assert found.peak == found.weights + found.slots + found.activations + 4 * (HIDDEN + 1)


def test_the_update_is_the_peak_of_a_small_batch():
    kernel = 4 * WIDTH * HIDDEN
    # Adam's first moment needs one number more for each of the largest variable.
    adam = of(network("adam"), batch_size=1)
    scalars = 64
    assert 0 <= adam.peak - (WEIGHTS + adam.slots + WEIGHTS + kernel) < scalars
    # SGD multiplies the gradient in place: the end of the backward pass is the peak, with the batch
    # and the hidden layer's gradient.
    sgd = of(network("sgd"), batch_size=1)
    assert sgd.slots == SCALARS
    assert 0 <= sgd.peak - (WEIGHTS + sgd.slots + WEIGHTS + 4 * (WIDTH + HIDDEN)) < scalars


def test_activations_grow_with_the_rows_and_nothing_else_does():
    small, large = of(network(), 100), of(network(), 300)
    assert large.activations == 3 * small.activations
    assert (large.weights, large.slots, large.gradients) == (
        small.weights,
        small.slots,
        small.gradients,
    )


def test_ranks_share_a_batch_as_if_each_were_traced():
    """Only the largest and the smallest share are traced; others lie between them."""
    model = network()
    report = tfdml.estimate_memory(model, 8 * ROWS, ranks=[1, 3, 8])
    third = next(c for c in report.choices if c.ranks == 3)
    rows = -(-8 * ROWS // 3)
    assert third.activations == of(model, rows).activations


def test_ranks_share_the_rows_of_an_embedding():
    """Its gradient has another shape for each number of rows."""
    layers = keras.layers
    body = [layers.Embedding(100, 16), layers.GlobalAveragePooling1D()]
    model = keras.Sequential([keras.Input((7,), dtype="int32"), *body])
    model.compile("sgd", "mse")
    report = tfdml.estimate_memory(model, 16, ranks=[1, 2, 4])
    found = {c.ranks: c.gradients for c in report.choices}
    assert found == {n: 16 // n * 7 * (4 * 16 + 4) for n in (1, 2, 4)}


def test_frozen_layers_have_no_gradients_and_slots():
    model = network()
    model.layers[0].trainable = False
    model.compile("adam", "mse")
    found = of(model)
    assert found.weights == WEIGHTS
    assert found.gradients == 4 * (HIDDEN + 1)
    assert found.slots == 2 * found.gradients + SCALARS


def test_rows_of_an_embedding_are_the_gradient():
    tokens, words, width = 7, 1000, 16
    model = keras.Sequential(
        [
            keras.Input((tokens,), dtype="int32"),
            keras.layers.Embedding(words, width),
            keras.layers.GlobalAveragePooling1D(),
        ]
    )
    model.compile("sgd", "mse")
    found = of(model, 4)
    assert found.weights == 4 * words * width
    assert found.gradients == 4 * tokens * (4 * width + 4)


def test_steps_of_a_loop_are_kept():
    def activations(steps: int) -> int:
        rnn = keras.layers.SimpleRNN(HIDDEN)
        model = keras.Sequential([keras.Input((steps, WIDTH)), rnn, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return of(model, 16).activations

    # A step more: the transposed copy of the batch, which replaces it, and the output. The backward
    # loop adds nothing for each step, because the batch needs no gradient.
    assert activations(30) - activations(20) == 10 * 4 * 16 * (WIDTH + HIDDEN)


def test_half_precision_halves_activations_and_keeps_weights():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        half = of(network())
    finally:
        keras.mixed_precision.set_global_policy("float32")
    whole = of(network())
    assert (half.weights, half.gradients) == (whole.weights, whole.gradients)
    assert 0.5 <= half.activations / whole.activations < 0.85


def test_a_loss_scale_is_among_the_slots():
    inner = keras.optimizers.Adam()
    scaled = of(network(tfdml.mixed_precision.LossScaleOptimizer(inner)))
    # The scale's own iterations, rate, counters of steps, of skipped steps, and the scale.
    assert scaled.slots - of(network()).slots == SCALARS + 8 + 8 + 4


def test_several_inputs_and_outputs_and_a_loss_of_classes():
    a, b = keras.Input((8,), name="a"), keras.Input((4,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    outputs = {"one": keras.layers.Dense(5)(joined), "two": keras.layers.Dense(1)(joined)}
    model = keras.Model({"a": a, "b": b}, outputs)
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", {"one": classes, "two": "mse"})
    data = (
        {"a": np.zeros((1, 8), "float32"), "b": np.zeros((1, 4), "float32")},
        {"one": np.zeros((1,), "int32"), "two": np.zeros((1, 1), "float32")},
    )
    found = of(model, data=data)
    assert found.weights == found.gradients == 4 * (12 * 6 + 6)


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", "categorical_crossentropy"])
def test_targets_follow_from_the_loss(loss):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", loss)
    assert of(model).gradients == 4 * (4 * 3 + 3)


class OwnStep(keras.Model):
    """Model with a step of its own and two optimizers, one for each half."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(8), keras.layers.Dense(1)

    def call(self, x):
        return self.second(self.first(x))

    def compile(self, first, second):
        super().compile(optimizer=first, loss="mse")
        self.optimizer_of_second = second

    def train_step(self, data):
        x, y = data
        for optimizer, layer in (
            (self.optimizer, self.first),
            (self.optimizer_of_second, self.second),
        ):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            own = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))
        return {"loss": loss}


def test_a_step_of_ones_own_with_two_optimizers():
    model = OwnStep()
    model.build((None, 4))
    model.compile(keras.optimizers.Adam(), keras.optimizers.SGD(momentum=0.9))
    found = of(model)
    first, second = 4 * (4 * 8 + 8), 4 * (8 + 1)
    assert found.gradients == first + second
    assert found.slots == 2 * first + SCALARS + second + SCALARS
    model.fit(np.zeros((8, 4)), np.zeros((8, 1)), verbose=0)
    assert of(model) == found


class UpdatesTwice(keras.Model):
    """Model whose step updates all its weights twice, with the same optimizer."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            own = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))
        return {"loss": loss}


def test_an_optimizer_that_updates_twice_has_its_slots_once():
    model = UpdatesTwice()
    model.build((None, 4))
    model.compile("adam")
    found = of(model, data=(np.zeros((1, 4), "float32"), np.zeros((1, 1), "float32")))
    assert found.slots == 2 * 4 * (4 + 1) + SCALARS


class Unread(keras.layers.Layer):
    """Computes a large tensor that nobody reads; TensorFlow leaves it out."""

    def call(self, inputs):
        tf.tile(inputs, [1, 1000])
        return inputs


def test_a_result_that_nobody_reads_takes_nothing():
    def model(*layers):
        made = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
        made.compile("sgd", "mse")
        return made

    assert of(model(Unread())).activations == of(model()).activations


class InABranch(keras.layers.Layer):
    """Computes a large tensor in a branch, which returns a small one."""

    def call(self, inputs):
        fixed = tf.stop_gradient(inputs)
        small = tf.reduce_mean(fixed, axis=1, keepdims=True)
        means = tf.cond(
            tf.reduce_sum(fixed) > 0,
            lambda: tf.reduce_mean(tf.tile(fixed, [1, 1000]), axis=1, keepdims=True),
            lambda: small,
        )
        return inputs + means


def test_the_inside_of_a_branch_counts_while_it_runs():
    model = keras.Sequential([keras.Input((WIDTH,)), InABranch(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert of(model).activations >= 4 * ROWS * WIDTH * 1000


class InAFunction(keras.layers.Layer):
    """Calls a function that TensorFlow has traced for any number of rows."""

    @tf.function(input_signature=[tf.TensorSpec((None, WIDTH))])
    def _mean(self, inputs):
        return tf.reduce_mean(tf.tile(inputs, [1, 1000]), axis=1, keepdims=True)

    def call(self, inputs):
        return inputs + self._mean(tf.stop_gradient(inputs))


def test_unknown_sizes_inside_a_function_are_told():
    model = keras.Sequential([keras.Input((WIDTH,)), InAFunction(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    (note,) = tfdml.estimate_memory(model, ROWS, ranks=[1]).notes
    assert "whose size is known only in training, the first of Tile" in note
