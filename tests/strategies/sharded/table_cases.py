"""Cases run by ranks: trainings with tables that are whole, and with tables dealt to the ranks."""

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdml
from tests.harness import rank_job
from tests.strategies.sharded.cases import OPTIMIZERS
from tfdml.callbacks.checkpoint.directory_use import leave_directory, use_directory
from tfdml.checkpointing import Files

USERS, ITEMS, LENGTH = 61, 40, 4
DEALT = tfdml.Sharding(optimizer_state=False, embeddings=True, min_embedding_bytes=0)
BOTH = tfdml.Sharding(embeddings=True, min_embedding_bytes=0)
SHARDING = {
    "whole": None,
    "dealt": DEALT,
    "both": BOTH,
    "bfloat16": dataclasses.replace(DEALT, row_codec="bfloat16"),
    "int8": dataclasses.replace(DEALT, row_codec="int8"),
}


def data(rows: int = 70) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns ids of users and lists of items, frequent ones often, and ratings."""
    rng = np.random.default_rng(3)
    users = np.minimum(rng.zipf(1.3, rows), USERS) - 1
    items = np.minimum(rng.zipf(1.3, (rows, LENGTH)), ITEMS) - 1
    return {"user": users, "items": items}, np.sin(users + items.sum(1)).astype("float32")


def make_model(
    shared: bool = False,
    mask: bool = False,
    remat: bool = False,
    rows: int = ITEMS,
    **table: Any,
) -> keras.Model:
    """Returns a model with a table of users, and one of items, of so many rows."""
    user = layers.Input((), dtype="int64", name="user")
    items = layers.Input((LENGTH,), dtype="int64", name="items")
    of_users = layers.Embedding(USERS, 6, name="users", **table)
    of_items = of_users if shared else layers.Embedding(rows, 6, mask_zero=mask, name="of_items")
    look_up = tfdml.remat(of_items) if remat else of_items
    mean = layers.GlobalAveragePooling1D()(look_up(items if rows == ITEMS else items % rows))
    x = layers.Concatenate()([of_users(user), mean])
    x = layers.Dense(8, activation="tanh")(x)
    return keras.Model([user, items], layers.Dense(1)(x))


class Twice(keras.Model):
    """A model that updates its weights twice in a step, the second time by what it then gives."""

    def train_step(self, data):
        """Makes two updates."""
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Chained(keras.Model):
    """A model whose second table is looked up by ids that rows of the first one give."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Embedding(USERS, 6)
        self.second = layers.Embedding(ITEMS, 6)
        self.top = layers.Dense(1)

    def call(self, x):
        """Looks up in both tables, and in the first one again."""
        rows = self.first(x["user"])
        ids = tf.cast(tf.abs(rows[:, 0]) * 1000.0, tf.int64) % ITEMS
        more = self.first(x["items"])
        return self.top(keras.ops.concatenate([rows, self.second(ids), more[:, 0]], 1))


def exchanges(kind: str, sharding: str = "dealt") -> dict[str, tf.DType]:
    """Returns the exchanges of rows in the graph of a train step: their names and dtypes."""
    made = rank_job.strategy(sharding=SHARDING[sharding])
    model = compiled(made, OPTIMIZERS["adam"], kind=kind)
    collective, dtypes = type(made.extended.collective), {}
    exchange = collective.all_to_all_ragged

    def noting(self, tensor: tf.Tensor, counts: tf.Tensor, name: str) -> Any:
        dtypes[name] = tensor.dtype
        return exchange(self, tensor, counts, name)

    collective.all_to_all_ragged = noting
    x, y = data(16)
    try:
        model.fit(x, y, batch_size=16, verbose=0)
    finally:
        collective.all_to_all_ragged = exchange
    return dtypes


def compiled(
    made: Any,
    optimizer: Any,
    scaled: bool = False,
    options: dict | None = None,
    kind: str = "plain",
    **model: Any,
) -> keras.Model:
    """Returns a compiled model with weights that are the same in each job."""
    with made.scope():
        # Rank 0's seed counts.
        keras.utils.set_random_seed(11 + rank_job.rank())
        built = Chained() if kind == "chained" else make_model(**model)
        if kind == "twice":
            built = Twice(built.inputs, built.outputs)
        optimizer = optimizer()
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 64.0)
        built.compile(optimizer, "mse", metrics=["mae"], **(options or {}))
    return built


def whole_variables(model: keras.Model) -> dict[str, list[np.ndarray]]:
    """Returns all weights and slots as a whole; all ranks call this."""
    store: dict[str, np.ndarray] = {}
    weights = []
    for layer in model._flatten_layers(include_self=False):
        own: dict[str, np.ndarray] = {}
        layer.save_own_variables(own)
        weights += [np.asarray(own[str(i)]) for i in range(len(own))]
    model.optimizer.save_own_variables(store)
    return {"weights": weights, "slots": [np.asarray(store[str(i)]) for i in range(len(store))]}


