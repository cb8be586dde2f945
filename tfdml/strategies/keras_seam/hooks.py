"""Hooks: the interface through which the patches of Keras call a strategy."""

import abc
import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator

from tfdml.strategies.keras_seam.calls import Call


class Hooks(abc.ABC):
    """Stateless hooks that `entry` calls for one of our strategies; the state is the strategy's.

    Every method except `calling` replaces one of Keras's functions. It receives Keras's own
    function and the arguments of the call, including `self`.
    """

    @abc.abstractmethod
    def calling(
        self, call: Call, arguments: dict[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Context manager: `fit`, `evaluate` or `predict` runs; on entry the call is checked.

        Args:
            call: The call.
            arguments: Its arguments by name; changed in place to those that Keras receives.
        """

    def can_go_on(self, model: keras.Model, callbacks: Any, error: Exception) -> bool:
        """Returns whether a `fit` that has failed can be called again, and goes on.

        Args:
            model: The model.
            callbacks: The call's argument.
            error: The error that ended it.
        """
        return False

    @abc.abstractmethod
    def set_up_data(
        self,
        keras_init: Callable,
        call: Call,
        iterator: TFEpochIterator,
        strategy: tf.distribute.Strategy,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Replaces `TFEpochIterator.__init__`: converts data to the input of the strategy's steps.

        Args:
            keras_init: Keras's own function.
            call: The call that sets up the data.
            iterator: Keras's iterator, to be initialized.
            strategy: The strategy.
            *args: Other positional arguments of Keras's call.
            **kwargs: Keyword arguments of Keras's call.
        """

    @abc.abstractmethod
    def build(
        self,
        keras_build: Callable,
        model: keras.Model,
        iterator: TFEpochIterator | None,
        data_batch: Any,
    ) -> None:
        """Replaces `_maybe_symbolic_build`: creates a model's variables before its first step."""

    @abc.abstractmethod
    def make_function(self, keras_make: Callable, model: keras.Model, step: Callable) -> Callable:
        """Replaces `_make_function`: returns a train or test function of an iterator."""

    @abc.abstractmethod
    def make_predict_function(self, keras_make: Callable, model: keras.Model, force: bool) -> None:
        """Replaces `make_predict_function`: sets the model's predict function."""

    @abc.abstractmethod
    def next_seed(
        self, keras_next: Callable, generator: keras.random.SeedGenerator, ordered: bool
    ) -> tf.Tensor:
        """Replaces `SeedGenerator.next`: returns a seed that differs per replica or worker."""

    @abc.abstractmethod
    def apply(
        self,
        keras_apply: Callable,
        optimizer: keras.Optimizer,
        gradients: list,
        variables: list | None,
    ) -> None:
        """Replaces `apply` of an optimizer: makes an update, or leaves it to the chief."""


def get_hooks(strategy: tf.distribute.Strategy | None) -> Hooks | None:
    """Returns the hooks of one of our strategies, including parameter servers, else None.

    A strategy's constructor sets them on its extended part.
    """
    return getattr(getattr(strategy, "extended", None), "keras_hooks", None)
