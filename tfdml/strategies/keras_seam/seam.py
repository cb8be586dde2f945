"""Where tfdml enters Keras: Keras 3.15's TensorFlow trainer, optimizers and losses.

Of the two ways that were open, a hook in `strategy.run` while Keras traces, and a dispatch on the
trainer's own methods, this is the dispatch: it is there before the first callback, it reaches
`predict`, whose step has no `__self__`, and it needs no guess about what a function is. The
functions below replace Keras's, and go straight on to Keras's own unless the model, or the replica
that calls, belongs to one of our strategies, or a callback of `fit` resumes it (see `resuming`).

| Keras's function | what is different under our strategies |
|---|---|
| `fit`, `evaluate`, `predict` | early checks; progress bar on the chief only; the guard |
| `TFEpochIterator` | data come as portions of global batches; see `feed_modes` |
| `_enumerate_iterator` | where a `fit` goes on, steps begin later; see `data_position` |
| `_get_metrics_result_or_logs` | the same: an epoch may have had its last step before |
| `_maybe_symbolic_build` | builds from the data's shapes, and reads no batch |
| `_make_function` | a step is a `MetricStep` on a global batch |
| `make_predict_function` | a step is a `PredictStep` on a global batch |
| `ArrayDataAdapter.get_tf_dataset` | one permutation for all processes; own rows only are read |
| `Optimizer.apply`, `LossScaleOptimizer.apply` | gradients are summed first: before the check for |
| | overflow, and before clipping |
| `SGD.update_step` | no momentum, where a compressor has done it |
| `_all_reduce_sum_gradients` | nothing is left to sum |
| `_backend_apply_gradients` | no branches in a replica: accumulation is done by then |
| `losses.reduce_weighted_values`, `(un)scale_loss_for_distribution` | exact means |
| `CompileLoss.call` | the logged loss of each output is the whole data's |
| `SeedGenerator.next` | replicas draw different random numbers |
"""

import contextvars
import functools
import inspect
import itertools
from collections.abc import Callable, Generator
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, TFEpochIterator
from keras.src.losses import loss as keras_loss
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.random.seed_generator import SeedGenerator
from keras.src.trainers.compile_utils import CompileLoss
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from tfdml.collectives.collective import LocalCollective
from tfdml.runtime.fingerprint import check_fingerprint, fingerprint
from tfdml.strategies import misuse
from tfdml.strategies.accumulation import accumulation_steps
from tfdml.strategies.agreement import check_arrays
from tfdml.strategies.extended import ReplicaExtended
from tfdml.strategies.keras_seam import losses, parameter_servers, partitions, resuming
from tfdml.strategies.keras_seam.array_data import ArrayOrder, agreed_seed, array_batches
from tfdml.strategies.keras_seam.callbacks import for_this_process
from tfdml.strategies.keras_seam.data_source import batch_spec, portions
from tfdml.strategies.parameter_server.step_scope import current_step
from tfdml.strategies.share import Share
from tfdml.strategies.step import MetricStep, PredictStep

SUPPORTED_KERAS = "3.15"


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
    others = [*partitions.REPLACEMENTS, *parameter_servers.REPLACEMENTS]
    for owner, name, make in [*others, *_REPLACEMENTS]:
        original = getattr(owner, name)
        if make not in getattr(original, "_tfdml_makers", ()):
            replacement = functools.wraps(original)(make(original))
            replacement._tfdml_replaces = original
            replacement._tfdml_makers = (*getattr(original, "_tfdml_makers", ()), make)
            setattr(owner, name, replacement)


def _extended(strategy: tf.distribute.Strategy | None) -> ReplicaExtended | None:
    extended = getattr(strategy, "extended", None)
    return extended if isinstance(extended, ReplicaExtended) else None


def _replicas(model: keras.Model) -> ReplicaExtended | None:
    """Returns the extension of the model's strategy, if it is ours and its steps are global.

    One replica takes Keras's own steps, but for accumulation: Keras's crashes in any strategy.
    """
    extended = _extended(model._distribute_strategy)
    if extended is None or (extended._num_replicas_in_sync == 1 and not accumulation_steps(model)):
        return None
    return extended


def _current_extended() -> ReplicaExtended | None:
    """Returns the extension of the strategy that the caller is a replica of, if it is ours."""
    replica = tf.distribute.get_replica_context()
    return _extended(replica.strategy) if replica is not None else None


