"""Checks that each part of `recomputing` and `block_passes` is needed: a case fails without it."""

import contextlib
from collections.abc import Callable
from unittest import mock

import pytest
import tensorflow as tf

from tests.strategies.compare import assert_close
from tests.strategies.remat import test_function as functions
from tests.strategies.remat import test_layer as layers
from tests.strategies.remat.cases import trained
from tfdml.strategies.keras_seam.step import block_passes, recomputing


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


FILES = {"block_passes": block_passes, "recomputing": recomputing}
# For each part, what is there without it, and a case that needs it.
PARTS = {
    "seeds": (
        "block_passes.SecondPass.seed",
        lambda self, draw: draw(),
        _in_graph(functions.test_blocks_in_blocks),
    ),
    "checks": (
        "block_passes.SecondPass.check",
        _nothing,
        lambda: functions.test_a_block_that_changes_is_refused("seeds"),
    ),
    "state": (
        "block_passes.FirstPass.change",
        _nothing,
        functions.test_a_variable_that_a_block_reads_and_assigns,
    ),
    "state of a scope": (
        "recomputing.get_stateless_scope",
        _nothing,
        functions.test_stateless_scopes,
    ),
    "no assignments": (
        "recomputing.keras.StatelessScope",
        lambda **options: mock.MagicMock(),
        _in_graph(functions.test_blocks_in_blocks),
    ),
    "losses": (
        "block_passes.FirstPass.add_loss",
        _add_at_once,
        lambda: _trains("losses", run_eagerly=True),
    ),
    "masks": ("recomputing.set_keras_mask", _nothing, layers.test_masks_go_through_a_function),
    "masks of cells": ("block_passes._cells", _empty, layers.test_a_cell_with_masks_of_its_own),
    "context": (
        "block_passes._in_context",
        lambda context: contextlib.nullcontext(),
        functions.test_training_of_the_call_is_that_of_the_first_pass,
    ),
    "dtype of the context": (
        "block_passes._CONTEXT",
        ("current_call_ctx",),
        functions.test_mixed_precision,
    ),
    "tensors from elsewhere": (
        "recomputing._taken_from_elsewhere",
        _empty,
        _in_graph(functions.test_tensors_and_variables_of_the_surrounding_code),
    ),
    "tensors from elsewhere, eagerly": (
        "recomputing._closure",
        _empty,
        lambda: functions.test_tensors_and_variables_of_the_surrounding_code(True),
    ),
    "each tensor from elsewhere once": (
        "recomputing._each_once",
        list,
        _in_graph(functions.test_an_argument_that_the_function_also_takes_from_elsewhere),
    ),
    "one block for each attention": (
        "recomputing._WHOLE",
        (),
        lambda: _trains("sequence", "full", run_eagerly=True),
    ),
    "random numbers of TensorFlow": (
        "recomputing._refuse_random",
        _nothing,
        functions.test_random_numbers_of_tensorflow_are_refused,
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_case_fails_without_the_part(part):
    where, replacement, case = PARTS[part]
    file, name = where.split(".", 1)
    fails = pytest.raises((AssertionError, TypeError, ValueError, pytest.fail.Exception))
    with mock.patch(f"{FILES[file].__name__}.{name}", replacement), fails:
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
