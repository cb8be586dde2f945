"""Plans: times, bytes and advice against numbers worked out by hand."""

import keras
import numpy as np
import pytest

import tfdml
from tests.pipeline.models import sequential, skipping, tied, two_in_two_out
from tfdml.pipeline.layer_costs import CallCost
from tfdml.pipeline.plan import make_plan
from tfdml.pipeline.schedule import Task
from tfdml.pipeline.schedule_times import schedule_times
from tfdml.pipeline.slot_bytes import slot_bytes
from tfdml.tensor_memory.graph_nodes import nbytes_of

layers = keras.layers
BIAS, KERNEL = 4 * 8, 4 * 8 * 8


def _chain(optimizer="adam"):
    """Returns four layers of 8 units: each has 288 bytes of weights."""
    body = [layers.Dense(8, name=name) for name in "abcd"]
    model = keras.Sequential([keras.Input((8,)), *body], name="chain")
    if optimizer:
        model.compile(optimizer, "mse")
    return model


def _costs(forward=(1, 1, 1, 1), backward=(2, 2, 2, 2), kept=(10, 20, 30, 40)):
    return [
        CallCost(f * 1e-3, b * 1e-3, KERNEL + BIAS, (32.0,), k)
        for f, b, k in zip(forward, backward, kept, strict=True)
    ]


def _plan(model=None, costs=None, **options):
    options = {"num_stages": 2, "num_microbatches": 4, "schedule": "1f1b"} | options
    batch_size = options.pop("batch_size", 32)
    return make_plan(model or _chain(), batch_size, costs=costs or _costs(), **options)


# -- Times ---------------------------------------------------------------------------------------


def test_times_of_a_schedule_by_hand():
    first, second = schedule_times([1, 1], [2, 2], 2, "1f1b")
    assert [(s.task, s.begin, s.end) for s in first] == [
        (Task("forward", 0), 0, 1),
        (Task("forward", 1), 1, 2),
        (Task("backward", 0), 4, 6),
        (Task("backward", 1), 7, 9),
    ]
    assert [(s.task, s.begin, s.end) for s in second] == [
        (Task("forward", 0), 1, 2),
        (Task("backward", 0), 2, 4),
        (Task("forward", 1), 4, 5),
        (Task("backward", 1), 5, 7),
    ]


def test_a_slow_stage_makes_the_others_wait():
    first, second = schedule_times([1, 3], [1, 4], 2, "gpipe")
    assert [(s.begin, s.end) for s in second] == [(1, 4), (4, 7), (7, 11), (11, 15)]
    assert [(s.begin, s.end) for s in first] == [(0, 1), (1, 2), (11, 12), (15, 16)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("count", "microbatches"), [(1, 3), (2, 4), (4, 4), (4, 16), (8, 3)])
def test_equal_stages_have_the_bubble_of_the_formula(schedule, count, microbatches):
    spans = schedule_times([1.0] * count, [2.0] * count, microbatches, schedule)
    step = max(own[-1].end for own in spans)
    assert step == 3.0 * (microbatches + count - 1)
    busy = sum(span.end - span.begin for own in spans for span in own)
    idle = 1 - busy / (step * count)
    assert idle == pytest.approx((count - 1) / (microbatches + count - 1))


def test_step_bubble_and_speed():
    plan = _plan()
    assert plan.assignment == (0, 0, 1, 1)
    # A stage takes 2 + 4 ms; 4 + 2 - 1 of them follow each other.
    assert plan.step_seconds == pytest.approx(30e-3)
    assert plan.one_device_seconds == pytest.approx(48e-3)
    assert plan.speedup == pytest.approx(1.6)
    assert plan.bubble == pytest.approx(plan.bubble_of_equal_stages) == pytest.approx(0.2)
    assert plan.data_parallel_seconds == pytest.approx(24e-3)


