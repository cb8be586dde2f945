"""Replicas' part in `fit`, `evaluate` and `predict`: checks, data, steps on global batches."""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, TFEpochIterator
from keras.src.callbacks.callback_list import CallbackList
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from tfdml.collectives.collective import Collective, LocalCollective
from tfdml.runtime.guard.fingerprint import check_fingerprint, fingerprint
from tfdml.strategies import usage_checks
from tfdml.strategies.arguments import ReplicaOptions
from tfdml.strategies.fit_session import finish_rounds, get_session
from tfdml.strategies.input.input_checks import check_arrays
from tfdml.strategies.input.iterators import Reiterable
from tfdml.strategies.keras_seam.adopting import adopt, adopt_read, check_made_inside
from tfdml.strategies.keras_seam.calls import Call, current_call
from tfdml.strategies.keras_seam.current import get_extended, get_replicas
from tfdml.strategies.keras_seam.data.array_data import ArrayOrder, agreed_seed, array_batches
from tfdml.strategies.keras_seam.data.data_source import (
    batch_spec,
    check_parts_can_change,
    check_read_by_all,
    local_batches,
)
from tfdml.strategies.keras_seam.fit import resuming
from tfdml.strategies.keras_seam.fit.balanced_split import BalancedSplit, with_balanced_split
from tfdml.strategies.keras_seam.fit.building import (
    build_for_predict,
    build_optimizer,
    is_called_by_own_steps,
)
from tfdml.strategies.keras_seam.fit.callbacks import NotedCallbacks, for_this_process
from tfdml.strategies.keras_seam.fit.log_order import in_log_order
from tfdml.strategies.keras_seam.fit.progress import with_progress
from tfdml.strategies.keras_seam.fit.recorded_steps import RecordedSteps
from tfdml.strategies.keras_seam.fit.step_call import with_direct_calls
from tfdml.strategies.keras_seam.hooks import Hooks
from tfdml.strategies.keras_seam.local_updates.local_step import RoundsFunction
from tfdml.strategies.keras_seam.pipeline.cutting import check_rows
from tfdml.strategies.keras_seam.pipeline.microbatches import pipelined
from tfdml.strategies.keras_seam.pipeline.placing import place
from tfdml.strategies.keras_seam.replacing import Replacement
from tfdml.strategies.keras_seam.step.compiled import (
    compiled,
    mark_compiled_whole,
    without_jit_compile,
)
from tfdml.strategies.keras_seam.step.observed import make_observed
from tfdml.strategies.keras_seam.step.optimizers import apply
from tfdml.strategies.keras_seam.step.replica_math import next_seed
from tfdml.strategies.replicas.extended import ReplicaExtended
from tfdml.strategies.replicas.global_step import MetricStep, PredictStep
from tfdml.strategies.replicas.row_gathering import concat_rows
from tfdml.timeline.rank_timeline import Kind


def _train_on_batch(original: Callable) -> Callable:
    def train_on_batch(self, *args, **kwargs):
        adopt_read(self)
        if get_extended(self._distribute_strategy) is None:
            check_made_inside(self, "train_on_batch")
        return original(self, *args, **kwargs)

    return train_on_batch


def _prepare(model: keras.Model, call: str, arguments: dict, extended: ReplicaExtended) -> None:
    """Checks a call, and replaces its callbacks by those of this process."""
    collective = extended.collective
    for name in ("x", "validation_data"):
        if extended.original_dataset(arguments.get(name)) is not None:
            arguments[name] = extended.original_dataset(arguments[name])
    adopt(model)
    usage_checks.check(model, arguments, collective)
    if extended.options.pipeline is not None:
        check_rows(arguments, extended)
    if not collective.topology.is_chief:
        arguments["verbose"] = 0
    given = arguments.get("callbacks")
    # `fit` passes its own `CallbackList` to `evaluate`.
    if collective.size > 1 and not isinstance(given, keras.callbacks.CallbackList):
        check_fingerprint(fingerprint(model, call, arguments, extended.must_match), collective)
        own = for_this_process(given, extended, trains=call == "fit")
        arguments["callbacks"] = with_progress(own, arguments.get("verbose", "auto"))
    if call == "fit" and extended.batch_split.is_auto:
        clock = lambda model: extended.replica_clock(get_session(model))  # noqa: E731
        balancing = BalancedSplit(extended.batch_split, clock, collective)
        arguments["callbacks"] = with_balanced_split(arguments.get("callbacks"), balancing, model)


