"""Cases of `remat`: the same model with and without blocks that are computed again.

Everything that a block must not do twice, or differently, is in the models: `Dropout`, statistics,
losses added inside, masks, recurrent layers.
"""

import contextlib
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdml
from tests.harness import rank_job

ROWS, BATCH, WIDTH, STEPS = 22, 8, 4, 5
NAMES = ["block_0", "block_1"]


@keras.saving.register_keras_serializable("tests")
def mean_square(tensor):
    """Returns a small loss; with half precision in float32, to which Keras adds no other losses."""
    return 0.05 * keras.ops.mean(keras.ops.square(keras.ops.cast(tensor, keras.config.floatx())))


@keras.saving.register_keras_serializable("tests")
class AddsLoss(layers.Layer):
    """Adds a loss of its inputs."""

    def call(self, inputs):
        """Returns the inputs."""
        self.add_loss(mean_square(inputs))
        return inputs


class Calls(layers.Layer):
    """Calls a layer by a function that is a block.

    Args:
        layer: The layer.
        remat: Makes a block of a function.
    """

    def __init__(self, layer: layers.Layer, remat: Callable):
        super().__init__(name=f"calls_{layer.name}")
        self.layer = layer
        self._function = remat(self._both)

    def _both(self, inputs, options: dict, shifted: bool = False):
        hidden = self.layer(inputs) * options["scale"]
        # Behind a function that is not linear, so that the sum is not part of the residual one,
        # whose terms Grappler would add in another order where no block is around them.
        return {"hidden": keras.ops.tanh(hidden + 1.0) if shifted else hidden, "name": self.name}

    def call(self, inputs):
        """Returns the layer's outputs, scaled and shifted."""
        # A power of 2: another order of factors gives the same bits.
        scale = keras.ops.cast(2.0, inputs.dtype)
        return self._function(inputs, {"scale": scale, "unused": None}, shifted=True)["hidden"]


def _dense_block(
    name: str, dropout: bool, statistics: bool, regularizer: Callable = mean_square
) -> keras.Sequential:
    return keras.Sequential(
        [
            layers.Dense(WIDTH, activation="tanh"),
            layers.Dropout(0.4 if dropout else 0.0),
            *([layers.BatchNormalization()] if statistics else []),
            AddsLoss(),
            layers.Dense(WIDTH, activation="relu", activity_regularizer=regularizer),
        ],
        name=name,
    )


# How a block is made of a layer; "none" is the reference of all but the functions.
BLOCKS = {
    "block": tfdml.remat,
    "function": lambda layer: Calls(layer, tfdml.remat),
    "keras.remat": lambda layer: Calls(layer, keras.remat),
    "no function": lambda layer: Calls(layer, lambda function: function),
}
SCOPES = {
    "full": {},
    "activations": {},
    "larger_than": {"output_size_threshold": 2},
    "list_of_layers": {"layer_names": NAMES},
}


def reference(how: str) -> str:
    """Returns how the same numbers are computed without `remat`."""
    return "no function" if how in ("function", "keras.remat") else "none"


def _scope(how: str):
    if how not in SCOPES:
        return contextlib.nullcontext()
    return keras.RematScope(how, **SCOPES[how])


def dense_model(
    how: str, dropout: bool = True, statistics: bool = True, regularizer: Callable = mean_square
) -> keras.Model:
    """A residual network."""
    make = BLOCKS.get(how, lambda layer: layer)
    with _scope(how):
        inputs = hidden = layers.Input((WIDTH,))
        for name in NAMES:
            hidden = layers.Add()(
                [hidden, make(_dense_block(name, dropout, statistics, regularizer))(hidden)]
            )
        return keras.Model(inputs, layers.Dense(1)(hidden))


def sequence_model(how: str, dropout: bool = True) -> keras.Model:
    """A recurrent network with attention, whose inputs have a mask."""
    rate = 0.3 if dropout else 0.0
    make = BLOCKS.get(how, lambda layer: layer)
    with _scope(how):
        inputs = layers.Input((STEPS,), dtype="int32")
        hidden = make(layers.Embedding(9, WIDTH, mask_zero=True, name="table"))(inputs)
        lstm = layers.LSTM(
            WIDTH, return_sequences=True, dropout=rate, recurrent_dropout=rate, name="block_0"
        )
        hidden = make(lstm)(hidden)
        attention = layers.MultiHeadAttention(2, 3, dropout=rate, name="block_1")
        hidden = make(attention)(hidden, hidden, use_causal_mask=True)
        hidden = layers.GlobalAveragePooling1D()(hidden)
        return keras.Model(inputs, layers.Dense(1)(hidden))


def losses_model(how: str, dropout: bool = True) -> keras.Model:
    """The residual network without the statistics, which are each replica's."""
    return dense_model(how, dropout, statistics=False)


def sums_model(how: str, dropout: bool = True) -> keras.Model:
    """The same, equal on any ranks: Keras divides what regularizes outputs by a rank's rows."""
    return dense_model(how, dropout, False, keras.regularizers.L2(0.01))


MODELS = {
    "dense": dense_model,
    "losses": losses_model,
    "sums": sums_model,
    "sequence": sequence_model,
}


def data(model: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and targets; the last batch is smaller."""
    rng = np.random.default_rng(3)
    targets = rng.normal(size=(ROWS, 1))
    if model == "sequence":
        return rng.integers(0, 9, size=(ROWS, STEPS)).astype("int32"), targets
    return rng.normal(size=(ROWS, WIDTH)), targets


@contextlib.contextmanager
def no_arithmetic_of_grappler() -> Iterator[None]:
    """Context manager: sums and products of graphs are computed in the order in which they are."""
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True})


def trained(
    how: str,
    model: str = "dense",
    strategy: tf.distribute.Strategy | None = None,
    dropout: bool = True,
    policy: str = "float64",
    accumulation: int | None = None,
    **options: bool,
) -> dict:
    """Trains for two epochs.

    Args:
        how: How blocks are made: of `BLOCKS` or `SCOPES`; "none" for no blocks.
        model: Name in `MODELS`.
        strategy: Strategy in whose scope the model is made.
        dropout: Whether the model draws random numbers, other ones on each replica.
        policy: Dtype policy.
        accumulation: The optimizer's `gradient_accumulation_steps`.
        **options: Arguments of `compile`.

    Returns:
        Weights, slots and losses.
    """
    tfdml.remat(lambda value: value)  # From now on, `keras.remat` is ours.
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(11)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            built = MODELS[model](how, dropout)
            optimizer = keras.optimizers.Adam(
                0.02, weight_decay=0.01, gradient_accumulation_steps=accumulation
            )
            if policy == "mixed_float16":
                optimizer = tfdml.mixed_precision.LossScaleOptimizer(optimizer, 2.0**10)
            built.compile(optimizer, "mse", **{"jit_compile": False, **options})
        x, y = data(model)
        history = built.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])
    return {
        "weights": [v.numpy() for v in built.weights],
        "slots": [np.asarray(v) for v in built.optimizer.variables],
        "loss": history.history["loss"],
    }


def eagerly(how: str, model: str, dropout: bool = True) -> dict:
    """Trains on the ranks of a job, without graphs."""
    return on_replicas(how, model, dropout, run_eagerly=True)


def on_replicas(how: str, model: str, dropout: bool = True, **options) -> dict:
    """Trains on the ranks of a job."""
    return trained(how, model, rank_job.strategy(), dropout, **options)


def asynchronously(how: str, model: str) -> dict:
    """Trains on asynchronous parameter servers, whose chief this is."""
    return trained(how, model, tfdml.ParameterServerStrategy())
