"""Cases run by ranks: training, saving, adapting, quantising and distilling architectures."""

import contextlib
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.harness import rank_job
from tests.recipes import cases as recipes
from tests.strategies.architectures.models import (
    ARCHITECTURES,
    CLASSES,
    ROWS,
    WIDTH,
    Task,
    TokensAndPositions,
    classification,
)
from tests.strategies.cases import outcome, seed_ranks_apart

BATCH = 8  # Of 22 rows the last batch has 6: 3 and 3, or 2, 2 and 2; the others have 3, 3 and 2.


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Computes in float64, without the graph optimizations, which take longer than all steps."""
    keras.backend.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({**before, "disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({**before, "disable_meta_optimizer": False})


ADAMW = {
    "learning_rate": 0.01,
    "weight_decay": 0.01,
    "global_clipnorm": 0.1,  # The gradients of all architectures have larger norms.
    "epsilon": 1e-6,  # MobileNet's norms are 1,000 times as large: clipped gradients are small.
}


def _evaluated(task: Task) -> dict:
    logs = task.model.evaluate(
        task.x, task.y, sample_weight=task.weights, batch_size=BATCH, verbose=0, return_dict=True
    )
    return {"evaluate": logs, "predict": task.model.predict(task.x, batch_size=BATCH, verbose=0)}


def _fitted(task: Task, epochs: int) -> keras.callbacks.History:
    return task.model.fit(
        task.x,
        task.y,
        sample_weight=task.weights,
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
    )


def trained(task: Task, epochs: int = 2) -> dict:
    """Fits, evaluates and predicts; returns what must be the same for any number of replicas."""
    found = outcome(task.model, _fitted(task, epochs))
    slots = [v.numpy() for v in task.model.optimizer.variables]
    return {**found, "optimizer": slots, **_evaluated(task)}


def _task(architecture: str) -> Task:
    return ARCHITECTURES[architecture](np.random.default_rng(0))


def _optimizer(name: str, options: dict | None) -> keras.Optimizer:
    """Creates an optimizer; by default AdamW with all gradients clipped by their global norm."""
    if name != "MultiOptimizer":
        return getattr(keras.optimizers, name)(**(options or ADAMW))
    tables = {".*/embeddings": keras.optimizers.Adagrad(0.1, global_clipnorm=0.1)}
    of_variables = keras.optimizers.OptimizerMap(keras.optimizers.AdamW(**ADAMW), tables)
    return keras.optimizers.MultiOptimizer(of_variables)


def _compiled(architecture: str, optimizer: str = "AdamW", options: dict | None = None) -> Task:
    """Builds and compiles an architecture; called in a strategy's scope."""
    seed_ranks_apart()
    task = _task(architecture)
    task.model.compile(_optimizer(optimizer, options), **task.compiled)
    return task


@in_float64()
def train(architecture: str, optimizer: str = "AdamW", options: dict | None = None) -> dict:
    """Trains an architecture.

    Args:
        architecture: One of `ARCHITECTURES`.
        optimizer: Keras's name of the optimizer.
        options: Arguments of its constructor.
    """
    with rank_job.strategy().scope():
        task = _compiled(architecture, optimizer, options)
    return trained(task)


@in_float64()
def save_and_go_on(architecture: str, optimizer: str, options: dict | None, path: str) -> dict:
    """Trains for an epoch, saves the model on rank 0, and trains for another."""
    with rank_job.strategy().scope():
        task = _compiled(architecture, optimizer, options)
    _fitted(task, epochs=1)
    if rank_job.rank() == 0:
        task.model.save(path)
    return trained(task, epochs=1)


@in_float64()
def load_and_go_on(architecture: str, path: str, in_scope: bool) -> dict:
    """Loads a model, in the scope of a strategy or in plain Keras, and trains for an epoch."""
    with rank_job.strategy().scope() if in_scope else contextlib.nullcontext():
        task = _task(architecture)
        task.model = keras.models.load_model(path)
    return trained(task, epochs=1)


class _Batches(keras.utils.PyDataset):
    """Yields batches of 8 and 7 rows, which rank 0 sends to the others."""

    def __init__(self, x: np.ndarray, y: np.ndarray):
        super().__init__()
        self.data = x, y

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return tuple(part[BATCH * index :][:BATCH] for part in self.data)


