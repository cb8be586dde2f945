"""Patches of Keras 3.14 and 3.15: its TensorFlow trainer, optimizers and losses.

There were two options: a hook in `strategy.run` while Keras traces, and a dispatch in the trainer's
own methods. This is the dispatch: it acts before the first callback, it reaches `predict`, whose
step has no `__self__`, and it does not have to guess what a function is.

Each of these functions is replaced once, so the order of replacement does not matter. The
replacements call Keras's own function unless the model, or the calling replica, belongs to one of
our strategies, or a callback of `fit` resumes it (see `resuming`). `keras_versions` handles the
differences between versions of Keras.

The functions of `entry` behave differently under parameter servers, too: each calls the strategy's
`Hooks`, which are `trainer.ReplicaHooks` or `parameter_servers.ServerHooks`.

| Keras's function | under replicas | under parameter servers |
|---|---|---|
| `TensorFlowTrainer.fit` | early checks; progress on the chief | a lost server is named |
| `TensorFlowTrainer.evaluate` | the same | the same |
| `TensorFlowTrainer.predict` | the same | the same |
| `TFEpochIterator.__init__` | local batches: see `feed_modes` | sent once, or read by the chief |
| `TensorFlowTrainer._maybe_symbolic_build` | builds from the data's shapes | the same |
| `TensorFlowTrainer._make_function` | a `MetricStep`; `compiled` | steps are tasks for workers |
| `TensorFlowTrainer.make_predict_function` | a `PredictStep` on a global batch | the same |
| `SeedGenerator.next` | a random stream per replica | a stream per worker; no count is lost |
| `BaseOptimizer.apply` | gradients are summed first | synchronous: left to the chief |
| `LossScaleOptimizer.apply` | the same, before the check for overflow | the same |

What else replicas of one job need:

| Keras's function | what is different |
|---|---|
| `TensorFlowTrainer.train_on_batch` | a model made outside the scope is adopted or refused |
| `CallbackList.__init__` | those that add to logs come first; the guard knows which one runs |
| `TFEpochIterator._get_iterator` | an epoch does not wait for `tf.data`'s tuner: `iterators` |
| `TFEpochIterator._enumerate_iterator` | a resumed `fit` starts at a later step |
| `TensorFlowTrainer._get_metrics_result_or_logs` | a resumed epoch may have no step left |
| `ArrayDataAdapter.get_tf_dataset` | same permutation on all processes; reads own rows only |
| `BaseOptimizer._backend_apply_gradients` | no branches: accumulation happens earlier |
| `SGD.update_step` | no momentum if the compressor applies it; one pass: `one_pass_updates` |
| `Adam.update_step` | one pass over the numbers |
| `TFOptimizer._all_reduce_sum_gradients` | does nothing: gradients are already summed |
| `loss.reduce_weighted_values` | losses estimate the global batch's: `losses` |
| `loss.scale_loss_for_distribution` | the same |
| `loss.unscale_loss_for_distribution` | the same |
| `TensorFlowTrainer._aggregate_additional_loss` | the same |
| `nn.compute_average_loss` | the same for TensorFlow's function |
| `nn.scale_regularization_loss` | the same for TensorFlow's function |
| `Mean.update_state` | a replica's scalar is weighted by its rows |
| `GradientTape.gradient` | the same for gradients: `gradients` |
| `GradientTape.jacobian` | the same |
| `cloning._clone_functional_model` | a clone belongs to the model's strategy |
| `cloning._clone_sequential_model` | the same |
| `saving_lib.deserialize_keras_object` | a model from a file can be adopted: `adopting` |
| `serialization_lib.deserialize_keras_object` | the same for the clone of a subclassed model |
| `legacy_h5_format.load_model_from_hdf5` | the same for an HDF5 file |
| `ReplicaContext.all_gather` | in a step, drops padded rows |
| `nn._compute_moments_sync` | one exchange, the same on all replicas, without padded rows |
| `BatchNormalization._moments` | also synchronized under a mask |
| `Variable.handle` | outside of a step, a tape uses the first replica's variable |
| `Variable._initialize_with_initializer` | runs outside of the function being traced |
| `Variable.__array__` | accepts `copy`, as NumPy 2 requires |
| `Variable._direct_assign` | outside of a step, sets a metric's whole state |
| `Function._run_through_graph` | in a pipeline's step, stage by stage: `pipeline` |
| `core.remat` | a block computed again does the same, and no more: `recomputing` |
| `Layer.rematerialized_call` | no crash of merging and recurrent layers in a `RematScope` |
| `Embedding.call` | reads the batch's rows; Keras reads the whole table |
| `Embedding.build` | with `Sharding(embeddings=True)`, makes this rank's rows: `tables` |
| `Embedding.embeddings` | refused in a step then |
| `Embedding.enable_lora` | refused then |
| `Embedding.quantize` | refused then |
| `Embedding.save_own_variables` | files hold whole tables |
| `Embedding.load_own_variables` | reads this rank's rows |
| `Layer.add_loss` | a loss added in such a block has a gradient |
| `TFOptimizer.__init__` | its `build` divides variables: `sharded_optimizers` |
| `TFOptimizer._overwrite_model_variables_with_average_value` | averages of parts are gathered |
| `BaseOptimizer.save_own_variables` | files hold whole slots: `optimizer_files` |
| `BaseOptimizer.load_own_variables` | the same |
| `saving_lib.save_model` | with divided slots, all ranks take part: `rank_files` |
| `saving_lib.save_weights_only` | the same |
| `saving_lib.is_memory_sufficient` | no file of tables in parts is made in memory: `stored_rows` |
| `legacy_h5_format.save_model_to_hdf5` | refused for divided slots |
| `distribution_lib.set_distribution` | refused in the scope: Keras ignores it on TensorFlow |
| `distribution.set_distribution` | the same |
| `saving_lib.get_attr_skipset` | creates no variables in the scope: one rank may save alone |

What else parameter servers need, installed with the first `ParameterServerStrategy`:

| Keras's function | what is different |
|---|---|
| `TFEpochIterator.tf_sync` | an epoch ends after its last step has ended |
| `Variable.assign_add` | runs on the server: no addition is lost |
| `Variable.assign_sub` | the same |
| `TFOptimizer.assign_add` | the same for rows, which TensorFlow adds without a lock |
| `TFOptimizer.assign_sub` | the same |
| `TFOptimizer._distributed_tf_update_step` | encodes gradients for the servers; LARS and LAMB |
| | get all parts of a variable at once |
| `LossScaleOptimizer._stateful_handle_non_finite_grads` | halves the scale that overflowed |
| `Layer.trainable_variables` | the parts instead of a partitioned variable |
| `Layer.trainable_weights` | the same |
| `TFOptimizer.add_variable_from_reference` | a slot knows which part it belongs to |
| `BaseOptimizer._clip_gradients` | `clipnorm` clips by the norm of the whole variable |
| `SavedModelExportArchive.write_out` | servers write their rows of an exported model: `exporting` |
| `Variable._serialize_to_tensors` | the same; TensorFlow's own files are refused for parts |
"""

