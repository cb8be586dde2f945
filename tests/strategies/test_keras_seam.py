"""What tfdml knows of Keras's insides: when Keras moves, this says what changed."""

import inspect

import keras
import pytest

from tfdml.strategies.keras_seam import seam

# The signatures that the seam was written for (Keras 3.15).
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
}


def _signatures() -> dict[str, str]:
    found = {}
    for owner, name, _ in seam.REPLACEMENTS:
        function = inspect.unwrap(getattr(owner, name))
        names = [p for p in inspect.signature(function).parameters if p != "self"]
        found[f"{owner.__name__}.{name}"] = " ".join(names)
    return found


def test_keras_is_as_the_seam_expects():
    assert keras.__version__.startswith(seam.SUPPORTED_KERAS + ".")
    assert _signatures() == SIGNATURES


def test_another_keras_is_refused(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.99.0")
    with pytest.raises(ImportError, match=r"Keras must be 3\.15\.\*.* Received: Keras 3\.99\.0"):
        seam.install()


def test_installing_twice_wraps_once():
    seam.install()
    before = keras.Model.fit
    seam.install()
    assert keras.Model.fit is before


def test_models_of_other_strategies_go_straight_to_keras():
    """The same bits with the seam in place as Keras's own functions give."""
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
    replaced = [(o, n, getattr(o, n)) for o, n, _ in seam.REPLACEMENTS]
    try:
        for owner, name, replacement in replaced:
            setattr(owner, name, replacement._tfdml_replaces)
        without = train()
    finally:
        for owner, name, replacement in replaced:
            setattr(owner, name, replacement)
    assert with_seam == without
