"""Parameter servers' part in `fit`, `evaluate` and `predict`, on the chief and in a step."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.collectives.collective import LocalCollective
from tfdml.strategies.input.local_batch import without_optionals
from tfdml.strategies.keras_seam.adopting import adopt
from tfdml.strategies.keras_seam.calls import Call
from tfdml.strategies.keras_seam.current import current_strategy, is_updating, updating
from tfdml.strategies.keras_seam.fit import resuming
from tfdml.strategies.keras_seam.fit.balanced_split import BalancedSplit, with_balanced_split
from tfdml.strategies.keras_seam.fit.building import build_optimizer, is_called_by_own_steps
from tfdml.strategies.keras_seam.fit.progress import with_progress
from tfdml.strategies.keras_seam.hooks import Hooks
from tfdml.strategies.keras_seam.parameter_servers import data
from tfdml.strategies.keras_seam.step.optimizers import inner_of, with_known_shape
from tfdml.strategies.parameter_server.chief.asynchronous import AsynchronousTraining
from tfdml.strategies.parameter_server.chief.remote_function import remote_functions
from tfdml.strategies.parameter_server.chief.scattered import (
    ScatteredEvaluation,
    ScatteredPrediction,
)
from tfdml.strategies.parameter_server.chief.synchronous import SynchronousTraining
from tfdml.strategies.parameter_server.cluster import checks
from tfdml.strategies.parameter_server.cluster.restoring import restored_servers
from tfdml.strategies.parameter_server.step.share_step import ShareStep
from tfdml.strategies.parameter_server.step.step_scope import STREAM_STRIDE, current_step
from tfdml.strategies.parameter_server.step.worker_step import WorkerStep


class ServerHooks(Hooks):
    """Hooks of parameter servers, under which steps are tasks for workers."""

    @contextlib.contextmanager
    def calling(self, call: Call, arguments: dict[str, Any]) -> Iterator[None]:
        """Checks the call; if a server is lost during it, raises an error that names it."""
        model, strategy = call.model, call.model.distribute_strategy
        if call.name == "fit" and strategy.batch_split.is_auto:
            clock = lambda model: strategy.share_clock  # noqa: E731
            balancing = BalancedSplit(strategy.batch_split, clock, LocalCollective())
            given = arguments.get("callbacks")
            arguments["callbacks"] = with_balanced_split(given, balancing, model)
        with resuming.resumed(call, arguments):
            adopt(model)
            checks.check_call(model, call.name, arguments)
            arguments["callbacks"] = with_progress(
                arguments.get("callbacks"), arguments.get("verbose", "auto")
            )
            try:
                if call.name == "fit" and strategy.restart_limit:
                    strategy.extended.note_scalars()
                yield
            except Exception as error:
                _give_up(model)
                checks.explain_loss(model.distribute_strategy, call.name, error)
                raise
            except BaseException:
                _give_up(model)
                raise

    def can_go_on(self, model, callbacks, error) -> bool:
        """Restores lost servers, if they are started again and a checkpoint has their variables."""
        strategy = model.distribute_strategy
        if not isinstance(error, checks.ServerLostError) or not strategy.restart_limit:
            return False
        has_checkpoint = any(c.can_resume() for c in resuming.resuming_callbacks(callbacks))
        return restored_servers(strategy, model, has_checkpoint)

    def set_up_data(self, keras_init, call, iterator, strategy, *args, **kwargs) -> None:
        """Sends the data to the workers once, or lets the chief read them."""
        if call.model is None:
            keras_init(iterator, strategy, *args, **kwargs)
        else:
            data.set_up(call, iterator, strategy, *args, **kwargs)

    def build(self, keras_build, model, iterator, data_batch) -> None:
        """Builds the model from the data's shapes."""
        if iterator is not None:
            data_batch = without_optionals(iterator._distributed_dataset.element_spec)
        if is_called_by_own_steps(model):
            build_optimizer(model)
        else:
            with model._distribute_strategy.scope():
                model._symbolic_build(data_batch=data_batch)
        checks.check_partitions(model)

    def make_function(self, keras_make, model, step) -> Callable:
        """Returns a function that schedules steps as tasks for workers."""
        strategy = model._distribute_strategy
        checks.check_model(model)
        if step.__name__ != "train_step":
            return ScatteredEvaluation(model, strategy, WorkerStep(model, step))
        if strategy.synchronous:
            return SynchronousTraining(model, strategy, ShareStep(model, step))
        return AsynchronousTraining(model, strategy, WorkerStep(model, step))

    def make_predict_function(self, keras_make, model, force) -> None:
        """Sets a predict function that schedules steps as tasks for workers."""
        step = WorkerStep(model, model.predict_step)
        model.predict_function = ScatteredPrediction(model, model._distribute_strategy, step)

    def next_seed(self, keras_next, generator, ordered) -> tf.Tensor:
        """Returns a seed from the worker's own stream; the counter loses no increment."""
        step = current_step()
        if step is None:
            return keras_next(generator, ordered)
        # A worker takes one step at a time, so its stream never repeats a number.
        seed = tf.convert_to_tensor(generator.state) * 1
        generator.state.assign_add(np.array([0, 1]))
        return seed + tf.cast(tf.stack([step.stream * STREAM_STRIDE, 0]), seed.dtype)

    def apply(self, keras_apply, optimizer, gradients, variables) -> None:
        """Makes the update on the servers; in a synchronous step, leaves it to the chief."""
        outermost = current_strategy() is not None and not is_updating()
        if outermost:
            inner = inner_of(optimizer)
            known = inner._trainable_variables if variables is None else variables
            gradients = [
                with_known_shape(g, v, inner) for g, v in zip(gradients, known, strict=True)
            ]
        step = current_step()
        if step is not None and step.share is not None:
            step.applied.append((optimizer, list(gradients)))
            return
        with updating() if outermost else contextlib.nullcontext():
            keras_apply(optimizer, gradients, variables)


def _give_up(model: keras.Model) -> None:
    for function in remote_functions(model):
        function.cancel()
