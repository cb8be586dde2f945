"""Where tfdml enters Keras: Keras 3.15's TensorFlow trainer, optimizers and losses.

Of the two ways that were open, a hook in `strategy.run` while Keras traces, and a dispatch on the
trainer's own methods, this is the dispatch: it is there before the first callback, it reaches
`predict`, whose step has no `__self__`, and it needs no guess about what a function is. The
functions of the modules beside this one replace Keras's, and go straight on to Keras's own unless
the model, or the replica that calls, belongs to one of our strategies, or a callback of `fit`
resumes it (see `resuming`).

| Keras's function | what is different under our strategies |
|---|---|
| `fit`, `evaluate`, `predict` | early checks; progress bar on the chief only; the guard |
| `CallbackList` | the guard knows which callback runs |
| `TFEpochIterator` | data come as portions of global batches; see `feed_modes` |
| `_get_iterator` | an epoch does not wait for `tf.data`'s autotuner; see `iteration` |
| `_enumerate_iterator` | where a `fit` goes on, steps begin later; see `data_position` |
| `_get_metrics_result_or_logs` | the same: an epoch may have had its last step before |
| `_maybe_symbolic_build` | builds from the data's shapes, and reads no batch |
| `_make_function` | a step is a `MetricStep` on a global batch; XLA: see `compiled` |
| `make_predict_function` | a step is a `PredictStep` on a global batch |
| `ArrayDataAdapter.get_tf_dataset` | one permutation for all processes; own rows only are read |
| `Optimizer.apply`, `LossScaleOptimizer.apply` | gradients are summed first: before the check for |
| | overflow, and before clipping |
| `SGD.update_step` | no momentum, where a compressor has done it |
| `_all_reduce_sum_gradients` | nothing is left to sum |
| `_backend_apply_gradients` | no branches in a replica: accumulation is done by then |
| `losses.reduce_weighted_values`, `(un)scale_loss_for_distribution`, | a replica's losses are |
| `_aggregate_additional_loss`, `tf.nn.compute_average_loss`, | estimates of the whole batch's; |
| `tf.nn.scale_regularization_loss` | see `losses` |
| `Mean.update_state` | a replica's scalar counts by its rows |
| `GradientTape.gradient`, `.jacobian` | the same, where a gradient is taken |
| `ReplicaContext.all_gather` | in a step, without padded rows |
| `cloning._clone_…_model` | a clone made outside of the scope belongs to the model's strategy |
| `train_on_batch`, `deserialize_keras_object`, | a model that was loaded, or cloned, outside |
| `load_model_from_hdf5` | of the scope is brought into it before it trains; see `adopting` |
| `SeedGenerator.next` | replicas draw different random numbers |
| `_compute_moments_sync` | one exchange, the same on all replicas, without padded rows |
| `BatchNormalization._moments` | under a mask as well |
| `Variable._initialize_with_initializer` | made outside of the function that is being traced |
| `Variable.handle` | a tape outside of a step takes gradients by the first replica's |
| `Variable.__array__` | takes `copy`, as NumPy 2 asks |
| `Variable._direct_assign` | outside of a step, a metric's state is set as it is given |
| `get_attr_skipset` | makes no variables in the scope: one rank may save there alone |
"""

import functools

import keras

from tfdml.strategies.keras_seam import (
    adopting,
    gathered,
    gradients,
    normalization,
    optimizers,
    parameter_servers,
    partitions,
    replica_math,
    trainer,
    variables,
)

SUPPORTED_KERAS = "3.15"

# What replicas of one job need; what parameter servers need is apart.
REPLACEMENTS = [
    *trainer.REPLACEMENTS,
    *optimizers.REPLACEMENTS,
    *replica_math.REPLACEMENTS,
    *gradients.REPLACEMENTS,
    *adopting.REPLACEMENTS,
    *gathered.REPLACEMENTS,
    *normalization.REPLACEMENTS,
    *variables.REPLACEMENTS,
]


def install() -> None:
    """Puts the seam in place, once.

    Raises:
        ImportError: If Keras is not of the supported version, or runs on another backend.
    """
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            f"Keras must run on TensorFlow for tfdml's strategies. Received: backend "
            f"{keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow."
        )
    if ".".join(keras.__version__.split(".")[:2]) != SUPPORTED_KERAS:
        raise ImportError(
            f"Keras must be {SUPPORTED_KERAS}.* for this version of tfdml, which knows Keras's "
            f"insides. Received: Keras {keras.__version__}. Run `pip install "
            f"'keras=={SUPPORTED_KERAS}.*'`."
        )
    partitions.install()
    variables.install()
    others = [*partitions.REPLACEMENTS, *parameter_servers.REPLACEMENTS]
    for owner, name, make in [*others, *REPLACEMENTS]:
        original = getattr(owner, name)
        if make not in getattr(original, "_tfdml_makers", ()):
            replacement = functools.wraps(original)(make(original))
            replacement._tfdml_replaces = original
            replacement._tfdml_makers = (*getattr(original, "_tfdml_makers", ()), make)
            setattr(owner, name, replacement)
