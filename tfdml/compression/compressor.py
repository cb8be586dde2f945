"""What a compressor is: explicit state and pure functions; it never communicates.

There are two kinds. A `ChunkCompressor` turns numbers into bytes that cannot be summed on the wire,
so gradients go in two phases: chunks to their owners, their encoded sums to all. A
`SummableCompressor` makes smaller tensors of numbers that are summed on the wire as they are.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.compression.error_feedback import ErrorFeedback, Memory, NoMemory, State

# A step of a `SummableCompressor`.
Step = Callable[..., tuple[list, ...]]


class Compressor:
    """A way to send gradients in fewer bytes.

    Attributes:
        biased: Whether what is left out does not average to 0. Then what a step leaves out is kept
            and added to the next step's gradient (error feedback).
        replaces_momentum: Whether the optimizer's momentum is left out, because the compressor's
            memory does it.
    """

    biased = True
    replaces_momentum = False

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Compressor":
        """Makes a compressor from what `get_config` returned."""
        return cls(**config)

    def memory(self, size: int) -> Memory:
        """Returns how what a step leaves out enters later ones.

        Args:
            size: The number of processes.
        """
        del size
        return ErrorFeedback() if self.biased else NoMemory()

    def check_optimizer(self, optimizer: keras.Optimizer) -> None:
        """Refuses optimizers that this is not defined for.

        Raises:
            ValueError: If it is not.
        """

    def takes(self, shape: Sequence[int], dtype: tf.DType) -> bool:
        """Returns whether gradients of this shape and dtype are worth compressing."""
        return dtype.is_floating and len(shape) > 1 and _size(shape) >= 1024

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


class ChunkCompressor(Compressor, abc.ABC):
    """A compressor that turns rows of numbers into rows of bytes.

    Numbers that are not finite must come out as numbers that are not finite: an overflow is found
    in what is decoded.

    Attributes:
        block: Rows are encoded in blocks of this many numbers.
        static: Whether a row's bytes follow from its length alone, so that XLA can compile it.
        native: What `tfdml.native` calls this encoding, as its operations' arguments; None if it
            does not have it. A class that is derived has to say so again.
    """

    block: int = 1
    static = True
    native: dict[str, Any] | None = None

    def parts(self, shapes: Sequence[Sequence[int]]) -> list[tuple["ChunkCompressor", list[int]]]:
        """Returns how gradients that go together are encoded: codecs, and the gradients of each.

        All in one row of numbers, unless a codec depends on their shapes.

        Args:
            shapes: The gradients' shapes.
        """
        return [(self, list(range(len(shapes))))]

    @abc.abstractmethod
    def row_bytes(self, length: int) -> int:
        """Returns the bytes that a row of `length` numbers becomes."""

    @abc.abstractmethod
    def encode(self, values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Returns the bytes of rows of numbers.

        Args:
            values: float32, shape `[rows, n]`, with `n` a multiple of `block`.
            seed: The step, and another number; what is random follows from both: int32, shape
                `[2]`.

        Returns:
            uint8, shape `[rows, bytes]`.
        """

    @abc.abstractmethod
    def decode(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Returns the numbers that bytes stand for: float32, shape `[rows, length]`.

        Args:
            payload: What `encode` returned.
            length: The numbers of a row.
        """

    def decode_sum(self, payload: tf.Tensor, length: int) -> tf.Tensor:
        """Returns the sum of the rows that bytes stand for: float32, shape `[length]`.

        Args:
            payload: What `encode` returned.
            length: The numbers of a row.
        """
        return tf.reduce_sum(self.decode(payload, length), 0)


class SummableCompressor(Compressor, abc.ABC):
    """A compressor whose payload is summed on the wire, in one round or more.

    Numbers that are not finite must make sums that are not finite: an overflow is found in those.

    Attributes:
        compiles: Whether XLA can compile the steps.
    """

    compiles = True

    @abc.abstractmethod
    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Returns the bytes that a gradient of this shape becomes, in all rounds together."""

    @abc.abstractmethod
    def init(self, name: str, shape: Sequence[int]) -> State:
        """Returns the state for one gradient at the start: the same on all processes.

        Args:
            name: The variable's path.
            shape: Its shape.
        """

    @property
    @abc.abstractmethod
    def steps(self) -> Sequence[Step]:
        """What is computed before, between and after the rounds: one function more than rounds.

        Each is called with the gradients (float32), their states, and, but for the first, with what
        the function before has kept and the sums of what it has sent. The last one returns what
        approximates the sums of the gradients, the new states, and tensors that are finite exactly
        where the sums are. The others return what is to be summed over all processes, and what they
        keep: lists of as many as gradients.
        """


def _size(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
