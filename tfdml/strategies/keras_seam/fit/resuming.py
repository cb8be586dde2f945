"""Resumption of a `fit` by a callback, which is called before the data are set up."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.random import seed_generator

from tfdml.strategies.fit_session import get_session
from tfdml.strategies.keras_seam.calls import Call, current_call, in_call
from tfdml.strategies.keras_seam.data.data_position import DataPosition


class ResumingCallback(keras.callbacks.Callback):
    """Callback that may make `fit` resume where an earlier one ended.

    It runs after all other callbacks, including `History`, so that it always sees their results.

    Attributes:
        data: Position in the training data of this `fit`.
        accepts_changes: Whether the data may differ from those of the state; see `DataPosition`.
    """

    data: DataPosition
    accepts_changes = False

    def begin_fit(self, model: keras.Model, callbacks: list) -> dict[str, Any] | None:
        """Returns the position to resume from; called on all ranks before the data are set up.

        Args:
            model: The model.
            callbacks: All of this process's callbacks; this one is the last.

        Returns:
            The result of `data.state` at the point to resume from; None to start from scratch.
        """

    def can_resume(self) -> bool:
        """Returns whether a `fit` that has failed would resume from a state that was saved."""
        return False

    def end_fit(self, error: BaseException | None) -> None:
        """Called at the end of a `fit`.

        Args:
            error: Exception that ends the `fit`, Ctrl-C included; None if it ends well.
        """


def resuming_callbacks(callbacks: Any) -> list[ResumingCallback]:
    """Returns the resuming ones among the callbacks of a call."""
    given = keras.tree.flatten(callbacks) if callbacks else []
    return [c for c in given if isinstance(c, ResumingCallback)]


@contextlib.contextmanager
def resumed(call: Call, arguments: dict[str, Any]) -> Iterator[None]:
    """Context manager: a `fit` runs, resuming at the position that its callback returns.

    Args:
        call: The call; its `resumed` is set to the position.
        arguments: The call's arguments; the callbacks are put in order.
    """
    model, given = call.model, arguments.get("callbacks")
    if call.name != "fit" or isinstance(given, keras.callbacks.CallbackList):
        yield
        return
    callbacks = keras.tree.flatten(given) if given else []
    own = resuming_callbacks(callbacks)
    if not own:
        yield
        return
    if len(own) > 1:
        raise ValueError(
            f"`callbacks` must have one callback that resumes `fit`. Received: {len(own)}. Leave "
            f"the others out."
        )
    others = [c for c in callbacks if c is not own[0]]
    data = arguments.get("x")
    counted = any(getattr(c, "pipeline", None) is data for c in others)
    if hasattr(data, "restore") and hasattr(data, "callback") and not counted:
        others.insert(0, data.callback())
    if not any(isinstance(c, keras.callbacks.History) for c in others):
        others.append(keras.callbacks.History())
    arguments["callbacks"] = [*others, own[0]]
    error = None
    try:
        state = own[0].begin_fit(model, arguments["callbacks"])
        own[0].data = call.resumed = DataPosition(model, data, state, own[0].accepts_changes)
        get_session(model).position = own[0].data
        try:
            yield
        finally:
            get_session(model).position = None
    except BaseException as raised:
        error = raised
        raise
    finally:
        model._initial_epoch = None
        own[0].end_fit(error)


@contextlib.contextmanager
def setting_up(iterator: TFEpochIterator) -> Iterator[Call]:
    """Context manager: Keras sets up data; the first data of a `fit` are the training data.

    Args:
        iterator: Iterator over the data; it starts where the `fit` resumes.
    """
    call = current_call()
    if call is None:
        with in_call(Call()) as call:
            yield call
        return
    found, call.resumed = call.resumed, None
    with call.overriding(position=found):
        yield call
    if found is not None:
        found.attach(iterator)
        iterator._tfdml_position = found


def position_of(iterator: TFEpochIterator) -> DataPosition | None:
    """Returns the position at which an iterator over the training data resumes, or None."""
    return getattr(iterator, "_tfdml_position", None)


def global_seed_generator(make: bool) -> keras.random.SeedGenerator | None:
    """Returns the generator that `keras.random` uses without a seed, or None.

    Args:
        make: Whether to create it if it does not exist yet.
    """
    found = seed_generator.global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return seed_generator.global_seed_generator() if found is None and make else found


def begin_with(model: keras.Model, epoch: int) -> None:
    """Sets the first epoch of a `fit` that has not started an epoch yet."""
    model._initial_epoch = epoch
