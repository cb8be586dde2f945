"""Cases run by the chief of a cluster with parameter servers."""

import contextlib
import threading
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.strategies.cases import CLASSES, data
from tfdml.strategies import ParameterServerStrategy
from tfdml.strategies.parameter_server.chief import asynchronous, metric_log
from tfdml.strategies.parameter_server.result_table import ResultTable

STEPS = 25
BATCH = 8


def classifier(strategy: tf.distribute.Strategy, dropout: float = 0.0, **options) -> keras.Model:
    """Returns a small, compiled model."""
    with strategy.scope():
        keras.utils.set_random_seed(11)
        model = keras.Sequential(
            [
                layers.Input((6,)),
                layers.Dense(8, activation="tanh"),
                layers.Dropout(dropout, seed=3),
                layers.Dense(CLASSES),
            ]
        )
        model.compile(
            **{
                "optimizer": keras.optimizers.Adam(0.02),
                "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "metrics": ["accuracy"],
                **options,
            }
        )
    return model


def dataset(rows: int = 101, batch: int = BATCH) -> tf.data.Dataset:
    """Returns endless batches of labelled samples; an epoch is a few passes."""
    return tf.data.Dataset.from_tensor_slices(data(rows)).repeat().batch(batch)


def stopped_at_the_end() -> None:
    """Stops a coordinator as Python does at its end, when no thread starts any more."""
    strategy = ParameterServerStrategy()
    error = RuntimeError("no thread starts any more")
    with mock.patch.object(threading.Thread, "start", side_effect=error):
        strategy.coordinator._cluster.stop()


class Recorder(keras.callbacks.Callback):
    """Records the arguments that callbacks get."""

    def __init__(self):
        super().__init__()
        self.batches: list = []
        self.epochs: list = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append((batch, sorted(logs)))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(logs)


def fit_asynchronously() -> dict:
    """Runs `fit` on a dataset, with everything that must not lose an update."""
    strategy = ParameterServerStrategy()
    model = classifier(strategy, dropout=0.2)
    counter = CountedMean(name="samples")
    recorder = Recorder()
    with strategy.scope():
        model.compile(
            keras.optimizers.Adam(0.02),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy", counter],
        )
    history = model.fit(
        dataset(),
        epochs=3,
        steps_per_epoch=STEPS,
        verbose=0,
        callbacks=[recorder],
        validation_data=data(50),
    )
    seeds = [v for v in model.non_trainable_variables if "seed" in v.path]
    return {
        "iterations": int(model.optimizer.iterations.numpy()),
        "samples": history.history["samples"],
        "seeds": [v.numpy().tolist() for v in seeds],
        "loss": history.history["loss"],
        "keys": sorted(history.history),
        "batches": recorder.batches,
        "devices": sorted({v.value.device for v in model.trainable_variables}),
    }