import keras

from tfdml.strategies.keras_seam import (
    adopting,
    distribution,
    entry,
    optimizer_files,
    rank_files,
    stored_rows,
    tables,
    variables,
)
from tfdml.strategies.keras_seam.fit import trainer
from tfdml.strategies.keras_seam.pipeline import stages
from tfdml.strategies.keras_seam.replacing import Replacement, put_in_place
from tfdml.strategies.keras_seam.step import (
    block_passes,
    gathered,
    gradients,
    lookups,
    momentum,
    normalization,
    one_pass_updates,
    recomputing,
    replica_math,
    sharded_optimizers,
    updates,
)

# The replacements that only parameter servers need are in `parameter_servers`.
REPLACEMENTS: list[Replacement] = [
    *entry.REPLACEMENTS,
    *trainer.REPLACEMENTS,
    *updates.REPLACEMENTS,
    *momentum.REPLACEMENTS,
    *one_pass_updates.REPLACEMENTS,
    *replica_math.REPLACEMENTS,
    *gradients.REPLACEMENTS,
    *adopting.REPLACEMENTS,
    *gathered.REPLACEMENTS,
    *lookups.REPLACEMENTS,
    *normalization.REPLACEMENTS,
    *recomputing.REPLACEMENTS,
    *block_passes.REPLACEMENTS,
    *variables.REPLACEMENTS,
    *sharded_optimizers.REPLACEMENTS,
    *optimizer_files.REPLACEMENTS,
    *rank_files.REPLACEMENTS,
    *stored_rows.REPLACEMENTS,
    *tables.REPLACEMENTS,
    *distribution.REPLACEMENTS,
    *stages.REPLACEMENTS,
]


def install() -> None:
    """Installs the replacements, once.

    Raises:
        ImportError: If Keras does not run on TensorFlow.
    """
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            f"Keras must run on TensorFlow for tfdml's strategies. Received: backend "
            f"{keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow."
        )
    put_in_place(REPLACEMENTS)
    entry.catch_early_lookups()
