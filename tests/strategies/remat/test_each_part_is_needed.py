"""Checks that each part of `recomputing` is needed: a case fails without it."""

import contextlib
from collections.abc import Callable
from unittest import mock

import pytest
import tensorflow as tf

from tests.strategies.compare import assert_close
from tests.strategies.remat import test_function as functions
from tests.strategies.remat import test_layer as layers
from tests.strategies.remat.cases import trained
from tfdml.strategies.keras_seam.step import recomputing


def _trains(model: str, how: str = "block", **options) -> None:
    """Trains with blocks and without, which must be the same."""
    plain, ours = (trained(how, model, **options) for how in ("none", how))
    assert_close(plain, ours, rtol=0, atol=0)


def _nothing(*args) -> None:
    pass


def _empty(*args) -> list:
    return []


def _add_at_once(self, layer, loss) -> None:
    """Adds a loss of the first pass, which has no gradient."""
    layer._losses.append(loss)


def _in_graph(case: Callable) -> Callable:
    return lambda: case(False)


# For each part, what is there without it, and a case that needs it.
PARTS = {
    "seeds": (
        "SecondPass.seed",
        lambda self, draw: draw(),
        _in_graph(functions.test_blocks_in_blocks),
    ),
    "checks": (
        "SecondPass.check",
        _nothing,
        lambda: functions.test_a_block_that_changes_is_refused("seeds"),
    ),
    "state": (
        "FirstPass.change",
        _nothing,
        functions.test_a_variable_that_a_block_reads_and_assigns,
    ),
    "state of a scope": ("get_stateless_scope", _nothing, functions.test_stateless_scopes),
    "no assignments": (
        "keras.StatelessScope",
        lambda **options: mock.MagicMock(),
        _in_graph(functions.test_blocks_in_blocks),
    ),
    "losses": ("FirstPass.add_loss", _add_at_once, lambda: _trains("losses", run_eagerly=True)),
    "masks": ("set_keras_mask", _nothing, layers.test_masks_go_through_a_function),
    "masks of cells": ("_cells", _empty, lambda: _trains("sequence", "full")),
    "context": (
        "_in_context",
        lambda context: contextlib.nullcontext(),
        functions.test_training_of_the_call_is_that_of_the_first_pass,
    ),
    "dtype of the context": (
        "_CONTEXT",
        ("current_call_ctx",),
        functions.test_mixed_precision,
    ),
    "tensors from elsewhere": (
        "_taken_from_elsewhere",
        _empty,
        _in_graph(functions.test_tensors_and_variables_of_the_surrounding_code),
    ),
    "tensors from elsewhere, eagerly": (
        "_closure",
        _empty,
        lambda: functions.test_tensors_and_variables_of_the_surrounding_code(True),
    ),
    "random numbers of TensorFlow": (
        "_refuse_random",
        _nothing,
        functions.test_random_numbers_of_tensorflow_are_refused,
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_case_fails_without_the_part(part):
    name, replacement, case = PARTS[part]
    fails = pytest.raises((AssertionError, TypeError, ValueError, pytest.fail.Exception))
    with mock.patch(f"{recomputing.__name__}.{name}", replacement), fails:
        case()


def test_it_runs_again_only_when_the_gradient_of_its_outputs_is_known():
    """Else nothing is saved: all blocks would be computed again at once."""

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = recomputing.recomputed(tf.sin)(x)
        return tape.gradient(y, x, output_gradients=tf.identity(y, name="upstream"))

    graph = gradient.get_concrete_function(tf.TensorSpec([3])).graph
    cosine = next(op for op in graph.get_operations() if op.type == "Cos")
    assert "upstream" in _ancestors(cosine)


def _ancestors(operation: tf.Operation) -> set[str]:
    names, left = set(), [operation]
    while left:
        for tensor in left.pop().inputs:
            if tensor.op.name not in names:
                names.add(tensor.op.name)
                left.append(tensor.op)
    return names
