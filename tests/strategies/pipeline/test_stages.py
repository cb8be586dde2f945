"""The stages of a pipeline: their order, transfers and places, and the size of the graph."""

import pytest

from tests.strategies.pipeline import cases
from tfdml.pipeline.schedule import max_in_flight, stage_order


@pytest.mark.parametrize(("schedule", "number"), [("1f1b", 6), ("1f1b", 2), ("gpipe", 6)])
def test_each_stage_keeps_the_order_of_the_schedule(ranks, schedule, number):
    (events,) = ranks(4, "mirrored").run(cases.order_of_passes, schedule, number)
    for stage in range(4):
        kinds = [kind for own, kind in events if own == stage]
        tasks = stage_order(stage, 4, number, schedule)
        assert kinds == [task.kind for task in tasks]
        in_flight = [kinds[:n].count("forward") - kinds[:n].count("backward") for n in range(99)]
        assert max(in_flight) == max_in_flight(stage, 4, number, schedule)


def test_stages_work_at_the_same_time(ranks):
    """The first stage is ahead of the last one by as many forward passes as there are stages."""
    (events,) = ranks(4, "mirrored").run(cases.order_of_passes, "1f1b", 6)
    before = events[: events.index((3, "backward"))]
    assert before.count((0, "forward")) >= 3


def test_only_activations_and_their_gradients_are_sent(ranks):
    ((sent, places),) = ranks(4, "mirrored").run(cases.between_stages)
    # Both `two` and the concatenation take the activations: they and their gradient are sent once.
    assert sent["forward 0"] == [((2, 5), "float32")]
    assert sent["forward 1"] == []
    assert [shape for shape, _ in sent["backward 1"]] == [(2, 5)]
    assert sent["backward 0"] == []
    # Gradients are summed and applied where they are.
    assert places == {"CPU:1"}


def test_gradients_of_one_tensor_are_added_up_on_its_stage(ranks):
    """Not on the last stage's device, where the step takes gradients."""
    (places,) = ranks(4, "mirrored").run(cases.places_of_gradient_sums)
    assert places == ["CPU:0"]


def test_graph_grows_in_proportion_to_microbatches(ranks):
    ((two, four, eight),) = ranks(4, "mirrored").run(cases.graph_sizes, [2, 4, 8])
    assert eight - four == 2 * (four - two)


def test_weights_and_slots_are_on_their_stage(ranks):
    ((wrong, slots),) = ranks(4, "mirrored").run(cases.devices_of_variables)
    assert not wrong
    assert any("one" in path for path in slots)
