"""Checks tfdml's assumptions on Keras's internals; a failure names what changed in Keras."""

import inspect
import json
import re
import subprocess
import sys

import keras
import pytest

from tfdml.strategies.keras_seam import parameter_servers, replacing, seam

# The signatures for which the seam was written (Keras 3.14 and 3.15).
SIGNATURES = {
    "TensorFlowTrainer.fit": "x y batch_size epochs verbose callbacks validation_split "
    "validation_data shuffle class_weight sample_weight initial_epoch steps_per_epoch "
    "validation_steps validation_batch_size validation_freq",
    "TensorFlowTrainer.evaluate": "x y batch_size verbose sample_weight steps callbacks "
    "return_dict kwargs",
    "TensorFlowTrainer.predict": "x batch_size verbose steps callbacks",
    "TFEpochIterator.__init__": "distribute_strategy args kwargs",
    "TFEpochIterator._get_iterator": "",
    "TFEpochIterator._enumerate_iterator": "",
    "TensorFlowTrainer._get_metrics_result_or_logs": "logs",
    "SGD.update_step": "gradient variable learning_rate",
    "Adam.update_step": "gradient variable learning_rate",
    "ArrayDataAdapter.get_tf_dataset": "",
    "TensorFlowTrainer._maybe_symbolic_build": "iterator data_batch",
    "TensorFlowTrainer._make_function": "step_function",
    "TensorFlowTrainer.make_predict_function": "force",
    "BaseOptimizer.apply": "grads trainable_variables",
    "BaseOptimizer._backend_apply_gradients": "grads trainable_variables",
    "Variable._initialize_with_initializer": "initializer",
    "keras.src.backend.tensorflow.nn._compute_moments_sync": "x axes keepdims",
    "BatchNormalization._moments": "inputs mask",
    "Variable.__array__": "dtype",
    "Variable.handle": "",
    "Variable._direct_assign": "value",
    "keras.src.saving.saving_lib.get_attr_skipset": "obj_type",
    "LossScaleOptimizer.apply": "grads trainable_variables",
    "TFOptimizer._all_reduce_sum_gradients": "grads_and_vars",
    "keras.src.losses.loss.reduce_weighted_values": "values sample_weight mask reduction dtype",
    "keras.src.losses.loss.scale_loss_for_distribution": "value",
    "keras.src.losses.loss.unscale_loss_for_distribution": "value",
    "CallbackList.__init__": "callbacks add_history add_progbar model params",
    "TensorFlowTrainer._aggregate_additional_loss": "loss",
    "tensorflow._api.v2.nn.compute_average_loss": (
        "per_example_loss sample_weight global_batch_size"
    ),
    "tensorflow._api.v2.nn.scale_regularization_loss": "regularization_loss",
    "Mean.update_state": "values sample_weight",
    "GradientTape.gradient": "target sources output_gradients unconnected_gradients",
    "GradientTape.jacobian": (
        "target sources unconnected_gradients parallel_iterations experimental_use_pfor"
    ),
    "keras.src.models.cloning._clone_functional_model": (
        "model clone_function input_tensors call_function"
    ),
    "keras.src.models.cloning._clone_sequential_model": "model clone_function input_tensors",
    "ReplicaContext.all_gather": "value axis options",
    "SeedGenerator.next": "ordered",
    "keras.src.backend.tensorflow.core.remat": "f",
    "Layer.rematerialized_call": "layer_call args kwargs",
    "Function._run_through_graph": "inputs operation_fn call_fn",
    "Layer.add_loss": "loss",
    "Embedding.call": "inputs",
    "Embedding.build": "input_shape",
    "Embedding.embeddings": "",
    "Embedding.enable_lora": "rank lora_alpha a_initializer b_initializer",
    "Embedding.quantize": "mode type_check config",
    "Embedding.save_own_variables": "store",
    "Embedding.load_own_variables": "store",
    "TensorFlowTrainer.train_on_batch": "x y sample_weight class_weight return_dict",
    "keras.src.saving.saving_lib.deserialize_keras_object": (
        "config custom_objects safe_mode kwargs"
    ),
    "keras.src.saving.serialization_lib.deserialize_keras_object": (
        "config custom_objects safe_mode kwargs"
    ),
    "keras.src.legacy.saving.legacy_h5_format.load_model_from_hdf5": (
        "filepath custom_objects compile safe_mode"
    ),
    "TFOptimizer.__init__": "args kwargs",
    "TFOptimizer._overwrite_model_variables_with_average_value": "trainable_variables",
    "keras.src.saving.saving_lib.save_model": "model filepath weights_format zipped",
    "keras.src.saving.saving_lib.is_memory_sufficient": "model",
    "keras.src.saving.saving_lib.save_weights_only": (
        "model filepath max_shard_size objects_to_skip"
    ),
    "keras.src.legacy.saving.legacy_h5_format.save_model_to_hdf5": (
        "model filepath overwrite include_optimizer"
    ),
    "keras.src.distribution.distribution_lib.set_distribution": "value",
    "keras.distribution.set_distribution": "value",
    # Only under parameter servers.
    "TFEpochIterator.tf_sync": "",
    "Variable.assign_add": "value",
    "Variable.assign_sub": "value",
    "TFOptimizer.assign_add": "variable value",
    "TFOptimizer.assign_sub": "variable value",
    "TFOptimizer._distributed_tf_update_step": "distribution grads_and_vars learning_rate",
    "LossScaleOptimizer._stateful_handle_non_finite_grads": "",
    "Layer.trainable_variables": "",
    "Layer.trainable_weights": "",
    "TFOptimizer.add_variable_from_reference": "reference_variable name initializer",
    "BaseOptimizer.save_own_variables": "store",
    "BaseOptimizer.load_own_variables": "store",
    "BaseOptimizer._clip_gradients": "grads",
    "SavedModelExportArchive.write_out": "filepath options verbose",
    "Variable._serialize_to_tensors": "",
}
ALL = [*seam.REPLACEMENTS, *parameter_servers.REPLACEMENTS]
# Run in a separate process: prints which functions are ours after each step.
INSTALLED = """
import gc, json, sys, types
import keras
import tensorflow as tf
import tfdml
from tfdml.strategies.keras_seam import parameter_servers

def ours():
    found = set()
    roots = [o for o in gc.get_objects() if isinstance(o, type)]
    roots += [m for n, m in list(sys.modules.items()) if n.startswith(("keras", "tensorflow"))]
    for owner in roots:
        for name, value in list(vars(owner).items()):
            function = value.fget if isinstance(value, property) else value
            if isinstance(function, types.FunctionType) and hasattr(function, "_tfdml_replaces"):
                found.add(f"{owner.__name__.split('.')[-1]}.{name}")
    return sorted(found)

steps = [ours()]
tfdml.MirroredStrategy()
steps += [ours(), hasattr(tf.__internal__.distribute.ShardedVariable, "__array__")]
parameter_servers.install()
steps += [ours()]
print(json.dumps(steps))
"""


