"""Where parameter servers enter Keras 3.15: what the chief does in `fit`, and workers in a step.

| Keras's function | what is different under a `ParameterServerStrategy` |
|---|---|
| `fit`, `evaluate`, `predict` | early checks; a lost server is named |
| `TFEpochIterator` | data are sent to the workers once, or read by the chief |
| `TFEpochIterator.tf_sync` | an epoch ends when its last step has |
| `_maybe_symbolic_build` | builds from the data's shapes |
| `_make_function`, `make_predict_function` | steps are tasks for workers |
| `Variable.assign_add`, `assign_sub` | done on the server: nothing is lost |
| `TFOptimizer.assign_add`, `assign_sub` | the same for rows, which TensorFlow adds without a lock |
| `SeedGenerator.next` | workers draw different random numbers; the counter loses nothing |
| `Optimizer.apply` | a synchronous step's gradients are taken out here |
| `TFOptimizer._distributed_tf_update_step` | an asynchronous step's go to the servers encoded |
| `LossScaleOptimizer._stateful_handle_non_finite_grads` | halves the scale that overflowed |
"""

import contextvars
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.variables import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, TFEpochIterator
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.random.seed_generator import SeedGenerator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from tfdml.collectives.collective import LocalCollective
from tfdml.strategies.keras_seam import resuming
from tfdml.strategies.keras_seam.adopting import adopt
from tfdml.strategies.keras_seam.array_data import ArrayOrder, agreed_seed, array_batches
from tfdml.strategies.keras_seam.building import build_optimizer, is_called_by_own_steps
from tfdml.strategies.keras_seam.progress import with_progress
from tfdml.strategies.parameter_server import checks
from tfdml.strategies.parameter_server.asynchronous import AsynchronousTraining
from tfdml.strategies.parameter_server.extended import ParameterServerExtended
from tfdml.strategies.parameter_server.pushing import sent_to_servers
from tfdml.strategies.parameter_server.scattered import ScatteredEvaluation, ScatteredPrediction
from tfdml.strategies.parameter_server.share_step import ShareStep
from tfdml.strategies.parameter_server.shipping import ShippedDataset, as_dataset, on_renamed_device
from tfdml.strategies.parameter_server.step_scope import (
    STREAM_STRIDE,
    add_on_server,
    add_rows_on_server,
    current_step,
    subtract_rows_on_server,
)
from tfdml.strategies.parameter_server.synchronous import SynchronousTraining
from tfdml.strategies.parameter_server.worker_step import WorkerStep
from tfdml.strategies.share import without_optionals


def _ours(strategy: tf.distribute.Strategy | None) -> bool:
    return isinstance(getattr(strategy, "extended", None), ParameterServerExtended)


# The call whose data Keras is setting up: its model, and what it is for.
_call: contextvars.ContextVar[tuple[keras.Model, str] | None] = contextvars.ContextVar(
    "_call", default=None
)


# -- The trainer -------------------------------------------------------------------------------


def _loop(original: Callable) -> Callable:
    """`fit`, `evaluate` and `predict`."""
    name, signature = original.__name__, inspect.signature(original)

    def loop(self, *args, **kwargs):
        if not _ours(self._distribute_strategy):
            return original(self, *args, **kwargs)
        adopt(self)
        bound = signature.bind(self, *args, **kwargs)
        checks.check_call(self, name, bound.arguments)
        bound.arguments["callbacks"] = with_progress(
            bound.arguments.get("callbacks"), bound.arguments.get("verbose", "auto")
        )
        token = _call.set((self, name))
        try:
            return original(*bound.args, **bound.kwargs)
        except Exception as error:
            _give_up(self)
            checks.explain_loss(self.distribute_strategy, name, error)
            raise
        except BaseException:
            _give_up(self)
            raise
        finally:
            _call.reset(token)

    return loop


def _functions(model: keras.Model) -> Iterator[Any]:
    for function in (model.train_function, model.test_function, model.predict_function):
        if hasattr(function, "cancel"):
            yield function


def _give_up(model: keras.Model) -> None:
    for function in _functions(model):
        function.cancel()


