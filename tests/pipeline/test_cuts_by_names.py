"""Cuts by names of layers, and the tensors that stages send."""

import keras
import pytest

from tests.pipeline.models import nested, sequential, skipping, tied, two_in_two_out
from tfdml.pipeline.cuts import cut_by_names, sent_tensors
from tfdml.pipeline.layer_graph import LayerGraph

layers = keras.layers


def _cut(model, stages):
    graph = LayerGraph(model)
    assignment = cut_by_names(graph, stages)
    return dict(zip(graph.names, assignment, strict=True)), graph, assignment


def _sent(model, stages):
    """Returns the layers whose results are sent, with both stages."""
    _, graph, assignment = _cut(model, stages)
    sent = sent_tensors(graph, assignment)
    return [(s.tensor._keras_history.operation.name, s.maker, s.user) for s in sent]


def test_calls_without_a_name_go_with_what_they_depend_on():
    stages, _, _ = _cut(skipping(), [["first"], ["second"], ["last"]])
    assert stages == {"first": 0, "second": 1, "add": 1, "last": 2}
    stages, _, _ = _cut(skipping(), [["first"], ["second"], ["add", "last"]])
    assert stages == {"first": 0, "second": 1, "add": 2, "last": 2}


def test_a_tensor_is_sent_once_to_each_stage_that_uses_it():
    stages = [["first"], ["second"], ["add", "last"]]
    assert _sent(skipping(), stages) == [("first", 0, 1), ("first", 0, 2), ("second", 1, 2)]
    assert _sent(skipping(), [["first"], ["second", "last"]]) == [("first", 0, 1)]


def test_seeds_are_not_weights():
    model = sequential()
    dense, dropout, norm, last = (layer.name for layer in model.layers)
    stages, _, _ = _cut(model, [[dense], [norm, last]])
    assert stages == {dense: 0, dropout: 0, norm: 1, last: 1}
    stages, _, _ = _cut(model, [[dense], [dropout, norm, last]])
    assert stages[dropout] == 1


def test_outputs_travel_to_the_last_stage_and_inputs_do_not_travel():
    assert _sent(two_in_two_out(), [["early"], ["middle"], ["late"]]) == [
        ("early", 0, 1),
        ("early", 0, 2),
        ("both", 1, 2),
    ]


def test_one_stage_sends_nothing():
    assert _sent(skipping(), [["first", "second", "last"]]) == []


def test_branches_need_not_be_in_the_order_of_the_calls():
    a = keras.Input((3,))
    left, right = layers.Dense(3, name="left")(a), layers.Dense(3, name="right")(a)
    model = keras.Model(a, layers.Add(name="sum")([left, right]))
    stages, _, _ = _cut(model, [["left"], ["right"]])
    assert stages == {"left": 0, "right": 1, "sum": 1}
    stages, _, _ = _cut(model, [["right"], ["left"]])
    assert stages == {"left": 1, "right": 0, "sum": 1}
    assert _sent(model, [["right"], ["left"]]) == [("right", 0, 1)]


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


def test_unused_results_are_not_sent():
    inputs = keras.Input((4,))
    left, _ = keras.ops.split(layers.Dense(4, name="d")(inputs), 2, axis=-1)
    model = keras.Model(inputs, layers.Dense(1, name="e")(left))
    _, graph, assignment = _cut(model, [["d"], ["e"]])
    (sent,) = sent_tensors(graph, assignment)
    assert sent.tensor is left


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
