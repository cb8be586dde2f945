"""Checks that each part of the seam is needed: a case fails without it."""

import inspect
from collections.abc import Callable
from unittest import mock

import pytest

from tests.strategies import cases
from tests.strategies.compare import assert_invariant
from tests.strategies.contract import (
    custom_step_cases,
    data_cases,
    fit_cases,
    step_cases,
    training_cases,
)
from tests.strategies.remat import cases as remat_cases
from tests.strategies.seam import scope_cases
from tfdml.strategies import keras_seam
from tfdml.strategies.keras_seam import replacing, seam


def _name(owner, name: str) -> str:
    return f"{owner.__name__.split('.')[-1]}.{name}"


def without(part: str, case: Callable, *args):
    """Runs `case` with Keras's own function instead of one of the seam's."""
    seam.install()
    owner, name = next((o, n) for o, n, _ in seam.REPLACEMENTS if _name(o, n) == part)
    ours = inspect.getattr_static(owner, name)
    setattr(owner, name, replacing.original(owner, name))
    try:
        # Creating a strategy would restore the part.
        with mock.patch.object(keras_seam, "install"):
            return case(*args)
    finally:
        setattr(owner, name, ours)


# For each part, a case that needs it.
NEEDED_BY = {
    "TensorFlowTrainer.fit": (fit_cases.distributed_data, "fit"),
    "TensorFlowTrainer.evaluate": (fit_cases.distributed_data, "evaluate"),
    "TensorFlowTrainer.predict": (fit_cases.distributed_data, "predict"),
    "TFEpochIterator.__init__": (cases.fit_dataset, "weighted"),
    "ArrayDataAdapter.get_tf_dataset": (cases.fit_arrays, 33, 16),
    "TensorFlowTrainer._maybe_symbolic_build": (data_cases.python_data, "generator"),
    "TensorFlowTrainer._make_function": (cases.fit_arrays, 33, 16),
    "TensorFlowTrainer.make_predict_function": (cases.fit_arrays, 33, 16),
    "BaseOptimizer.apply": (cases.fit_arrays, 33, 16),
    "BaseOptimizer._backend_apply_gradients": (
        fit_cases.optimizer,
        "SGD",
        {"use_ema": True, "ema_overwrite_frequency": 3},
    ),
    "nn._compute_moments_sync": (step_cases.synchronized, "unequal"),
    "BatchNormalization._moments": (step_cases.synchronized, "masked"),
    "Variable.__array__": (scope_cases.numbers_of_variables,),
    "Variable.handle": (scope_cases.update_outside,),
    "Variable._direct_assign": (scope_cases.losses_and_metrics,),
    "saving_lib.get_attr_skipset": (scope_cases.saved_by_rank_0,),
    "LossScaleOptimizer.apply": (training_cases.overflow_counts, 11),
    "TFOptimizer._all_reduce_sum_gradients": (cases.fit_arrays, 33, 16),
    "loss.reduce_weighted_values": (cases.masked_loss, "sum_over_batch_size"),
    "loss.scale_loss_for_distribution": (cases.fit_arrays, 33, 16),
    "loss.unscale_loss_for_distribution": (cases.fit_arrays, 33, 16),
    "TensorFlowTrainer._aggregate_additional_loss": (custom_step_cases.train, "added_losses"),
    "nn.compute_average_loss": (custom_step_cases.train, "tensorflow_means"),
    "nn.scale_regularization_loss": (custom_step_cases.train, "tensorflow_means"),
    "Mean.update_state": (custom_step_cases.train, "dcgan"),
    "GradientTape.gradient": (custom_step_cases.train, "vae"),
    "GradientTape.jacobian": (custom_step_cases.train, "private"),
    "cloning._clone_functional_model": (scope_cases.cloned, True),
    "cloning._clone_sequential_model": (scope_cases.cloned, False),
    "TensorFlowTrainer.train_on_batch": (scope_cases.read_outside, "batches"),
    "saving_lib.deserialize_keras_object": (scope_cases.read_outside, "keras"),
    "serialization_lib.deserialize_keras_object": (scope_cases.read_outside, "clone"),
    "legacy_h5_format.load_model_from_hdf5": (scope_cases.read_outside, "h5"),
    "ReplicaContext.all_gather": (custom_step_cases.train, "simclr", 9),
    "SeedGenerator.next": (training_cases.distinct_masks,),
    "SGD.update_step": (fit_cases.momentum_before_the_exchange,),
    "core.remat": (remat_cases.on_replicas, "full", "sums", False),
    "Layer.rematerialized_call": (remat_cases.on_replicas, "larger_than", "sums", False),
    "Layer.add_loss": (remat_cases.eagerly, "block", "sums", False),
}
# These run by default, the others are slow tests.
QUICK = {
    "ArrayDataAdapter.get_tf_dataset",
    "TensorFlowTrainer._make_function",
    "BaseOptimizer.apply",
    "loss.unscale_loss_for_distribution",
}
# Needed only by resumed training: tests/checkpointing/test_resume.py removes these.
RESUMING = {"TFEpochIterator._enumerate_iterator", "TensorFlowTrainer._get_metrics_result_or_logs"}
# Needed only by a guard's message: tests/runtime/guard/test_guard.py fails without it.
GUARDING = {"CallbackList.__init__"}
# Without it the next epoch begins later: tests/strategies/input/test_iterators.py.
FREEING = {"TFEpochIterator._get_iterator"}
# Without it a step costs as much as the table is large: tests/optimizers/test_replicas.py.
LOOKUPS = {"Embedding.call"}
# Without it an update takes longer: tests/optimizers/test_one_pass_updates.py.
FASTER = {"Adam.update_step"}
# Without it a file is made in memory: tests/strategies/parameter_server/test_partition.py.
ON_DISK = {"saving_lib.is_memory_sufficient"}
# Needed by several devices of a process: test_scope.py maps layers over data there.
ON_DEVICES = {"Variable._initialize_with_initializer"}
# Without it a model runs as a whole, on one device: tests/strategies/pipeline/test_stages.py.
STAGES = {"Function._run_through_graph"}
# Needed only by sharding: tests/strategies/sharded.
SHARDING = {
    "TFOptimizer.__init__",
    "TFOptimizer._overwrite_model_variables_with_average_value",
    "BaseOptimizer.save_own_variables",
    "BaseOptimizer.load_own_variables",
    "saving_lib.save_model",
    "saving_lib.save_weights_only",
    "legacy_h5_format.save_model_to_hdf5",
    "distribution_lib.set_distribution",
    "distribution.set_distribution",
    "Embedding.build",
    "Embedding.embeddings",
    "Embedding.enable_lora",
    "Embedding.quantize",
    "Embedding.save_own_variables",
    "Embedding.load_own_variables",
}


def test_every_part_of_the_seam_is_listed():
    parts = {_name(o, n) for o, n, _ in seam.REPLACEMENTS}
    elsewhere = RESUMING | GUARDING | FREEING | LOOKUPS | FASTER | ON_DISK | ON_DEVICES
    assert parts == NEEDED_BY.keys() | elsewhere | STAGES | SHARDING


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=() if part in QUICK else pytest.mark.slow) for part in NEEDED_BY],
)
def test_case_fails_without_the_part(ranks, part):
    case, *args = NEEDED_BY[part]
    whole = ranks.run_sizes((1, 2), case, *args)
    assert_invariant(whole)
    with pytest.raises(AssertionError):
        assert_invariant(whole | {2: ranks(2).run(without, part, case, *args, timeout=20)})
