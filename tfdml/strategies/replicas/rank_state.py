"""State of one rank for callbacks that save it: its rank, residuals and accumulated gradients."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.collectives.aggregator import GradientAggregator
from tfdml.collectives.collective import Collective, LocalCollective
from tfdml.compression.exchange.kept_state import residuals_in
from tfdml.runtime.timing.time_recorder import TimeRecorder
from tfdml.strategies.batch_split import BatchSplit
from tfdml.strategies.fit_session import get_session
from tfdml.strategies.replicas.earlier_ranks import SLOTS, restore_common, sum_of_ranks

_MESSAGE_BYTES = 8192
# Prefix of the names in the state of a model's second and later optimizers.
_OPTIMIZER = "optimizer_"
# Prefix of the names in the state of rounds of local steps.
_ROUNDS = "local_updates/"


class RankState:
    """Rank of the job that trains a model; the only one if the strategy is not one of tfdml's.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model):
        extended = getattr(model.distribute_strategy, "extended", None)
        self._collective = getattr(extended, "collective", None) or LocalCollective()
        self._extended = extended if hasattr(extended, "collective") else None
        self._model = model

    @property
    def collective(self) -> Collective:
        """The job's collective."""
        return self._collective

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._collective.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._collective.size

    @property
    def recorder(self) -> TimeRecorder:
        """The recorder of this rank's timeline; without a strategy of tfdml one that is closed."""
        return getattr(self._extended, "recorder", None) or TimeRecorder()

    def broadcast_json(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """Broadcasts rank 0's message to all ranks, as JSON of up to 8 KB."""
        if self.size == 1:
            return message
        payload = json.dumps(message).encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES)
        words = tf.constant(list(payload), tf.uint8)
        received = self._collective.broadcast(words, "checkpoint/message").numpy()
        return json.loads(bytes(received.tolist()))

    def any_rank(self, vote: bool) -> bool:
        """Returns whether any rank's `vote` is true; all ranks call this and wait for all."""
        own_vote = tf.constant([int(vote)], tf.int32)
        return bool(self._collective.all_gather(own_vote, "checkpoint/any").numpy().any())

    def wait_for_steps(self) -> None:
        """Waits for steps that workers of parameter servers are still running."""
        join = getattr(self._model.train_function, "join", None)
        if join is not None:
            join()

    @property
    def batch_split(self) -> list[int] | None:
        """The weights of the replicas' parts from the next epoch on, if they are measured."""
        split = self._batch_split
        return list(split.planned) if split is not None and split.is_auto else None

    def restore_batch_split(self, weights: Sequence[int] | None) -> None:
        """Plans weights that `batch_split` returned; None for those of a job without any."""
        if self._batch_split is not None:
            self._batch_split.plan(weights)

    @property
    def _batch_split(self) -> BatchSplit | None:
        strategy = self._model.distribute_strategy
        return getattr(self._extended or strategy, "batch_split", None)

    @property
    def local_updates(self) -> dict[str, Any] | None:
        """The state of rounds of local steps that is the same on all ranks, for JSON; or None."""
        rounds = get_session(self._model).rounds
        return None if rounds is None else rounds.saved.notes

    @property
    def is_synchronized(self) -> bool:
        """Whether all ranks have the same weights after the last step."""
        rounds = get_session(self._model).rounds
        return rounds is None or rounds.synchronized

    # -- State between steps -------------------------------------------------------------------

    def local_state(self) -> dict[str, np.ndarray]:
        """Returns this rank's own state by name: residuals and accumulated gradients.

        The arrays are valid as those of `values_of` are.
        """
        if self._extended is None:
            return {}
        state = {}
        for prefix, aggregator in self._aggregators():
            state |= {f"{prefix}{n}": np.asarray(_read(v)) for n, v in aggregator.state.items()}
        for name, parts in self._accumulated().items():
            for number, part in enumerate(parts):
                state[f"{name}/{number}"] = np.asarray(_read(part))
        rounds = get_session(self._model).rounds
        if rounds is not None:
            for name, copies in rounds.saved.own.items():
                state[f"{_ROUNDS}{name}"] = np.asarray(_read(copies[0]))
        return state

    def squared_residual(self) -> float:
        """Returns the squared norm of what compression has left out of this rank's gradients."""
        if self._extended is None:
            return 0.0
        return sum(
            2 * float(tf.nn.l2_loss(_read(variable)))
            for _, aggregator in self._aggregators()
            for variable in residuals_in(aggregator.state)
        )

    def restore(
        self,
        before: Sequence[Mapping[str, np.ndarray]],
        local_updates: Mapping[str, Any] | None = None,
        has_slots: bool = True,
    ) -> None:
        """Restores the state of an earlier job's ranks; the number of ranks may differ.

        Args:
            before: Each rank's `local_state`.
            local_updates: The property `local_updates` at that time.
            has_slots: Whether the optimizers are those of that time.
        """
        if self._extended is None:
            return
        own = [_below(_ROUNDS, state) for state in before]
        if not has_slots:
            own = [{n: v for n, v in o.items() if not n.startswith(SLOTS)} for o in own]
        rounds = get_session(self._model).rounds
        if local_updates is not None and rounds is not None:
            rounds.saved.restore(local_updates, own)
        elif local_updates is not None:
            restore_common(self._model, optimizers_of(self._model), own)
        for prefix, aggregator in self._aggregators():
            aggregator.restore([_of_prefix(state, prefix) for state in before])
        self._restore_accumulated(before, local_updates)

    def _restore_accumulated(
        self, before: Sequence[Mapping[str, np.ndarray]], local_updates: Mapping[str, Any] | None
    ) -> None:
        """Restores accumulated gradients; see `restore`.

        The sum over the replicas that take steps together is the gradient of their rows. The mean
        over such groups is taken for the whole batch's, and each group begins with that.
        """
        now = self.local_updates
        groups = [0] * len(before) if local_updates is None else local_updates["groups"]
        groups_now = [0] * self.size if now is None else now["groups"]
        count, members = max(groups) + 1, groups_now.count(groups_now[self.rank])
        for (name, parts), deal in zip(self._accumulated().items(), self._deals(), strict=True):
            found = [[v for k, v in state.items() if k.startswith(f"{name}/")] for state in before]
            if groups == groups_now and len(found[0]) == len(parts):
                values = found[self.rank]
            elif deal is not None:
                # Each replica gets the sum of its rank's rows.
                whole = sum_of_ranks(found, deal.shape) / count
                values = [deal.part_of(whole, self.rank)] * len(parts)
            else:
                # Only the sum over a group's replicas matters.
                first = sum_of_ranks(found, parts[0].shape) / (count * members)
                values = [first, *(first * 0 for _ in parts[1:])]
            for part, value in zip(parts, values, strict=True):
                part.assign(value)

    def _aggregators(self) -> Iterator[tuple[str, GradientAggregator]]:
        """Yields each optimizer's aggregator, after the prefix of the names in its state."""
        rounds = get_session(self._model).rounds
        outer = [] if rounds is None else [fragment.outer for fragment in rounds.fragments]
        for number, optimizer in enumerate([*optimizers_of(self._model), *outer]):
            prefix = f"{_OPTIMIZER}{number}/" if number else ""
            yield prefix, self._extended.get_aggregator(optimizer)

    def _deals(self) -> list:
        """Returns the division of each accumulated gradient whose table is dealt to the ranks."""
        accumulator = get_session(self._model).accumulator
        return [] if accumulator is None else accumulator.deals

    def _accumulated(self) -> dict[str, list[tf.Variable]]:
        accumulator = get_session(self._model).accumulator
        if accumulator is None:
            return {}
        return {f"gathered/{i}": parts for i, parts in enumerate(accumulator.parts)}


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """Returns a model's optimizers: the compiled one, and those held by its attributes."""
    held = [getattr(model, "optimizer", None)]
    for value in vars(model).values():
        values = value.values() if isinstance(value, Mapping) else value
        held.extend(values if isinstance(value, Mapping | list | tuple) else [value])
    found = {id(o): o for o in held if isinstance(o, keras.Optimizer)}
    return list(found.values())


