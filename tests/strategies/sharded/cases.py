"""Cases run by ranks: trainings with and without divided optimizer state, and their results."""

import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdml
from tests.harness import rank_job
from tests.strategies.cases import CLASSES
from tfdml.callbacks.checkpoint.directory_use import leave_directory

WORDS, LENGTH = 64, 5


class Unknown(keras.optimizers.Optimizer):
    """An optimizer that tfdml does not know: it divides by the largest gradient of a variable."""

    def __init__(self, learning_rate: float = 0.01, **options: Any):
        super().__init__(learning_rate=learning_rate, **options)

    def build(self, variables):
        """Makes the slots one by one, as custom optimizers do."""
        super().build(variables)
        self.momentums = []
        for variable in variables:
            self.momentums.append(self.add_variable_from_reference(variable, "momentum"))

    def update_step(self, gradient, variable, learning_rate):
        """Updates a variable."""
        gradient = keras.ops.convert_to_tensor(gradient)
        slot = self.momentums[self._get_variable_index(variable)]
        scaled = gradient / (keras.ops.max(keras.ops.abs(gradient)) + 1e-3)
        self.assign(slot, 0.9 * slot.value + scaled)
        self.assign_sub(variable, keras.ops.cast(learning_rate, variable.dtype) * slot.value)


OPTIMIZERS = {
    "sgd": lambda **o: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, **o),
    "plain_sgd": lambda **o: keras.optimizers.SGD(0.1, **o),
    "adam": lambda **o: keras.optimizers.Adam(0.01, **o),
    "amsgrad": lambda **o: keras.optimizers.Adam(0.01, amsgrad=True, **o),
    "adamw": lambda **o: keras.optimizers.AdamW(0.01, weight_decay=0.02, **o),
    "adagrad": lambda **o: keras.optimizers.Adagrad(0.1, **o),
    "adadelta": lambda **o: keras.optimizers.Adadelta(1.0, **o),
    "adamax": lambda **o: keras.optimizers.Adamax(0.01, **o),
    "nadam": lambda **o: keras.optimizers.Nadam(0.01, **o),
    "ftrl": lambda **o: keras.optimizers.Ftrl(0.1, l1_regularization_strength=1e-4, **o),
    "lion": lambda **o: keras.optimizers.Lion(0.001, **o),
    "rmsprop": lambda **o: keras.optimizers.RMSprop(0.01, momentum=0.5, **o),
    "centered": lambda **o: keras.optimizers.RMSprop(0.01, centered=True, **o),
    "adafactor": lambda **o: keras.optimizers.Adafactor(0.01, **o),
    "muon": lambda **o: keras.optimizers.Muon(0.01, **o),
    "keras_lamb": lambda **o: keras.optimizers.Lamb(0.01, **o),
    "lars": lambda **o: tfdml.optimizers.LARS(0.5, **o),
    "lamb": lambda **o: tfdml.optimizers.LAMB(0.01, **o),
    "row_wise_adagrad": lambda **o: tfdml.optimizers.RowWiseAdagrad(0.1, **o),
    "lazy_adam": lambda **o: tfdml.optimizers.LazyAdam(0.01, **o),
    "unknown": Unknown,
    "scheduled": lambda **o: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.5), **o
    ),
}


# Arguments of `trained` for ways to train.
WAYS = {
    "devices": {"devices": 2},
    "jit": {"compile_options": {"jit_compile": True}},
    "steps_per_execution": {"compile_options": {"steps_per_execution": 3}},
    "eager": {"compile_options": {"run_eagerly": True}},
    "half": {"dtype": "mixed_float16"},
    "scaled": {"scaled": True},
    "constraint": {"constraint": 0.5},
    "frozen": {"frozen": True},
}


def data(rows: int = 70) -> tuple[np.ndarray, np.ndarray]:
    """Returns texts of word numbers, and their classes."""
    rng = np.random.default_rng(3)
    x = rng.integers(0, WORDS, (rows, LENGTH))
    return x, x[:, 0] % CLASSES


