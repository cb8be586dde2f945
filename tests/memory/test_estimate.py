"""Checks estimates against numbers that can be worked out by hand, and against real state."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdml
from tests.memory import cases
from tfdml.memory import Choice, MemoryReport
from tfdml.memory.graph_nodes import nbytes_of

ROWS, WIDTH, HIDDEN = 256, 32, 64
# A kernel and a bias of two layers, in float32.
WEIGHTS = 4 * (WIDTH * HIDDEN + HIDDEN + HIDDEN + 1)
# Adam's iterations and learning rate.
SCALARS = 8 + 4


def network(optimizer="adam", loss="mse", **options) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((WIDTH,)), layers.Dense(HIDDEN, "relu", **options), layers.Dense(1)]
    )
    model.compile(optimizer, loss)
    return model


def of(model: keras.Model, batch_size: int = ROWS, **options) -> Choice:
    """Returns the estimate for one rank."""
    return tfdml.estimate_memory(model, batch_size, ranks=[1], **options).choices[0]


# -- Parts -----------------------------------------------------------------------------------------


def test_parts_of_a_small_network():
    found = of(network())
    assert found.weights == WEIGHTS
    assert found.gradients == WEIGHTS
    assert found.slots == 2 * WEIGHTS + SCALARS
    assert found.exchange == found.residuals == 0
    # When the hidden layer's gradient exists: the batch, the hidden layer's output, its gradient,
    # and the gradient of the network's output.
    batch, hidden, output = 4 * ROWS * WIDTH, 4 * ROWS * HIDDEN, 4 * ROWS
    assert found.activations == batch + 2 * hidden + output
    # The last layer's gradients are there at that moment, too.
    assert found.peak == found.weights + found.slots + found.activations + 4 * (HIDDEN + 1)


def test_the_update_is_the_peak_of_a_small_batch():
    kernel = 4 * WIDTH * HIDDEN
    # Adam's first moment needs one number more for each of the largest variable.
    adam = of(network("adam"), batch_size=1)
    scalars = 64
    assert 0 <= adam.peak - (WEIGHTS + adam.slots + WEIGHTS + kernel) < scalars
    # SGD multiplies the gradient in place: the end of the backward pass is the peak, with the batch
    # and the hidden layer's gradient.
    sgd = of(network("sgd"), batch_size=1)
    assert sgd.slots == SCALARS
    assert 0 <= sgd.peak - (WEIGHTS + sgd.slots + WEIGHTS + 4 * (WIDTH + HIDDEN)) < scalars


def test_activations_grow_with_the_rows_and_nothing_else_does():
    small, large = of(network(), 100), of(network(), 300)
    assert large.activations == 3 * small.activations
    assert (large.weights, large.slots, large.gradients) == (
        small.weights,
        small.slots,
        small.gradients,
    )


def test_ranks_share_a_batch_as_if_each_were_traced():
    """Only the largest and the smallest share are traced; others lie between them."""
    model = network()
    report = tfdml.estimate_memory(model, 8 * ROWS, ranks=[1, 3, 8])
    third = next(c for c in report.choices if c.ranks == 3)
    rows = -(-8 * ROWS // 3)
    assert third.activations == of(model, rows).activations


def test_ranks_share_the_rows_of_an_embedding():
    """Its gradient has another shape for each number of rows."""
    layers = keras.layers
    body = [layers.Embedding(100, 16), layers.GlobalAveragePooling1D()]
    model = keras.Sequential([keras.Input((7,), dtype="int32"), *body])
    model.compile("sgd", "mse")
    report = tfdml.estimate_memory(model, 16, ranks=[1, 2, 4])
    found = {c.ranks: c.gradients for c in report.choices}
    assert found == {n: 16 // n * 7 * (4 * 16 + 4) for n in (1, 2, 4)}


def test_frozen_layers_have_no_gradients_and_slots():
    model = network()
    model.layers[0].trainable = False
    model.compile("adam", "mse")
    found = of(model)
    assert found.weights == WEIGHTS
    assert found.gradients == 4 * (HIDDEN + 1)
    assert found.slots == 2 * found.gradients + SCALARS


def test_rows_of_an_embedding_are_the_gradient():
    tokens, words, width = 7, 1000, 16
    model = keras.Sequential(
        [
            keras.Input((tokens,), dtype="int32"),
            keras.layers.Embedding(words, width),
            keras.layers.GlobalAveragePooling1D(),
        ]
    )
    model.compile("sgd", "mse")
    found = of(model, 4)
    assert found.weights == 4 * words * width
    assert found.gradients == 4 * tokens * (4 * width + 4)


def test_steps_of_a_loop_are_kept():
    def activations(steps: int) -> int:
        rnn = keras.layers.SimpleRNN(HIDDEN)
        model = keras.Sequential([keras.Input((steps, WIDTH)), rnn, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return of(model, 16).activations

    # A step more: the transposed copy of the batch, which replaces it, and the output. The backward
    # loop adds nothing for each step, because the batch needs no gradient.
    assert activations(30) - activations(20) == 10 * 4 * 16 * (WIDTH + HIDDEN)


def test_half_precision_halves_activations_and_keeps_weights():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        half = of(network())
    finally:
        keras.mixed_precision.set_global_policy("float32")
    whole = of(network())
    assert (half.weights, half.gradients) == (whole.weights, whole.gradients)
    assert 0.5 <= half.activations / whole.activations < 0.85


def test_a_loss_scale_is_among_the_slots():
    inner = keras.optimizers.Adam()
    scaled = of(network(tfdml.mixed_precision.LossScaleOptimizer(inner)))
    # The scale's own iterations, rate, counters of steps, of skipped steps, and the scale.
    assert scaled.slots - of(network()).slots == SCALARS + 8 + 8 + 4


def test_several_inputs_and_outputs_and_a_loss_of_classes():
    a, b = keras.Input((8,), name="a"), keras.Input((4,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    outputs = {"one": keras.layers.Dense(5)(joined), "two": keras.layers.Dense(1)(joined)}
    model = keras.Model({"a": a, "b": b}, outputs)
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", {"one": classes, "two": "mse"})
    data = (
        {"a": np.zeros((1, 8), "float32"), "b": np.zeros((1, 4), "float32")},
        {"one": np.zeros((1,), "int32"), "two": np.zeros((1, 1), "float32")},
    )
    found = of(model, data=data)
    assert found.weights == found.gradients == 4 * (12 * 6 + 6)


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", "categorical_crossentropy"])
def test_targets_follow_from_the_loss(loss):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", loss)
    assert of(model).gradients == 4 * (4 * 3 + 3)


class OwnStep(keras.Model):
    """Model with a step of its own and two optimizers, one for each half."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(8), keras.layers.Dense(1)

    def call(self, x):
        return self.second(self.first(x))

    def compile(self, first, second):
        super().compile(optimizer=first, loss="mse")
        self.optimizer_of_second = second

    def train_step(self, data):
        x, y = data
        for optimizer, layer in (
            (self.optimizer, self.first),
            (self.optimizer_of_second, self.second),
        ):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            own = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))
        return {"loss": loss}


