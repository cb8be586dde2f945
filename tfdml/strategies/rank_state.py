"""What belongs to one rank, seen by a callback that saves it: who it is, and what it keeps."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.collectives.aggregator import GradientAggregator
from tfdml.collectives.collective import LocalCollective
from tfdml.strategies.session import session_of

_MESSAGE_BYTES = 8192
# Goes before the names of what is kept for a model's second optimizer, and those that follow.
_OPTIMIZER = "optimizer_"


class RankState:
    """A rank of the job that trains a model; the only one, without a strategy of tfdml.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model):
        extended = getattr(model.distribute_strategy, "extended", None)
        self._collective = getattr(extended, "collective", None) or LocalCollective()
        self._extended = extended if hasattr(extended, "collective") else None
        self._model = model

    @property
    def rank(self) -> int:
        """This rank."""
        return self._collective.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._collective.size

    def told_by_rank_0(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """Returns what rank 0 says, on all ranks: JSON of up to 8 KB."""
        if self.size == 1:
            return message
        payload = json.dumps(message).encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES)
        words = tf.constant(list(payload), tf.uint8)
        said = self._collective.broadcast(words, "checkpoint/message").numpy()
        return json.loads(bytes(said.tolist()))

    def any_of_all(self, wish: bool) -> bool:
        """Returns whether any rank wishes it; all ranks call it, and wait for each other."""
        own = tf.constant([int(wish)], tf.int32)
        return bool(self._collective.all_gather(own, "checkpoint/any").numpy().any())

    def wait_for_steps(self) -> None:
        """Waits until steps are done that workers of parameter servers still take."""
        join = getattr(self._model.train_function, "join", None)
        if join is not None:
            join()

    # -- What is kept between steps ------------------------------------------------------------

    def kept(self) -> dict[str, np.ndarray]:
        """Returns what this rank alone keeps: residuals, and gradients gathered for an update.

        As `values_of` does.
        """
        if self._extended is None:
            return {}
        kept = {}
        for prefix, aggregator in self._aggregators():
            kept |= {f"{prefix}{n}": np.asarray(_read(v)) for n, v in aggregator.state.items()}
        for name, parts in self._gathered().items():
            for number, part in enumerate(parts):
                kept[f"{name}/{number}"] = np.asarray(_read(part))
        return kept

    def restore(self, before: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Takes up what the ranks of an earlier job have kept, however many they were."""
        if self._extended is None:
            return
        for prefix, aggregator in self._aggregators():
            aggregator.restore([_of_prefix(kept, prefix) for kept in before])
        for name, parts in self._gathered().items():
            found = [[v for k, v in kept.items() if k.startswith(f"{name}/")] for kept in before]
            if len(found) == self.size and len(found[0]) == len(parts):
                values = found[self.rank]
            else:
                # Their sum is what counts: each rank has an equal share of it.
                total = sum(np.sum(values, 0) for values in found)
                first = (total / self.size).astype(total.dtype)
                values = [first, *(first * 0 for _ in parts[1:])]
            for part, value in zip(parts, values, strict=True):
                part.assign(value)

    def _aggregators(self) -> Iterator[tuple[str, GradientAggregator]]:
        """Yields what goes before the names that an optimizer's aggregator keeps, and that."""
        for number, optimizer in enumerate(optimizers_of(self._model)):
            prefix = f"{_OPTIMIZER}{number}/" if number else ""
            yield prefix, self._extended.aggregator_of(optimizer)

    def _gathered(self) -> dict[str, list[tf.Variable]]:
        accumulator = session_of(self._model).accumulator
        if accumulator is None:
            return {}
        return {f"gathered/{i}": parts for i, parts in enumerate(accumulator.parts)}


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """Returns a model's optimizers: the compiled one, and those that its attributes hold."""
    held = [getattr(model, "optimizer", None)]
    for value in vars(model).values():
        values = value.values() if isinstance(value, Mapping) else value
        held.extend(values if isinstance(value, Mapping | list | tuple) else [value])
    found = {id(o): o for o in held if isinstance(o, keras.Optimizer)}
    return list(found.values())


def _of_prefix(kept: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Returns what is kept under names with a prefix, by the rest of the names.

    Earlier checkpoints have what all optimizers keep under names without one.
    """
    found = {n.removeprefix(prefix): v for n, v in kept.items() if prefix and n.startswith(prefix)}
    return found or {n: v for n, v in kept.items() if not n.startswith(_OPTIMIZER)}


def values_of(variables: Sequence[Sequence[tf.Variable]], summed: bool = False) -> list[np.ndarray]:
    """Returns the values of variables, as they are now, whatever becomes of the variables.

    In the host's memory they are not copies: as long as somebody has a value, TensorFlow gives its
    variable new memory where it would else write over the old.

    Args:
        variables: The copies of each one, see `components`: looked up once, because training
            stands still while hundreds are read.
        summed: Whether a variable's value is the sum over this process's replicas, as a metric's.
    """
    found = []
    for copies in variables:
        value = tf.add_n([_read(c) for c in copies]) if summed else _read(copies[0])
        found.append(np.asarray(value))
    return found


def _read(variable: tf.Variable) -> tf.Tensor:
    """Returns `variable.read_value()`, in a fourth of its time."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def assign_values(
    variables: Sequence[Sequence[tf.Variable]], values: Sequence[np.ndarray], summed: bool = False
) -> None:
    """Gives variables values that `values_of` has returned."""
    for copies, value in zip(variables, values, strict=True):
        for number, copy in enumerate(copies):
            copy.assign(value if number == 0 or not summed else np.zeros_like(value))
