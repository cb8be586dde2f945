"""Cases run by a chief: partitioned variables."""

import contextlib
import warnings

import keras
import numpy as np
import psutil
import tensorflow as tf
from keras import layers

import tfdml.optimizers
from tests.harness import rank_job
from tests.harness.memory import peak
from tests.strategies.parameter_server.cases import _raised, classifier, dataset
from tfdml.strategies import ParameterServerStrategy

ROWS, WIDTH = 40, 4


def _strategy(partitioned: bool):
    if not partitioned:
        return rank_job.strategy()
    return ParameterServerStrategy(synchronous=True, variable_partitioner=_in_two)


def _in_two(shape, dtype):
    """Partitioner that splits variables with enough rows."""
    return [2 if shape[0] == ROWS else 1] + [1] * (shape.rank - 1)


def _model(strategy, optimizer: str = "adam") -> keras.Model:
    with strategy.scope():
        keras.utils.set_random_seed(7)
        made = {
            "adam": lambda: keras.optimizers.Adam(0.05),
            "adagrad": lambda: keras.optimizers.Adagrad(0.05),
            "clipnorm": lambda: keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.01),
            "LARS": lambda: tfdml.optimizers.LARS(0.5, weight_decay=1e-2),
            "LAMB": lambda: tfdml.optimizers.LAMB(0.05, weight_decay=1e-2),
            "RowWiseAdagrad": lambda: tfdml.optimizers.RowWiseAdagrad(0.05, weight_decay=1e-2),
            "LazyAdam": lambda: tfdml.optimizers.LazyAdam(0.05, amsgrad=True),
        }[optimizer]()
        model = keras.Sequential(
            [
                layers.Input((3,), dtype="int32"),
                layers.Embedding(ROWS, WIDTH, name="table"),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        model.compile(made, "mse", metrics=["mae"])
    return model


def _samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, ROWS, (50, 3)).astype("int32")
    return ids, (ids.sum(1, keepdims=True) % 5).astype("float32")


def _parts(model: keras.Model) -> list:
    return [v for v in model.trainable_variables if hasattr(v, "whole")]


def _result(model: keras.Model) -> dict:
    ids, _ = _samples()
    return {
        "weights": [w.numpy() for w in model.weights],
        "predict": model.predict(ids, batch_size=16, verbose=0),
    }


def recommender(optimizer: str, partitioned: bool) -> dict:
    """Trains an embedding in two partitions, or whole."""
    model = _model(_strategy(partitioned), optimizer)
    ids, target = _samples()
    history = model.fit(ids, target, batch_size=16, epochs=3, shuffle=False, verbose=0)
    parts = _parts(model)
    slots = [v for v in model.optimizer.variables if hasattr(v, "slot_of")]
    return {
        **_result(model),
        "loss": np.array(history.history["loss"]),
        "parts": len(parts),
        "slot_devices": sorted({v.value.device for v in slots}),
        "part_devices": sorted({v.value.device for v in parts}),
    }


def traces_of_updates() -> int:
    """Returns how often the chief has traced its update in steps that look up 3 to 24 rows."""
    model = _model(_strategy(True))
    ids = np.array([np.arange(48) % different for different in range(3, 25, 3)], "int32")
    ids = ids.reshape(-1, 3)
    target = np.ones((len(ids), 1), "float32")
    model.fit(ids, target, batch_size=16, shuffle=False, verbose=0)
    return len(model.train_function._updates)


def hashed(partitioned: bool) -> dict:
    """Trains a partitioned or whole table whose rows are found by hashes of int64 ids and words."""
    rng = np.random.default_rng(1)
    users = rng.integers(2**40, 2**60, (48, 1))
    words = np.array([["red"], ["green"], ["blue"]])[rng.integers(0, 3, 48)]
    with _strategy(partitioned).scope():
        keras.utils.set_random_seed(7)
        user = layers.Input((1,), dtype="int64", name="user")
        color = layers.Input((1,), dtype="string", name="color")
        rows = [layers.Hashing(ROWS, salt=n)(x) for n, x in enumerate((user, color))]
        table = layers.Embedding(ROWS, WIDTH)
        joined = layers.Concatenate()([layers.Flatten()(table(row)) for row in rows])
        model = keras.Model([user, color], layers.Dense(1)(joined))
        model.compile(keras.optimizers.Adam(0.05), "mse")
    data = tf.data.Dataset.from_tensor_slices(
        ({"user": users, "color": words}, (users % 5).astype("float32"))
    )
    history = model.fit(data.batch(16), epochs=3, verbose=0)
    return {
        "weights": [w.numpy() for w in model.weights],
        "loss": np.array(history.history["loss"]),
        "parts": len(_parts(model)),
    }


def out_of_range(method: str, partitioned: bool) -> str:
    """Returns the error of a call with an id that is not a row of the table."""
    model = _model(ParameterServerStrategy(variable_partitioner=_in_two if partitioned else None))
    ids, target = _samples()
    ids[5, 2] = ROWS + 7
    data = (ids,) if method == "predict" else (ids, target)
    try:
        getattr(model, method)(*data, batch_size=16, verbose=0)
    except tf.errors.InvalidArgumentError as error:
        return str(error)
    return "nothing was raised"


def placed_by_size() -> dict:
    """Returns layers of different sizes."""
    strategy = ParameterServerStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [layers.Input((30,)), *(layers.Dense(n) for n in (100, 90, 10, 200, 20))]
        )
    sizes = [4 * int(np.prod(v.shape)) for v in model.weights]
    return {
        "bytes": strategy.extended.bytes_on,
        "total": sum(sizes),
        "largest": max(sizes),
        "table": strategy.placement,
    }