def test_a_step_of_ones_own_with_two_optimizers():
    model = OwnStep()
    model.build((None, 4))
    model.compile(keras.optimizers.Adam(), keras.optimizers.SGD(momentum=0.9))
    found = of(model)
    first, second = 4 * (4 * 8 + 8), 4 * (8 + 1)
    assert found.gradients == first + second
    assert found.slots == 2 * first + SCALARS + second + SCALARS
    model.fit(np.zeros((8, 4)), np.zeros((8, 1)), verbose=0)
    assert of(model) == found


class UpdatesTwice(keras.Model):
    """Model whose step updates all its weights twice, with the same optimizer."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            own = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))
        return {"loss": loss}


def test_an_optimizer_that_updates_twice_has_its_slots_once():
    model = UpdatesTwice()
    model.build((None, 4))
    model.compile("adam")
    found = of(model, data=(np.zeros((1, 4), "float32"), np.zeros((1, 1), "float32")))
    assert found.slots == 2 * 4 * (4 + 1) + SCALARS


# -- Slots -----------------------------------------------------------------------------------------

OPTIMIZERS = (
    "SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam",
    "Ftrl", "Lion", "Lamb", "Muon",
)  # fmt: skip
MAKE = {name: lambda name=name: getattr(keras.optimizers, name)() for name in OPTIMIZERS}
MAKE |= {
    "momentum": lambda: keras.optimizers.SGD(momentum=0.9, nesterov=True),
    "amsgrad, averages": lambda: keras.optimizers.Adam(amsgrad=True, use_ema=True),
    "accumulation": lambda: keras.optimizers.Adam(gradient_accumulation_steps=3),
    "LARS": lambda: tfdml.optimizers.LARS(0.1),
    "LAMB": lambda: tfdml.optimizers.LAMB(0.1),
}


# By default those with slots of their own kind; the others are slow tests.
BY_DEFAULT = {"SGD", "Adam", "Adafactor", "Muon", "amsgrad, averages", "accumulation"}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=() if name in BY_DEFAULT else pytest.mark.slow)
        for name, make in MAKE.items()
    ],
)
def test_slots_are_those_of_the_built_optimizer(make):
    optimizer = make()
    model = network(optimizer)
    estimated = of(model)
    assert not optimizer.built, "The estimate must leave the optimizer as it was."
    optimizer.build(model.trainable_variables)
    assert estimated.slots == sum(nbytes_of(v) for v in optimizer.variables)


def test_every_optimizer_of_keras_is_here():
    found = {
        name
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, keras.Optimizer)
    }
    # The base class, the loss scale, and one that is made of others or not in all versions.
    others = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "ScheduleFreeAdamW"}
    assert found - others == set(OPTIMIZERS)


def test_slots_are_not_allocated():
    """A slot of 4 GB would be seen; the variables have 40 KB."""
    taken = []

    class Greedy(keras.optimizers.SGD):
        def build(self, variables):
            super().build(variables)

            def fill(shape, dtype=None):
                taken.append(tf.executing_eagerly())
                return tf.zeros(shape, dtype)

            self.add_variable((1000, 1000, 1000), fill, "float32", name="huge")

    found = of(network(Greedy()))
    assert found.slots == 4 * 10**9 + SCALARS
    assert not any(taken)


# -- Training is as before -------------------------------------------------------------------------


def test_training_is_not_changed():
    def losses(estimate: bool) -> list[float]:
        keras.utils.set_random_seed(1)
        model = network(keras.optimizers.Adam(0.01))
        if estimate:
            tfdml.estimate_memory(model, 16)
        x = np.random.default_rng(0).normal(size=(64, WIDTH)).astype("float32")
        return model.fit(x, x[:, :1], epochs=2, verbose=0, shuffle=False).history["loss"]

    assert losses(True) == losses(False)


class Unread(keras.layers.Layer):
    """Computes a large tensor that nobody reads; TensorFlow leaves it out."""

    def call(self, inputs):
        tf.tile(inputs, [1, 1000])
        return inputs


def test_a_result_that_nobody_reads_takes_nothing():
    def model(*layers):
        made = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
        made.compile("sgd", "mse")
        return made

    assert of(model(Unread())).activations == of(model()).activations


class InABranch(keras.layers.Layer):
    """Computes a large tensor in a branch, which returns a small one."""

    def call(self, inputs):
        fixed = tf.stop_gradient(inputs)
        small = tf.reduce_mean(fixed, axis=1, keepdims=True)
        means = tf.cond(
            tf.reduce_sum(fixed) > 0,
            lambda: tf.reduce_mean(tf.tile(fixed, [1, 1000]), axis=1, keepdims=True),
            lambda: small,
        )
        return inputs + means


def test_the_inside_of_a_branch_counts_while_it_runs():
    model = keras.Sequential([keras.Input((WIDTH,)), InABranch(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert of(model).activations >= 4 * ROWS * WIDTH * 1000


class InAFunction(keras.layers.Layer):
    """Calls a function that TensorFlow has traced for any number of rows."""

    @tf.function(input_signature=[tf.TensorSpec((None, WIDTH))])
    def _mean(self, inputs):
        return tf.reduce_mean(tf.tile(inputs, [1, 1000]), axis=1, keepdims=True)

    def call(self, inputs):
        return inputs + self._mean(tf.stop_gradient(inputs))


def test_unknown_sizes_inside_a_function_are_told():
    model = keras.Sequential([keras.Input((WIDTH,)), InAFunction(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    (note,) = tfdml.estimate_memory(model, ROWS, ranks=[1]).notes
    assert "whose size is known only in training, the first of Tile" in note


# -- Ranks and choices -----------------------------------------------------------------------------


def test_choices_of_a_number_of_ranks():
    report = tfdml.estimate_memory(network(), ROWS, ranks=[2])
    plain, sharded, checkpointed, both = report.choices
    assert [c.name for c in report.choices] == [
        "2 ranks",
        "2 ranks with sharding",
        "2 ranks with checkpointing",
        "2 ranks with sharding and checkpointing",
    ]
    assert sharded.slots == -(-plain.slots // 2)
    assert plain.peak - sharded.peak == plain.slots - sharded.slots
    assert checkpointed.activations <= plain.activations
    assert both.slots == sharded.slots
    assert both.activations == checkpointed.activations
    # All sums, and one bucket: all four gradients are sent together.
    assert plain.exchange == 2 * WEIGHTS


def test_checkpointing_leaves_inputs_of_blocks_and_the_inside_of_one():
    depth, rows = 16, 4096
    layers = [keras.layers.Dense(HIDDEN, "relu") for _ in range(depth)]
    model = keras.Sequential([keras.Input((HIDDEN,)), *layers])
    model.compile("sgd", "mse")
    plain, checkpointed = tfdml.estimate_memory(model, rows, ranks=[1]).choices
    saved = plain.activations - checkpointed.activations
    # Four blocks keep three inputs and the four outputs of one, of sixteen outputs.
    assert 6 < saved / (4 * rows * HIDDEN) <= 9
    assert plain.peak - checkpointed.peak == saved


def test_the_first_choice_that_fits():
    def choice(ranks, sharding, checkpointing, peak):
        return Choice(ranks, sharding, checkpointing, 1, 1, 1, 1, 1, 1, peak)

    report = MemoryReport(
        "m", 8, 1, (choice(1, False, False, 90), choice(2, False, False, 50),
                    choice(2, True, False, 40), choice(4, False, False, 30))
    )  # fmt: skip
    assert report.fits(90).ranks == 1
    assert report.fits(89).name == "2 ranks"
    assert report.fits(40).name == "2 ranks with sharding"
    assert report.fits(39).ranks == 4
    assert report.fits(29) is None
    assert report.fits(100, ranks=2).name == "2 ranks"
    assert report.fits(45, ranks=4).ranks == 4
    with pytest.raises(ValueError, match="`memory` must be a positive number of bytes"):
        report.fits(0)
    with pytest.raises(ValueError, match=r"`ranks` must be a number of the table.*1, 2, 4"):
        report.fits(50, ranks=3)


def test_table_and_json_and_plot(tmp_path):
    report = tfdml.estimate_memory(network(), ROWS, ranks=[1, 2])
    lines = str(report).splitlines()
    assert lines[2].split() == [
        "ranks", "sharding", "checkpointing", "weights", "gradients", "slots", "activations",
        "exchange", "residuals", "peak",
    ]  # fmt: skip
    assert lines[3].split()[:5] == ["1", "-", "-", "8.71", "KB"]
    assert len(lines) >= 3 + 6
    again = json.loads(json.dumps(report.as_dict()))
    assert again["choices"][0]["weights"] == WEIGHTS
    assert len({len(line) for line in lines[2:9]}) == 1
    report.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


# -- Strategies ------------------------------------------------------------------------------------


def test_codec_of_a_strategy():
    strategy = tfdml.MirroredStrategy(["CPU:0"], compression="onebit")
    plain, coded = (
        tfdml.estimate_memory(network(), ROWS, s, ranks=[2]).choices[0] for s in (None, strategy)
    )
    # One residual of the compressed kernel, one of the half that a rank owns; see test_state_bytes.
    assert plain.residuals == 0
    assert coded.residuals > 4 * WIDTH * HIDDEN * 1.5


def test_exchange_and_residuals_are_in_the_peak_of_an_update():
    """Of two ranks with one row each, whose peak is the update's."""
    strategy = tfdml.MirroredStrategy(["CPU:0"], compression="onebit")
    one = of(network(), 1)
    for given in (None, strategy):
        two = tfdml.estimate_memory(network(), 2, given, ranks=[2]).choices[0]
        assert two.peak - one.peak == two.exchange + two.residuals > 0