class CountedMean(keras.metrics.Metric):
    """Metric that counts samples by reading and assigning, as many of Keras's metrics do."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign(self.rows + tf.cast(tf.shape(y_pred)[0], self.rows.dtype))

    def result(self):
        return tf.identity(self.rows.value)


def fit_with_few_rows() -> dict:
    """Runs `fit` with a chief that reads results only when the table has no free row."""
    strategy = ParameterServerStrategy()
    with strategy.scope():
        counter = CountedMean(name="samples")
    model = classifier(strategy, metrics=[counter])
    with (
        mock.patch.object(asynchronous, "_ROWS", 1),
        mock.patch.object(metric_log, "_REFRESH_SECONDS", 3600.0),
    ):
        history = model.fit(dataset(), epochs=2, steps_per_epoch=STEPS, verbose=0)
    return {"samples": history.history["samples"], "rows": len(model.train_function._table._free)}


def results_in_a_table() -> dict:
    """Returns the results in a table of three rows, and whether it is full before and after."""
    strategy = ParameterServerStrategy()
    table = ResultTable(strategy.coordinator, 3)
    taken = [table.take_row() for _ in range(3)]
    full = [table.is_full]

    @tf.function
    def leave(row):
        table.write(row, tf.cast(tf.stack([row, row * 10]), tf.float64))

    for row in taken:
        strategy.coordinator.schedule(leave, args=(table.on_workers(row),))
    strategy.coordinator.join()
    read = [vector.tolist() for vector in table.read([2, 1])]
    full.append(table.is_full)
    return {
        "taken": taken,
        "read": read,
        "full": full,
        "then": [table.take_row(), table.take_row()],
    }


class Penalty(layers.Layer):
    """Layer that adds 10 to the loss."""

    def call(self, inputs):
        """Returns `inputs`."""
        self.add_loss(10.0 + 0.0 * tf.reduce_sum(inputs))
        return inputs


def loss_of_layers() -> dict:
    """Returns the losses of asynchronous training and of evaluation, with a layer's added loss."""
    strategy = ParameterServerStrategy()
    with strategy.scope():
        model = keras.Sequential([layers.Input((6,)), Penalty(), layers.Dense(CLASSES)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(dataset(), epochs=1, steps_per_epoch=10, verbose=0)
    return {"fit": history.history["loss"][0], "evaluate": model.evaluate(*data(20), verbose=0)}


def evaluate_and_predict(directory: str) -> dict:
    """Returns the results of a model on the cluster, and those of a plain copy of it."""
    strategy = ParameterServerStrategy()
    x, y = data(53)
    model = classifier(strategy)
    model.fit(dataset(), epochs=1, steps_per_epoch=10, verbose=0)
    result = {
        "evaluate": model.evaluate(x, y, batch_size=8, verbose=0),
        "evaluate_generator": model.evaluate(
            ((x[i : i + 9], y[i : i + 9]) for i in range(0, 53, 9)), verbose=0
        ),
        "predict": model.predict(x, batch_size=8, verbose=0),
        "predict_on_batch": model.predict_on_batch(x),
    }
    model.save(f"{directory}/model.keras")
    plain = keras.saving.load_model(f"{directory}/model.keras")
    result["plain"] = {
        "strategy": type(plain.distribute_strategy).__name__,
        "evaluate": plain.evaluate(x, y, batch_size=8, verbose=0),
        "predict": plain.predict(x, batch_size=8, verbose=0),
        "iterations": int(plain.optimizer.iterations.numpy()),
    }
    return result


COUNTED_STEPS, PER_STEP = 100, 50


class Counts(layers.Layer):
    """Layer that counts, and draws seeds, many times in a step."""

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs):
        for _ in range(PER_STEP):
            self.count.assign_add(1.0)
            self.seeds.next()
        return inputs


@contextlib.contextmanager
def without(part: str | None):
    """Context manager: restores Keras's original of one replaced function.

    Args:
        part: Name such as "Variable.assign_add"; None for none.
    """
    from tfdml.strategies.keras_seam import entry, parameter_servers, replacing

    taken = [
        (o, n, getattr(o, n))
        for o, n, _ in [*entry.REPLACEMENTS, *parameter_servers.REPLACEMENTS]
        if f"{o.__name__}.{n}" == part
    ]
    assert bool(taken) == (part is not None)
    for owner, name, _ in taken:
        setattr(owner, name, replacing.original(owner, name))
    try:
        yield
    finally:
        for owner, name, ours in taken:
            setattr(owner, name, ours)


def fit_until_all_are_busy(model: keras.Model, batches: tf.data.Dataset) -> None:
    """Trains until both workers are busy simultaneously: a worker's first step takes long."""
    while len(getattr(model.train_function, "workers_seen", ())) < 2:
        model.fit(batches, epochs=1, steps_per_epoch=COUNTED_STEPS, verbose=0)


def count_many(part: str | None = None) -> dict[str, int]:
    """Returns the counts of two busy workers.

    Args:
        part: Replaced function that is restored to Keras's original.
    """
    strategy = ParameterServerStrategy()  # It installs the replacements.
    with without(part):
        with strategy.scope():
            counts = Counts()
            model = keras.Sequential([layers.Input((6,)), counts, layers.Dense(CLASSES)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, steps_per_execution=10)
        fit_until_all_are_busy(model, dataset())
        counts.count.assign(0)
        drawn = int(counts.seeds.state.numpy()[1])
        model.fit(dataset(), epochs=1, steps_per_epoch=COUNTED_STEPS, verbose=0)
    drawn = int(counts.seeds.state.numpy()[1]) - drawn
    return {"count": int(counts.count.numpy()), "seeds": drawn}


ROWS, WIDTH = 8, 1 << 14


def _rows_of(number: float) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.fill([ROWS, WIDTH], number), tf.range(ROWS))


class AddsRows(keras.Model):
    """A model whose step adds 1 to all rows of an embedding, many times."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(ROWS, WIDTH, embeddings_initializer="zeros")

    def train_step(self, data):
        ids, target = data
        loss = self.compute_loss(ids, target, self(ids))
        weights = self.table.trainable_variables[0].value
        for i in range(PER_STEP):
            # As an optimizer does with an embedding's gradient.
            with tf.device(weights.device):
                if i % 2:
                    self.optimizer.assign_add(weights, _rows_of(1.0))
                else:
                    self.optimizer.assign_sub(weights, _rows_of(-1.0))
        self.optimizer.iterations.assign_add(1)
        return {"loss": loss}

    def call(self, ids):
        return self.table(ids)


def count_in_rows(part: str | None = None) -> list[float]:
    """Returns the distinct values of an embedding to which two busy workers have added.

    Args:
        part: Replaced function that is restored to Keras's original.
    """
    strategy = ParameterServerStrategy()
    with without(part):
        with strategy.scope():
            model = AddsRows()
            model.compile("sgd", "mse", steps_per_execution=5)
        ids = np.zeros((1, 1), "int32")
        batches = tf.data.Dataset.from_tensors((ids, np.zeros((1, 1, WIDTH), "float32"))).repeat()
        fit_until_all_are_busy(model, batches)
        model.table.embeddings.assign(tf.zeros([ROWS, WIDTH]))
        model.fit(batches, epochs=1, steps_per_epoch=COUNTED_STEPS, verbose=0)
    return np.unique(model.table.embeddings.numpy()).tolist()


def staleness(bound: int | None) -> list[float]:
    """Returns the number of the other workers' updates during each step."""
    strategy = ParameterServerStrategy(max_staleness=bound)
    with strategy.scope():
        keras.utils.set_random_seed(11)
        inputs = layers.Input((6,))
        model = CountsUpdates(inputs, layers.Dense(CLASSES)(layers.Dense(64)(inputs)))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    seen: list[float] = []
    each = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs.get("others", 0.0))
    )
    model.fit(dataset(), epochs=1, steps_per_epoch=60, verbose=0, callbacks=[each])
    return seen