class _Unlimited(DataAdapter):
    """Keras's view of data that workers read for themselves."""

    @property
    def num_batches(self) -> None:
        """The number of batches: there is no end."""


def _epoch_iterator(original: Callable) -> Callable:
    def __init__(self, distribute_strategy=None, *args, **kwargs):
        if not _ours(distribute_strategy) or _call.get() is None:
            return original(self, distribute_strategy, *args, **kwargs)
        (model, call), strategy = _call.get(), distribute_strategy
        if call == "fit":
            # What follows in the same call is the validation's.
            _call.set((model, "evaluate"))
        self._distribute_strategy, self._tfdml_model = strategy, model
        reads_remotely = call == "fit" and not strategy.synchronous
        source = kwargs.get("x")
        if not (reads_remotely and callable(source)):
            kwargs["x"] = as_dataset(source)
            EpochIterator.__init__(self, *args, **kwargs)
            source = _dataset_of(self.data_adapter, shuffled_by_us=not reads_remotely)
        if reads_remotely:
            steps = kwargs.get("steps_per_epoch")
            if isinstance(getattr(self, "data_adapter", None), ArrayDataAdapter):
                steps = steps or self.data_adapter.num_batches
            _read_remotely(self, source, steps, kwargs.get("steps_per_execution", 1), strategy)
        elif call == "predict":
            model.make_predict_function()
            self._distributed_dataset = _Ahead(on_renamed_device(source), model)
        else:
            self._distributed_dataset = on_renamed_device(source)

    return __init__


def _read_remotely(self: TFEpochIterator, source: Any, steps, steps_per_execution, strategy):
    self._distributed_dataset = ShippedDataset(source, strategy.coordinator, strategy.size)
    self.data_adapter = _Unlimited()
    self.steps_per_epoch, self.steps_per_execution = steps, steps_per_execution
    self._num_batches = self._current_iterator = self._epoch_iterator = None
    self._steps_seen = 0


def _dataset_of(adapter: DataAdapter, shuffled_by_us: bool) -> tf.data.Dataset:
    if shuffled_by_us and isinstance(adapter, ArrayDataAdapter):
        # As under the other strategies: an order that follows from Keras's seed.
        def seed() -> int | None:
            return agreed_seed(LocalCollective()) if adapter._shuffle else None

        found = resuming.position()
        order = ArrayOrder(seed()) if found is None else found.array_order(seed)
        return array_batches(adapter, order, None)
    # Workers cannot be sent an order that Python counts.
    with resuming.without_position():
        return adapter.get_tf_dataset()


class _Ahead:
    """Batches for `predict`, sent to the workers ahead of their turn.

    Args:
        dataset: The batches.
        model: The model.
    """

    def __init__(self, dataset: tf.data.Dataset, model: keras.Model):
        self._dataset = dataset
        self._model = model

    def __iter__(self) -> Iterator:
        return self._model.predict_function.ahead(self._dataset)


def _tf_sync(original: Callable) -> Callable:
    def tf_sync(self):
        model = getattr(self, "_tfdml_model", None)
        if model is None:
            return original(self)
        for function in _functions(model):
            function.join()

    return tf_sync


def _maybe_symbolic_build(original: Callable) -> Callable:
    def maybe_symbolic_build(self, iterator=None, data_batch=None):
        if not _ours(self._distribute_strategy):
            return original(self, iterator, data_batch)
        if iterator is not None:
            data_batch = without_optionals(iterator._distributed_dataset.element_spec)
        if is_called_by_own_steps(self):
            build_optimizer(self)
        else:
            with self._distribute_strategy.scope():
                self._symbolic_build(data_batch=data_batch)
        checks.check_partitions(self)

    return maybe_symbolic_build


def _make_function(original: Callable) -> Callable:
    def make_function(self, step_function):
        strategy = self._distribute_strategy
        if not _ours(strategy):
            return original(self, step_function)
        checks.check_model(self)
        if step_function.__name__ != "train_step":
            return ScatteredEvaluation(self, strategy, WorkerStep(self, step_function))
        if strategy.synchronous:
            return SynchronousTraining(self, strategy, ShareStep(self, step_function))
        return AsynchronousTraining(self, strategy, WorkerStep(self, step_function))

    return make_function