def _current_replicas() -> ReplicaExtended | None:
    """Returns the same, if there are gradients to exchange or to gather."""
    extended = _current_extended()
    if extended is None:
        return None
    several = extended._num_replicas_in_sync > 1
    return extended if several or extended.accumulator is not None else None


def _current_share() -> Share | None:
    step = current_step()
    if step is not None:
        return step.share
    extended = _current_replicas()
    return extended.current_share() if extended is not None else None


# -- The trainer -------------------------------------------------------------------------------


def _loop(original: Callable) -> Callable:
    """`fit`, `evaluate` and `predict`."""
    signature = inspect.signature(original)

    def loop(self, *args, **kwargs):
        extended = _extended(self._distribute_strategy)
        if extended is None:
            if _extended(tf.distribute.get_strategy()) is not None:
                misuse.refuse_model_made_outside(self)
            bound = signature.bind(self, *args, **kwargs)
            with resuming.resumed(self, original.__name__, bound.arguments):
                return original(*bound.args, **bound.kwargs)
        bound = signature.bind(self, *args, **kwargs)
        with extended.collective_call(original.__name__):
            _prepare(self, original.__name__, bound.arguments, extended)
            with resuming.resumed(self, original.__name__, bound.arguments):
                return original(*bound.args, **bound.kwargs)

    return loop


def _prepare(model: keras.Model, call: str, arguments: dict, extended: ReplicaExtended) -> None:
    """Checks a call, and gives it the callbacks of this process."""
    collective = extended.collective
    misuse.check(model, arguments, collective)
    if not collective.topology.is_chief:
        arguments["verbose"] = 0
    given = arguments.get("callbacks")
    # `fit` passes its own list on to `evaluate`.
    if collective.size > 1 and not isinstance(given, keras.callbacks.CallbackList):
        own = fingerprint(model, call, arguments, extended.options)
        check_fingerprint(own, collective)
        arguments["callbacks"] = for_this_process(given, extended, trains=call == "fit")


# The extension whose data Keras is setting up.
_distributing: contextvars.ContextVar[ReplicaExtended | None] = contextvars.ContextVar(
    "_distributing", default=None
)


def _epoch_iterator(original: Callable) -> Callable:
    def __init__(self, distribute_strategy=None, *args, **kwargs):
        with resuming.setting_up(self):
            set_up(self, distribute_strategy, *args, **kwargs)

    def set_up(self, distribute_strategy, *args, **kwargs):
        extended = _extended(distribute_strategy)
        if extended is None:
            original(self, distribute_strategy, *args, **kwargs)
            return
        token = _distributing.set(extended)
        try:
            with extended.global_steps():
                original(self, distribute_strategy, *args, **kwargs)
        finally:
            _distributing.reset(token)
        self.data_adapter, self._distributed_dataset = portions(
            self.data_adapter, self._distributed_dataset, extended
        )
        self._num_batches = self.data_adapter.num_batches

    return __init__


def _get_tf_dataset(original: Callable) -> Callable:
    def get_tf_dataset(self):
        extended, position = _distributing.get(), resuming.position()
        if extended is None and position is None:
            return original(self)
        collective = LocalCollective() if extended is None else extended.collective
        check_arrays(self._inputs, collective)

        def seed() -> int | None:
            return agreed_seed(collective) if self._shuffle else None

        order = ArrayOrder(seed()) if position is None else position.array_order(seed)
        splitter = None
        if extended is not None and extended._num_replicas_in_sync > 1:
            splitter = extended.splitter
        return array_batches(self, order, splitter)

    return get_tf_dataset


def _enumerate_iterator(original: Callable) -> Callable:
    def enumerate_iterator(self):
        found = getattr(self, "_tfdml_position", None)
        return original(self) if found is None else found.steps()

    return enumerate_iterator


def _logs_of_epoch(original: Callable) -> Callable:
    def get_metrics_result_or_logs(self, logs):
        found = getattr(self, "_tfdml_position", None)
        # An epoch that was resumed behind its last step has no logs of its own.
        return original(self, found.logs if found is not None and not logs else logs)

    return get_metrics_result_or_logs


def _maybe_symbolic_build(original: Callable) -> Callable:
    def maybe_symbolic_build(self, iterator=None, data_batch=None):
        if _extended(self._distribute_strategy) is None or iterator is None:
            return original(self, iterator, data_batch)
        # From what the data declare: Keras would take a batch, which a generator cannot give back.
        return original(self, data_batch=batch_spec(iterator._distributed_dataset))

    return maybe_symbolic_build