def make_model(constraint: Any = None, width: int = 33) -> keras.Model:
    """A model with a table, rows that cannot be dealt evenly, and small variables."""
    return keras.Sequential(
        [
            layers.Input((LENGTH,), dtype="int64"),
            layers.Embedding(WORDS, 12),
            layers.Conv1D(18, 3, activation="tanh"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(width, activation="tanh", kernel_constraint=constraint),
            layers.Dropout(0.2, seed=5),
            layers.Dense(CLASSES),
        ]
    )


def strategy(sharded: bool, devices: int = 1, **options: Any):
    """Returns the job's strategy, with or without sharding."""
    if sharded:
        options["sharding"] = tfdml.Sharding(optimizer_state=True)
    return rank_job.strategy(devices, **options)


def compiled(
    made: Any,
    optimizer: Any,
    constraint: Any = None,
    width: int = 33,
    frozen: bool = False,
    **options: Any,
) -> keras.Model:
    """Returns a compiled model with weights that are the same in each job."""
    with made.scope():
        keras.utils.set_random_seed(11)
        model = make_model(constraint, width)
        model.layers[0].trainable = not frozen
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"], **options)
    return model


class TwoOptimizers(keras.Model):
    """A model whose table has an optimizer of its own."""

    def __init__(self, inner: keras.Model, table_optimizer: keras.Optimizer):
        super().__init__()
        self.inner, self.table_optimizer = inner, table_optimizer
        table_optimizer.build(inner.trainable_variables[:1])

    def call(self, x, training=False):
        """Calls the model inside."""
        return self.inner(x, training=training)

    def train_step(self, batch):
        """Updates the table and the other variables by an optimizer each."""
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.inner.trainable_variables)
        table, *others = self.inner.trainable_variables
        self.table_optimizer.apply(gradients[:1], [table])
        self.optimizer.apply(gradients[1:], others)
        return {"loss": loss}


def trained_by_two(sharded: bool, dtype: str = "float32") -> dict[str, Any]:
    """Trains with two optimizers; returns `outcome`, with the slots of both."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        return _trained_by_two(strategy(sharded))
    finally:
        keras.config.set_dtype_policy(before)


def _trained_by_two(made: Any) -> dict[str, Any]:
    with made.scope():
        keras.utils.set_random_seed(11)
        inner = make_model()
        model = TwoOptimizers(inner, keras.optimizers.Adagrad(0.1))
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model.optimizer.build(inner.trainable_variables[1:])
    x, y = data()
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    result = outcome(model, history)
    store: dict[str, np.ndarray] = {}
    model.table_optimizer.save_own_variables(store)
    result["slots"] += [np.asarray(store[str(i)]) for i in range(len(store))]
    return result


def slots_of(model: keras.Model) -> list[np.ndarray]:
    """Returns all of an optimizer's variables whole; all ranks call this."""
    store: dict[str, np.ndarray] = {}
    model.optimizer.save_own_variables(store)
    return [np.asarray(store[str(i)]) for i in range(len(store))]


def outcome(model: keras.Model, history: keras.callbacks.History) -> dict[str, Any]:
    """Returns what must not depend on sharding, and the bytes of this rank's slots."""
    return {
        "weights": [v.numpy() for v in model.weights],
        "slots": slots_of(model),
        "history": {k: np.array(v) for k, v in history.history.items()},
        "bytes": sum(v.numpy().nbytes for v in model.optimizer.variables),
    }


def trained(
    name: str,
    sharded: bool,
    optimizer_options: dict | None = None,
    dtype: str = "float32",
    devices: int = 1,
    constraint: float | None = None,
    compile_options: dict | None = None,
    scaled: bool = False,
    strategy_options: dict | None = None,
    frozen: bool = False,
) -> dict[str, Any]:
    """Trains for two epochs; returns `outcome`.

    With LARS and LAMB, the largest matrix is so large that it is cut.
    """
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        made = strategy(sharded, devices, **(strategy_options or {}))

        def optimizer() -> keras.Optimizer:
            inner = OPTIMIZERS[name](**(optimizer_options or {}))
            return keras.optimizers.LossScaleOptimizer(inner, 64.0) if scaled else inner

        limit = None if constraint is None else keras.constraints.MaxNorm(constraint)
        width = 330 if name in ("lars", "lamb") else 33
        model = compiled(made, optimizer, limit, width, frozen, **(compile_options or {}))
        x, y = data()
        history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
        return outcome(model, history)
    finally:
        keras.config.set_dtype_policy(before)


