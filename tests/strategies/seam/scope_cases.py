"""Cases run by ranks: losses, metrics, updates, numbers and exports in the scope, outside steps."""

import tempfile
import warnings
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.harness import rank_job
from tests.strategies.cases import SubclassedModel, compiled, data, dense_model, outcome


def losses_and_metrics() -> dict:
    """Losses are plain values; metrics, also of integers, count their inputs."""
    strategy = rank_job.strategy()
    with strategy.scope():
        mean = keras.losses.MeanSquaredError()(np.ones((2, 2)), np.zeros((2, 2)))
        overlap = keras.metrics.MeanIoU(num_classes=2)
        average = keras.metrics.Mean()
        for _ in range(2):
            overlap.update_state([0, 1, 1, 0], [0, 1, 0, 0])
            average.update_state([1.0, 2.0, 6.0])
        found = {
            "loss": float(mean),
            "overlap": np.array(overlap.result()),
            "counts": overlap.total_cm.numpy(),
            "average": np.array(average.result()),
        }
        replicas = strategy.num_replicas_in_sync
        scaled = strategy.run(lambda: keras.losses.MeanSquaredError()([[1.0]], [[0.0]]))
    # In a custom replica function, Keras's scaling: the sum over replicas is the mean.
    local = strategy.experimental_local_results(scaled)
    found["in a replica"] = float(local[0]) * replicas
    return {"weights": [], **found}


def metric_of_a_model() -> dict:
    """A metric used by `fit` and then updated further; its state is that of the whole job."""
    x, y = data(24)
    model = compiled(rank_job.strategy())
    model.fit(x, y, batch_size=12, verbose=0)
    metric = model.metrics[-1]
    with model.distribute_strategy.scope():
        metric.reset_state()
        metric.update_state(np.array([[0], [2]]), np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
    return {"weights": [], "state": [np.array(v) for v in metric.variables]}


def numbers_of_variables() -> dict:
    """Distributed variables convert to Python numbers and arrays."""
    x, y = data(24)
    model = compiled(rank_job.strategy(), optimizer="adam")
    model.fit(x, y, batch_size=12, verbose=0)
    rate, steps = model.optimizer.learning_rate, model.optimizer.iterations
    assert (float(rate), int(steps)) == (np.float32(0.001), 2)
    assert (float(rate.value), int(steps.value)) == (np.float32(0.001), 2)
    kernel = model.weights[0]
    for variable in (kernel, kernel.value):
        array = np.asarray(variable, "float64")
        assert (array.dtype, array.shape) == (np.float64, (6, 8))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            copied = np.asarray(variable, copy=True)
        copied[:] = 0.0
        assert np.any(kernel.numpy())
    return {"weights": []}


def update_outside() -> dict:
    """`apply` outside of a step: every replica makes the same update, once per call."""
    strategy = rank_job.strategy()
    with strategy.scope():
        model = keras.Sequential(
            [layers.Input((4,), dtype="int32"), layers.Embedding(5, 2), layers.Dense(1)]
        )
        rng = np.random.default_rng(0)
        model.set_weights([rng.normal(size=v.shape) for v in model.weights])
        plain = keras.optimizers.Adam(0.1, global_clipnorm=1.0)
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0)
        ids = np.array([[0, 1, 1, 3]])

        def gradients(scale):
            with tf.GradientTape() as tape:
                loss = scale * tf.reduce_mean(tf.square(model(ids)))
            return tape.gradient(loss, model.trainable_variables)

        plain.build(model.trainable_variables)
        plain.apply(gradients(1.0))
        scaled.apply_gradients(zip(gradients(4.0), model.trainable_variables, strict=True))
        tf.function(lambda: plain.apply(gradients(1.0)))()
    plain.apply([tf.convert_to_tensor(g) for g in gradients(1.0)])
    copies = [
        [part.numpy() for part in strategy.experimental_local_results(v.value)]
        for v in model.weights
    ]
    for parts in copies:
        assert all(part.tobytes() == parts[0].tobytes() for part in parts)
    return {**outcome(model), "steps": int(plain.iterations)}


def other_updates() -> None:
    """Rank 1 passes other gradients to `apply`; must raise on both."""
    strategy = rank_job.strategy()
    with strategy.scope():
        variable = keras.Variable([1.0])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([variable])
        optimizer.apply([tf.constant([1.0 + rank_job.rank()])])


