"""Checks the count of a model's floating-point operations against hand counts and TensorFlow's."""

import keras
import pytest
import tensorflow as tf
from keras import layers

from tfdml.callbacks.performance.flops import training_flops


def dense() -> keras.Model:
    return keras.Sequential([layers.Input((40,)), layers.Dense(30, "relu"), layers.Dense(5)])


def convolutional() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((16, 16, 4)),
            layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Conv2D(6, 3, strides=2, groups=2),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, "softmax"),
        ]
    )


def other_convolutions() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((8, 8, 4)),
            layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same"),
            layers.Conv2DTranspose(5, 2, strides=2),
        ]
    )


def attention() -> keras.Model:
    rows = layers.Input((10, 16))
    return keras.Model(rows, layers.MultiHeadAttention(num_heads=2, key_dim=8)(rows, rows))


class Twice(layers.Layer):
    """A product in a function, in a branch of a condition."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(7)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, rows):
        product = tf.function(self.dense, autograph=False)
        is_positive = tf.reduce_sum(rows) > 0
        return tf.cond(is_positive, lambda: product(rows), lambda: self.dense(-rows))

    def compute_output_shape(self, shape):
        return self.dense.compute_output_shape(shape)


def structured() -> keras.Model:
    inputs = {
        "ids": layers.Input((6,), dtype="int32", name="ids"),
        "rows": layers.Input((6, 3), name="rows"),
    }
    table = layers.Embedding(20, 3)(inputs["ids"])
    dots = layers.Dot(axes=2)([table, inputs["rows"]])
    products = layers.EinsumDense("...x,xy->...y", output_shape=2)(dots)
    return keras.Model(inputs, Twice()(layers.Flatten()(products)))


# In multiplications and additions of the forward pass.
COUNTS = {
    dense: 2 * (40 * 30 + 30 * 5),
    convolutional: 2 * (16 * 16 * 8 * 9 * 4 + 3 * 3 * 6 * 9 * 4 + 54 * 10),
    other_convolutions: 2 * (8 * 8 * 8 * 9 + 8 * 8 * 8 * 4 * 5),
    attention: 2 * (4 * 10 * 16 * 16 + 2 * 2 * 10 * 10 * 8),
    structured: 2 * (6 * 6 * 3 + 6 * 6 * 2 + 12 * 7),
}


@pytest.mark.parametrize("make", COUNTS)
def test_products_are_counted_as_by_hand(make):
    assert training_flops(make()) == 3 * COUNTS[make]


@pytest.mark.parametrize("make", [dense, convolutional])
def test_tensorflow_counts_a_little_more(make):
    """Its profiler counts operations by element, too; it sees no functions and no `Einsum`."""
    model = make()
    forward = tf.function(lambda rows: model(rows, training=False), autograph=False)
    graph = forward.get_concrete_function(tf.TensorSpec([1, *model.input_shape[1:]])).graph
    options = tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
    options["output"] = "none"
    counted = tf.compat.v1.profiler.profile(graph, options=options).total_float_ops
    assert training_flops(model) / 3 <= counted <= training_flops(model) / 3 * 1.05


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, rows):
        return self.dense(rows)


class OfPairs(layers.Layer):
    """Layer of two rows each."""

    def call(self, rows):
        return tf.reshape(rows, [-1, 2, rows.shape[1]])

    def compute_output_shape(self, shape):
        return None, 2, shape[1]


@pytest.mark.parametrize(
    "model",
    [
        lambda: keras.Sequential([layers.Input((10, 4)), layers.LSTM(8)]),
        lambda: keras.Sequential([layers.Input((None, 4)), layers.Dense(8)]),
        lambda: keras.Sequential([layers.Dense(8)]),
        lambda: keras.Sequential([layers.Input((4,), dtype="int32"), layers.Embedding(9, 2)]),
        lambda: keras.Sequential([layers.Input((4,)), OfPairs(), layers.Dense(3)]),
        lambda: keras.Sequential([layers.Input((4,), sparse=True), layers.Dense(3)]),
        Subclassed,
    ],
    ids=[
        "loop",
        "unknown length",
        "not built",
        "no products",
        "not one row",
        "sparse",
        "subclassed",
    ],
)
def test_what_cannot_be_counted_has_no_number(model):
    assert training_flops(model()) is None