def test_unequal_stages_have_a_larger_bubble():
    plan = _plan(costs=_costs((1, 1, 1, 6), (2, 2, 2, 9)))
    # The last stage takes 15 ms: 4 of them, with 3 ms forward before and 6 ms backward after.
    assert plan.assignment == (0, 0, 0, 1)
    assert plan.step_seconds == pytest.approx(69e-3)
    assert plan.bubble == pytest.approx(1 - 96 / 138)
    assert plan.bubble_of_equal_stages == pytest.approx(0.2)


# -- Bytes ---------------------------------------------------------------------------------------


def test_bytes_of_the_stages():
    first, second = _plan().stages
    assert first.layers == ("a", "b")
    assert second.layers == ("c", "d")
    assert first.weight_bytes == first.gradient_bytes == 2 * (KERNEL + BIAS)
    # Adam's two averages.
    assert first.slot_bytes == second.slot_bytes == 4 * (KERNEL + BIAS)
    # Microbatches of 8 rows. The second stage also keeps what it gets: 32 bytes a row.
    assert (first.in_flight, second.in_flight) == (2, 1)
    assert first.activation_bytes == 2 * 8 * (10 + 20)
    assert second.activation_bytes == 8 * (30 + 40 + 32)
    assert (first.sent_bytes, second.sent_bytes) == (8 * 32, 0)
    assert first.memory == 8 * (KERNEL + BIAS) + 480


def test_gpipe_keeps_all_microbatches():
    plan = _plan(schedule="gpipe")
    assert [stage.in_flight for stage in plan.stages] == [4, 4]
    assert plan.stages[0].activation_bytes == 4 * 8 * 30


def test_an_uneven_last_microbatch_is_smaller():
    assert _plan(batch_size=29).stages[1].sent_bytes == 0
    assert _plan(batch_size=29).stages[0].sent_bytes == 8 * 32


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (None, 0),
        ("sgd", 0),
        ("adam", 2),
        (lambda: keras.optimizers.Adam(use_ema=True), 3),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), 2),
        (lambda: tfdml.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam()), 2),
    ],
)
def test_slots_of_optimizers(optimizer, slots):
    model = _chain(optimizer() if callable(optimizer) else optimizer)
    plan = _plan(model)
    assert [stage.slot_bytes for stage in plan.stages] == [2 * slots * (KERNEL + BIAS)] * 2
    assert optimizer is None or not getattr(model.optimizer, "_trainable_variables", ())


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.Adafactor(),
        keras.optimizers.Nadam(),
        # Which variables have two slots depends on their paths.
        keras.optimizers.Muon(0.1, exclude_layers=["shared"]),
    ],
    ids=lambda optimizer: optimizer.name,
)
def test_slots_are_those_of_the_built_optimizer(optimizer):
    model = tied()
    counted = slot_bytes(optimizer, [[v] for v in model.trainable_variables])
    assert not getattr(optimizer, "_trainable_variables", ())
    optimizer.build(model.trainable_variables)
    assert sum(counted) == sum(nbytes_of(slot) for slot in optimizer.variables if len(slot.shape))


def test_frozen_weights_have_neither_gradients_nor_slots():
    model = _chain()
    model.get_layer("a").trainable = False
    model.compile("adam", "mse")
    first = _plan(model).stages[0]
    assert first.weight_bytes == 2 * (KERNEL + BIAS)
    assert first.gradient_bytes == KERNEL + BIAS
    assert first.slot_bytes == 2 * (KERNEL + BIAS)


def test_a_tensor_is_sent_once_to_each_stage_that_uses_it():
    costs = [CallCost(1e-3, 1e-3, 0, (16.0,)) for _ in range(3)] + [CallCost(1e-3, 1e-3, 0, (4.0,))]
    stages = [["first"], ["second"], ["add", "last"]]
    plan = make_plan(
        skipping(), 8, num_stages=3, num_microbatches=4, schedule="1f1b", stages=stages, costs=costs
    )
    assert plan.assignment == (0, 1, 2, 2)
    # `first` goes to both later stages, `second` to the last.
    assert [stage.sent_bytes for stage in plan.stages] == [2 * 2 * 16, 2 * 16, 0]
    assert [s.activation_bytes for s in plan.stages] == [0, 2 * 2 * 16, 2 * (16 + 16)]


