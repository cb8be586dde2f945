"""Small models of the kinds that pipelines cut."""

import keras

layers = keras.layers


def sequential() -> keras.Model:
    """Returns layers with weights, a seed and moving statistics, one after the other."""
    body = [layers.Dense(4), layers.Dropout(0.5), layers.BatchNormalization(), layers.Dense(2)]
    return keras.Sequential([keras.Input((3,)), *body])


def skipping() -> keras.Model:
    """Returns a model whose first layer's result is used again two calls later."""
    inputs = keras.Input((3,), name="x")
    first = layers.Dense(4, name="first")(inputs)
    second = layers.Dense(4, name="second")(first)
    total = layers.Add(name="add")([first, second])
    return keras.Model(inputs, layers.Dense(1, name="last")(total))


def two_in_two_out() -> keras.Model:
    """Returns a model with an input that is used late, and an output that is made early."""
    a, b = keras.Input((3,), name="a"), keras.Input((4,), name="b")
    early = layers.Dense(4, name="early")(a)
    middle = layers.Dense(4, name="middle")(early)
    late = layers.Dense(2, name="late")(layers.Add(name="both")([middle, b]))
    return keras.Model([a, b], {"early": early, "late": late})


class TiedHead(layers.Layer):
    """Multiplies by an embedding's table."""

    def __init__(self, embedding: layers.Embedding, **options):
        super().__init__(**options)
        self.embedding = embedding

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))


def tied() -> keras.Model:
    """Returns a model with a layer that is called twice, and a table that two layers use."""
    tokens = keras.Input((5,), dtype="int32", name="tokens")
    embed = layers.Embedding(7, 4, name="embed")
    shared = layers.Dense(4, name="shared")
    x = shared(layers.Activation("relu", name="relu")(shared(embed(tokens))))
    return keras.Model(tokens, TiedHead(embed, name="head")(x))


def nested() -> keras.Model:
    """Returns a model with a model as a layer."""
    inner_inputs = keras.Input((4,))
    x = layers.Dense(4)(inner_inputs)
    inner = keras.Model(inner_inputs, layers.BatchNormalization()(x), name="inner")
    inputs = keras.Input((3,), name="x")
    x = inner(layers.Dense(4, name="before")(inputs))
    return keras.Model(inputs, layers.Dense(1, name="after")(x))
