"""What a strategy does where Keras comes to it: the hooks, one method for each such point."""

import abc
import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator

from tfdml.strategies.keras_seam.calls import Call


class Hooks(abc.ABC):
    """What `entry` asks of a strategy of ours. It has no state: the strategy has.

    Every method but `calling` takes the place of one of Keras's functions: it is given Keras's own,
    and what Keras calls it with, `self` included.
    """

    @abc.abstractmethod
    def calling(
        self, call: Call, arguments: dict[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """While this is entered, `fit`, `evaluate` or `predict` runs; it is checked before.

        Args:
            call: The call.
            arguments: Its arguments by name; changed to what Keras shall be given.
        """

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
        """`TFEpochIterator.__init__`: data become what the strategy's steps take.

        Args:
            keras_init: Keras's own function.
            call: The call that the data are of.
            iterator: Keras's iterator, to be initialized.
            strategy: The strategy.
            *args: Keras's other arguments.
            **kwargs: The same.
        """

    @abc.abstractmethod
    def build(
        self,
        keras_build: Callable,
        model: keras.Model,
        iterator: TFEpochIterator | None,
        data_batch: Any,
    ) -> None:
        """`_maybe_symbolic_build`: makes a model's variables before its first step."""

    @abc.abstractmethod
    def make_function(self, keras_make: Callable, model: keras.Model, step: Callable) -> Callable:
        """`_make_function`: returns what takes a train or test step on batches of an iterator."""

    @abc.abstractmethod
    def make_predict_function(self, keras_make: Callable, model: keras.Model, force: bool) -> None:
        """`make_predict_function`: gives the model what takes predict steps on batches."""

    @abc.abstractmethod
    def next_seed(
        self, keras_next: Callable, generator: keras.random.SeedGenerator, ordered: bool
    ) -> tf.Tensor:
        """`SeedGenerator.next`: returns a seed, another one on each replica or worker."""

    @abc.abstractmethod
    def apply(
        self,
        keras_apply: Callable,
        optimizer: keras.Optimizer,
        gradients: list,
        variables: list | None,
    ) -> None:
        """`apply` of an optimizer: makes an update, or leaves it to the chief."""


def hooks_of(strategy: tf.distribute.Strategy | None) -> Hooks | None:
    """Returns the hooks of a strategy of ours, parameter servers included; None of any other.

    A strategy's constructor notes them at its extended part.
    """
    return getattr(getattr(strategy, "extended", None), "keras_hooks", None)