def _state(model: keras.Model) -> dict:
    store: dict = {}
    model.optimizer.save_own_variables(store)
    return {**_result(model), "slots": [np.asarray(store[str(i)]) for i in range(len(store))]}


def stored_and_trained() -> list[int]:
    """Returns the slots in a dict that training changes after the optimizer has filled it."""
    model = _model(_strategy(True))
    ids, target = _samples()
    store: dict = {}
    model.fit(ids, target, batch_size=16, verbose=0)
    model.optimizer.save_own_variables(store)
    before = {key: np.array(value) for key, value in store.items()}
    model.fit(ids, target, batch_size=16, verbose=0)
    return [int(key) for key in store if np.any(np.asarray(store[key]) != before[key])]


def save_partitioned(directory: str, optimizer: str) -> dict:
    """Trains and saves a model whose embedding has two partitions."""
    model = _model(_strategy(True), optimizer)
    ids, target = _samples()
    model.fit(ids, target, batch_size=16, epochs=1, shuffle=False, verbose=0)
    model.save(f"{directory}/parts.keras")
    return _state(model)


def load_plain(directory: str) -> dict:
    """Loads the model outside of any strategy."""
    return _state(keras.saving.load_model(f"{directory}/parts.keras"))


def load_partitioned(directory: str) -> dict:
    """Loads the model into partitions."""
    with _strategy(True).scope():
        model = keras.saving.load_model(f"{directory}/parts.keras")
    return {**_state(model), "parts": len(_parts(model))}


def traffic() -> dict:
    """Returns the bytes on this machine's loopback per step with a large embedding."""
    strategy = ParameterServerStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [
                layers.Input((8,), dtype="int32"),
                layers.Embedding(32768, 64),
                layers.GlobalAveragePooling1D(),
                layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
    kinds: list[str] = []
    table = model.layers[0]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.constant([[1, 2, 3, 4, 5, 6, 7, 8]])))
    kinds.append(type(tape.gradient(loss, table.trainable_variables)[0]).__name__)
    ids = np.arange(64, dtype="int32").reshape(8, 8)
    batches = tf.data.Dataset.from_tensors((ids, np.ones((8, 1), "float32"))).repeat()
    model.fit(batches, steps_per_epoch=4, verbose=0)
    steps = 40
    before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    model.fit(batches, steps_per_epoch=steps, verbose=0)
    sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before
    return {"gradient": kinds[0], "bytes_per_step": sent / steps}


def splits_nothing() -> tuple[str, int]:
    """Returns the messages about a partitioner that splits nothing, and the number of steps."""
    partitioners = tf.distribute.experimental.partitioners
    whole = partitioners.MinSizePartitioner(min_shard_bytes=1 << 20, max_shards=2)
    model = classifier(ParameterServerStrategy(variable_partitioner=whole))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(dataset(), steps_per_epoch=3, verbose=0)
    return " ".join(str(w.message) for w in caught), int(model.optimizer.iterations.numpy())