def _make_function(original: Callable) -> Callable:
    def make_function(self, step_function):
        if _extended(self._distribute_strategy) is None:
            return original(self, step_function)
        extended, name = _extended(self._distribute_strategy), step_function.__name__
        if _replicas(self) is not None:
            # Keras calls `strategy.run(step, batch)`; ours gives a GlobalStep the portion.
            step_function = MetricStep(self, step_function)
        function = original(self, step_function)

        def on_batches(iterator):
            if isinstance(iterator, Generator):
                # Its end must be seen here: Keras's loop takes no end for an answer.
                more = itertools.islice(iterator, self.steps_per_execution - 1)
                iterator = itertools.chain([next(iterator)], more)
            with extended.collective_step(f"the exchange of {name}", self.steps_per_execution):
                return function(iterator)

        return on_batches

    return make_function


def _make_predict_function(original: Callable) -> Callable:
    def make_predict_function(self, force=False):
        if _replicas(self) is None or (self.predict_function is not None and not force):
            return original(self, force)
        step = PredictStep(self, "predict_step")

        def predict_function(data: list) -> Any:
            outputs = [self.distribute_strategy.run(step, args=(batch,)) for batch in data]
            return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

        if not self.run_eagerly:
            predict_function = tf.function(predict_function, reduce_retracing=True)
        extended = _replicas(self)

        def on_batches(data: list) -> Any:
            with extended.collective_step("the exchange of predict_step", len(data)):
                return predict_function(data)

        self.predict_function = on_batches

    return make_predict_function


# -- Optimizers --------------------------------------------------------------------------------


def _apply(original: Callable) -> Callable:
    """`apply` of the outermost optimizer: gradients are summed before anything else is done."""

    def apply(self, grads, trainable_variables=None):
        extended = _current_replicas()
        inner = getattr(self, "inner_optimizer", self)
        if extended is None or getattr(self, "_tfdml_gets_sums", False):
            return original(self, grads, trainable_variables)
        grads, variables = list(grads), trainable_variables
        accumulator = extended.accumulator
        if inner.gradient_accumulation_steps:
            variables = list(inner._trainable_variables if variables is None else variables)
            if accumulator is None or accumulator.optimizer is not inner:
                raise ValueError(
                    "`gradient_accumulation_steps` must be of the optimizer that `compile` was "
                    f"given, in a call of `fit` or `train_on_batch`. Received: {inner.name}, "
                    "applied elsewhere. Sum the gradients of several steps yourself there."
                )
            if not accumulator.updates:
                return accumulator.keep(grads, variables)
            grads = accumulator.take(grads, variables)
        names = [v.path for v in (inner._trainable_variables if variables is None else variables)]
        rates = functools.partial(_rates, self, inner)
        if extended.compressor is not None:
            extended.compressor.check_optimizer(inner)
        grads = extended.sum_gradients(f"gradients/{self.name}", grads, names, rates)
        if inner is self:
            return original(self, grads, variables)
        before = tf.convert_to_tensor(inner._iterations)
        inner._tfdml_gets_sums = True
        try:
            original(self, grads, variables)
        finally:
            inner._tfdml_gets_sums = False
        if inner.gradient_accumulation_steps:
            accumulator.restart(before)

    return apply


def _rates(outer: keras.Optimizer, inner: keras.Optimizer) -> tuple[tf.Tensor | None, tf.Tensor]:
    """Returns the loss scale, None without one, and the learning rate."""
    scale = None if inner is outer else tf.convert_to_tensor(outer.dynamic_scale)
    return scale, tf.convert_to_tensor(inner.learning_rate)


def _sgd_update_step(original: Callable) -> Callable:
    def update_step(self, gradient, variable, learning_rate):
        extended = _extended(tf.distribute.get_strategy())
        aggregator = extended.aggregator if extended is not None else None
        if aggregator is None or not extended.compressor.replaces_momentum:
            return original(self, gradient, variable, learning_rate)
        # Momentum is in what has been exchanged.
        rate = tf.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, tf.cast(gradient, variable.dtype) * rate)

    return update_step