class CountsUpdates(keras.Model):
    """A model whose step returns the number of other workers' updates during it.

    The step takes about 30 ms, so that the steps of two workers overlap.
    """

    def train_step(self, data):
        before = self.optimizer.iterations.value.read_value()
        with tf.control_dependencies([before]):
            square = tf.random.uniform([400, 400])
            for _ in range(20):
                square = tf.matmul(square, square) / 400.0
        with tf.control_dependencies([square]):
            logs = super().train_step(data)
        with tf.control_dependencies(tf.nest.flatten(logs)):
            after = self.optimizer.iterations.value.read_value()
        return {**logs, "others": tf.cast(after - before - 1, tf.float32)}


def other_data() -> dict:
    """Runs `fit` on arrays, on a function, and single batches; returns iterations and samples."""
    strategy = ParameterServerStrategy()
    x, y = data(101)
    model = classifier(strategy)
    iterations = lambda: int(model.optimizer.iterations.numpy())  # noqa: E731
    result = {}
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    result["arrays"], before = iterations(), iterations()
    model.fit(lambda: dataset(), epochs=2, steps_per_epoch=10, verbose=0)
    result["function"], before = iterations() - before, iterations()
    fast = classifier(strategy, steps_per_execution=5)
    fast.fit(
        lambda context: dataset().shard(context.num_input_pipelines, context.input_pipeline_id),
        epochs=2,
        steps_per_epoch=10,
        verbose=0,
    )
    result["steps_per_execution"] = int(fast.optimizer.iterations.numpy())
    model.train_on_batch(x[:8], y[:8])
    result["on_batch"] = iterations() - before
    return result


