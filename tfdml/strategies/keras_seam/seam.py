"""Where tfdml enters Keras 3.14 and 3.15: its TensorFlow trainer, optimizers and losses.

Of the two ways that were open, a hook in `strategy.run` while Keras traces, and a dispatch on the
trainer's own methods, this is the dispatch: it is there before the first callback, it reaches
`predict`, whose step has no `__self__`, and it needs no guess about what a function is.

Each of these functions is replaced once, so the order in which they are does not matter. The
functions that replace them go straight on to Keras's own unless the model, or the replica that
calls, belongs to one of our strategies, or a callback of `fit` resumes it (see `resuming`). Where
versions of Keras differ, `keras_versions` has what is done about it.

In the functions of `entry` parameter servers differ from Keras, too: each asks the strategy's
`Hooks`, which are `trainer.ReplicaHooks` or `parameter_servers.ServerHooks`.

| Keras's function | under replicas | under parameter servers |
|---|---|---|
| `TensorFlowTrainer.fit` | early checks; progress on the chief | a lost server is named |
| `TensorFlowTrainer.evaluate` | the same | the same |
| `TensorFlowTrainer.predict` | the same | the same |
| `TFEpochIterator.__init__` | portions: see `feed_modes` | sent once, or read by the chief |
| `TensorFlowTrainer._maybe_symbolic_build` | builds by the data's shapes | the same |
| `TensorFlowTrainer._make_function` | a `MetricStep`; `compiled` | steps are tasks for workers |
| `TensorFlowTrainer.make_predict_function` | a `PredictStep` on a global batch | the same |
| `SeedGenerator.next` | replicas draw different numbers | so do workers; counts are not lost |
| `BaseOptimizer.apply` | gradients are summed first | a synchronous step's are taken out |
| `LossScaleOptimizer.apply` | the same, before the check for overflow | the same |

What else replicas of one job need:

| Keras's function | what is different |
|---|---|
| `TensorFlowTrainer.train_on_batch` | a model that was made outside is brought in, or refused |
| `CallbackList.__init__` | the guard knows which callback runs |
| `TFEpochIterator._get_iterator` | an epoch does not wait for `tf.data`'s tuner: `iteration` |
| `TFEpochIterator._enumerate_iterator` | where a `fit` goes on, steps begin later |
| `TensorFlowTrainer._get_metrics_result_or_logs` | an epoch may have had its last step before |
| `ArrayDataAdapter.get_tf_dataset` | one permutation for all processes; own rows only are read |
| `BaseOptimizer._backend_apply_gradients` | no branches: accumulation is done by then |
| `SGD.update_step` | no momentum, where a compressor has done it |
| `TFOptimizer._all_reduce_sum_gradients` | nothing is left to sum |
| `loss.reduce_weighted_values` | losses are estimates of the whole batch's: `losses` |
| `loss.scale_loss_for_distribution` | the same |
| `loss.unscale_loss_for_distribution` | the same |
| `TensorFlowTrainer._aggregate_additional_loss` | the same |
| `nn.compute_average_loss` | the same, by TensorFlow |
| `nn.scale_regularization_loss` | the same, by TensorFlow |
| `Mean.update_state` | a replica's scalar counts by its rows |
| `GradientTape.gradient` | the same, where a gradient is taken: `gradients` |
| `GradientTape.jacobian` | the same |
| `cloning._clone_functional_model` | a clone belongs to the model's strategy |
| `cloning._clone_sequential_model` | the same |
| `saving_lib.deserialize_keras_object` | a model of a file can be brought in: `adopting` |
| `serialization_lib.deserialize_keras_object` | the same for the clone of a subclassed model |
| `legacy_h5_format.load_model_from_hdf5` | the same for an HDF5 file |
| `ReplicaContext.all_gather` | in a step, without padded rows |
| `nn._compute_moments_sync` | one exchange, the same on all replicas, without padded rows |
| `BatchNormalization._moments` | synchronized under a mask as well |
| `Variable.handle` | a tape outside of a step takes gradients by the first replica's |
| `Variable._initialize_with_initializer` | outside of the function that is being traced |
| `Variable.__array__` | takes `copy`, as NumPy 2 asks |
| `Variable._direct_assign` | outside of a step, a metric's state is set as it is given |
| `saving_lib.get_attr_skipset` | makes no variables in the scope: one rank may save alone |

What else parameter servers need, in place once there is a `ParameterServerStrategy`:

| Keras's function | what is different |
|---|---|
| `TFEpochIterator.tf_sync` | an epoch ends when its last step has |
| `Variable.assign_add` | done on the server: nothing is lost |
| `Variable.assign_sub` | the same |
| `TFOptimizer.assign_add` | the same for rows, which TensorFlow adds without a lock |
| `TFOptimizer.assign_sub` | the same |
| `TFOptimizer._distributed_tf_update_step` | gradients go to the servers encoded; LARS and LAMB |
| | are given all parts of a variable at once |
| `LossScaleOptimizer._stateful_handle_non_finite_grads` | halves the scale that overflowed |
| `Layer.trainable_variables` | parts in the place of a partitioned variable |
| `Layer.trainable_weights` | the same |
| `Embedding.call` | looks rows up on the server; Keras would fetch the whole table |
| `TFOptimizer.add_variable_from_reference` | a slot knows which part it belongs to |
| `BaseOptimizer.save_own_variables` | files hold whole slots |
| `BaseOptimizer.load_own_variables` | the same |
| `BaseOptimizer._clip_gradients` | `clipnorm` is of the whole |
"""

import keras

from tfdml.strategies.keras_seam import (
    adopting,
    entry,
    gathered,
    gradients,
    momentum,
    normalization,
    replica_math,
    trainer,
    updates,
    variables,
)
from tfdml.strategies.keras_seam.replacing import Replacement, put_in_place

# What parameter servers need besides is in `parameter_servers`.
REPLACEMENTS: list[Replacement] = [
    *entry.REPLACEMENTS,
    *trainer.REPLACEMENTS,
    *updates.REPLACEMENTS,
    *momentum.REPLACEMENTS,
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
        ImportError: If Keras runs on another backend.
    """
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            f"Keras must run on TensorFlow for tfdml's strategies. Received: backend "
            f"{keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow."
        )
    put_in_place(REPLACEMENTS)
