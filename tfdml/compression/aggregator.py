"""Sums gradients over all processes in fewer bytes: what is compressed, sent, fed back and kept."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdml.collectives.aggregator import Gradient, sum_gradients
from tfdml.collectives.buckets import BUCKET_BYTES, plan_buckets
from tfdml.collectives.collective import Collective
from tfdml.collectives.own_variable import own_variable
from tfdml.compression.compressor import ChunkCompressor, Compressor, SummableCompressor
from tfdml.compression.error_feedback import State
from tfdml.compression.redistribution import PART, SERVER, of_ranks, redistributed
from tfdml.compression.rounds import sum_in_rounds
from tfdml.compression.sparse import sum_sparse
from tfdml.compression.two_phase import chunk_length, sum_in_two_phases


class CompressedAggregator:
    """One process's part in summing compressed gradients.

    What a biased compressor leaves out of a step is kept, per variable, and added to its next
    gradient. It is kept in the units of the unscaled loss, so a loss scale that changes does not
    matter, and follows the learning rate, in whose proportion it would have gone into the weights.
    A step whose sums are not finite (an overflow) leaves all that is kept as it was; its sums come
    out as not finite on all processes.

    Args:
        collective: What moves the bytes.
        compressor: What makes them fewer.
        bucket_bytes: Bytes of gradients that go together.
        state: Where what is kept goes; aggregators may share it.
        prefix: What goes before the names of exchanges.
    """

    def __init__(
        self,
        collective: Collective,
        compressor: Compressor,
        bucket_bytes: int = BUCKET_BYTES,
        state: dict[str, tf.Variable] | None = None,
        prefix: str = "",
    ):
        self._collective = collective
        self._compressor = compressor
        self._memory = compressor.memory(collective.size)
        self._bucket_bytes = bucket_bytes
        self._state: dict[str, tf.Variable] = {} if state is None else state
        self._prefix = prefix
        # What this rank goes on with; variables are made when they are first used.
        self._before: Mapping[str, np.ndarray] = {}

    @property
    def state(self) -> dict[str, tf.Variable]:
        """What is kept between steps, by name: this process's own."""
        return dict(self._state)

    def restore(self, before: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Goes on with what the ranks of an earlier job have kept.

        Args:
            before: Each process's `state` as arrays, in their order, however many they were.
                Names that are not of this aggregator are left alone.

        Raises:
            ValueError: If something has another shape than what is kept here: then, or when it is
                first used.
        """
        before = of_ranks(before)
        if len(before) != self._collective.size:
            before = redistributed(before, self._collective.size)
        own = before[self._collective.rank]
        self._before = {name: value for name, value in own.items() if self._is_mine(name)}
        for name, variable in self._state.items():
            if self._is_mine(name):
                start = variable if name.startswith(PART) else tf.zeros_like(variable)
                variable.assign(self._start(name, start))

    def _is_mine(self, name: str) -> bool:
        """Whether something that is kept is not of another candidate's exchanges."""
        of = name.partition("/")[2]
        return of.startswith(self._prefix) or not of.partition("/")[0].isdigit()

    def sum_gradients(
        self,
        gradients: Sequence[Gradient],
        names: Sequence[str],
        label: str,
        loss_scale: tf.Tensor | None = None,
        learning_rate: tf.Tensor | None = None,
    ) -> list[Gradient]:
        """Sums gradients over all processes.

        Args:
            gradients: This process's gradients, in the order of the layers.
            names: Their variables' paths.
            label: What the exchanges are called.
            loss_scale: What the gradients are multiplied with, None for 1.
            learning_rate: The rate of this step, None where it is not known.

        Returns:
            The sums, in the order of `gradients`: the same bits on all processes.
        """
        taken = [i for i, g in enumerate(gradients) if self._takes(g)]
        sparse = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
        dense = [i for i in range(len(gradients)) if i not in {*taken, *sparse}]
        result: list[Gradient | None] = [None] * len(gradients)
        name = f"{self._prefix}{label}"
        others = [*dense, *sparse]
        plain = [
            *sum_gradients(
                self._collective, [gradients[i] for i in dense], name, self._bucket_bytes
            ),
            *sum_sparse(self._collective, [gradients[i] for i in sparse], name),
        ]
        scale = tf.constant(1.0) if loss_scale is None else tf.cast(loss_scale, tf.float32)
        kept, commits = self._kept_factor(label, learning_rate)
        for i, total in zip(others, plain, strict=True):
            result[i], new = self._after_sum(total, names[i], scale, kept)
            commits += new
        if not taken and not commits:
            return result
        values = [t.values if isinstance(t, tf.IndexedSlices) else t for t in plain]
        finite = [tf.reduce_all(tf.math.is_finite(v)) for v in values if v.dtype.is_floating]
        step = self._zeros("step", [], tf.int32)
        commits.append((step, step + 1))
        sizes = [gradients[i].shape.num_elements() for i in taken]
        buckets = plan_buckets(
            [4 * s for s in sizes], [tf.float32] * len(taken), self._bucket_bytes
        )
        exchange = (
            self._in_rounds
            if isinstance(self._compressor, SummableCompressor)
            else self._in_two_phases
        )
        for number, bucket in enumerate(buckets):
            places = [taken[i] for i in bucket.indices]
            own, paths = [gradients[i] for i in places], [names[i] for i in places]
            sums, good, new = exchange(own, paths, (scale, kept), step, name, number)
            finite.append(good)
            commits += new
            for i, total in zip(places, sums, strict=True):
                result[i] = total
        # The sums are the same on all processes, and so is this vote.
        _assign_if(tf.reduce_all(tf.stack(finite)), commits)
        return result

    def _takes(self, gradient: Gradient) -> bool:
        if isinstance(gradient, tf.IndexedSlices) or not gradient.shape.is_fully_defined():
            return False
        return self._compressor.takes(gradient.shape, gradient.dtype)

    def _after_sum(
        self, total: Gradient, name: str, scale: tf.Tensor, kept: tf.Tensor
    ) -> tuple[Gradient, list]:
        """Returns what a sum that went uncompressed becomes, and what is then kept of it."""
        variables = self._made(name, self._memory.init_plain, total.shape)
        if not variables:
            return total, []
        state = {key: value * kept for key, value in _values(variables).items()}
        dense = tf.cast(tf.convert_to_tensor(total), tf.float32) / scale
        result, after = self._memory.after_sum(dense, state)
        return tf.cast(result * scale, total.dtype), _pairs([variables], [after])

    def _in_two_phases(
        self, own, names, rates, step, label, number
    ) -> tuple[list, tf.Tensor, list]:
        """Returns a bucket's sums, whether they are finite, and the new values of what is kept."""
        memories = [
            self._made(n, self._memory.init, g.shape) for n, g in zip(names, own, strict=True)
        ]
        servers = [
            self._server(codec, [own[i] for i in places], f"{label}/{names[places[0]]}")
            for codec, places in self._compressor.parts([g.shape for g in own])
        ]
        sums, finite, after, servers_after = sum_in_two_phases(
            self._collective,
            self._compressor,
            own,
            [_values(m) for m in memories],
            [_values(s) for s in servers],
            rates,
            step,
            f"{label}/compressed_{number}",
        )
        return sums, finite, _pairs([*memories, *servers], [*after, *servers_after])

    def _server(
        self, codec: ChunkCompressor, gradients: Sequence[tf.Tensor], name: str
    ) -> dict[str, tf.Variable]:
        """Returns what the owner of a chunk keeps of a part of a bucket.

        Its name is that of the part's first variable, so that another part is known by its length.
        """
        if not codec.biased:
            return {}
        length = sum(g.shape.num_elements() for g in gradients)
        chunk = chunk_length(length, self._collective.size, codec.block)
        with tf.init_scope():
            # What is cut into chunks anew where the number of processes changes.
            self._kept(f"{PART}{name}", tf.constant([length, codec.block]))
            return {"residual": self._kept(f"{SERVER}{name}", tf.zeros([chunk]))}

    def _in_rounds(self, own, names, rates, step, label, number) -> tuple[list, tf.Tensor, list]:
        """Returns a bucket's sums, whether they are finite, and the new values of what is kept."""
        del step
        memories = [
            self._made(n, self._memory.init, g.shape) for n, g in zip(names, own, strict=True)
        ]
        states = [
            self._made(n, self._compressor.init, n, g.shape)
            for n, g in zip(names, own, strict=True)
        ]
        sums, finite, after, states_after = sum_in_rounds(
            self._collective,
            self._compressor,
            own,
            [_values(m) for m in memories],
            [_values(s) for s in states],
            rates,
            f"{label}/compressed_{number}",
        )
        return sums, finite, _pairs([*memories, *states], [*after, *states_after])

    def _kept_factor(
        self, label: str, learning_rate: tf.Tensor | None
    ) -> tuple[tf.Tensor, list[tuple[tf.Variable, tf.Tensor]]]:
        """Returns what all that is kept is multiplied with, for a rate that has changed."""
        if learning_rate is None or not self._compressor.biased:
            return tf.constant(1.0), []
        now = tf.cast(learning_rate, tf.float32)
        last = self._zeros(f"learning_rate/{label}", [])
        before = last.read_value()
        return tf.where((before > 0) & (now > 0), before / now, 1.0), [(last, now)]

    def _made(self, name: str, init: Callable[..., State], *arguments) -> dict[str, tf.Variable]:
        """Returns what is kept of one gradient, made by `init` when it is first asked for."""
        with tf.init_scope():
            start = init(*arguments)
            return {key: self._kept(f"{key}/{name}", value) for key, value in start.items()}

    def _zeros(self, name: str, shape: Sequence[int], dtype: tf.DType = tf.float32) -> tf.Variable:
        with tf.init_scope():
            return self._kept(name, tf.zeros(shape, dtype))

    def _kept(self, name: str, start: tf.Tensor) -> tf.Variable:
        """Returns what is kept under a name; not the strategy's, but this process's own.

        To be called where variables are made, in an `init_scope`.
        """
        if name not in self._state:
            self._state[name] = own_variable(self._start(name, start))
        return self._state[name]

    def _start(self, name: str, start: tf.Tensor) -> tf.Tensor:
        if name not in self._before:
            return start
        value = self._before[name]
        is_part = name.startswith(PART)
        if not (np.array_equal(start, value) if is_part else start.shape == value.shape):
            raise ValueError(
                f"`before` must be of the same model, compressor and `bucket_bytes`. Received: "
                f"{name} of {_told(value)}, kept is {_told(start)}. Begin anew, or go on as before."
            )
        return tf.constant(value)


def _values(variables: dict[str, tf.Variable]) -> State:
    return {key: variable.read_value() for key, variable in variables.items()}


def _told(value: tf.Tensor | np.ndarray) -> str:
    """Returns a part's numbers and block; of anything else the shape."""
    value = np.asarray(value)
    return f"{value.tolist()}" if value.dtype.kind == "i" else f"shape {value.shape}"


def _pairs(variables: Sequence[dict[str, tf.Variable]], values: Sequence[State]) -> list[tuple]:
    return [
        (variable, new[key])
        for own, new in zip(variables, values, strict=True)
        for key, variable in own.items()
    ]


def _assign_if(condition: tf.Tensor, pairs: Sequence[tuple[tf.Variable, tf.Tensor]]) -> None:
    """Assigns values to variables if the condition holds; a branch, so that nothing is copied."""

    def assign() -> None:
        for variable, value in pairs:
            variable.assign(value, read_value=False)

    tf.cond(condition, assign, lambda: None)