def _callback_list(original: Callable) -> Callable:
    signature = inspect.signature(original)

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.callbacks = in_log_order(self.callbacks)
        model = signature.bind(self, *args, **kwargs).arguments.get("model")
        extended = get_extended(getattr(model, "_distribute_strategy", None))
        if extended is not None and extended.guard is not None:
            self.callbacks = NotedCallbacks(self.callbacks, extended.guard)

    return __init__


def _get_iterator(original: Callable) -> Callable:
    def get_iterator(self):
        data = original(self)
        return data if get_extended(self._distribute_strategy) is None else Reiterable(data)

    return get_iterator


def _get_tf_dataset(original: Callable) -> Callable:
    def get_tf_dataset(self):
        call = current_call()
        if call is None or (call.extended is None and call.position is None):
            return original(self)
        extended, position = call.extended, call.position
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
        found = resuming.position_of(self)
        return original(self) if found is None else found.steps()

    return enumerate_iterator


def _logs_of_epoch(original: Callable) -> Callable:
    def get_metrics_result_or_logs(self, logs):
        session = get_session(self)
        if session.rounds is not None:
            session.rounds.finish()
            logs = _with_means(logs, self.get_metrics_result(), session.rounds.collective)
        found = session.position
        # An epoch that was resumed after its last step has no logs of its own.
        return original(self, found.logs if found is not None and not logs else logs)

    return get_metrics_result_or_logs


def _with_means(logs: Any, results: dict[str, Any], collective: Collective) -> Any:
    """Returns an epoch's logs with what local steps returned beside metrics averaged over ranks.

    Args:
        logs: The last step's logs, on this rank.
        results: The metrics' results over the epoch, the same on all ranks.
        collective: Collective of the job.
    """
    if not isinstance(logs, dict) or logs.keys() <= results.keys():
        return logs
    others = {name: value for name, value in logs.items() if name not in results}
    own = tf.stack([tf.cast(tf.convert_to_tensor(v), tf.float64) for v in others.values()])
    (total,) = collective.all_reduce([own], "local_updates/logs")
    means = dict(zip(others, (total / collective.size).numpy().tolist(), strict=True))
    return {name: means[name] if name in means else results[name] for name in logs}


def _around(model: keras.Model) -> Callable | None:
    """Returns the wrapper of a replica's step: into microbatches, or for XLA; None for neither."""
    if get_extended(model._distribute_strategy).options.pipeline is not None:
        return functools.partial(pipelined, model)
    return functools.partial(compiled, model) if model.jit_compile else None


