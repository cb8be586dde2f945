"""What the ranks run for each feature of Keras that must give what one replica gives."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.harness import job
from tests.strategies.cases import CLASSES, InScope, compiled, data, outcome, seed_ranks_apart

CROSSENTROPY = "sparse_categorical_crossentropy"


def _fit(model: keras.Model, x, y, rows: int = 16, epochs: int = 3, **options) -> dict:
    history = model.fit(x, y, batch_size=rows, epochs=epochs, verbose=0, **options)
    return outcome(model, history)


def optimizer(name: str, **options) -> dict:
    """An optimizer with options, on batches of which the last has 1 row."""
    x, y = data(49)
    if name == "schedule":
        schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)
        made = InScope(keras.optimizers.SGD, schedule)
    else:
        made = InScope(getattr(keras.optimizers, name), **{"learning_rate": 0.01, **options})
    model = compiled(job.strategy(), optimizer=made)
    result = _fit(model, x, y)
    result["iterations"] = np.array(model.optimizer.iterations)
    return result


def several_outputs() -> dict:
    """Two outputs with losses of their own, weighted; each loss is logged."""
    x, y = data(61)
    with job.strategy().scope():
        seed_ranks_apart()
        inputs = layers.Input((6,))
        hidden = layers.Dense(8, activation="tanh")(inputs)
        outputs = {"a": layers.Dense(CLASSES)(hidden), "b": layers.Dense(1)(hidden)}
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.1),
            loss={
                "a": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "b": keras.losses.MeanSquaredError(),
            },
            loss_weights={"a": 1.0, "b": 0.3},
            metrics={"a": ["accuracy"], "b": ["mae"]},
        )
    return _fit(model, x, {"a": y, "b": x[:, :1]}, validation_split=0.2)


def many_metrics() -> dict:
    """Metrics whose states are sums, histograms and matrices."""
    x, y = data(50)
    with job.strategy().scope():
        seed_ranks_apart()
        model = keras.Sequential([layers.Input((6,)), layers.Dense(1, activation="sigmoid")])
        model.compile(
            keras.optimizers.SGD(0.1),
            "binary_crossentropy",
            metrics=[
                keras.metrics.AUC(),
                keras.metrics.Precision(),
                keras.metrics.Recall(),
                keras.metrics.BinaryIoU([0, 1], 0.5),
                keras.metrics.F1Score(),
            ],
        )
    return _fit(model, x, (y[:, None] > 0).astype("float32"), validation_split=0.3)


def synchronized_batch_norm() -> dict:
    """`BatchNormalization(synchronized=True)`: statistics of the global batch."""
    x, y = data(48)
    with job.strategy().scope():
        seed_ranks_apart()
        model = keras.Sequential(
            [
                layers.Input((6,)),
                layers.Dense(8),
                layers.BatchNormalization(synchronized=True),
                layers.Dense(CLASSES),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    return _fit(model, x, y, rows=12)


def sparse_gradients() -> dict:
    """An embedding, attention with a mask, a frozen layer and a layer without gradient."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 50, (40, 7))
    tokens[np.arange(7)[None] >= rng.integers(2, 8, 40)[:, None]] = 0
    with job.strategy().scope():
        seed_ranks_apart()
        inputs = layers.Input((7,), dtype="int32")
        embedded = layers.Embedding(50, 4, mask_zero=True)(inputs)
        attended = layers.MultiHeadAttention(2, 4)(embedded, embedded)
        recurrent = layers.GRU(4)(attended)
        frozen = layers.Dense(4, trainable=False)
        model = keras.Model(inputs, layers.Dense(CLASSES)(frozen(recurrent)))
        model.compile(
            keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    return _fit(model, tokens, rng.integers(0, CLASSES, 40), rows=12)


def recurrent_and_attention() -> dict:
    """Masked sequences of different lengths through an LSTM and an attention layer."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 20, (33, 7))
    tokens[np.arange(7)[None, :] >= rng.integers(2, 8, (33, 1))] = 0
    y = rng.integers(0, 3, 33)
    with job.strategy().scope():
        seed_ranks_apart()
        inputs = layers.Input((7,), dtype="int64")
        embedded = layers.Embedding(20, 8, mask_zero=True)(inputs)
        hidden = layers.LSTM(8, return_sequences=True)(embedded)
        attended = layers.MultiHeadAttention(2, 4)(hidden, hidden)
        outputs = layers.Dense(3)(layers.GlobalAveragePooling1D()(attended))
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    return _fit(model, tokens, y)


class WithSpareWeights(keras.Model):
    """A model with a frozen layer, and with one that the loss does not depend on."""

    def __init__(self):
        super().__init__()
        self.frozen = layers.Dense(8, trainable=False)
        self.spare = layers.Dense(4)
        self.out = layers.Dense(5)

    def build(self, shape):
        """Builds all layers, the spare one too."""
        self.frozen.build(shape)
        self.spare.build(shape)
        self.out.build((None, 8))

    def call(self, inputs):
        """Leaves the spare layer out."""
        return self.out(self.frozen(inputs))


def variables_without_gradient() -> dict:
    """Frozen weights, and weights that no gradient reaches, stay as they are."""
    x, y = data(33)
    with job.strategy().scope():
        seed_ranks_apart()
        model = WithSpareWeights()
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return _fit(model, x, y)


def policy(name: str) -> dict:
    """A mixed-precision policy."""
    keras.config.set_dtype_policy(name)
    x, y = data(48)
    model = compiled(job.strategy(), optimizer=InScope(keras.optimizers.SGD, 0.05))
    return _fit(model, x, y, rows=12)


class Adversaries(keras.Model):
    """Two networks with an optimizer each, and a `train_step` of the user's own."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([layers.Input((6,)), layers.Dense(6)])
        self.critic = keras.Sequential([layers.Input((6,)), layers.Dense(1)])
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def compile(self, generator_optimizer, critic_optimizer):
        """Takes both optimizers."""
        super().compile()
        self.generator_optimizer = generator_optimizer
        self.critic_optimizer = critic_optimizer

    def call(self, inputs):
        """Returns the critic's opinion of what the generator makes."""
        return self.critic(self.generator(inputs))

    def train_step(self, batch):
        """Trains the critic, then the generator."""
        real = batch[0] if isinstance(batch, tuple) else batch
        with tf.GradientTape() as tape:
            fake = self.generator(real * 0.5, training=True)
            verdicts = tf.concat([self.critic(real), self.critic(fake)], 0)
            truth = tf.concat([tf.ones_like(real[:, :1]), tf.zeros_like(real[:, :1])], 0)
            critic_loss = self.loss_fn(truth, verdicts)
        variables = self.critic.trainable_variables
        self.critic_optimizer.apply_gradients(
            zip(tape.gradient(critic_loss, variables), variables, strict=True)
        )
        with tf.GradientTape() as tape:
            opinion = self.critic(self.generator(real * 0.5, training=True))
            generator_loss = self.loss_fn(tf.ones_like(opinion), opinion)
        variables = self.generator.trainable_variables
        self.generator_optimizer.apply_gradients(
            zip(tape.gradient(generator_loss, variables), variables, strict=True)
        )
        return {"critic_loss": critic_loss, "generator_loss": generator_loss}


def several_optimizers() -> dict:
    """A `train_step` with two optimizers; its losses are `keras.losses`, whose means are exact."""
    x, _ = data(50)
    with job.strategy().scope():
        seed_ranks_apart()
        model = Adversaries()
        model.compile(keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01))
    model.fit(x, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return outcome(model)


class WithAddedLoss(layers.Layer):
    """A layer that adds the mean square of its input to the loss."""

    def call(self, inputs):
        """Returns `inputs`."""
        self.add_loss(keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def added_loss() -> dict:
    """`add_loss` with a mean over rows, and an activity regulariser."""
    x, y = data(50)
    with job.strategy().scope():
        seed_ranks_apart()
        model = keras.Sequential(
            [layers.Input((6,)), layers.Dense(8), WithAddedLoss(), layers.Dense(CLASSES)]
        )
        model.compile(
            keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    return _fit(model, x, y)


class Noted(keras.utils.PyDataset):
    """Batches in an order that every rank draws for itself."""

    def __init__(self, x, y, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = x, y
        self.order = np.random.default_rng(job.rank()).permutation(len(x))

    def __len__(self):
        return -(-len(self.x) // 16)

    def __getitem__(self, index):
        rows = self.order[index * 16 : (index + 1) * 16]
        return self.x[rows], self.y[rows]


def python_data(kind: str) -> dict:
    """Data that only rank 0 reads: each rank would read other rows."""
    seed_ranks_apart()
    x, y = data(50)
    model = compiled(job.strategy())
    if kind == "PyDataset":
        source, options = Noted(x, y), {}
    elif kind == "PyDataset with workers":
        source, options = Noted(x, y, workers=2, max_queue_size=2), {}
    else:
        rng = np.random.default_rng(job.rank())
        batches = ((x[rows], y[rows]) for _ in range(100) for rows in [rng.integers(0, len(x), 13)])
        source, options = batches, {"steps_per_epoch": 4}
    history = model.fit(source, epochs=3, verbose=0, **options)
    return outcome(model, history)


def own_parts(epochs: int = 2) -> dict:
    """Each rank reads its own rows; the ranks' numbers of batches differ."""
    strategy = job.strategy()
    x, y = data(45)
    begin, end = (0, 45) if strategy.size == 1 else ((0, 30), (30, 45))[strategy.rank]
    if strategy.size == 1:  # The global batches that two ranks make of their parts.
        order = [
            *range(0, 6), *range(30, 36), *range(6, 12), *range(36, 42), *range(12, 18),
            *range(42, 45),
        ]  # fmt: skip
        rows = [order[:12], order[12:24], order[24:], range(18, 24), range(24, 30)]
        batches = [(x[list(r)], y[list(r)]) for r in rows]
        signature = (tf.TensorSpec((None, 6)), tf.TensorSpec((None,), tf.int64))
        dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(5))
    else:
        dataset = tf.data.Dataset.from_tensor_slices((x[begin:end], y[begin:end])).batch(12)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        dataset = dataset.with_options(options)
    model = compiled(strategy)
    history = model.fit(dataset, epochs=epochs, verbose=0)
    return outcome(model, history)


def wrong_data(kind: str) -> None:
    """Data that do not go together; must raise on every rank."""
    strategy = job.strategy()
    x, y = data(48)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    rank = strategy.rank
    if kind == "other bits":

        def differently(x, y):
            noise = tf.numpy_function(lambda: np.float32(rank), [], "float32")
            return x + tf.reshape(noise, []), y

        dataset = dataset.map(differently)
    elif kind == "fewer batches":
        dataset = dataset.take(4 - rank).filter(lambda x, y: True)
    elif kind == "an error":

        def batches():
            for begin in (0, 12, 24):  # Keras looks at two batches in advance.
                yield x[begin : begin + 12], y[begin : begin + 12]
            if rank == 0:
                raise OSError("the file is gone")
            yield x[36:], y[36:]

        compiled(strategy).fit(batches(), steps_per_epoch=4, verbose=0)
    elif kind == "no part":
        dataset = dataset.skip(4 * rank)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        dataset = dataset.with_options(options)
    compiled(strategy).fit(dataset, verbose=0)


def dropout_masks() -> list[np.ndarray]:
    """The masks that this process's replicas drew in two steps."""
    seed_ranks_apart()
    strategy = job.strategy()
    with strategy.scope():
        model = keras.Sequential([layers.Input((64,)), layers.Dropout(0.5)])
        model.compile("sgd", "mse")
    masks = []

    def remember(outputs):
        masks.append(outputs != 0)

    class Spy(layers.Layer):
        def call(self, inputs):
            tf.numpy_function(remember, [inputs], [])
            return inputs

    with strategy.scope():
        model = keras.Sequential([layers.Input((64,)), layers.Dropout(0.5), Spy(), layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = strategy.num_replicas_in_sync
    x = np.ones((2 * rows, 64), "float32")
    model.fit(x, x[:, :1], batch_size=rows, epochs=1, shuffle=False, verbose=0)
    return masks


def stops(kind: str) -> dict:
    """Callbacks that decide by the logs, or by themselves at the end of an epoch."""
    strategy = job.strategy()
    x, y = data(48)
    model = compiled(strategy)
    epochs = []
    count = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    callbacks = [count]
    if kind == "nan":
        x = x.copy()
        x[47] = np.nan  # The last row: the last replica's.
        callbacks.append(keras.callbacks.TerminateOnNaN())
    elif kind == "early":
        callbacks.append(keras.callbacks.EarlyStopping("loss", min_delta=1e3, patience=1))
    elif kind == "plateau":
        callbacks.append(keras.callbacks.ReduceLROnPlateau("loss", min_delta=1e3, patience=1))
    elif kind == "one rank":

        def stop(epoch, logs):
            if strategy.rank == strategy.size - 1 and epoch == 1:
                model.stop_training = True

        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=stop))
    model.fit(x, y, batch_size=12, epochs=6, shuffle=False, verbose=0, callbacks=callbacks)
    return {"epochs": len(epochs), "rate": float(np.asarray(model.optimizer.learning_rate))}


def files(directory: str) -> list[str]:
    """Callbacks that write: only rank 0's files may be there."""
    strategy = job.strategy()
    x, y = data(48)
    own = Path(directory, f"rank{strategy.rank}")
    own.mkdir()
    os.chdir(own)
    model = compiled(strategy)
    callbacks = [
        keras.callbacks.ModelCheckpoint("model.keras"),
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.TensorBoard("board"),
        keras.callbacks.BackupAndRestore("backup", delete_checkpoint=False),
    ]
    model.fit(x, y, batch_size=12, epochs=2, verbose=0, callbacks=callbacks)
    return sorted(p.name for p in own.iterdir())


def jit_compiled() -> None:
    """`jit_compile=True`, which must be refused before the first step."""
    x, y = data(12)
    compiled(job.strategy(), jit_compile=True).fit(x, y, verbose=0)


def optimizer_with(name: str, options: dict) -> dict:
    """`optimizer`, its options as a dict."""
    return optimizer(name, **options)


def saved(path: str) -> np.ndarray:
    """Rank 0 saves what was trained in a scope; returns what the model predicts."""
    strategy = job.strategy()
    x, y = data(24)
    model = compiled(strategy)
    model.fit(x, y, batch_size=12, verbose=0)
    if strategy.is_chief:
        model.save(path)
    return model.predict(x, verbose=0)


def loaded_elsewhere(path: str) -> np.ndarray:
    """A process in which tfdml cannot be imported loads the model; returns what it predicts."""
    code = (
        "import sys; sys.modules['tfdml'] = None\n"
        "import keras, numpy as np\n"
        f"model = keras.models.load_model({path!r})\n"
        f"x = np.load({path + '.x.npy'!r})\n"
        f"np.save({path + '.y.npy'!r}, model.predict(x, verbose=0, batch_size=32))\n"
    )
    np.save(path + ".x.npy", data(24)[0])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=90, capture_output=True)
    return np.load(path + ".y.npy")


def tutorial() -> dict:
    """The model of every beginner's tutorial, on noise of the shape of its images."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1100, 28, 28)).astype("float32")
    y = rng.integers(0, 10, 1100)
    with job.strategy().scope():
        seed_ranks_apart()
        model = keras.Sequential(
            [
                layers.Input((28, 28)),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dense(10),
            ]
        )
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(x, y, batch_size=256, epochs=4, verbose=0)
    # Adam amplifies the rounding of gradients near 0: what is compared is what a user sees.
    result = outcome(model, history)
    return result


def jit_compiled_is_refused(method: str) -> dict:
    """Whether a method refuses `jit_compile=True` where there are several processes."""
    strategy = job.strategy()
    x, y = data(12)
    model = compiled(strategy)
    model.train_on_batch(x, y)
    model.jit_compile = strategy.size > 1
    model.train_function = model.test_function = model.predict_function = None
    try:
        getattr(model, method)(x, **({} if method == "predict" else {"y": y}), verbose=0)
        refused = strategy.size == 1  # There it need not be.
    except ValueError as error:
        refused = "`jit_compile` must not be True" in str(error)
    except tf.errors.OpError:
        refused = False
    return {"weights": [], "refused": np.array(refused)}


def distinct_masks() -> dict:
    """Whether all masks that the replicas drew differ."""
    masks = np.concatenate(dropout_masks())
    gathered = job.strategy().extended.collective.all_gather(
        tf.constant(np.packbits(masks, 1)), "masks"
    )
    return {"weights": [], "distinct": len(np.unique(gathered, axis=0)) == len(gathered)}