def rows_read_by_each_worker() -> dict[int, list[int]]:
    """Returns the sample numbers in each worker's first batches."""
    from tfdml.strategies.parameter_server.chief.in_flight_tasks import InFlightTasks
    from tfdml.strategies.parameter_server.remote_datasets import ShippedDataset

    strategy = ParameterServerStrategy()
    numbered = tf.data.Dataset.range(96).batch(8)
    iterators = iter(ShippedDataset(numbered, strategy.coordinator, strategy.size)).values
    read = tf.function(lambda iterator: next(iterator))
    read = read.get_concrete_function(iterators._values[0]._type_spec)
    in_flight, seen = InFlightTasks(strategy.coordinator), {}
    while sum(map(bool, seen.values())) < 2 or min(map(len, seen.values())) < 48:
        in_flight.begin(read, (iterators,))
        in_flight.wait_until(lambda: in_flight.size < 4)
        for task in in_flight.take_done():
            seen.setdefault(task.worker, []).extend(task.value.numpy().tolist())
    in_flight.cancel()
    return {worker: numbers[:48] for worker, numbers in seen.items()}


def _raised(call) -> str:
    try:
        call()
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing was raised"


def unsendable(kind: str) -> str:
    """Returns the error of `fit` for data that need Python on the workers."""
    strategy = ParameterServerStrategy()
    model = classifier(strategy)
    x, y = data(32)
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8)]

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return len(batches)

        def __getitem__(self, index):
            return batches[index]

    signature = (tf.TensorSpec((None, 6)), tf.TensorSpec((None,), tf.int64))

    def doubled(a, b):
        (double,) = tf.py_function(lambda v: [v * 2], [a], [tf.float32])
        double.set_shape(a.shape)
        return double, b

    made = {
        "generator": lambda: iter(batches),
        "pydataset": Batches,
        "py_function": lambda: dataset().map(doubled),
        "from_generator": lambda: tf.data.Dataset.from_generator(
            lambda: iter(batches), output_signature=signature
        ),
    }[kind]()
    if kind == "generator":
        made = (batch for batch in batches)
    message = _raised(lambda: model.fit(made, steps_per_epoch=4, verbose=0))
    assert int(model.optimizer.iterations.numpy()) == 0
    return message


def refused(kind: str) -> str:
    """Returns the error of a call that workers do not support."""
    strategy = ParameterServerStrategy()
    options, steps = {}, 4
    if kind == "no steps_per_epoch":
        steps = None
    elif kind in ("run_eagerly", "jit_compile"):
        options[kind] = True
    elif kind == "another cluster":
        spec = {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]}
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), task_type="chief", task_id=0
        )
        return _raised(lambda: ParameterServerStrategy(resolver))
    elif kind == "backup workers":
        return _raised(lambda: ParameterServerStrategy(synchronous=True, backup_workers=2))
    elif kind == "optimizer outside":
        options["optimizer"] = keras.optimizers.SGD()
        options["optimizer"].apply([tf.ones(1)], [keras.Variable([1.0])])
    if kind == "accumulation":
        with strategy.scope():
            options["optimizer"] = keras.optimizers.SGD(gradient_accumulation_steps=2)
    model = classifier(strategy, **options)
    return _raised(lambda: model.fit(dataset(), steps_per_epoch=steps, verbose=0))


def optimizer_made_outside() -> int:
    """Returns the number of steps of an optimizer created outside of the scope."""
    optimizer = keras.optimizers.Adam(0.01)
    model = classifier(ParameterServerStrategy(), optimizer=optimizer)
    model.fit(dataset(), steps_per_epoch=5, verbose=0)
    return int(optimizer.iterations)


def step_that_fails() -> tuple[str, int]:
    """A loss that fails for one label, and then `fit` on data without it."""
    strategy = ParameterServerStrategy()

    def loss(y, p):
        tf.debugging.assert_less(y, tf.cast(100, y.dtype), "the label is wrong")
        return tf.reduce_mean(tf.square(p), -1)

    model = classifier(strategy, loss=loss, metrics=[])
    x, y = data(16)
    wrong = tf.data.Dataset.from_tensor_slices((x, y + 100)).batch(8)
    try:
        model.fit(wrong, steps_per_epoch=4, verbose=0)
        message = "nothing was raised"
    except tf.errors.InvalidArgumentError as error:
        message = str(error)
    before = int(model.optimizer.iterations.numpy())
    model.fit(dataset(), steps_per_epoch=5, verbose=0)
    return message, int(model.optimizer.iterations.numpy()) - before