def outcome(model: keras.Model, history: keras.callbacks.History) -> dict[str, Any]:
    """Returns what must not depend on sharding, and the bytes of this rank's tables and slots."""
    x, y = data()
    evaluated = model.evaluate(x, y, batch_size=16, verbose=0)
    return {
        **whole_variables(model),
        "history": {k: np.array(v) for k, v in history.history.items()},
        "evaluated": np.array(evaluated),
        "predicted": model.predict(x, batch_size=16, verbose=0),
        "bytes": sum(v.numpy().nbytes for v in [*model.variables, *model.optimizer.variables]),
    }


def trained(
    sharding: str,
    name: str = "adam",
    optimizer_options: dict | None = None,
    dtype: str = "float32",
    devices: int = 1,
    scaled: bool = False,
    samples: int = 70,
    options: dict | None = None,
    strategy_options: dict | None = None,
    **model: Any,
) -> dict[str, Any]:
    """Trains for two epochs; returns `outcome`."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    # In float64 losses are, too.
    keras.config.set_floatx("float64" if dtype == "float64" else "float32")
    try:
        made = rank_job.strategy(devices, sharding=SHARDING[sharding], **(strategy_options or {}))

        def optimizer() -> keras.Optimizer:
            return OPTIMIZERS[name](**(optimizer_options or {}))

        built = compiled(made, optimizer, scaled, options, **model)
        x, y = data(samples)
        history = built.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
        return outcome(built, history)
    finally:
        keras.config.set_dtype_policy(before)
        keras.config.set_floatx("float32")


def own_loop(sharding: str) -> list[np.ndarray]:
    """Trains in a loop of its own, each replica on all rows; returns the weights."""
    made = rank_job.strategy(sharding=SHARDING[sharding])
    model = compiled(made, OPTIMIZERS["plain_sgd"])
    x, y = data(16)
    x = {name: tf.constant(ids) for name, ids in x.items()}

    @tf.function
    def step() -> None:
        def replica() -> None:
            with tf.GradientTape() as tape:
                errors = model(x, training=True)[:, 0] - y
                loss = tf.reduce_mean(tf.square(errors)) / made.num_replicas_in_sync
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)

        made.run(replica)

    with made.scope():
        model.optimizer.build(model.trainable_variables)
    for _ in range(3):
        step()
    return whole_variables(model)["weights"]


def overflowing(sharding: str = "dealt") -> tuple[float, int]:
    """Trains for a step whose gradient overflows in a row that one rank owns.

    Returns:
        The loss scale afterwards, and the number of updates.
    """
    with rank_job.strategy(sharding=SHARDING[sharding]).scope():
        keras.utils.set_random_seed(11)
        model = make_model()
        for layer in model.layers:
            layer.trainable = isinstance(layer, layers.Embedding)
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 64.0), "mse")
    # The gradient is infinite for the first row of the batch: for rows of rank 0 alone.
    x = {"user": np.array([2, 3]), "items": np.zeros((2, LENGTH), int)}
    model.fit(x, np.array([np.inf, 0.0], "float32"), batch_size=2, verbose=0)
    inner = model.optimizer.inner_optimizer
    return float(model.optimizer.dynamic_scale.numpy()), int(inner.iterations.numpy())


def resumed(
    directory: str,
    epochs: int,
    sharding: str,
    name: str = "adam",
    optimizer_options: dict | None = None,
) -> dict[str, Any]:
    """Trains up to an epoch, from the last checkpoint if there is one."""

    def optimizer() -> keras.Optimizer:
        return OPTIMIZERS[name](**(optimizer_options or {}))

    model = compiled(rank_job.strategy(sharding=SHARDING[sharding]), optimizer)
    x, y = data()
    callbacks = [tfdml.callbacks.FaultTolerantCheckpoint(directory)]
    history = model.fit(
        x, y, batch_size=16, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks
    )
    # The next job is another program.
    leave_directory(directory)
    return outcome(model, history)


class RecordedReads(Files):
    """Local files, and which bytes of them have been read: path, begin, end."""

    def __init__(self):
        super().__init__()
        self.reads: list[tuple[str, int, int | None]] = []

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        self.reads.append((path, begin, end))
        return super().read(path, begin, end)


def read_while_resuming(directory: str, sharding: str) -> list[tuple[str, int, int | None]]:
    """Resumes a training that has finished; returns what this rank has read."""
    files = RecordedReads()
    use_directory(directory).files = files
    resumed(directory, 1, sharding)
    return files.reads


def saved(path: str, sharding: str, by_callback: bool) -> dict[str, Any]:
    """Trains for an epoch, and saves the model with its optimizer."""
    model = compiled(rank_job.strategy(sharding=SHARDING[sharding]), OPTIMIZERS["adam"])
    x, y = data()
    callbacks = [keras.callbacks.ModelCheckpoint(path)] if by_callback else []
    history = model.fit(
        x, y, batch_size=16, epochs=1, verbose=0, shuffle=False, callbacks=callbacks
    )
    if not by_callback:
        model.save(path)
    return outcome(model, history)


def loaded(path: str, sharding: str) -> dict[str, Any]:
    """Loads a model, and trains it for another epoch."""
    with rank_job.strategy(sharding=SHARDING[sharding]).scope():
        model = keras.models.load_model(path)
    before = whole_variables(model)
    x, y = data()
    history = model.fit(x, y, batch_size=16, epochs=1, verbose=0, shuffle=False)
    return {**outcome(model, history), "before": before}


def bytes_of_tables() -> str:
    """Returns how many bytes of tables this rank keeps."""
    model = compiled(rank_job.strategy(sharding=DEALT), OPTIMIZERS["adam"])
    tables = [v for v in model.variables if "embeddings" in v.path]
    return str(sum(table.numpy().nbytes for table in tables))


def assigned() -> str:
    """Loads a whole table; returns this rank's first row, which is that of its rank."""
    model = compiled(rank_job.strategy(sharding=DEALT), OPTIMIZERS["adam"])
    layer = model.get_layer("users")
    layer.load_own_variables({"0": np.arange(USERS * 6.0).reshape(USERS, 6)})
    return str(layer.embeddings.numpy()[0])


