"""`fit`, `evaluate` and `predict`: their checks, their data, and steps on global batches."""

import contextvars
import functools
import inspect
import itertools
from collections.abc import Callable, Generator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, TFEpochIterator
from keras.src.callbacks.callback_list import CallbackList
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from tfdml.collectives.collective import LocalCollective
from tfdml.runtime.fingerprint import check_fingerprint, fingerprint
from tfdml.strategies import misuse
from tfdml.strategies.agreement import check_arrays
from tfdml.strategies.alone import check_not_alone, model_made_outside
from tfdml.strategies.extended import ReplicaExtended
from tfdml.strategies.gathering import concat_rows
from tfdml.strategies.iteration import Passes
from tfdml.strategies.keras_seam import resuming
from tfdml.strategies.keras_seam.adopting import adopt, adopt_read
from tfdml.strategies.keras_seam.array_data import ArrayOrder, agreed_seed, array_batches
from tfdml.strategies.keras_seam.building import (
    build_for_predict,
    build_optimizer,
    is_called_by_own_steps,
)
from tfdml.strategies.keras_seam.callbacks import NotedCallbacks, for_this_process
from tfdml.strategies.keras_seam.compiled import compiled, compiled_whole, not_as_a_whole
from tfdml.strategies.keras_seam.current import extended_of, is_ours, replicas_of
from tfdml.strategies.keras_seam.data_source import batch_spec, portions
from tfdml.strategies.keras_seam.progress import with_progress
from tfdml.strategies.step import MetricStep, PredictStep


def _loop(original: Callable) -> Callable:
    """`fit`, `evaluate` and `predict`."""
    signature = inspect.signature(original)

    def loop(self, *args, **kwargs):
        if original.__name__ == "fit":
            adopt_read(self)
        extended = extended_of(self._distribute_strategy)
        if extended is None:
            _check_made_inside(self, original.__name__)
            bound = signature.bind(self, *args, **kwargs)
            with resuming.resumed(self, original.__name__, bound.arguments):
                return original(*bound.args, **bound.kwargs)
        bound = signature.bind(self, *args, **kwargs)
        with extended.collective_call(original.__name__):
            _prepare(self, original.__name__, bound.arguments, extended)
            with resuming.resumed(self, original.__name__, bound.arguments):
                return original(*bound.args, **bound.kwargs)

    return loop


def _check_made_inside(model: keras.Model, call: str) -> None:
    """Refuses a model that was made outside of the scope, and shows that it should not have been.

    It is used in the scope, its optimizer was made there, or there is a job that it should share.
    """
    optimizer = getattr(model, "optimizer", None)
    for strategy in (
        tf.distribute.get_strategy(),
        getattr(optimizer, "_distribution_strategy", None),
    ):
        if model._distribute_strategy is None and extended_of(strategy) is not None:
            raise model_made_outside(model, strategy.rank)
    if call in ("fit", "train_on_batch") and not is_ours(model._distribute_strategy):
        check_not_alone(model)


def _train_on_batch(original: Callable) -> Callable:
    def train_on_batch(self, *args, **kwargs):
        adopt_read(self)
        if extended_of(self._distribute_strategy) is None:
            _check_made_inside(self, "train_on_batch")
        return original(self, *args, **kwargs)

    return train_on_batch


def _prepare(model: keras.Model, call: str, arguments: dict, extended: ReplicaExtended) -> None:
    """Checks a call, and gives it the callbacks of this process."""
    collective = extended.collective
    for name in ("x", "validation_data"):
        if extended.whole_of(arguments.get(name)) is not None:
            arguments[name] = extended.whole_of(arguments[name])
    adopt(model)
    misuse.check(model, arguments, collective)
    if not collective.topology.is_chief:
        arguments["verbose"] = 0
    given = arguments.get("callbacks")
    # `fit` passes its own list on to `evaluate`.
    if collective.size > 1 and not isinstance(given, keras.callbacks.CallbackList):
        check_fingerprint(fingerprint(model, call, arguments, extended.alike), collective)
        own = for_this_process(given, extended, trains=call == "fit")
        arguments["callbacks"] = with_progress(own, arguments.get("verbose", "auto"))