def accumulated_outside(scaled: bool) -> dict:
    """Updates outside of a step by an optimizer that accumulates two gradients."""
    with rank_job.strategy().scope():
        variable = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        scale = 1.0
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
            scale = 4.0
        optimizer.build([variable])
        values = []
        for first in (1.0, 3.0, 5.0, 5.0):
            optimizer.apply([scale * tf.constant([first, 0.0])])
            values.append(variable.numpy())
        tf.function(lambda: optimizer.apply([scale * tf.constant([1.0, 1.0])]))()
        tf.function(lambda: optimizer.apply([scale * tf.constant([1.0, 3.0])]))()
    return {"weights": [variable.numpy()], "values": values}


def saved_by_rank_0() -> dict:
    """Only rank 0 saves in the scope, directly and by a callback, and restores the weights."""
    x, y = data(24)
    strategy = rank_job.strategy()
    keras.utils.clear_session()  # Keras remembers attributes that files omit.
    model = compiled(strategy)
    with tempfile.TemporaryDirectory() as directory, strategy.scope():
        backup = keras.callbacks.BackupAndRestore(f"{directory}/backup", delete_checkpoint=False)
        model.fit(x, y, batch_size=12, shuffle=False, verbose=0, callbacks=[backup])
        if strategy.is_chief:
            model.save(f"{directory}/model.keras")
            model.save_weights(f"{directory}/model.weights.h5")
            model.load_weights(f"{directory}/model.weights.h5")
            assert Path(directory, "backup").exists()
        return {**outcome(model), "result": np.array(model.evaluate(x, y, verbose=0))}


def exported(loads_in_scope: bool) -> dict:
    """A model exported in the scope, loaded there or outside, also as a layer of a model."""
    x, _ = data(8)
    strategy = rank_job.strategy()
    model = compiled(strategy)
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory, "exported"))
        with strategy.scope():
            model.export(path, verbose=False)
        if not loads_in_scope:
            loaded = tf.saved_model.load(path)
            served = loaded.serve(x)
            return {"weights": [], "served": served.numpy(), "predicted": model(x).numpy()}
        with strategy.scope():
            loaded = tf.saved_model.load(path)
            served = loaded.serve(x)
            layer = layers.TFSMLayer(path, call_endpoint="serve")
            above = keras.Sequential([layers.Input((6,)), layer])
        np.testing.assert_array_equal(above.predict(x, verbose=0), model.predict(x, verbose=0))
        return {"weights": [], "served": served.numpy(), "predicted": model(x).numpy()}


def mapped_layers() -> dict:
    """Layers with variables, mapped over data in the scope; some are built there."""
    with rank_job.strategy().scope():
        rng = np.random.default_rng(0)
        normalization = layers.Normalization()
        normalization.adapt(rng.normal(size=(20, 3)))
        words, lookup = layers.TextVectorization(), layers.StringLookup()
        words.adapt(["a b", "b c"])
        lookup.adapt(["a", "b"])
        sound = layers.STFTSpectrogram(fft_length=64, frame_length=64, frame_step=32)
        texts = tf.data.Dataset.from_tensor_slices(["a", "b c"]).batch(2)
        numbers = tf.data.Dataset.from_tensor_slices(rng.normal(size=(4, 3))).batch(2)
        sounds = rng.normal(size=(2, 200, 1)).astype("float32")
        waves = tf.data.Dataset.from_tensor_slices(sounds).batch(2)
        found = [
            [element.numpy() for element in dataset]
            for dataset in (
                numbers.map(normalization),
                texts.map(words),
                texts.map(lookup),
                waves.map(sound),
            )
        ]
    return {"weights": [], "found": found}


