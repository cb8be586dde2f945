"""Cuts by names of layers, and the tensors that cross them."""

import keras
import pytest

from tests.pipeline.models import nested, sequential, skipping, tied, two_in_two_out
from tfdml.pipeline.cuts import crossing_between, cut_by_names
from tfdml.pipeline.layer_graph import LayerGraph

layers = keras.layers


def _cut(model, stages):
    graph = LayerGraph(model)
    assignment = cut_by_names(graph, stages)
    return dict(zip(graph.names, assignment, strict=True)), graph, assignment


def _names(tensors):
    return [tensor._keras_history.operation.name for tensor in tensors]


def _crossing(model, stages):
    _, graph, assignment = _cut(model, stages)
    return [_names(tensors) for tensors in crossing_between(graph, assignment)]


def test_calls_without_a_name_go_with_what_they_depend_on():
    stages, _, _ = _cut(skipping(), [["first"], ["second"], ["last"]])
    assert stages == {"first": 0, "second": 1, "add": 1, "last": 2}
    stages, _, _ = _cut(skipping(), [["first"], ["second"], ["add", "last"]])
    assert stages == {"first": 0, "second": 1, "add": 2, "last": 2}


def test_a_skip_crosses_every_boundary_that_it_spans():
    stages = [["first"], ["second"], ["add", "last"]]
    assert _crossing(skipping(), stages) == [["first"], ["first", "second"]]
    assert _crossing(skipping(), [["first"], ["second", "last"]]) == [["first"]]


def test_seeds_are_not_weights():
    model = sequential()
    dense, dropout, norm, last = (layer.name for layer in model.layers)
    stages, _, _ = _cut(model, [[dense], [norm, last]])
    assert stages == {dense: 0, dropout: 0, norm: 1, last: 1}
    stages, _, _ = _cut(model, [[dense], [dropout, norm, last]])
    assert stages[dropout] == 1


def test_outputs_travel_to_the_last_stage_and_inputs_do_not_travel():
    assert _crossing(two_in_two_out(), [["early"], ["middle"], ["late"]]) == [
        ["early"],
        ["early", "both"],
    ]


def test_one_stage_has_no_boundary():
    _, graph, assignment = _cut(skipping(), [["first", "second", "last"]])
    assert assignment == [0, 0, 0, 0]
    assert crossing_between(graph, assignment) == []


def test_branches_need_not_be_in_the_order_of_the_calls():
    a = keras.Input((3,))
    left, right = layers.Dense(3, name="left")(a), layers.Dense(3, name="right")(a)
    model = keras.Model(a, layers.Add(name="sum")([left, right]))
    stages, _, _ = _cut(model, [["left"], ["right"]])
    assert stages == {"left": 0, "right": 1, "sum": 1}
    stages, graph, assignment = _cut(model, [["right"], ["left"]])
    assert stages == {"left": 1, "right": 0, "sum": 1}
    assert [_names(c) for c in crossing_between(graph, assignment)] == [["right"]]


def test_further_calls_of_a_layer_go_with_what_they_depend_on():
    graph = LayerGraph(tied())
    assignment = cut_by_names(graph, [["embed", "shared"], ["relu"], ["head"]])
    assert list(zip(graph.names, assignment, strict=True)) == [
        ("embed", 0),
        ("shared", 0),
        ("relu", 1),
        ("shared", 1),
        ("head", 2),
    ]


def test_further_calls_are_not_before_the_layers_stage():
    a = keras.Input((3,))
    shared = layers.Dense(3, name="shared")
    first = layers.Dense(3, name="first")(a)
    model = keras.Model(a, [shared(first), shared(a)])
    graph = LayerGraph(model)
    assignment = cut_by_names(graph, [["first"], ["shared"]])
    assert assignment == [{"first": 0, "shared": 1}[name] for name in graph.names]


def test_a_nested_model_is_named_as_one():
    stages, _, _ = _cut(nested(), [["before"], ["inner", "after"]])
    assert stages == {"before": 0, "inner": 1, "after": 1}


def test_unused_results_do_not_cross():
    inputs = keras.Input((4,))
    left, _ = keras.ops.split(layers.Dense(4, name="d")(inputs), 2, axis=-1)
    model = keras.Model(inputs, layers.Dense(1, name="e")(left))
    _, graph, assignment = _cut(model, [["d"], ["e"]])
    (crossing,) = crossing_between(graph, assignment)
    assert [id(tensor) for tensor in crossing] == [id(left)]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([["first"], ["second"]], "every layer with weights. Missing: 'last'"),
        ([["first"], ["last"]], "Missing: 'second'"),
        (
            [["second"], ["first", "last"]],
            "'second' in stage 0, which uses what 'first' in stage 1 makes. Move 'second' to "
            "stage 1 or later, or 'first' to stage 0 or earlier",
        ),
        (
            [["first", "last"], ["second"]],
            "'last' in stage 0, which uses what 'second' in stage 1 makes",
        ),
        ([["first", "secnd"], ["last"]], "'secnd' in stage 0. Close names are 'second'"),
        ([["first", "zzz"], ["last"]], "The model's are 'first', 'second', 'add', 'last'"),
        ([["x", "first", "second"], ["last"]], "'x' in stage 0. It is an input.*leave it out"),
        ([["first", "second"], ["second", "last"]], "'second' in stage 0 and in stage 1"),
        ([["first", "first"], ["second", "last"]], "'first' in stage 0 and in stage 0"),
        ([["first", "second", "last"], []], "No stage may be empty.*no layer in stage 1"),
        (["second", "last"], "must be lists of names.*Received: 'second' for stage 0"),
        ([], r"must be lists of names.*stages=\[\]"),
        ("second", "must be lists of names.*stages='second'"),
        ([[1], ["last"]], r"Received: \[1\] for stage 0"),
    ],
)
def test_wrong_stages_are_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        cut_by_names(LayerGraph(skipping()), stages)


def test_layers_inside_of_a_model_are_not_divided():
    model = nested()
    inside = model.get_layer("inner").layers[1].name
    with pytest.raises(ValueError, match="It is inside of 'inner', which is not divided"):
        cut_by_names(LayerGraph(model), [["before", inside], ["after"]])
