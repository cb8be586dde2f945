"""Checks the choices of a report: ranks, sharding, checkpointing, and strategies."""

import json

import keras
import pytest

import tfdml
from tests.memory import cases
from tests.memory.networks import HIDDEN, ROWS, WEIGHTS, WIDTH, network, of
from tfdml.memory import Choice, MemoryReport


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
