"""Patches of Keras through which replicas and parameter servers are called, by `Hooks`.

Each function here replaces one of Keras's. It calls the hooks of the strategy concerned, or Keras's
own function if that strategy is not one of ours.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, TFEpochIterator
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.random.seed_generator import SeedGenerator

from tfdml.strategies.keras_seam.adopting import adopt_read, check_made_inside
from tfdml.strategies.keras_seam.calls import Call, current_call, in_call
from tfdml.strategies.keras_seam.current import current_strategy
from tfdml.strategies.keras_seam.fit import resuming
from tfdml.strategies.keras_seam.hooks import get_hooks
from tfdml.strategies.keras_seam.replacing import Replacement, original
from tfdml.strategies.keras_seam.step.block_passes import current_pass
from tfdml.strategies.keras_seam.step.observed import make_observed, observed_update


def _loop(original: Callable) -> Callable:
    """Replaces `fit`, `evaluate` and `predict`."""
    name, signature = original.__name__, inspect.signature(original)

    def loop(self, *args, **kwargs):
        if name == "fit":
            adopt_read(self)
        hooks = get_hooks(self._distribute_strategy)

        def once() -> Any:
            bound = signature.bind(self, *args, **kwargs)
            with in_call(Call(self, name, trains=name == "fit")) as call:
                if hooks is None:
                    check_made_inside(self, name)
                    calling = resuming.resumed(call, bound.arguments)
                else:
                    calling = hooks.calling(call, bound.arguments)
                with calling:
                    return original(*bound.args, **bound.kwargs)

        if hooks is None or name != "fit":
            return once()
        callbacks = signature.bind(self, *args, **kwargs).arguments.get("callbacks")
        while True:
            try:
                return once()
            except Exception as error:
                if not hooks.can_go_on(self, callbacks, error):
                    raise

    return loop


def catch_early_lookups() -> None:
    """Makes `model.fit(callbacks=[ours()])` run our `fit`, though Python looked up Keras's.

    Python looks `model.fit` up before it makes the arguments, of which the first of ours installs
    the replacements. Keras's `fit` is a function in the closure of one that filters tracebacks, so
    the closure gets one that calls ours.
    """
    keras_s = original(TensorFlowTrainer, "fit")
    function = inspect.unwrap(keras_s)
    for cell in keras_s.__closure__ or ():
        if cell.cell_contents is function:
            cell.cell_contents = _redirected(function)


def _redirected(function: Callable) -> Callable:
    @functools.wraps(function)
    def fit(self, *args, **kwargs):
        call = current_call()
        is_ours = call is not None and call.model is self and call.name == "fit"
        if is_ours or original(TensorFlowTrainer, "fit") is None:
            return function(self, *args, **kwargs)
        return TensorFlowTrainer.fit(self, *args, **kwargs)

    return fit


def _epoch_iterator(original: Callable) -> Callable:
    def __init__(self, distribute_strategy=None, *args, **kwargs):
        hooks = get_hooks(distribute_strategy)
        with resuming.setting_up(self) as call:
            if hooks is None:
                original(self, distribute_strategy, *args, **kwargs)
            else:
                hooks.set_up_data(original, call, self, distribute_strategy, *args, **kwargs)

    return __init__


def _maybe_symbolic_build(original: Callable) -> Callable:
    def maybe_symbolic_build(self, iterator=None, data_batch=None):
        hooks = get_hooks(self._distribute_strategy)
        if hooks is None:
            return original(self, iterator, data_batch)
        return hooks.build(original, self, iterator, data_batch)

    return maybe_symbolic_build


def _make_function(original: Callable) -> Callable:
    def make_function(self, step_function):
        hooks = get_hooks(self._distribute_strategy)
        if hooks is None:
            return make_observed(original, self, step_function)
        return hooks.make_function(original, self, step_function)

    return make_function


def _make_predict_function(original: Callable) -> Callable:
    def make_predict_function(self, force=False):
        hooks = get_hooks(self._distribute_strategy)
        if hooks is None:
            return original(self, force)
        if self.predict_function is None or force:
            hooks.make_predict_function(original, self, force)
        return self.predict_function

    return make_predict_function


def _next_seed(original: Callable) -> Callable:
    def draw(generator: SeedGenerator, ordered: bool) -> tf.Tensor:
        hooks = get_hooks(tf.distribute.get_strategy())
        if hooks is None:
            return original(generator, ordered)
        return hooks.next_seed(original, generator, ordered)

    def next_seed(self, ordered=True):
        block = current_pass()
        if block is None:
            return draw(self, ordered)
        return block.seed(lambda: draw(self, ordered))

    return next_seed


def _apply(original: Callable) -> Callable:
    """Replaces `apply` of an optimizer, in a replica or for all replicas.

    The update of a `LossScaleOptimizer` passes through here twice, because it calls `apply` of its
    inner optimizer, and a model may have either kind. The hooks distinguish the two calls by
    `is_updating`.
    """

    def apply(self, grads, trainable_variables=None):
        hooks = get_hooks(current_strategy()) or get_hooks(self._distribution_strategy)
        if hooks is None:
            with observed_update(self, grads):
                return original(self, grads, trainable_variables)
        return hooks.apply(original, self, grads, trainable_variables)

    return apply


REPLACEMENTS: list[Replacement] = [
    (TensorFlowTrainer, "fit", _loop),
    (TensorFlowTrainer, "evaluate", _loop),
    (TensorFlowTrainer, "predict", _loop),
    (TFEpochIterator, "__init__", _epoch_iterator),
    (TensorFlowTrainer, "_maybe_symbolic_build", _maybe_symbolic_build),
    (TensorFlowTrainer, "_make_function", _make_function),
    (TensorFlowTrainer, "make_predict_function", _make_predict_function),
    (SeedGenerator, "next", _next_seed),
    (BaseOptimizer, "apply", _apply),
    (LossScaleOptimizer, "apply", _apply),
]