def resumed(
    directory: str,
    epochs: int,
    name: str,
    sharded: bool,
    scaled: bool = False,
    strategy_options: dict | None = None,
) -> dict[str, Any]:
    """Trains up to an epoch, from the last checkpoint if there is one."""

    def optimizer() -> keras.Optimizer:
        inner = OPTIMIZERS[name]()
        return keras.optimizers.LossScaleOptimizer(inner, 64.0) if scaled else inner

    model = compiled(strategy(sharded, **(strategy_options or {})), optimizer)
    x, y = data()
    callbacks = [tfdml.callbacks.FaultTolerantCheckpoint(directory)]
    history = model.fit(
        x, y, batch_size=16, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks
    )
    # The next job is another program.
    leave_directory(directory)
    return outcome(model, history)


def saved(path: str, name: str, sharded: bool, by_callback: bool) -> dict[str, Any]:
    """Trains for an epoch, and saves the model with its optimizer."""
    model = compiled(strategy(sharded), OPTIMIZERS[name])
    x, y = data()
    callbacks = [keras.callbacks.ModelCheckpoint(path)] if by_callback else []
    history = model.fit(
        x, y, batch_size=16, epochs=1, verbose=0, shuffle=False, callbacks=callbacks
    )
    if not by_callback:
        model.save(path)
    return outcome(model, history)


def loaded(path: str, sharded: bool) -> dict[str, Any]:
    """Loads a model, and trains it for another epoch."""
    with strategy(sharded).scope():
        model = keras.models.load_model(path, custom_objects={"Unknown": Unknown})
    before = slots_of(model)
    x, y = data()
    history = model.fit(x, y, batch_size=16, epochs=1, verbose=0, shuffle=False)
    return {**outcome(model, history), "before": before}


def backed_up(directory: str, name: str, sharded: bool, epochs: int) -> dict[str, Any]:
    """Trains with `BackupAndRestore`, which saves the weights and slots after each epoch."""
    model = compiled(strategy(sharded), OPTIMIZERS[name])
    x, y = data()
    backup = keras.callbacks.BackupAndRestore(directory, delete_checkpoint=False)
    history = model.fit(
        x, y, batch_size=16, epochs=epochs, verbose=0, shuffle=False, callbacks=[backup]
    )
    return outcome(model, history)


def error_of(what: str) -> str:
    """Returns the message of what is refused."""
    made = strategy(True)
    x, y = data()
    try:
        if what == "h5":
            model = compiled(made, OPTIMIZERS["adam"])
            model.fit(x, y, verbose=0)
            with tempfile.TemporaryDirectory() as directory:
                model.save(f"{directory}/model.h5")
        elif what == "built_elsewhere":
            optimizer = keras.optimizers.Adam()
            optimizer.build(make_model().trainable_variables)
            compiled(made, lambda: optimizer).fit(x, y, verbose=0)
        elif what == "swap":
            model = compiled(made, lambda: OPTIMIZERS["adam"](use_ema=True))
            model.fit(x, y, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()])
        elif what == "idle_rank":
            model = compiled(made, OPTIMIZERS["unknown"])
            model.optimizer.build(model.trainable_variables)
            table = model.trainable_variables[0]
            made.run(lambda: model.optimizer.apply([tf.ones(table.shape)], [table]))
        elif what == "distribution":
            with made.scope():
                keras.distribution.set_distribution(
                    keras.distribution.DataParallel(devices=["cpu:0"])
                )
    except ValueError as error:
        return str(error)
    return ""