def test_outputs_are_sent_to_the_last_stage():
    costs = [CallCost(1e-3, 1e-3, 0, (nbytes,)) for nbytes in (16.0, 16.0, 16.0, 8.0)]
    stages = [["early", "middle"], ["late"]]
    plan = make_plan(
        two_in_two_out(), 8, num_stages=2, num_microbatches=4, schedule="1f1b", stages=stages,
        costs=costs,
    )  # fmt: skip
    # `both`, which `late` uses, and the output `early`.
    assert plan.stages[0].sent_bytes == 2 * (16 + 16)


# -- Cuts ----------------------------------------------------------------------------------------


def test_stages_by_names():
    plan = _plan(stages=[["a"], ["b", "c", "d"]])
    assert plan.assignment == (0, 1, 1, 1)
    assert plan.stages[1].layers == ("b", "c", "d")


def test_limits_move_the_cut():
    kept = (1000, 10, 10, 10)
    assert _plan(costs=_costs(kept=kept)).assignment == (0, 0, 1, 1)
    # In the first stage two microbatches of 8 rows are in flight.
    limit = 4 * (KERNEL + BIAS) + 2 * 8 * 1000
    plan = _plan(costs=_costs(kept=kept), memory_limits=[limit, 1e6])
    assert plan.assignment == (0, 1, 1, 1)
    assert plan.stages[0].memory == limit


def test_one_limit_is_for_all_stages():
    with pytest.raises(ValueError, match="'a' alone takes"):
        _plan(memory_limits=1000)
    assert _plan(memory_limits=1e6).memory_limits == (1e6, 1e6)


def test_wide_tensors_are_not_cut_if_stages_are_nearly_equal():
    costs = [
        CallCost(3e-3, 0, 0, (8e6,)),
        CallCost(0, 0, 0, (8.0,)),
        CallCost(0, 0, 0, (8e6,)),
        CallCost(3e-3, 0, 0, (8.0,)),
    ]
    assert _plan(costs=costs).assignment == (0, 0, 1, 1)


def test_a_measured_plan():
    model = sequential()
    model.compile("sgd", "mse")
    plan = make_plan(model, 8, num_stages=2, num_microbatches=4, schedule="1f1b")
    assert sorted(set(plan.assignment)) == [0, 1]
    assert plan.step_seconds > 0
    assert sum(s.weight_bytes for s in plan.stages) == sum(map(nbytes_of, model.variables))


def test_a_plan_in_the_scope_of_a_strategy():
    with tfdml.MirroredStrategy(["CPU:0"]).scope():
        model = _chain()
        plan = make_plan(model, 8, num_stages=2, num_microbatches=4, schedule="1f1b")
    assert sum(stage.slot_bytes for stage in plan.stages) == 8 * (KERNEL + BIAS)
    # The model trains as before.
    before = keras.ops.convert_to_numpy(model.get_layer("d").kernel)
    model.fit(np.ones((8, 8)), np.ones((8, 8)), verbose=0)
    assert (keras.ops.convert_to_numpy(model.get_layer("d").kernel) != before).any()


# -- What is printed -----------------------------------------------------------------------------


def test_the_table():
    lines = str(_plan()).splitlines()
    assert lines[0] == "chain, 32 rows in 4 microbatches, 1f1b: 2 stages"
    assert lines[2].split() == [
        "stage", "layers", "forward", "backward", "weights", "gradients", "slots", "activations",
        "sent",
    ]  # fmt: skip
    assert lines[3].split() == [
        "0", "a,", "b", "2", "ms", "4", "ms", "576", "B", "576", "B", "1.15", "KB", "480", "B",
        "(2)", "256", "B",
    ]  # fmt: skip
    assert "takes 30 ms, 1.60 times as fast as the same microbatches on one device (48 ms)" in (
        " ".join(lines)
    )
    assert "idle for 20.0 % of it" in " ".join(lines)
    assert max(map(len, lines)) <= 100