class Halves(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that is not registered with Keras."""

    def __call__(self, step):
        """Returns the rate."""
        return 0.1 / (1.0 + tf.cast(step, "float32"))


class OwnOptimizers(keras.Model):
    """A model whose `compile` takes two optimizers and creates a tracker."""

    def __init__(self):
        super().__init__()
        self.one, self.other = layers.Dense(3), layers.Dense(3)
        self.one.build((None, 6))
        self.other.build((None, 3))

    def compile(self, first, second):
        """Sets both optimizers."""
        super().compile()
        self.optimizers = {"one": first, "other": second}
        self.tracker = keras.metrics.Mean(name="tracked")

    def train_step(self, batch):
        """Trains both layers, each with its own optimizer."""
        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            logits = self.other(self.one(x))
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            loss = keras.ops.mean(losses)
        for name, layer in (("one", self.one), ("other", self.other)):
            gradients = tape.gradient(loss, layer.trainable_variables)
            self.optimizers[name].apply(gradients, layer.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def made_outside(what: str) -> dict:
    """Calls `compile`, or creates its arguments, outside of the model's scope."""
    x, y = data(37)
    if what == "float16":
        keras.config.set_dtype_policy("mixed_float16")
    with rank_job.strategy().scope():
        keras.utils.set_random_seed(3)
        model = OwnOptimizers() if what == "optimizers" else dense_model()
    optimizer = keras.optimizers.Adam(Halves() if what == "schedule" else 0.01, global_clipnorm=0.5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    own = keras.metrics.SparseCategoricalAccuracy(name="own")
    # Its counts before the training are reset, as everywhere.
    own.update_state([1], [[0.0, 1.0, 0.0]])
    given = {"metrics": ["accuracy", own]}
    if what == "optimizers":
        model.compile(optimizer, keras.optimizers.SGD(0.1))
    elif what == "scope":  # Only the first step uses the metrics.
        with model.distribute_strategy.scope():
            model.compile(optimizer, loss, **given)
    else:
        model.compile(optimizer, loss, **given)
    if what == "batches":
        for begin in range(0, 37, 8):
            model.train_on_batch(x[begin : begin + 8], y[begin : begin + 8])
        return outcome(model)
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    if what == "schedule":
        # The optimizer that the program holds is the one that trained.
        assert int(optimizer.iterations) == 10
        model.compile(optimizer, loss)
        model.fit(x, y, batch_size=8, verbose=0)
        assert int(optimizer.iterations) == 15
    return outcome(model, history)


def cleared() -> dict:
    """Calls `clear_session` in the scope, as in a search; then leaves the scope."""
    x, y = data(37)
    strategy = rank_job.strategy()
    losses = []
    for _ in range(2):
        with strategy.scope():
            dense_model()
            keras.utils.clear_session()
            keras.utils.set_random_seed(3)
            model = dense_model()
            model.compile("adam", "sparse_categorical_crossentropy")
        assert not tf.distribute.has_strategy()
        losses += model.fit(x, y, batch_size=8, verbose=0).history["loss"]
    assert losses[0] == losses[1]
    return outcome(model)


def cloned(functional: bool) -> dict:
    """A clone created, compiled and trained outside of the scope."""
    x, y = data(37)
    with rank_job.strategy().scope():
        keras.utils.set_random_seed(3)
        model = dense_model()
        if functional:
            model = keras.Model(model.inputs, model.outputs)
    clone = keras.models.clone_model(model)
    assert clone.distribute_strategy is model.distribute_strategy
    clone.set_weights(model.get_weights())
    clone.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return outcome(clone, clone.fit(x, y, batch_size=8, epochs=2, verbose=0))


@keras.saving.register_keras_serializable()
class Registered(SubclassedModel):
    """A subclassed model that can be saved, and cloned."""

    def get_config(self):
        """Returns the constructor's arguments."""
        return {}


def read_outside(how: str) -> dict:
    """A model loaded or cloned, and trained, outside of the scope."""
    x, y = data(37)
    strategy = rank_job.strategy()
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = Registered() if how in ("clone", "subclassed") else dense_model()
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(x, y, batch_size=8, verbose=0)
    if how == "clone":
        read = keras.models.clone_model(model)
        read.compile(keras.optimizers.Adam(), model.loss, metrics=["accuracy"])
        read.build((None, 6))
        read.set_weights(model.get_weights())
    else:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "model.h5" if how == "h5" else "model.keras")
            model.save(path)
            # From such files, Keras cannot train even its own compiled models.
            read = keras.models.load_model(path, compile=how != "h5")
        if how == "h5":
            read.compile("adam", model.loss, metrics=["accuracy"])
    # A single rank may read it.
    assert read._distribute_strategy is None
    read.predict(x[:3], verbose=0)
    hidden = read.layers[0]
    if how == "batches":
        for begin in range(0, 37, 8):
            read.train_on_batch(x[begin : begin + 8], y[begin : begin + 8])
        result = outcome(read)
    else:
        result = outcome(read, read.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0))
    if max(strategy.size, strategy.num_replicas_in_sync) > 1:
        assert read.distribute_strategy is strategy
    result["predicted"] = read.predict(x, verbose=0)
    # The program may hold references to the layers.
    result["hidden"] = hidden.get_weights()
    assert hidden is read.layers[0]
    return result
