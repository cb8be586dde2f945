"""Cases of pipelines: models to be cut, trained in stages and, for comparison, by plain Keras."""

import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdml
from tests.harness import rank_job
from tfdml.pipeline.schedule import Task
from tfdml.strategies import HorovodStrategy, MirroredStrategy, MultiWorkerMirroredStrategy
from tfdml.strategies.keras_seam.pipeline import microbatches, task_order
from tfdml.strategies.replicas.variable_places import devices_of

# Of the last batch of an epoch, some microbatches of two groups have no rows.
ROWS, BATCH, CLASSES, WORDS, LENGTH = 68, 16, 3, 11, 5
MICROBATCHES = 3
ONE_GROUP = [["CPU:0", "CPU:1"]]
TWO_GROUPS = [["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]]
FOUR_STAGES = [["CPU:0", "CPU:1", "CPU:2", "CPU:3"]]


@keras.saving.register_keras_serializable("tfdml-tests")
class TiedEmbedding(layers.Layer):
    """Embedding whose table also gives the logits, in a later stage."""

    def __init__(self, width: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.width = width

    def build(self, shape: Any) -> None:
        """Makes the table."""
        self.table = self.add_weight(shape=(WORDS, self.width), initializer="uniform")

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        """Returns rows of the table, or logits."""
        if reverse:
            return keras.ops.matmul(inputs, keras.ops.transpose(self.table))
        return keras.ops.take(self.table, inputs, axis=0)

    def compute_output_spec(self, inputs: Any, reverse: bool = False) -> Any:
        """Returns the shape of the results."""
        last = (*inputs.shape[:-1], WORDS) if reverse else (*inputs.shape, self.width)
        return keras.KerasTensor(last, dtype=self.compute_dtype)


def sequential() -> keras.Model:
    """Layers in a row, with a weight's regularizer."""
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8, "tanh", kernel_regularizer="l2"),
            layers.Dense(8, "tanh"),
            layers.Dense(7, "tanh"),
            layers.Dense(CLASSES, "softmax"),
        ]
    )


def residual() -> keras.Model:
    """Skips over the cuts, and an added loss in each stage."""
    inputs = layers.Input((6,))
    first = layers.Dense(8, "tanh", activity_regularizer="l2")(inputs)
    hidden = layers.Dense(8, "tanh")(first)
    hidden = layers.Dense(8, "tanh", activity_regularizer="l1")(layers.Add()([hidden, first]))
    hidden = layers.Concatenate()([hidden, first, inputs])
    return keras.Model(inputs, layers.Dense(CLASSES, "softmax")(hidden))


def convolutional() -> keras.Model:
    """Convolutions, which cannot compute on 0 rows."""
    inputs = layers.Input((6,))
    hidden = layers.Reshape((3, 2, 1))(inputs)
    hidden = layers.Conv2D(4, 2, padding="same", activation="relu")(hidden)
    hidden = layers.Conv2D(4, 2, activation="relu")(hidden)
    return keras.Model(inputs, layers.Dense(CLASSES, "softmax")(layers.Flatten()(hidden)))


def shared() -> keras.Model:
    """A layer that is called in two stages."""
    inputs = layers.Input((6,))
    twice = layers.Dense(6, "tanh")
    hidden = layers.Dense(6, "tanh")(twice(inputs))
    hidden = layers.Dense(6, "tanh")(hidden)
    return keras.Model(inputs, layers.Dense(CLASSES, "softmax")(twice(hidden)))


def transformer() -> keras.Model:
    """A block of attention, with the table of the embedding tied to the output."""
    tokens = layers.Input((LENGTH,), dtype="int32")
    embedding = TiedEmbedding(8)
    hidden = embedding(tokens)
    attended = layers.MultiHeadAttention(2, 4)(hidden, hidden, use_causal_mask=True)
    hidden = layers.LayerNormalization()(hidden + attended)
    hidden = layers.LayerNormalization()(hidden + layers.Dense(8, "gelu")(hidden))
    return keras.Model(tokens, embedding(hidden, reverse=True))


def masked() -> keras.Model:
    """A mask that layers of later stages use."""
    tokens = layers.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(WORDS, 8, mask_zero=True)(tokens)
    hidden = layers.TimeDistributed(layers.Dense(6))(hidden)
    hidden = layers.LSTM(5, return_sequences=True)(hidden)
    return keras.Model(tokens, layers.Dense(CLASSES, "softmax")(layers.LSTM(5)(hidden)))