def _callback_list(original: Callable) -> Callable:
    signature = inspect.signature(original)

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        model = signature.bind(self, *args, **kwargs).arguments.get("model")
        extended = extended_of(getattr(model, "_distribute_strategy", None))
        if extended is not None and extended.guard is not None:
            self.callbacks = NotedCallbacks(self.callbacks, extended.guard.place)

    return __init__


# The extension whose data Keras is setting up.
_distributing: contextvars.ContextVar[ReplicaExtended | None] = contextvars.ContextVar(
    "_distributing", default=None
)


def _epoch_iterator(original: Callable) -> Callable:
    def __init__(self, distribute_strategy=None, *args, **kwargs):
        with resuming.setting_up(self):
            set_up(self, distribute_strategy, *args, **kwargs)

    def set_up(self, distribute_strategy, *args, **kwargs):
        extended = extended_of(distribute_strategy)
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
            self.data_adapter,
            self._distributed_dataset,
            extended,
            by_steps=self.steps_per_epoch is not None,
        )
        self._num_batches = self.data_adapter.num_batches

    return __init__


def _get_iterator(original: Callable) -> Callable:
    def get_iterator(self):
        data = original(self)
        return data if extended_of(self._distribute_strategy) is None else Passes(data)

    return get_iterator


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
        if extended_of(self._distribute_strategy) is None:
            return original(self, iterator, data_batch)
        if is_called_by_own_steps(self):
            return build_optimizer(self)
        if iterator is None:
            adopt(self)
            return original(self, iterator, data_batch)
        # From what the data declare: Keras would take a batch, which a generator cannot give back.
        return original(self, data_batch=batch_spec(iterator._distributed_dataset))

    return maybe_symbolic_build


def _make_function(original: Callable) -> Callable:
    def make_function(self, step_function):
        if extended_of(self._distribute_strategy) is None:
            return original(self, step_function)
        extended, name = extended_of(self._distribute_strategy), step_function.__name__
        if replicas_of(self) is None:
            step = compiled_whole(step_function) if self.jit_compile else step_function
            function = original(self, step)
        else:
            around = functools.partial(compiled, self) if self.jit_compile else None
            with not_as_a_whole(self):
                # Keras calls `strategy.run(step, batch)`; ours gives a GlobalStep the portion.
                function = original(self, MetricStep(self, step_function, around))

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
        if replicas_of(self) is None or (self.predict_function is not None and not force):
            return original(self, force)
        around = functools.partial(compiled, self) if self.jit_compile else None
        step = PredictStep(self, self.predict_step, around)

        def predict_function(data: list) -> Any:
            outputs = [self.distribute_strategy.run(step, args=(batch,)) for batch in data]
            return tf.nest.map_structure(lambda *parts: concat_rows(parts), *outputs)

        if not self.run_eagerly:
            own = tf.autograph.experimental.do_not_convert(predict_function)
            predict_function = tf.function(own, reduce_retracing=True)
        extended = replicas_of(self)

        def on_batches(data: list) -> Any:
            if self.jit_compile:
                build_for_predict(self, extended.portion_of(data[0]).parts[0])
            with extended.collective_step("the exchange of predict_step", len(data)):
                return predict_function(data)

        self.predict_function = on_batches

    return make_predict_function


REPLACEMENTS: list[tuple[Any, str, Callable]] = [
    (TensorFlowTrainer, "fit", _loop),
    (TensorFlowTrainer, "evaluate", _loop),
    (TensorFlowTrainer, "predict", _loop),
    (TensorFlowTrainer, "train_on_batch", _train_on_batch),
    (CallbackList, "__init__", _callback_list),
    (TFEpochIterator, "__init__", _epoch_iterator),
    (TFEpochIterator, "_get_iterator", _get_iterator),
    (TFEpochIterator, "_enumerate_iterator", _enumerate_iterator),
    (ArrayDataAdapter, "get_tf_dataset", _get_tf_dataset),
    (TensorFlowTrainer, "_get_metrics_result_or_logs", _logs_of_epoch),
    (TensorFlowTrainer, "_maybe_symbolic_build", _maybe_symbolic_build),
    (TensorFlowTrainer, "_make_function", _make_function),
    (TensorFlowTrainer, "make_predict_function", _make_predict_function),
]
