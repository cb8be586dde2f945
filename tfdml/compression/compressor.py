"""Base classes of compressors: explicit state and pure functions, no communication.

There are two kinds. A `ChunkCompressor` encodes values as bytes that cannot be summed on the wire,
so gradients are exchanged in two phases: each chunk is sent to its owner, which sends the encoded
sum to all. A `SummableCompressor` produces smaller tensors that an all-reduce sums as they are.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.compression.error_feedback import ErrorFeedback, Memory, NoMemory, State

# A stage of a `SummableCompressor`; see `SummableCompressor.steps`.
Step = Callable[..., tuple[list, ...]]


class Compressor:
    """Base class of methods that send gradients in fewer bytes.

    Attributes:
        biased: Whether the compression error does not average to 0. If so, a step's error is kept
            and added to the next step's gradient (error feedback).
        replaces_momentum: Whether the compressor's memory computes the momentum, so that the
            optimizer's own is left out.
        momentum_waits: Whether the momentum of SGD moves, and decays, only the numbers that a step
            has sent, which are those whose sum is not 0.
    """

    biased = True
    replaces_momentum = False
    momentum_waits = False

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Compressor":
        """Creates a compressor from the dict that `get_config` returned."""
        return cls(**config)

    def memory(self, size: int) -> Memory:
        """Returns the rule by which a step's compression error enters later steps.

        Args:
            size: The number of processes.
        """
        del size
        return ErrorFeedback() if self.biased else NoMemory()

    def check_optimizer(self, optimizer: keras.Optimizer) -> None:
        """Rejects optimizers that this compressor does not support.

        Raises:
            ValueError: If `optimizer` is not supported.
        """

    def takes(self, shape: Sequence[int], dtype: tf.DType) -> bool:
        """Returns whether gradients of this shape and dtype are worth compressing."""
        return dtype.is_floating and len(shape) > 1 and _size(shape) >= 1024

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


class ChunkCompressor(Compressor, abc.ABC):
    """Base class of compressors that encode rows of values as rows of bytes.

    Values that are not finite must decode to values that are not finite: overflow is detected in
    the decoded values.

    Attributes:
        block: Values per encoding block; rows are encoded block by block.
        static: Whether a row's encoded size follows from its length alone, so that XLA can compile
            it.
        native: Arguments that select this encoding in the operations of `tfdml.native`; None if
            they do not implement it. A subclass has to set it again.
    """

    block: int = 1
    static = True
    native: dict[str, Any] | None = None

    def parts(self, shapes: Sequence[Sequence[int]]) -> list[tuple["ChunkCompressor", list[int]]]:
        """Returns the codecs of a bucket, each with the indices of the gradients that it encodes.

        By default one codec encodes all gradients as one row of values. Codecs that depend on a
        gradient's shape override this.

        Args:
            shapes: The gradients' shapes.
        """
        return [(self, list(range(len(shapes))))]

    @abc.abstractmethod
    def row_bytes(self, length: int) -> int:
        """Returns the encoded size in bytes of a row of `length` values."""

    @abc.abstractmethod
    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Encodes rows of values as bytes.

        Args:
            values: float32, shape `[rows, n]`, with `n` a multiple of `block`.
            seed: Seed of the random numbers, the step and a salt: int32, shape `[2]`.

        Returns:
            uint8, shape `[rows, bytes]`.
        """

    @abc.abstractmethod
    def decode(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Returns the decoded values: float32, shape `[rows, length]`.

        Args:
            payload: The bytes that `encode` returned.
            length: Values per row.
        """

    def decode_sum(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Returns the sum of the decoded rows: float32, shape `[length]`.

        Args:
            payload: The bytes that `encode` returned.
            length: Values per row.
        """
        return tf.reduce_sum(self.decode(payload, length), 0)


class SummableCompressor(Compressor, abc.ABC):
    """Base class of compressors whose payload is summed by all-reduces, in one or more rounds.

    Values that are not finite must lead to sums that are not finite: overflow is detected in the
    sums.

    Attributes:
        compiles: Whether XLA can compile the stages.
    """

    compiles = True

    @abc.abstractmethod
    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Returns the bytes that are sent for a gradient of this shape, in all rounds together."""

    @abc.abstractmethod
    def init(self, name: str, shape: Sequence[int]) -> State:
        """Returns the initial state of one gradient, the same on all processes.

        Args:
            name: The variable's path.
            shape: The variable's shape.
        """

    @property
    @abc.abstractmethod
    def steps(self) -> Sequence[Step]:
        """The stages before, between and after the rounds: one more function than rounds.

        Each is called with the gradients (float32) and their states. All but the first also receive
        what the previous stage kept and the sums of what it sent. The last one returns the
        approximate sums of the gradients, the new states, and tensors that are finite exactly where
        the sums are. The others return the tensors to sum over all processes and what to keep, each
        a list with one item per gradient.
        """


def _size(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
