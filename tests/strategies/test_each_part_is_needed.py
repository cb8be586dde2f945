"""Taking any one part of the seam out turns a case red: none is there for nothing."""

import inspect
from collections.abc import Callable
from unittest import mock

import pytest

from tests.strategies import cases, feature_cases, training_cases
from tests.strategies.compare import assert_invariant
from tfdml.strategies import keras_seam
from tfdml.strategies.keras_seam import seam


def _name(owner, name: str) -> str:
    return f"{owner.__name__.split('.')[-1]}.{name}"


def without(part: str, case: Callable, *args):
    """Runs `case` with Keras's own function in the place of one of the seam's."""
    seam.install()
    owner, name = next((o, n) for o, n, _ in seam._REPLACEMENTS if _name(o, n) == part)
    ours = inspect.getattr_static(owner, name)
    setattr(owner, name, ours._tfdml_replaces)
    try:
        # Making a strategy would put the part back.
        with mock.patch.object(keras_seam, "install"):
            return case(*args)
    finally:
        setattr(owner, name, ours)


# For each part, a case that needs it.
NEEDED_BY = {
    "TensorFlowTrainer.fit": (feature_cases.jit_compiled_is_refused, "fit"),
    "TensorFlowTrainer.evaluate": (feature_cases.jit_compiled_is_refused, "evaluate"),
    "TensorFlowTrainer.predict": (feature_cases.jit_compiled_is_refused, "predict"),
    "TFEpochIterator.__init__": (cases.fit_dataset, "weighted"),
    "ArrayDataAdapter.get_tf_dataset": (cases.fit_arrays, 33, 16),
    "TensorFlowTrainer._maybe_symbolic_build": (feature_cases.python_data, "generator"),
    "TensorFlowTrainer._make_function": (cases.fit_arrays, 33, 16),
    "TensorFlowTrainer.make_predict_function": (cases.fit_arrays, 33, 16),
    "BaseOptimizer.apply": (cases.fit_arrays, 33, 16),
    "BaseOptimizer._backend_apply_gradients": (
        feature_cases.optimizer_with,
        "SGD",
        {"use_ema": True, "ema_overwrite_frequency": 3},
    ),
    "LossScaleOptimizer.apply": (training_cases.overflow_counts, 11),
    "TFOptimizer._all_reduce_sum_gradients": (cases.fit_arrays, 33, 16),
    "loss.reduce_weighted_values": (cases.masked_loss, "sum_over_batch_size"),
    "loss.scale_loss_for_distribution": (cases.fit_arrays, 33, 16),
    "loss.unscale_loss_for_distribution": (cases.fit_arrays, 33, 16),
    "CompileLoss.call": (feature_cases.several_outputs,),
    "SeedGenerator.next": (feature_cases.distinct_masks,),
}


def test_every_part_is_here():
    assert {_name(o, n) for o, n, _ in seam._REPLACEMENTS} == NEEDED_BY.keys()


def _hold(ranks, part: str) -> None:
    case, *args = NEEDED_BY[part]
    (one,) = ranks.run_sizes((1,), case, *args).values()
    assert_invariant({1: one, 2: ranks(2).run(case, *args)})


def _hold_without(ranks, part: str) -> None:
    case, *args = NEEDED_BY[part]
    (one,) = ranks.run_sizes((1,), case, *args).values()
    assert_invariant({1: one, 2: ranks(2).run(without, part, case, *args, timeout=20)})


@pytest.mark.parametrize("part", NEEDED_BY)
def test_a_case_goes_red_without(ranks, part):
    _hold(ranks, part)
    with pytest.raises(AssertionError):
        _hold_without(ranks, part)
