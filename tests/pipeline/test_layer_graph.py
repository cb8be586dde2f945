"""The calls of a model's layers: their order, what crosses a cut, and whose variables they use."""

import keras
import numpy as np
import pytest

from tests.pipeline.models import (
    nested,
    sequential,
    skipping,
    tied,
    two_in_two_out,
)
from tfdml.pipeline.layer_graph import LayerGraph


class _Calls:
    """Notes the operations of Keras's own run of a graph."""

    def __init__(self, graph: LayerGraph):
        self.names = []
        inputs = [np.zeros((2, *t.shape[1:]), t.dtype) for t in graph.inputs]
        graph.function._run_through_graph(inputs, self._noted)

    def _noted(self, operation):
        self.names.append(operation.name)
        return operation


@pytest.mark.parametrize("build", [sequential, skipping, tied, two_in_two_out, nested])
def test_the_order_is_that_in_which_keras_runs_the_calls(build):
    graph = LayerGraph(build())
    assert graph.names == _Calls(graph).names
    assert graph.names == [call.operation.name for call in graph.calls]


def _names(tensors):
    return [tensor._keras_history.operation.name for tensor in tensors]


def test_a_skip_crosses_every_cut_that_it_spans():
    graph = LayerGraph(skipping())
    assert graph.names == ["first", "second", "add", "last"]
    crossing = [_names(graph.crossing(n)) for n in range(5)]
    assert crossing == [["x"], ["first"], ["first", "second"], ["add"], ["last"]]


def test_inputs_and_outputs_cross_to_where_they_are_used():
    graph = LayerGraph(two_in_two_out())
    assert graph.names == ["early", "middle", "both", "late"]
    crossing = [_names(graph.crossing(n)) for n in range(5)]
    assert crossing == [
        ["a", "b"],
        ["b", "early"],
        ["b", "early", "middle"],
        ["early", "both"],
        ["early", "late"],
    ]


def test_a_tensor_that_is_used_twice_crosses_once():
    inputs = keras.Input((3,))
    x = keras.layers.Dense(3, name="d")(inputs)
    graph = LayerGraph(keras.Model(inputs, keras.layers.Add()([x, x, x])))
    assert _names(graph.crossing(1)) == ["d"]


def test_unused_results_do_not_cross():
    inputs = keras.Input((4,))
    left, _right = keras.ops.split(inputs, 2, axis=-1)
    graph = LayerGraph(keras.Model(inputs, keras.layers.Dense(1)(left)))
    assert [id(t) for t in graph.crossing(1)] == [id(left)]


def test_makers():
    graph = LayerGraph(skipping())
    assert [graph.maker(t) for t in graph.crossing(2)] == [0, 1]
    assert graph.maker(graph.inputs[0]) == -1


def _ids(variables):
    return [id(variable) for variable in variables]


def test_variables_of_a_range_of_calls():
    model = sequential()
    graph = LayerGraph(model)
    dense, dropout, norm, last = model.layers
    # Seeds and moving statistics are variables as well.
    assert _ids(graph.variables(0, 2)) == _ids([*dense.variables, *dropout.variables])
    assert len(dropout.variables) == 1
    assert _ids(graph.variables(2, 4)) == _ids([*norm.variables, *last.variables])
    assert graph.variables(1, 1) == []


def test_a_shared_layer_belongs_to_its_first_call():
    model = tied()
    graph = LayerGraph(model)
    shared = model.get_layer("shared")
    calls = [n for n, name in enumerate(graph.names) if name == "shared"]
    assert len(calls) == 2
    assert {graph.owners()[id(v)] for v in shared.variables} == {calls[0]}
    assert _ids(graph.variables(calls[0], calls[1] + 1)) == _ids(shared.variables)


def test_weights_that_two_layers_share_belong_to_the_first():
    graph = LayerGraph(tied())
    table = graph.function.get_layer("embed").embeddings
    head = graph.names.index("head")
    assert _ids(graph.variables(head, head + 1)) == [id(table)]
    assert graph.owners()[id(table)] == graph.names.index("embed")


def test_a_variable_that_an_operation_gets_is_its_variable():
    scale = keras.Variable(2.0)
    inputs = keras.Input((3,))
    graph = LayerGraph(keras.Model(inputs, keras.ops.multiply(inputs, scale)))
    assert _ids(graph.variables(0, 1)) == [id(scale)]


def test_a_nested_model_is_one_call_with_all_of_its_variables():
    model = nested()
    graph = LayerGraph(model)
    inner = graph.names.index("inner")
    found = graph.variables(inner, inner + 1)
    assert _ids(found) == _ids(model.get_layer("inner").variables)
    assert len(found) == 6


class Subclassed(keras.Model):
    def call(self, x):
        return x


class Overriding(keras.Model):
    def __init__(self):
        inputs = keras.Input((3,))
        super().__init__(inputs, keras.layers.Dense(1)(inputs), name="other")

    def call(self, x):
        return super().call(x) * 2


class OverridingSequential(keras.Sequential):
    def call(self, x):
        return x


class OnlyItsOwnTrainStep(keras.Model):
    pass


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Subclassed(name="mine"), "functional or Sequential model.*'mine' of the class Subclassed"),
        (Overriding(), "'other' of the class Overriding, which overrides `call`"),
        (OverridingSequential(name="s"), "'s' of the class OverridingSequential, which overrides"),
        (keras.Sequential([keras.layers.Dense(1)], name="un"), "'un', which does not.*keras.Input"),
        (3, "must be a keras.Model. Received: model=3"),
    ],
)
def test_models_without_a_graph_are_refused(model, message):
    with pytest.raises(ValueError, match=message):
        LayerGraph(model)


def test_a_subclass_that_runs_its_graph_is_accepted():
    inputs = keras.Input((3,))
    model = OnlyItsOwnTrainStep(inputs, keras.layers.Dense(1, name="d")(inputs))
    assert LayerGraph(model).names == ["d"]
