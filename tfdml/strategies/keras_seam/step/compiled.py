"""`jit_compile=True`: XLA compiles a replica's step up to its update, which follows the exchange.

XLA-compiled code cannot contain an exchange between processes. So the compiled part returns the
gradients; they are summed outside, and the optimizer's uncompiled operations make the update. A
step's results and metrics are computed before the update, as in Keras's own step.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdml.strategies.traced import traced, tracing


class Update(NamedTuple):
    """Update to be made after the compiled part: the function that makes it, and its gradients."""

    make: Callable[[list], None]
    gradients: list


def hold_back(update: Callable[[list], None], gradients: Iterable) -> bool:
    """Defers an update if a step is being compiled; returns whether it was deferred.

    Args:
        update: Function of the gradients that makes the update.
        gradients: The gradients.
    """
    updates = traced().held_back
    if updates is None:
        return False
    updates.append(Update(update, list(gradients)))
    return True


def compiled(model: keras.Model, step: Callable) -> Callable:
    """Returns a replica's step in which XLA compiles everything except the update.

    Args:
        model: The Keras model.
        step: Its `train_step`, `test_step` or `predict_step`.

    Raises:
        ValueError: If the model overrides `train_step`.
    """
    if step.__name__ == "train_step" and type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            "`jit_compile` must not be True for a model with a custom `train_step`, "
            "because XLA compiles what comes before the update, so that code of the step that "
            "needs the new weights would get the old ones. Received: jit_compile=True, and "
            f"{type(model).__name__}.train_step. Leave it out of `compile`."
        )

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(step)
    def step_with_update(data: Any) -> Any:
        updates: list[Update] = []

        # Created for each graph, because it captures tensors of that graph, such as the share.
        @tf.function(jit_compile=True, autograph=False)
        def before_the_update(data: Any) -> tuple[Any, list[list]]:
            updates.clear()
            with tracing(held_back=updates):
                outputs = step(data)
            return outputs, [update.gradients for update in updates]

        outputs, gradients = _without_exchange(before_the_update, data)
        for update, own in zip(updates, gradients, strict=True):
            update.make(own)
        return outputs

    return step_with_update


def _without_exchange(function: Callable, data: Any) -> Any:
    """Calls `function`, and raises a clear error if replicas exchange something in it."""
    try:
        return function(data)
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise ValueError(
            "`jit_compile` must not be True for a model whose replicas exchange something in the "
            "middle of a step, like `BatchNormalization(synchronized=True)`, or a loss's mask "
            "whose entries are counted: XLA cannot hold the exchange. Received: "
            "jit_compile=True. Leave it out of `compile`."
        ) from error


def mark_compiled_whole(step: Callable) -> Callable:
    """Returns a single replica's step, marked in `traced()` as compiled as a whole with XLA.

    Args:
        step: A model's `train_step` or `test_step`.
    """

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(step)
    def marked(data: Any) -> Any:
        with tracing(compiled_whole=True):
            return step(data)

    return marked


@contextlib.contextmanager
def without_jit_compile(model: keras.Model) -> Iterator[None]:
    """Context manager: Keras makes functions that XLA does not compile."""
    before, model.jit_compile = model.jit_compile, False
    try:
        yield
    finally:
        model.jit_compile = before
