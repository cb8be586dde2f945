"""How a callback resumes a `fit`: it is asked before the data are set up, and comes last."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.random import seed_generator

from tfdml.strategies.keras_seam.calls import Call, current_call, in_call
from tfdml.strategies.keras_seam.data_position import DataPosition
from tfdml.strategies.session import session_of


class ResumingCallback(keras.callbacks.Callback):
    """A callback that may make `fit` go on where an earlier one has ended.

    It comes after all other callbacks, `History` among them: at each point it finds what they have
    made of it.

    Attributes:
        data: The position of this `fit`'s training data.
    """

    data: DataPosition

    def begin_fit(self, model: keras.Model, callbacks: list) -> dict[str, Any] | None:
        """Called before the data of a `fit` are set up, on all ranks.

        Args:
            model: The model.
            callbacks: All of this process's callbacks, this one the last.

        Returns:
            What `data.state` has returned at the point to go on from; None to begin anew.
        """

    def end_fit(self) -> None:
        """Called at the end of a `fit`, whatever has ended it."""


@contextlib.contextmanager
def resumed(call: Call, arguments: dict[str, Any]) -> Iterator[None]:
    """While this is entered, a `fit` runs; it goes on where its callback says.

    Args:
        call: The call; is told where its training data are.
        arguments: The call's; gets the callbacks in their order.
    """
    model, given = call.model, arguments.get("callbacks")
    if call.name != "fit" or isinstance(given, keras.callbacks.CallbackList):
        yield
        return
    callbacks = keras.tree.flatten(given) if given else []
    own = [c for c in callbacks if isinstance(c, ResumingCallback)]
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
    counted = any(getattr(c, "_pipeline", None) is data for c in others)
    if hasattr(data, "restore") and hasattr(data, "callback") and not counted:
        others.insert(0, data.callback())
    if not any(isinstance(c, keras.callbacks.History) for c in others):
        others.append(keras.callbacks.History())
    arguments["callbacks"] = [*others, own[0]]
    try:
        state = own[0].begin_fit(model, arguments["callbacks"])
        own[0].data = call.resumed = DataPosition(model, data, state)
        session_of(model).position = own[0].data
        try:
            yield
        finally:
            session_of(model).position = None
    finally:
        model._initial_epoch = None
        own[0].end_fit()


@contextlib.contextmanager
def setting_up(iterator: TFEpochIterator) -> Iterator[Call]:
    """While this is entered, Keras sets up data; the first of a `fit` are those to train on.

    Args:
        iterator: What iterates over them; it begins where the `fit` goes on.
    """
    call = current_call()
    if call is None:
        with in_call(Call()) as call:
            yield call
        return
    found, call.resumed = call.resumed, None
    with call.having(position=found):
        yield call
    if found is not None:
        found.attach(iterator)
        iterator._tfdml_position = found


def global_seed_generator(make: bool) -> keras.random.SeedGenerator | None:
    """Returns what `keras.random` draws from without a seed; None if there is none yet."""
    found = seed_generator.global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return seed_generator.global_seed_generator() if found is None and make else found


def begin_with(model: keras.Model, epoch: int) -> None:
    """Makes a `fit` that has not yet begun its first epoch begin with this one."""
    model._initial_epoch = epoch
