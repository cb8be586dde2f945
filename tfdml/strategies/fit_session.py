"""The state of one model's training, between its steps and from one `fit` to the next."""

import weakref
from typing import TYPE_CHECKING, Protocol, TypeVar

import keras
import tensorflow as tf

from tfdml.strategies.aggregation.accumulation import Accumulator

if TYPE_CHECKING:
    from tfdml.strategies.keras_seam.data.data_position import DataPosition
    from tfdml.strategies.keras_seam.local_updates.rounds import Rounds


class Observer(Protocol):
    """Observer of a model's train steps, inside their graph.

    Each rank's observations are summed over ranks in the message that carries a step's metrics.
    """

    def begin(self) -> None:
        """Notes that a step begins; called in its graph once the batch has arrived."""

    def slots(self) -> tf.Tensor:
        """Returns this rank's part of the sum over ranks: float32, of a known shape."""

    def add(self, total: tf.Tensor) -> None:
        """Receives the sum of the ranks' slots; called in the step's graph, at its end."""


Kind = TypeVar("Kind", bound=Observer)


class FitSession:
    """State of training one model, except for the state that belongs to one of its optimizers.

    The residuals of an optimizer's exchanges are in its aggregator, see
    `ReplicaExtended.get_aggregator`, because a custom loop has optimizers but no model.

    Args:
        model: The model.

    Attributes:
        position: Position in the training data of the current `fit`, if a callback resumes it.
        rounds: Rounds of local steps, if the strategy has `local_updates`.
        checkpoint_stall: Seconds for which checkpoints have kept training waiting so far.
    """

    def __init__(self, model: keras.Model):
        self.position: DataPosition | None = None
        self.rounds: Rounds | None = None
        self.checkpoint_stall = 0.0
        self._model = weakref.ref(model)
        self._observers: dict[type, Observer] = {}
        self._accumulator: Accumulator | None = None

    @property
    def observers(self) -> list[Observer]:
        """The observers of the train steps, in the same order on all ranks."""
        return [self._observers[kind] for kind in sorted(self._observers, key=lambda k: k.__name__)]

    def observer(self, kind: type[Kind]) -> Kind | None:
        """Returns the observer of a kind, or None."""
        return self._observers.get(kind)

    def attach(self, observer: Observer) -> None:
        """Attaches an observer to the train steps; it replaces an earlier one of its kind."""
        self._observers[type(observer)] = observer
        self.trace_again()

    def trace_again(self) -> None:
        """Makes the next train step retrace, because its graph must change."""
        model = self._model()
        if model is not None:
            model.train_function = None

    @property
    def accumulator(self) -> Accumulator | None:
        """The accumulator of gradients for the next update; None if every step updates."""
        return self._accumulator

    def accumulate(self, optimizer: keras.Optimizer | None) -> None:
        """Starts to accumulate gradients for an optimizer, or continues with its accumulator.

        Args:
            optimizer: The model's built optimizer, without the loss scale around it. With None, or
                without `gradient_accumulation_steps`, every step updates.
        """
        if getattr(optimizer, "gradient_accumulation_steps", None) is None:
            self._accumulator = None
        elif self._accumulator is None or self._accumulator.optimizer is not optimizer:
            strategy = self._model().distribute_strategy
            self._accumulator = Accumulator(strategy, optimizer)

    def leave(self) -> None:
        """Drops the state that was made for the previous set of ranks."""
        self._observers.clear()
        self._accumulator = self.rounds = None
        self.trace_again()


_sessions: weakref.WeakKeyDictionary[keras.Model, FitSession] = weakref.WeakKeyDictionary()


def get_session(model: keras.Model) -> FitSession:
    """Returns a model's session, created on first use."""
    if model not in _sessions:
        _sessions[model] = FitSession(model)
    return _sessions[model]


def leave_sessions(strategy: tf.distribute.Strategy) -> None:
    """Drops the state for the previous set of ranks in the sessions of a strategy's models."""
    for model, session in list(_sessions.items()):
        if model.distribute_strategy is strategy:
            session.leave()


def finish_rounds(strategy: tf.distribute.Strategy, but_of: keras.Model | None = None) -> None:
    """Ends the rounds of local steps of a strategy's models: they may share weights.

    Args:
        strategy: The strategy.
        but_of: Model whose rounds go on.
    """
    if strategy.extended.local_updates is None:
        return
    for model, session in list(_sessions.items()):
        is_other = model is not but_of and model.distribute_strategy is strategy
        if is_other and session.rounds is not None:
            session.rounds.finish()
