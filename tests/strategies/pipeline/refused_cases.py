"""Cases of pipelines that are refused or warned about, and of models that may be changed."""

import warnings
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.strategies.pipeline import cases

X, Y = np.ones((24, 6), "float32"), np.arange(24) % cases.CLASSES


class WithoutGraph(keras.Model):
    """A subclassed model."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(cases.CLASSES, "softmax")

    def call(self, x):
        """Returns the classes."""
        return self.dense(x)


class OwnTrainStep(keras.Sequential):
    """A model with its own step."""

    def train_step(self, data):
        """Takes Keras's step."""
        return super().train_step(data)


def network(*more: keras.Layer, kind: type = keras.Sequential) -> keras.Model:
    """Returns a model with two dense layers, and others between them."""
    names = iter(["first", "last"])
    dense = [layers.Dense(n, name=next(names)) for n in (8, cases.CLASSES)]
    return kind([layers.Input((6,)), dense[0], *more, dense[1]])


def masked_tokens() -> keras.Model:
    """Returns a model whose output has a mask."""
    tokens = layers.Input((6,))
    rows = layers.Embedding(9, 4, mask_zero=True, name="words")(tokens)
    return keras.Model(tokens, layers.TimeDistributed(layers.Dense(cases.CLASSES))(rows))


MODELS = {
    "subclassed": WithoutGraph,
    "own_train_step": lambda: network(kind=OwnTrainStep),
    "dense": network,
    "one_layer": lambda: keras.Sequential([layers.Input((6,)), layers.Dense(cases.CLASSES)]),
    "masked": masked_tokens,
    "normalized": lambda: network(layers.BatchNormalization(name="norm")),
    "synchronized": lambda: network(layers.BatchNormalization(synchronized=True, name="norm")),
}


def error(
    model: str,
    batch_size: int = 12,
    weighted: bool = False,
    reduction: str = "sum_over_batch_size",
    **options: Any,
) -> str:
    """Returns the message with which `fit` refuses a model.

    Args:
        model: Name in `MODELS`.
        batch_size: Rows of a batch.
        weighted: Whether rows have weights.
        reduction: The loss's reduction.
        **options: Of the strategy.
    """
    y = np.repeat(Y[:, np.newaxis], 6, 1) if model == "masked" else Y
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    with cases.strategy(options.pop("groups", cases.ONE_GROUP), **options).scope():
        made = MODELS[model]()
        made.compile("sgd", loss)
    weights = np.ones(24) if weighted else None
    try:
        made.fit(X, y, batch_size=batch_size, verbose=0, sample_weight=weights)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def warned() -> list[str]:
    """Returns the warnings of two trainings of a model with batch normalization."""
    with cases.strategy(cases.ONE_GROUP).scope():
        made = MODELS["normalized"]()
        made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        made.fit(X, Y, batch_size=12, verbose=0)
        made.evaluate(X, Y, batch_size=12, verbose=0)
        made.fit(X, Y, batch_size=12, verbose=0)
    return [str(w.message) for w in found if "microbatch" in str(w.message)]


@keras.saving.register_keras_serializable("tfdml-tests")
class OwnLoss(keras.Model):
    """A functional model with its own loss and its own metrics."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """Returns Keras's loss, and a penalty of the predictions."""
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + keras.losses.MeanSquaredError()(keras.ops.zeros_like(y_pred), y_pred)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        """Returns Keras's metrics, and another one."""
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**found, "constant": 2.0, "twice": 2 * found["accuracy"]}


def own_loss(in_stages: bool) -> dict[str, Any]:
    """Returns the results of a model with its own loss."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    cases.MODELS["own_loss"] = _own_loss
    if not in_stages:
        return cases.results(cases.compiled("own_loss"), "own_loss")
    with cases.strategy(cases.TWO_GROUPS).scope():
        made = cases.compiled("own_loss")
    return cases.results(made, "own_loss")


def _own_loss() -> keras.Model:
    made = cases.residual()
    return OwnLoss(made.inputs, made.outputs[0])


def both_own_losses() -> tuple[dict, dict]:
    """Returns the results of plain Keras, and those in stages."""
    return own_loss(False), own_loss(True)