def two_of_each() -> keras.Model:
    """Two inputs, and two outputs of which one is made in the first stage."""
    left, right = layers.Input((6,), name="left"), layers.Input((4,), name="right")
    early = layers.Dense(1, name="early")(left)
    hidden = layers.Dense(8, "tanh")(layers.Concatenate()([left, right]))
    hidden = layers.Dense(8, "tanh")(hidden)
    late = layers.Dense(CLASSES, "softmax", name="late")(layers.Concatenate()([hidden, right]))
    return keras.Model({"left": left, "right": right}, {"early": early, "late": late})


MODELS: dict[str, Callable[[], keras.Model]] = {
    "sequential": sequential,
    "residual": residual,
    "convolutional": convolutional,
    "shared": shared,
    "transformer": transformer,
    "masked": masked,
    "two_of_each": two_of_each,
}


def adam() -> keras.Optimizer:
    """Returns an optimizer with slots."""
    return keras.optimizers.Adam(0.01)


def momentum() -> keras.Optimizer:
    """Returns an optimizer that adds up parts of a row's gradient, which Keras's Adam does not."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


def clipped() -> keras.Optimizer:
    """Returns an optimizer that clips by the norm of all stages' gradients together."""
    return keras.optimizers.AdamW(0.01, global_clipnorm=0.1)


def averaged() -> keras.Optimizer:
    """Returns an optimizer whose averages of weights replace them."""
    return keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_overwrite_frequency=2)


def accumulating() -> keras.Optimizer:
    """Returns an optimizer that updates after two steps."""
    return keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)


OPTIMIZERS = {"masked": momentum}


def data(model: str) -> tuple[Any, Any]:
    """Returns rows for a model, the same on every rank."""
    rng = np.random.default_rng(0)
    x, classes = rng.normal(size=(ROWS, 6)), rng.integers(0, CLASSES, ROWS)
    tokens = rng.integers(0, WORDS, (ROWS, LENGTH))
    if model == "transformer":
        return tokens, rng.integers(0, WORDS, (ROWS, LENGTH))
    if model == "masked":
        tokens[:, 0] = 1
        return tokens, classes
    if model == "two_of_each":
        left_right = {"left": x, "right": rng.normal(size=(ROWS, 4))}
        return left_right, {"early": x[:, :1], "late": classes}
    return x, classes


def compiled(model: str, **options: Any) -> keras.Model:
    """Returns a compiled model, with the same weights on every rank and each time."""
    keras.utils.set_random_seed(11)
    built = MODELS[model]()
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=model == "transformer")
    given = {"loss": crossentropy, "weighted_metrics": ["accuracy"]}
    if model == "two_of_each":
        given = {
            "loss": {"early": "mse", "late": crossentropy},
            "loss_weights": {"early": 0.3, "late": 1.0},
            "weighted_metrics": {"early": ["mae"], "late": ["accuracy"]},
        }
    built.compile(options.pop("optimizer", OPTIMIZERS.get(model, adam))(), **{**given, **options})
    return built


def results(built: keras.Model, model: str, **options: Any) -> dict[str, Any]:
    """Fits, evaluates and predicts; returns all that must be the same in stages."""
    x, y = data(model)
    weights = np.random.default_rng(1).uniform(0.5, 1.5, ROWS)
    if model == "transformer":
        weights = np.repeat(weights[:, np.newaxis], LENGTH, 1)
    if model == "two_of_each":
        weights = {"early": weights, "late": weights[::-1]}
    options = {"batch_size": BATCH, "verbose": 0, **options}
    history = built.fit(x, y, epochs=2, shuffle=False, sample_weight=weights, **options)
    evaluated = built.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    predicted = built.predict(x, batch_size=BATCH, verbose=0)
    return {
        "history": {name: np.array(values) for name, values in history.history.items()},
        "evaluated": evaluated,
        "predicted": tf.nest.flatten(predicted),
        "weights": [v.numpy() for v in built.weights],
        "slots": [np.array(v) for v in built.optimizer.variables],
    }


def strategy(groups: Sequence[Sequence[str]], **options: Any) -> tf.distribute.Strategy:
    """Returns a strategy of the job's kind, with a pipeline on each group of devices."""
    pipeline = tfdml.PipelineParallel(
        num_microbatches=options.pop("num_microbatches", MICROBATCHES),
        schedule=options.pop("schedule", "1f1b"),
        stages=options.pop("stages", None),
    )
    kind = {"mirrored": MirroredStrategy, "multi_worker": MultiWorkerMirroredStrategy}
    made = kind.get(rank_job.KIND, HorovodStrategy)
    return made(devices=groups, pipeline=pipeline, **options)