class ReplicaHooks(Hooks):
    """Hooks of the replicas, which take steps on global batches."""

    def strategy_options(self, options: ReplicaOptions) -> ReplicaOptions:
        """Returns the options that the strategy uses: those that its constructor was given."""
        return options

    @contextlib.contextmanager
    def calling(self, call: Call, arguments: dict[str, Any]) -> Iterator[None]:
        """Checks the call, and reports it to the guard while it runs."""
        extended = get_extended(call.model._distribute_strategy)
        if call.name == "fit":
            extended.recorder.drop()
        with extended.collective_call(call.name), extended.recorder.span(Kind.CALL, call.name):
            finish_rounds(call.model.distribute_strategy)
            _prepare(call.model, call.name, arguments, extended)
            with resuming.resumed(call, arguments):
                yield

    def set_up_data(self, keras_init, call, iterator, strategy, *args, **kwargs) -> None:
        """Makes the iterator yield local batches of global batches; see `feed_modes`."""
        extended = strategy.extended
        with call.overriding(extended=extended), extended.global_steps():
            keras_init(iterator, strategy, *args, **kwargs)
        if call.trains:
            call.trains = False
            check_parts_can_change(iterator._distributed_dataset, extended)
            if extended.local_updates is not None:
                check_read_by_all(iterator.data_adapter, iterator._distributed_dataset, extended)
        iterator.data_adapter, iterator._distributed_dataset = local_batches(
            iterator.data_adapter,
            iterator._distributed_dataset,
            extended,
            by_steps=iterator.steps_per_epoch is not None,
        )
        iterator._num_batches = iterator.data_adapter.num_batches

    def build(self, keras_build, model, iterator, data_batch) -> None:
        """Builds the model from the data's element spec, without reading a batch."""
        extended = get_extended(model._distribute_strategy)
        if is_called_by_own_steps(model):
            build_optimizer(model)
        elif iterator is None:
            adopt(model)
            keras_build(model, iterator, data_batch)
        else:
            # Keras would consume a batch, which is lost if the data are a generator.
            keras_build(model, data_batch=batch_spec(iterator._distributed_dataset))
        if extended.options.pipeline is not None and place(model, extended):
            model.train_function = model.test_function = model.predict_function = None

    def make_function(self, keras_make, model, step) -> Callable:
        """Returns a function that runs a `MetricStep` on global batches; for XLA see `compiled`."""
        extended, name = get_extended(model._distribute_strategy), step.__name__
        if get_replicas(model) is None:
            step = mark_compiled_whole(step) if model.jit_compile else step
            function = make_observed(keras_make, model, step)
            function = with_direct_calls(function, model)
        else:
            around = _around(model)

            def make(kind: type[MetricStep]) -> Callable:
                with without_jit_compile(model):
                    # Keras calls `strategy.run(step, batch)`; ours runs a `GlobalStep` on its rows.
                    function = keras_make(model, kind(model, step, around))
                return with_direct_calls(function, model)

            if name != "train_step":
                function = make(MetricStep)
            elif extended.local_updates is None:
                function = RecordedSteps(model, extended.recorder, lambda: make(MetricStep))
            else:
                make_rounds = functools.partial(RoundsFunction, model, extended, make)
                function = RecordedSteps(model, extended.recorder, make_rounds)

        def on_batches(iterator):
            if isinstance(iterator, Generator):
                # Detect its end here, because Keras's loop over steps does not handle it.
                more = itertools.islice(iterator, model.steps_per_execution - 1)
                with extended.recorder.span(Kind.DATA):
                    iterator = itertools.chain([next(iterator)], more)
            own = model if name == "train_step" else None
            finish_rounds(model.distribute_strategy, but_of=own)
            with extended.collective_step(f"the exchange of {name}", model.steps_per_execution):
                return function(iterator)

        return on_batches

    def make_predict_function(self, keras_make, model, force) -> None:
        """Sets a predict function that runs a `PredictStep` on global batches."""
        extended = get_replicas(model)
        if extended is None:
            keras_make(model, force)
            return
        around = _around(model)
        step = PredictStep(model, model.predict_step, around)

        def predict_function(data: list) -> Any:
            outputs = [model.distribute_strategy.run(step, args=(batch,)) for batch in data]
            return tf.nest.map_structure(lambda *parts: concat_rows(parts), *outputs)

        def untraced() -> Callable:
            if model.run_eagerly:
                return predict_function
            own = tf.autograph.experimental.do_not_convert(predict_function)
            return tf.function(own, reduce_retracing=True)

        function = untraced()

        def on_batches(data: list) -> Any:
            nonlocal function
            is_cut = extended.options.pipeline is not None
            if model.jit_compile or is_cut:
                build_for_predict(model, extended.make_local_batch(data[0]).parts[0])
            if is_cut and place(model, extended):
                model.train_function = model.test_function = None
                function = untraced()
            finish_rounds(model.distribute_strategy)
            with extended.collective_step("the exchange of predict_step", len(data)):
                return function(data)

        model.predict_function = on_batches

    next_seed = staticmethod(next_seed)
    apply = staticmethod(apply)


REPLACEMENTS: list[Replacement] = [
    (TensorFlowTrainer, "train_on_batch", _train_on_batch),
    (CallbackList, "__init__", _callback_list),
    (TFEpochIterator, "_get_iterator", _get_iterator),
    (TFEpochIterator, "_enumerate_iterator", _enumerate_iterator),
    (ArrayDataAdapter, "get_tf_dataset", _get_tf_dataset),
    (TensorFlowTrainer, "_get_metrics_result_or_logs", _logs_of_epoch),
]
