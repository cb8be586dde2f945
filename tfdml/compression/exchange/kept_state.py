"""State that a compressing aggregator keeps between steps: residuals, factors, the last rate."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdml.collectives.unmanaged_variable import unmanaged_variable
from tfdml.compression.error_feedback import State
from tfdml.compression.exchange.redistribution import CHUNK_LAYOUT, redistributed, states_by_rank


class KeptState:
    """This process's own variables by name, created on first use, and restored by name.

    Args:
        variables: Dict that receives the variables; aggregators may share it.
        prefix: Prefix of the names of the aggregator's exchanges: state of exchanges with another
            number as prefix is another aggregator's.
    """

    def __init__(self, variables: dict[str, tf.Variable], prefix: str):
        self.variables = variables
        self._prefix = prefix
        # This rank's restored state; variables are created when they are first used.
        self._before: Mapping[str, np.ndarray] = {}

    def restore(self, before: Sequence[Mapping[str, np.ndarray]], rank: int, size: int) -> None:
        """Restores the state of an earlier job's ranks.

        Args:
            before: State of each process of that job, in the order of the ranks.
            rank: This rank.
            size: Number of ranks now; what ranks keep of their own is redistributed to it.

        Raises:
            ValueError: If a variable that exists has another shape.
        """
        before = states_by_rank(before)
        if len(before) != size:
            before = redistributed(before, size)
        self._before = {n: value for n, value in before[rank].items() if self._is_own(n)}
        for name, variable in self.variables.items():
            if self._is_own(name):
                start = variable if name.startswith(CHUNK_LAYOUT) else tf.zeros_like(variable)
                variable.assign(self._start(name, start))

    def gradient_state(
        self, name: str, init: Callable[..., State], *arguments: object
    ) -> dict[str, tf.Variable]:
        """Returns the state variables of one gradient.

        Args:
            name: Path of the gradient's variable.
            init: Function that returns the first values, by the names of the state.
            *arguments: Arguments of `init`.
        """
        with tf.init_scope():
            start = init(*arguments)
            return {key: self._variable(f"{key}/{name}", value) for key, value in start.items()}

    def scalar(self, name: str, dtype: tf.DType = tf.float32) -> tf.Variable:
        """Returns a variable of shape `[]` that starts at 0.

        Args:
            name: Name of the variable.
            dtype: Its dtype.
        """
        return self.value(name, lambda: tf.zeros([], dtype))

    def value(self, name: str, start: Callable[[], tf.Tensor]) -> tf.Variable:
        """Returns the variable of a name.

        Args:
            name: Name of the variable.
            start: Function that returns its first value.

        Raises:
            ValueError: If the restored value has another shape.
        """
        with tf.init_scope():
            return self._variable(name, start())

    def _variable(self, name: str, start: tf.Tensor) -> tf.Variable:
        if name not in self.variables:
            self.variables[name] = unmanaged_variable(self._start(name, start))
        return self.variables[name]

    def _is_own(self, name: str) -> bool:
        """Returns whether a state variable does not belong to another candidate's exchanges."""
        of = name.partition("/")[2]
        return of.startswith(self._prefix) or not of.partition("/")[0].isdigit()

    def _start(self, name: str, start: tf.Tensor) -> tf.Tensor:
        if name not in self._before:
            return start
        value = self._before[name]
        is_part = name.startswith(CHUNK_LAYOUT)
        if not (np.array_equal(start, value) if is_part else start.shape == value.shape):
            raise ValueError(
                f"`before` must be of the same model, compressor and `bucket_bytes`. Received: "
                f"{name} of {_in_words(value)}, but the model needs {_in_words(start)}. "
                f"Restore the former settings, or train from scratch."
            )
        return tf.constant(value)


def _in_words(value: tf.Tensor | np.ndarray) -> str:
    """Returns a part's length and block size, or the shape of any other state, as text."""
    value = np.asarray(value)
    return f"{value.tolist()}" if value.dtype.kind == "i" else f"shape {value.shape}"
