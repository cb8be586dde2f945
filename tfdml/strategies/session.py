"""The state of one model's training, between its steps and from one `fit` to the next."""

import weakref
from typing import TYPE_CHECKING, Protocol, TypeVar

import keras
import tensorflow as tf

from tfdml.strategies.accumulation import Accumulator

if TYPE_CHECKING:
    from tfdml.strategies.keras_seam.data_position import DataPosition


class Observer(Protocol):
    """Watches a model's train steps from inside their graph.

    What a rank has seen goes to the others in the message that each step sends for its metrics.
    """

    def begin(self) -> None:
        """Notes that a step begins; called in its graph once the batch is there."""

    def slots(self) -> tf.Tensor:
        """Returns this rank's part of what the ranks add up: float32, of a known shape."""

    def add(self, total: tf.Tensor) -> None:
        """Takes what the ranks' slots add up to; called in the step's graph, at its end."""


Kind = TypeVar("Kind", bound=Observer)


class FitSession:
    """Everything that training one model keeps, but for what belongs to one of its optimizers.

    What an optimizer's exchanges leave over is in its aggregator, see
    `ReplicaExtended.aggregator_of`: a custom loop has optimizers, and no model.

    Args:
        model: The model.

    Attributes:
        position: Where the training data of the `fit` under way are, if a callback resumes it.
    """

    def __init__(self, model: keras.Model):
        self.position: DataPosition | None = None
        self._model = weakref.ref(model)
        self._observers: dict[type, Observer] = {}
        self._accumulator: Accumulator | None = None

    @property
    def observers(self) -> list[Observer]:
        """The observers of the train steps, in the same order on all ranks."""
        return [self._observers[kind] for kind in sorted(self._observers, key=lambda k: k.__name__)]

    def observer(self, kind: type[Kind]) -> Kind | None:
        """Returns the observer of a kind, None without one."""
        return self._observers.get(kind)

    def attach(self, observer: Observer) -> None:
        """Lets an observer watch the train steps, in the place of another one of its kind."""
        self._observers[type(observer)] = observer
        self.trace_again()

    def trace_again(self) -> None:
        """Lets the next train step be traced again: what it does has changed."""
        model = self._model()
        if model is not None:
            model.train_function = None

    @property
    def accumulator(self) -> Accumulator | None:
        """The gradients that are gathered for the next update; None where each step updates."""
        return self._accumulator

    def accumulate(self, optimizer: keras.Optimizer | None) -> None:
        """Gathers gradients for an optimizer, and keeps what is gathered for it already.

        Args:
            optimizer: The model's, built, without the loss scale around it; None, or one without
                `gradient_accumulation_steps`, for an update in each step.
        """
        if getattr(optimizer, "gradient_accumulation_steps", None) is None:
            self._accumulator = None
        elif self._accumulator is None or self._accumulator.optimizer is not optimizer:
            strategy = self._model().distribute_strategy
            self._accumulator = Accumulator(strategy, optimizer)

    def leave(self) -> None:
        """Forgets what was made for the ranks that there were, as others have come."""
        self._observers.clear()
        self._accumulator = None
        self.trace_again()


_sessions: weakref.WeakKeyDictionary[keras.Model, FitSession] = weakref.WeakKeyDictionary()


def session_of(model: keras.Model) -> FitSession:
    """Returns a model's session, made when it is first asked for."""
    if model not in _sessions:
        _sessions[model] = FitSession(model)
    return _sessions[model]


def leave_sessions(strategy: tf.distribute.Strategy) -> None:
    """Lets the sessions of a strategy's models forget the ranks that there were."""
    for model, session in list(_sessions.items()):
        if model.distribute_strategy is strategy:
            session.leave()
