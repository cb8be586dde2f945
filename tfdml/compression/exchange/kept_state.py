"""State that a compressing aggregator keeps between steps: residuals, factors, the last rate."""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdml.collectives.hosts import Hosts
from tfdml.collectives.unmanaged_variable import unmanaged_variable
from tfdml.compression.compressor import ChunkCompressor
from tfdml.compression.error_feedback import State
from tfdml.compression.exchange.native_stages import chunk_length
from tfdml.compression.exchange.redistribution import (
    CHUNK_LAYOUT,
    HOST_PART,
    HOSTS,
    OWNER_RESIDUAL,
    WAY,
    redistributed,
    states_by_rank,
    without_hosts,
)

# Names of residuals: of gradients and of chunks' owners, also for each device of one process.
_RESIDUAL = re.compile(rf"(device_\d+/)?(residual/|{OWNER_RESIDUAL})")


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
        # All ranks' restored residuals of chunks, joined, if they are for other hosts.
        self._owner_residuals: dict[str, np.ndarray] = {}
        # The function `convert` of each variable that has one, by name.
        self._conversions: dict[str, Callable[[], np.ndarray]] = {}

    def restore(
        self,
        before: Sequence[Mapping[str, np.ndarray]],
        rank: int,
        size: int,
        hosts: Hosts | None = None,
    ) -> None:
        """Restores the state of an earlier job's ranks.

        Args:
            before: State of each process of that job, in the order of the ranks.
            rank: This rank.
            size: Number of ranks now; what ranks keep of their own is redistributed to it.
            hosts: Hosts and their ranks now; None if that does not matter.

        Raises:
            ValueError: If a variable that exists has another shape.
        """
        before = states_by_rank(before)
        self._owner_residuals = {}
        is_moved = not (_have_hosts(before[0], hosts) and self._goes_on_by(before[0]))
        if is_moved:
            before = without_hosts(before)
            self._owner_residuals = _joined_owner_residuals(before)
        if len(before) != size or (is_moved and hosts is not None):
            # Where ranks may sum by hosts, all of them must have equal shares.
            before = redistributed(before, size)
        self._before = {n: value for n, value in before[rank].items() if self._is_own(n)}
        for name, variable in self.variables.items():
            if self._is_own(name):
                is_layout = name.startswith((CHUNK_LAYOUT, HOST_PART, HOSTS, WAY))
                start = variable if is_layout else tf.zeros_like(variable)
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

    def owner_residual(
        self, name: str, codec: ChunkCompressor, length: int, ranks: int
    ) -> dict[str, tf.Variable]:
        """Returns what a chunk's owner keeps for a part of a bucket: a residual, if it is biased.

        Args:
            name: Name of the part: that of its first variable, so a part that has changed is
                detected by its length.
            codec: The part's codec.
            length: Number of the part's values.
            ranks: The number of ranks that own chunks of it.
        """
        if not codec.biased:
            return {}
        chunk = chunk_length(length, ranks, codec.block)
        # Needed to cut the residual into new chunks when the number of processes changes.
        self.value(f"{CHUNK_LAYOUT}{name}", lambda: tf.constant([length, codec.block]))
        return {"residual": self.value(f"{OWNER_RESIDUAL}{name}", lambda: tf.zeros([chunk]))}

    def value(
        self,
        name: str,
        start: Callable[[], tf.Tensor],
        convert: Callable[[], np.ndarray] | None = None,
    ) -> tf.Variable:
        """Returns the variable of a name.

        Args:
            name: Name of the variable.
            start: Function that returns its first value.
            convert: Function that makes the value from restored state with other names, called
                where there is none with this name.

        Raises:
            ValueError: If the restored value has another shape.
        """
        if convert is not None:
            self._conversions[name] = convert
        with tf.init_scope():
            return self._variable(name, start())

    def restored(self, name: str) -> np.ndarray | None:
        """Returns this rank's restored value of a name, if there is one."""
        return self._before.get(name)

    def restored_owner_residual(self, name: str) -> np.ndarray | None:
        """Returns the restored residual of a part of a job with other hosts: all ranks' chunks."""
        return self._owner_residuals.get(name)

    def _variable(self, name: str, start: tf.Tensor) -> tf.Variable:
        if name not in self.variables:
            self.variables[name] = unmanaged_variable(self._start(name, start))
        return self.variables[name]

    def _goes_on_by(self, before: Mapping[str, np.ndarray]) -> bool:
        """Returns whether gradients are summed in the way in which a restored job summed them.

        They are if that has not been decided yet: then the restored job decides.
        """
        own = {name: v for name, v in self.variables.items() if name.startswith(WAY)}
        return all(name not in before or before[name] == v.numpy() for name, v in own.items())

    def _is_own(self, name: str) -> bool:
        """Returns whether a state variable does not belong to another candidate's exchanges."""
        of = name.partition("/")[2]
        return of.startswith(self._prefix) or not of.partition("/")[0].isdigit()

    def _start(self, name: str, start: tf.Tensor) -> tf.Tensor:
        if name not in self._before:
            convert = self._conversions.get(name) if self._before else None
            return start if convert is None else tf.constant(convert())
        value = self._before[name]
        is_part = name.startswith((CHUNK_LAYOUT, HOST_PART, HOSTS))
        if not (np.array_equal(start, value) if is_part else start.shape == value.shape):
            raise ValueError(
                f"`before` must be of the same model, compressor and `bucket_bytes`. Received: "
                f"{name} of {_in_words(value)}, but the model needs {_in_words(start)}. "
                f"Restore the former settings, or train from scratch."
            )
        return tf.constant(value)


def residuals_in(state: Mapping[str, tf.Variable]) -> list[tf.Variable]:
    """Returns the residuals among an aggregator's variables: what was not sent yet.

    Args:
        state: The aggregator's `state`.
    """
    return [variable for name, variable in state.items() if _RESIDUAL.match(name)]


def _have_hosts(state: Mapping[str, np.ndarray], hosts: Hosts | None) -> bool:
    """Returns whether a state is of a job with these hosts, or hosts matter in neither."""
    before = state.get(HOSTS)
    return (None if before is None else before.tolist()) == (hosts and hosts.by_rank)


def _joined_owner_residuals(states: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the residuals of all ranks' chunks, joined, by name."""
    joined = {}
    for name in states[0]:
        if name.startswith(OWNER_RESIDUAL):
            length = int(states[0][CHUNK_LAYOUT + name.removeprefix(OWNER_RESIDUAL)][0])
            joined[name] = np.concatenate([state[name] for state in states])[:length]
    return joined


def _in_words(value: tf.Tensor | np.ndarray) -> str:
    """Returns a part's length and block size, or the shape of any other state, as text."""
    value = np.asarray(value)
    return f"{value.tolist()}" if value.dtype.kind == "i" else f"shape {value.shape}"