def loaded_by_rank_0(path: str) -> str:
    """Loads weights on rank 0 alone; returns the message of `fit`."""
    model = compiled(rank_job.strategy(sharding=DEALT), OPTIMIZERS["adam"])
    if rank_job.rank() == 0:
        model.load_weights(path)
    x, y = data()
    try:
        model.fit(x, y, verbose=0)
    except RuntimeError as error:
        return str(error)
    return ""


def error_of(what: str) -> str:
    """Returns the message of what is refused."""
    made = rank_job.strategy(sharding=DEALT)
    x, y = data()
    try:
        if what in ("regularizer", "constraint"):
            values = {"regularizer": "l2", "constraint": "non_neg"}
            with made.scope():
                make_model(**{f"embeddings_{what}": values[what]})
        elif what == "optimizer":
            compiled(made, OPTIMIZERS["keras_lamb"]).fit(x, y, verbose=0)
        elif what == "tied":
            with made.scope():
                keras.utils.set_random_seed(1)
                model = Tied()
                model.compile("adam", "mse")
            model.fit(x["items"], np.zeros((70, LENGTH, ITEMS)), verbose=0)
        elif what == "id":
            x["items"][3, 2] = ITEMS
            compiled(made, OPTIMIZERS["adam"]).fit(x, y, batch_size=70, shuffle=False, verbose=0)
        elif what == "outside":
            model = compiled(made, OPTIMIZERS["adam"])
            model.optimizer.build(model.trainable_variables)
            tables = [v for v in model.trainable_variables if "embeddings" in v.path]
            model.optimizer.apply([tf.ones(t.shape) for t in tables], tables)
        elif what == "lora":
            with made.scope():
                make_model().get_layer("users").enable_lora(2)
        elif what == "quantize":
            with made.scope():
                make_model().get_layer("users").quantize("int8")
        elif what == "remat":
            compiled(made, OPTIMIZERS["adam"], remat=True).fit(x, y, verbose=0)
        elif what == "h5":
            compiled(made, OPTIMIZERS["adam"]).save("model.h5")
    except (ValueError, tf.errors.OpError) as error:
        return str(error)
    return ""


class Tied(keras.Model):
    """A model whose output layer has the table's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(ITEMS, 6)

    def call(self, items):
        """Looks up, and returns a score of each item."""
        rows = self.table(items)
        return keras.ops.matmul(rows, keras.ops.transpose(self.table.embeddings))


def predicted(weights: list[np.ndarray]) -> np.ndarray:
    """Returns the predictions of a model with whole tables, and these weights."""
    model = make_model()
    model.set_weights(weights)
    return model.predict(data()[0], batch_size=16, verbose=0)


def scaled_after_a_bare_optimizer() -> dict[str, Any]:
    """Trains with a loss scale, in a process that has made an object of Keras's base class."""
    with rank_job.strategy(sharding=DEALT).scope():
        keras.optimizers.Optimizer(0.1)
    return trained("dealt", scaled=True)