def in_stages(
    model: str,
    groups: Sequence[Sequence[str]] = ONE_GROUP,
    compile_options: dict | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Returns the results of a model that is trained in stages, in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    with strategy(groups, **options).scope():
        built = compiled(model, **(compile_options or {}))
    return results(built, model)


def plain(model: str, compile_options: dict | None = None) -> dict[str, Any]:
    """Returns the results of the same model by plain Keras, in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    return results(compiled(model, **(compile_options or {})), model)


def both(
    model: str, groups: Sequence[Sequence[str]], compile_options: dict, options: dict
) -> tuple:
    """Returns the results of plain Keras, and those in stages."""
    return plain(model, compile_options), in_stages(model, groups, compile_options, **options)


class Noted(layers.Layer):
    """Notes when its passes run: it takes time, so that others could run at the same time."""

    # Number of the layer and kind of the pass, at begins and ends.
    events: list[tuple[int, str]] = []

    def __init__(self, number: int):
        super().__init__(name=f"noted_{number}")
        self.number = number

    def build(self, shape: Any) -> None:
        """Makes a weight: without one, there would be no gradient."""
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, inputs: Any) -> Any:
        """Returns a product of `inputs`."""

        @tf.custom_gradient
        def noted(x):
            return self._note("forward", x), lambda upstream: self._note("backward", upstream)

        return noted(tf.matmul(inputs, self.kernel))

    def _note(self, kind: str, tensor: tf.Tensor) -> tf.Tensor:
        def work(values: np.ndarray) -> np.ndarray:
            self.events.append((self.number, kind))
            time.sleep(0.005)
            return values

        # Without state, TensorFlow orders nothing by itself.
        same = tf.numpy_function(work, [tensor], tensor.dtype, stateful=False)
        return tf.ensure_shape(same, tensor.shape)


def order_of_passes(schedule: str, num_microbatches: int) -> list[tuple[int, str]]:
    """Returns the passes of four stages in the second of two steps, in the order of beginning."""
    with strategy(FOUR_STAGES, schedule=schedule, num_microbatches=num_microbatches).scope():
        model = keras.Sequential([layers.Input((4,)), *map(Noted, range(4))])
        model.compile("sgd", "mse")
    x = np.ones((2 * num_microbatches, 4), "float32")
    for _ in range(2):
        Noted.events.clear()
        model.train_on_batch(x, x)
    return list(Noted.events)


def between_stages() -> tuple[dict[str, list], set]:
    """Returns what stages send to other devices, and where gradients of the second stage are.

    Returns:
        The shapes and dtypes that each stage's first passes send: by "forward 0" for stage 0, and
        so on; and the devices of operations with results of the shape of a kernel of stage 1.
    """
    noted: list[task_order.TaskOrder] = []

    class Kept(task_order.TaskOrder):
        def add(self) -> None:
            super().add()
            noted.append(self)

    with mock.patch.object(microbatches, "TaskOrder", Kept):
        with strategy(ONE_GROUP, stages=[["one"], ["two", "three"]]).scope():
            inputs = layers.Input((6,), dtype="float32")
            first = layers.Dense(5, name="one")(inputs)
            hidden = layers.Concatenate()([layers.Dense(7, name="two")(first), first])
            model = keras.Model(inputs, layers.Dense(3, name="three")(hidden))
            model.compile("sgd", "mse")
        model.fit(np.ones((12, 6), "float32"), np.ones((12, 3), "float32"), 6, verbose=0)
    graph = noted[0]._calls[0, Task("forward", 0)][0].graph
    # With the update, which is traced after the passes.
    places = {
        op.device[-5:]
        for op in graph.get_operations()
        if any(tensor.shape == (5, 7) for tensor in op.outputs)
    }
    sent = {
        f"{task.kind} {stage}": sorted(set().union(*map(_sent, calls)), key=str)
        for (stage, task), calls in noted[0]._calls.items()
        if task.microbatch == 0
    }
    return sent, places - {""}


def _sent(call: tf.Operation) -> set[tuple]:
    """Returns the shapes and dtypes of an operation's results that other devices use."""
    return {
        (tuple(tensor.shape), tensor.dtype.name)
        for tensor in call.outputs
        for user in tensor.consumers()
        if user.device not in ("", call.device)
    }


def graph_sizes(counts: Sequence[int]) -> list[int]:
    """Returns the number of the graph's operations for each number of microbatches."""
    sizes = []

    class Counting(task_order.TaskOrder):
        def add(self) -> None:
            super().add()
            sizes.append(len(tf.compat.v1.get_default_graph().get_operations()))

    with mock.patch.object(microbatches, "TaskOrder", Counting):
        for count in counts:
            before = len(sizes)
            with strategy(FOUR_STAGES, num_microbatches=count).scope():
                model = compiled("residual")
            x, y = data("residual")
            model.fit(x, y, batch_size=ROWS, verbose=0)
            del sizes[before + 1 :]
    return sizes


def devices_of_variables() -> tuple[list, list]:
    """Returns the stages' weights, and the slots, that are not on the devices of their stage."""
    with strategy(TWO_GROUPS, stages=[["one"], ["two"]]).scope():
        model = keras.Sequential(
            [layers.Input((6,)), layers.Dense(5, name="one"), layers.Dense(CLASSES, name="two")]
        )
        model.compile("adam", "mse")
    x = np.ones((BATCH, 6), "float32")
    model.fit(x, np.ones((BATCH, CLASSES), "float32"), verbose=0)
    wanted = {"one": ["CPU:0", "CPU:2"], "two": ["CPU:1", "CPU:3"]}
    wrong = []
    for variable in [*model.weights, *model.optimizer.variables]:
        devices = [part.device[-5:] for part in variable.value.values]
        layer = next((name for name in wanted if name in variable.path), None)
        if layer is not None and devices != wanted[layer]:
            wrong.append((variable.path, devices))
    return wrong, [v.path for v in model.optimizer.variables]


def places_of_gradient_sums() -> list[str]:
    """Returns where the gradients are added up that two stages send to the first one."""
    places: set[str] = set()

    class Looking(task_order.TaskOrder):
        def add(self) -> None:
            super().add()
            backward = self._calls[0, Task("backward", 0)][0]
            makers = [tensor.op for tensor in backward.inputs]
            places.update(op.device[-5:] for op in makers if op.type in ("AddN", "AddV2"))

    groups, stages = [["CPU:0", "CPU:1", "CPU:2"]], [["one"], ["two"], ["three", "four"]]
    with mock.patch.object(microbatches, "TaskOrder", Looking):
        with strategy(groups, stages=stages).scope():
            inputs = layers.Input((6,))
            first = layers.Dense(5, name="one")(inputs)
            hidden = layers.Dense(5, name="two")(first)
            both = [layers.Dense(3, name="three")(hidden), layers.Dense(3, name="four")(first)]
            model = keras.Model(inputs, layers.Add()(both))
            model.compile("sgd", "mse")
        model.fit(np.ones((12, 6), "float32"), np.ones((12, 3), "float32"), 6, verbose=0)
    return sorted(places)


def with_divided_slots() -> tuple[list, list]:
    """Trains with slots that are divided among the ranks.

    Returns:
        The weights; and the devices of each weight with those of its part and each of its slots.
    """
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    with strategy(ONE_GROUP, sharding=tfdml.Sharding()).scope():
        built = compiled("residual")
    found = results(built, "residual")["weights"]
    optimizer = built.optimizer
    weights = built.trainable_variables
    parts = built.distribute_strategy.extended.optimizer_parts[optimizer].of(weights)
    slots = zip(weights, parts, optimizer._momentums, optimizer._velocities, strict=True)
    return found, [(devices_of(v), devices_of(s)) for v, *own in slots for s in own]


def monitored(directory: str | None) -> dict[str, Any]:
    """Trains in two stages, with all callbacks that observe steps if there is a directory.

    Args:
        directory: Directory of the timeline.
    """
    stages = [["dense", "dense_1"], ["dense_2", "dense_3"]]
    with strategy(ONE_GROUP, stages=stages).scope():
        built = compiled("residual")
    x, y = data("residual")
    callbacks = []
    if directory is not None:
        callbacks = [
            tfdml.callbacks.PerformanceMetrics(),
            tfdml.callbacks.StepMonitor(),
            tfdml.callbacks.GradientNoiseScale(),
            tfdml.callbacks.Timeline(directory, profile_batch=(2, 3)),
        ]
    options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    history = built.fit(x, y, **options, callbacks=callbacks).history
    return {"history": history, "weights": [v.numpy() for v in built.weights]}