def _backend_apply_gradients(original: Callable) -> Callable:
    """The update itself, without Keras's branches; accumulation is done before the exchange."""

    def backend_apply_gradients(self, grads, trainable_variables):
        extended = _current_extended()
        if extended is None:
            return original(self, grads, trainable_variables)
        grads = self._clip_gradients(grads)
        self._apply_weight_decay(trainable_variables)
        self._backend_update_step(grads, trainable_variables, self.learning_rate)
        if self.use_ema:
            self._update_model_variables_moving_average(self._trainable_variables)
        if self.use_ema and self.ema_overwrite_frequency:
            # Keras branches here, which a replica may not: an update must follow.
            due = (self.iterations + 1) % self.ema_overwrite_frequency == 0
            averages = [v.value for v in self._model_variables_moving_average]
            variables = [v.value for v in self._trainable_variables]
            extended.overwrite_where(due, variables, averages)

    return backend_apply_gradients


def _all_reduce_sum_gradients(original: Callable) -> Callable:
    def all_reduce_sum_gradients(self, grads_and_vars):
        if _current_replicas() is not None:
            return list(grads_and_vars)
        return original(self, grads_and_vars)

    return all_reduce_sum_gradients


# -- Random numbers ----------------------------------------------------------------------------


def _next_seed(original: Callable) -> Callable:
    def next_seed(self, ordered=True):
        seed = original(self, ordered)
        if _current_share() is None:
            return seed
        # Another stream on each replica; on the first, and on one alone, Keras's own.
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return seed + tf.cast(tf.stack([replica * 1_000_003, 0]), seed.dtype)

    return next_seed


# -- Losses ------------------------------------------------------------------------------------


def _reduce_weighted_values(original: Callable) -> Callable:
    def reduce_weighted_values(
        values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None
    ):
        share = _current_share()
        if share is None:
            return original(values, sample_weight, mask, reduction, dtype)
        return losses.reduce_for_share(
            original, share, values, sample_weight, mask, reduction, dtype
        )

    return reduce_weighted_values


# Whether the tracker that a loss is meant for weighs it by rows. Each replica has a thread of its
# own, and they take turns in the middle of a loss.
_losses_by_rows: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "_losses_by_rows", default=True
)


def _compile_loss(original: Callable) -> Callable:
    def call(self, y_true, y_pred, sample_weight=None):
        if _current_share() is None:
            return original(self, y_true, y_pred, sample_weight)
        # Keras's trackers of each output's loss weigh a step by its rows only if they are static.
        counted = tree.flatten(y_pred)[0].shape[0] is not None
        token = _losses_by_rows.set(counted)
        try:
            return original(self, y_true, y_pred, sample_weight)
        finally:
            _losses_by_rows.reset(token)

    return call


def _scale(original: Callable) -> Callable:
    def scale_loss_for_distribution(value):
        share = _current_share()
        return original(value) if share is None else losses.scale_for_share(value, share)

    return scale_loss_for_distribution


def _unscale(original: Callable) -> Callable:
    def unscale_loss_for_distribution(value):
        share = _current_share()
        if share is None:
            return original(value)
        return losses.unscale_for_share(value, share, _losses_by_rows.get())

    return unscale_loss_for_distribution


_REPLACEMENTS: list[tuple[Any, str, Callable]] = [
    (TensorFlowTrainer, "fit", _loop),
    (TensorFlowTrainer, "evaluate", _loop),
    (TensorFlowTrainer, "predict", _loop),
    (TFEpochIterator, "__init__", _epoch_iterator),
    (TFEpochIterator, "_enumerate_iterator", _enumerate_iterator),
    (ArrayDataAdapter, "get_tf_dataset", _get_tf_dataset),
    (TensorFlowTrainer, "_get_metrics_result_or_logs", _logs_of_epoch),
    (TensorFlowTrainer, "_maybe_symbolic_build", _maybe_symbolic_build),
    (TensorFlowTrainer, "_make_function", _make_function),
    (TensorFlowTrainer, "make_predict_function", _make_predict_function),
    (BaseOptimizer, "apply", _apply),
    (BaseOptimizer, "_backend_apply_gradients", _backend_apply_gradients),
    (LossScaleOptimizer, "apply", _apply),
    (keras.optimizers.SGD, "update_step", _sgd_update_step),
    (TFOptimizer, "_all_reduce_sum_gradients", _all_reduce_sum_gradients),
    (keras_loss, "reduce_weighted_values", _reduce_weighted_values),
    (keras_loss, "scale_loss_for_distribution", _scale),
    (keras_loss, "unscale_loss_for_distribution", _unscale),
    (CompileLoss, "call", _compile_loss),
    (SeedGenerator, "next", _next_seed),
]