def test_accumulated_gradients_of_a_strategy():
    """A strategy sums gradients over steps in variables of its own, besides Keras's slots."""

    def estimated(steps: int | None, strategy) -> Choice:
        return of(
            network(keras.optimizers.Adam(gradient_accumulation_steps=steps)), 1, strategy=strategy
        )

    strategy = tfdml.MirroredStrategy(["CPU:0"])
    plain, ours = (estimated(2, given) for given in (None, strategy))
    assert estimated(None, strategy).gradients == plain.gradients == WEIGHTS
    assert ours.gradients == 2 * WEIGHTS
    assert ours.peak - plain.peak == WEIGHTS


@pytest.mark.parametrize("codec", [pytest.param("powersgd", marks=pytest.mark.slow), "onebit"])
def test_residuals_and_slots_are_those_of_real_ranks(ranks, codec):
    for estimated, real in ranks(2).run(cases.estimated_and_real, codec):
        assert estimated == real


# -- Errors ----------------------------------------------------------------------------------------


def test_wrong_arguments():
    model = network()
    for arguments, message in (
        ((object(), 1), "`model` must be a keras.Model"),
        ((model, 0), "`batch_size` must be a positive number"),
        ((model, True), "`batch_size` must be a positive number"),
        ((model, 1, "horovod"), "`strategy` must be a synchronous strategy"),
    ):
        with pytest.raises(ValueError, match=message):
            tfdml.estimate_memory(*arguments)
    with pytest.raises(ValueError, match="`ranks` must be positive numbers"):
        tfdml.estimate_memory(model, 1, ranks=[0])


def test_a_model_that_is_not_ready():
    bare = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="must be compiled with an optimizer"):
        tfdml.estimate_memory(bare, 1)
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    with pytest.raises(ValueError, match="must be built"):
        tfdml.estimate_memory(unbuilt, 1)


def test_data_that_the_step_does_not_take():
    with pytest.raises(ValueError, match=r"`data` must be a batch that `Sequential.train_step`"):
        of(network(), data=(np.zeros((1, WIDTH + 1), "float32"), np.zeros((1, 1), "float32")))


def test_an_optimizer_that_cannot_be_copied():
    class Odd(keras.optimizers.SGD):
        def __init__(self, needed):
            super().__init__()

    with pytest.raises(ValueError, match="from_config.*Odd"):
        of(network(Odd(1)))