@in_float64()
def train_on_unequal_shares(data: str) -> dict:
    """Trains on 8 rows and on 7: with two replicas, the first one's share has 4 rows both times.

    Synchronised `BatchNormalization` counts rows by an exchange. Keras exchanges the gradient of
    the count too, unless TensorFlow knows the number of rows statically.

    Args:
        data: Form in which the rows are passed.
    """
    x, y = np.random.default_rng(0).normal(size=(15, 6)), np.arange(15) % CLASSES
    with rank_job.strategy().scope():
        seed_ranks_apart()
        model = keras.Sequential(
            [
                layers.Input((6,)),
                layers.Dense(WIDTH),
                layers.BatchNormalization(synchronized=True),
                layers.Dense(CLASSES),
            ]
        )
        model.compile(keras.optimizers.AdamW(**ADAMW), **classification())
    if data == "arrays":
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    elif data == "of-unknown-length":
        known = tf.data.Dataset.from_tensor_slices((x, y))
        model.fit(known.filter(lambda *row: True).batch(8), verbose=0)
    elif data == "sent-by-rank-0":
        model.fit(_Batches(x, y), verbose=0)
    elif data == "of-two-calls":
        model.fit(x[:8], y[:8], batch_size=8, shuffle=False, verbose=0)
        model.fit(x[8:], y[8:], batch_size=7, shuffle=False, verbose=0)
    elif data == "of-two-calls-on-batches":
        model.train_on_batch(x[:8], y[:8])
        model.train_on_batch(x[8:], y[8:])
    return outcome(model)


@in_float64()
def run_recipe() -> str:
    """Returns the output of the recipe that synchronises a model of `keras.applications`."""
    return recipes.run("synchronized_batch_norm", {})


def _adapted(layer: layers.Layer) -> None:
    """Enables LoRA where KerasHub does, and for embeddings and dense layers."""
    if isinstance(layer, TokensAndPositions):
        layer.tokens.enable_lora(2)
    elif isinstance(layer, layers.MultiHeadAttention):
        layer.query_dense.enable_lora(2)
        layer.value_dense.enable_lora(2)
    elif isinstance(layer, layers.Dense | layers.Embedding):
        layer.enable_lora(2)


@in_float64()
def adapt(architecture: str, quantized: bool) -> dict:
    """Trains LoRA weights of a model in float64 or quantised to int8.

    LoRA weights are float32 in any policy. Keras cannot compute a norm over both dtypes, so
    gradients are not clipped here.
    """
    with rank_job.strategy().scope():
        task = _compiled(architecture)
        if quantized:
            task.model.quantize("int8")
        for layer in task.model.layers:
            _adapted(layer)
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.01)
        task.model.compile(optimizer, **task.compiled)
    return trained(task)


@in_float64()
def quantize(architecture: str) -> dict:
    """Trains, quantises to int8, evaluates and predicts.

    In float32, rounding errors would decide the 8-bit value of some numbers.
    """
    with rank_job.strategy().scope():
        task = _compiled(architecture)
        _fitted(task, epochs=1)
        task.model.quantize("int8")
    return {**outcome(task.model), **_evaluated(task)}


@in_float64()
def distill(losses: str) -> dict:
    """Trains a student with its labels, a teacher's logits, and a layer's output of the teacher.

    Args:
        losses: "objects" of `keras.losses`, or Keras's "default" ones, which are functions.
    """
    x, y = np.random.default_rng(0).normal(size=(ROWS, 6)), np.arange(ROWS) % CLASSES

    def network(width: int) -> keras.Model:
        inputs = layers.Input((6,))
        hidden = layers.Dense(width, activation="tanh")(inputs)
        hidden = layers.Dense(WIDTH, activation="tanh", name="hidden")(hidden)
        return keras.Model(inputs, layers.Dense(CLASSES)(hidden))

    def chosen(loss: type[keras.losses.Loss]) -> dict:
        return {"loss": loss()} if losses == "objects" else {}

    with rank_job.strategy().scope():
        seed_ranks_apart()
        distiller = keras.distillation.Distiller(
            network(2 * WIDTH),
            network(4),
            [
                keras.distillation.LogitsDistillation(2.0, **chosen(keras.losses.KLDivergence)),
                keras.distillation.FeatureDistillation(
                    teacher_layer_name="hidden",
                    student_layer_name="hidden",
                    **chosen(keras.losses.MeanSquaredError),
                ),
            ],
            [1.0, 0.5],
        )
        distiller.compile(keras.optimizers.AdamW(**ADAMW), **classification())
    return trained(Task(distiller, x, y, {}))