def _make_predict_function(original: Callable) -> Callable:
    def make_predict_function(self, force=False):
        if not _ours(self._distribute_strategy):
            return original(self, force)
        if self.predict_function is None or force:
            step = WorkerStep(self, self.predict_step)
            self.predict_function = ScatteredPrediction(self, self._distribute_strategy, step)

    return make_predict_function


# -- What a step on a worker changes -----------------------------------------------------------


def _assign_add(original: Callable) -> Callable:
    def assign_add(self, value):
        step = current_step()
        if step is None or step.owns(self):
            return original(self, value)
        return add_on_server(self, keras.ops.convert_to_tensor(value, self._dtype))

    return assign_add


def _assign_sub(original: Callable) -> Callable:
    def assign_sub(self, value):
        step = current_step()
        if step is None or step.owns(self):
            return original(self, value)
        return add_on_server(self, -keras.ops.convert_to_tensor(value, self._dtype))

    return assign_sub


def _add_rows(original: Callable) -> Callable:
    def assign_add(self, variable, value):
        if current_step() is None or not isinstance(value, tf.IndexedSlices):
            return original(self, variable, value)
        return add_rows_on_server(variable, value)

    return assign_add


def _subtract_rows(original: Callable) -> Callable:
    def assign_sub(self, variable, value):
        if current_step() is None or not isinstance(value, tf.IndexedSlices):
            return original(self, variable, value)
        return subtract_rows_on_server(variable, value)

    return assign_sub


def _next_seed(original: Callable) -> Callable:
    def next_seed(self, ordered=True):
        step = current_step()
        if step is None:
            return original(self, ordered)
        # A worker takes one step at a time, so in its own stream no two numbers are alike.
        seed = tf.convert_to_tensor(self.state) * 1
        self.state.assign_add(np.array([0, 1]))
        return seed + tf.cast(tf.stack([step.stream * STREAM_STRIDE, 0]), seed.dtype)

    return next_seed


def _apply(original: Callable) -> Callable:
    def apply(self, grads, trainable_variables=None):
        step = current_step()
        if step is None or step.share is None:
            return original(self, grads, trainable_variables)
        step.applied.append((self, list(grads)))

    return apply


def _distributed_tf_update_step(original: Callable) -> Callable:
    def update(self, distribution, grads_and_vars, learning_rate):
        step = current_step()
        compressor = getattr(distribution, "compressor", None)
        if step is not None and compressor is not None:
            grads_and_vars = sent_to_servers(compressor, list(grads_and_vars), step.stream)
        return original(self, distribution, grads_and_vars, learning_rate)

    return update


def _skip_update(original: Callable) -> Callable:
    def handle_non_finite_gradients(self):
        if current_step() is not None:
            # Keras has traced the other branch, which may double the scale.
            current_step().remember()
        return original(self)

    return handle_non_finite_gradients


REPLACEMENTS: list[tuple[Any, str, Callable]] = [
    (TensorFlowTrainer, "fit", _loop),
    (TensorFlowTrainer, "evaluate", _loop),
    (TensorFlowTrainer, "predict", _loop),
    (TFEpochIterator, "__init__", _epoch_iterator),
    (TFEpochIterator, "tf_sync", _tf_sync),
    (TensorFlowTrainer, "_maybe_symbolic_build", _maybe_symbolic_build),
    (TensorFlowTrainer, "_make_function", _make_function),
    (TensorFlowTrainer, "make_predict_function", _make_predict_function),
    (Variable, "assign_add", _assign_add),
    (Variable, "assign_sub", _assign_sub),
    (TFOptimizer, "assign_add", _add_rows),
    (TFOptimizer, "assign_sub", _subtract_rows),
    (SeedGenerator, "next", _next_seed),
    (BaseOptimizer, "apply", _apply),
    (LossScaleOptimizer, "apply", _apply),
    (TFOptimizer, "_distributed_tf_update_step", _distributed_tf_update_step),
    (LossScaleOptimizer, "_stateful_handle_non_finite_grads", _skip_update),
]