def _signatures() -> dict[str, str]:
    found = {}
    for owner, name, _ in ALL:
        function = inspect.getattr_static(owner, name)
        function = inspect.unwrap(getattr(function, "fget", function))
        names = [p for p in inspect.signature(function).parameters if p != "self"]
        found[f"{owner.__name__}.{name}"] = " ".join(names)
    return found


def test_keras_matches_the_seam():
    assert _signatures() == SIGNATURES


def _table(text: str) -> list[str]:
    """Returns the functions in a table's first column."""
    return re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)


def test_table_matches_the_installed_functions():
    """Replicas do not install the replacements that only parameter servers need."""
    replicas, servers = seam.__doc__.split("What else parameter servers need")
    replicas, servers = _table(replicas), _table(servers)
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    before, mirrored, array, both = json.loads(done.stdout.splitlines()[-1])
    assert before == []
    assert mirrored == sorted(replicas)
    assert not array
    assert both == sorted(replicas + servers)


@pytest.mark.parametrize("order", [ALL, ALL[::-1]], ids=["in order", "reversed"])
def test_each_function_is_wrapped_once(order):
    assert len({(owner, name) for owner, name, _ in order}) == len(order)
    replacing.put_in_place(order)
    ours = [(o, n, inspect.getattr_static(o, n)) for o, n, _ in order]
    try:
        keras_s = [(o, n, replacing.original(o, n)) for o, n, _ in ours]
        for owner, name, function in keras_s:
            setattr(owner, name, function)
        # With Keras's own function installed, none of ours remains.
        assert all(replacing.original(o, n) is None for o, n, _ in order)
        replacing.put_in_place(order)
        replacing.put_in_place(order[::-1])
        assert [(o, n, replacing.original(o, n)) for o, n, _ in order] == keras_s
    finally:
        for owner, name, function in ours:
            setattr(owner, name, function)


def test_installing_twice_wraps_once():
    seam.install()
    before = keras.Model.fit
    seam.install()
    assert keras.Model.fit is before


def test_models_of_other_strategies_call_keras_directly():
    """With the seam, results are bit-identical to those of Keras's own functions."""
    import numpy as np

    seam.install()

    def train() -> list:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        model.compile("adam", "mse", metrics=["mae"])
        x = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
        history = model.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0)
        return [history.history, model.predict(x, verbose=0).tolist()]

    with_seam = train()
    replaced = [(o, n, inspect.getattr_static(o, n)) for o, n, _ in seam.REPLACEMENTS]
    try:
        for owner, name, _ in replaced:
            setattr(owner, name, replacing.original(owner, name))
        without = train()
    finally:
        for owner, name, replacement in replaced:
            setattr(owner, name, replacement)
    assert with_seam == without