def test_the_picture_in_text():
    text = str(_plan(num_microbatches=2, batch_size=16)).splitlines()
    # A step takes 18 ms: 6 of 2 + 4 ms with 2 ms, or 9 columns of 78.
    (first,) = [line for line in text if line.startswith("stage 0 ")]
    (second,) = [line for line in text if line.startswith("stage 1 ")]
    assert first == "stage 0  " + "0" * 9 + "1" * 8 + "." * 18 + "a" * 17 + "." * 9 + "b" * 17
    assert second == "stage 1  " + "." * 9 + "0" * 8 + "a" * 18 + "1" * 8 + "b" * 18 + "." * 17


def test_long_stages_are_named_by_their_first_and_last_layer():
    assert "b ... d (3)" in str(_plan(stages=[["a"], ["b", "c", "d"]]))


def test_advice_on_data_parallelism():
    words = " ".join(str(_plan()).split())
    # Each device needs all weights, gradients and slots, and activations of 16 rows.
    memory = 4 * 4 * (KERNEL + BIAS) + 16 * 100
    assert _plan().data_parallel_memory == memory == 6208
    assert "on the same 2 devices needs 6.21 KB on each, and, if they have it, takes 24 ms" in words
    # Two devices send all gradients once in 30 - 24 ms.
    assert "faster if 1.15 KB from and to each device take less than 6 ms, at 192 KB/s" in words


def test_advice_with_limits():
    words = " ".join(str(_plan(memory_limits=6208)).split())
    assert "needs 6.21 KB on each, which fits, and takes 24 ms" in words
    plan = _plan(memory_limits=[6000, 6208])
    assert not plan.data_parallel_fits
    assert "needs 6.21 KB on each, more than the limit of 6 KB." in " ".join(str(plan).split())


def test_advice_without_a_bubble():
    assert str(_plan(num_stages=1)).endswith("One stage is no pipeline.")


def test_stages_by_names_that_are_over_a_limit_are_named():
    text = str(_plan(stages=[["a"], ["b", "c", "d"]], memory_limits=[1e6, 3000]))
    assert "Stage 1 needs 4.43 KB, over its limit of 3 KB." in text
    assert "Stage 0 needs" not in text


def test_the_picture(tmp_path):
    plan = _plan(costs=_costs((1, 1, 1, 6), (2, 2, 2, 9)))
    figure = plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    # A box for each pass of each microbatch on each stage, idle times between them.
    boxes = [(p.get_x(), p.get_width(), round(p.get_y() + 0.4)) for p in axes.patches]
    assert len(boxes) == 2 * 2 * 4
    expected = [
        (1e3 * span.begin, 1e3 * (span.end - span.begin), stage)
        for stage, spans in enumerate(plan.spans)
        for span in spans
    ]
    np.testing.assert_allclose(sorted(boxes), sorted(expected), atol=1e-9)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0", "stage 1"]
    assert plan.plot() is not None


# -- Wrong arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_microbatches": 33}, "batch_size=32 and num_microbatches=33. Use at most 32"),
        ({"num_microbatches": 0}, "`num_microbatches` must be a positive number"),
        ({"batch_size": 0}, "`batch_size` must be a positive number"),
        ({"num_stages": 5}, "num_stages=5 and a model with 4 calls"),
        ({"stages": [["a", "b", "c", "d"]]}, "Received: 1 stages for num_stages=2. Name 2, or"),
        ({"stages": [["a", "b"], ["c"]]}, "Missing: 'd'"),
        ({"memory_limits": [1]}, "one for each of the 2 stages"),
        ({"memory_limits": 0}, "`memory_limits` must be a positive number of bytes"),
        ({"costs": _costs()[:3]}, "Received: 3, for 4 calls"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        _plan(**options)


def test_a_model_without_a_graph_is_refused():
    class Mine(keras.Model):
        def call(self, x):
            return x

    with pytest.raises(ValueError, match="'mine' of the class Mine, whose `call` is code"):
        make_plan(Mine(name="mine"), 8, num_stages=2, num_microbatches=2, schedule="1f1b")