def _below(prefix: str, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the entries whose name has a prefix, by the name without it."""
    return {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}


def _of_prefix(state: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Returns the entries whose name has a prefix, by the name without it.

    Earlier checkpoints have the state of all optimizers under names without a prefix.
    """
    found = _below(prefix, state) if prefix else {}
    return found or {n: v for n, v in state.items() if not n.startswith(_OPTIMIZER)}


def values_of(variables: Sequence[Sequence[tf.Variable]], summed: bool = False) -> list[np.ndarray]:
    """Returns the current values of variables, which later updates do not change.

    In host memory they are not copies: while a value is referenced, TensorFlow allocates new memory
    for its variable instead of overwriting the old one.

    Args:
        variables: The copies of each variable, see `components`: looked up once by the caller,
            because training stands still while hundreds of variables are read.
        summed: Whether a variable's value is the sum over this process's replicas, like a metric's.
    """
    found = []
    for copies in variables:
        value = tf.add_n([_read(c) for c in copies]) if summed else _read(copies[0])
        found.append(np.asarray(value))
    return found


def _read(variable: tf.Variable) -> tf.Tensor:
    """Returns `variable.read_value()`, in a quarter of the time."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def assign_values(
    variables: Sequence[Sequence[tf.Variable]], values: Sequence[np.ndarray], summed: bool = False
) -> None:
    """Assigns values that `values_of` returned to variables."""
    for copies, value in zip(variables, values, strict=True):
        for number, copy in enumerate(copies):
            copy.assign(value if number == 0 or not summed else np.zeros_like(value))