def refused(kind: str) -> str:
    """Returns the error for an unusable partitioner."""
    partitioners = tf.distribute.experimental.partitioners
    partitioner = {
        "wrong axis": lambda shape, dtype: [1] * (shape.rank - 1) + [2],
        "constraint": partitioners.FixedShardsPartitioner(2),
        "no function": 2,
    }[kind]

    def use():
        strategy = ParameterServerStrategy(variable_partitioner=partitioner)
        if kind != "constraint":
            return classifier(strategy).fit(dataset(), steps_per_epoch=1, verbose=0)
        with strategy.scope():
            model = keras.Sequential(
                [layers.Input((6,)), layers.Dense(3, kernel_constraint="unit_norm")]
            )
            model.compile("sgd", "mse")
        return model.fit(dataset(), steps_per_epoch=1, verbose=0)

    return _raised(use)


INITIALIZERS = {
    "uniform": lambda: keras.initializers.RandomUniform(seed=3),
    "truncated": lambda: keras.initializers.TruncatedNormal(0.1, 0.5, seed=5),
    "he_normal": lambda: keras.initializers.HeNormal(seed=7),
    "orthogonal": lambda: keras.initializers.Orthogonal(seed=1),
    "ones": keras.initializers.Ones,
    "generator": lambda: keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(9)),
}


def initial_values(parts: int) -> dict[str, np.ndarray]:
    """Returns the initial values of variables in that many parts; 0 for plain Keras."""
    shape = (37, 5)
    made: dict[str, np.ndarray] = {}
    strategy = parts and ParameterServerStrategy(
        variable_partitioner=lambda shape, dtype: [parts, 1]
    )
    with strategy.scope() if parts else contextlib.nullcontext():
        for name, make in INITIALIZERS.items():
            made[name] = np.asarray(keras.Variable(make(), shape).numpy())
    return made


def memory_of_a_large_table(megabytes: int) -> dict[str, float]:
    """Returns by how much making a table moved the chief's peak of memory, in MB, and its value."""
    width = 64
    rows = megabytes * 2**20 // width // 4
    strategy = ParameterServerStrategy(variable_partitioner=lambda shape, dtype: [4, 1])
    with strategy.scope():
        layers.Embedding(40, width).build()
        peak()
        before = peak()
        table = layers.Embedding(rows, width)
        table.build()
    growth = peak() - before
    last = tf.gather(table._embeddings._value.variables[3], [rows // 4 - 1])
    return {"peak": growth, "last": float(np.abs(last).sum())}


def memory_of_a_saved_table(directory: str, megabytes: int) -> dict[str, float]:
    """Returns by how much saving and loading a table moved the chief's peak of memory, in MB."""
    in_four = tf.distribute.experimental.partitioners.MinSizePartitioner(1024, max_shards=4)
    strategy = ParameterServerStrategy(variable_partitioner=in_four)

    def made(rows: int) -> keras.Model:
        with strategy.scope():
            table = layers.Embedding(rows, 64)
            model = keras.Sequential([layers.Input((3,)), table, layers.Flatten(), layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    def loaded(path: str) -> keras.Model:
        with strategy.scope():
            return keras.saving.load_model(path)

    def rows(model: keras.Model) -> list[np.ndarray]:
        found = [v for v in model.optimizer.variables if hasattr(v, "slot_of")] + _parts(model)
        return [tf.gather(v._value, [0, v.shape[0] - 1]).numpy() for v in found]

    small, large = f"{directory}/small.keras", f"{directory}/large.keras"
    made(10 * ROWS).save(small)  # What is imported, and allocated once.
    loaded(small)
    model = made(megabytes * 2**20 // 64 // 4)
    for index, slot in enumerate(v for v in model.optimizer.variables if hasattr(v, "slot_of")):
        slot._value.scatter_update(tf.IndexedSlices(tf.fill([1, 64], float(index)), [0]))
    peaks = {}
    peak()
    before = peak()
    model.save(large)
    peaks["save"] = peak() - before
    before = peak()
    again = loaded(large)
    peaks["load"] = peak() - before
    differ = sum(np.any(a != b) for a, b in zip(rows(model), rows(again), strict=True))
    return {**peaks, "differ": float(differ), "parts": len(rows(again))}
