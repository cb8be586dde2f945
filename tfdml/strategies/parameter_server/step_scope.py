"""What Keras's variables are during a step on a worker: some are the step's own, some the servers'.

In the scope a step's metrics begin at 0 and stay in its graph, so that it returns what it adds to
them. All else is read from the servers and changed there. Keras's `assign_add` would read a value,
send it to the worker, add there and send it back, and so lose what other workers add meanwhile.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.strategies.share import Share
from tfdml.strategies.traced import traced, tracing

# Between the random streams of two workers.
STREAM_STRIDE = 1_000_003


class StepScope(keras.StatelessScope):
    """The scope of one step.

    Args:
        own: Variables that are the step's own, each with its value at the start.
        read_once: Variables on servers whose value stays as it was read, each with that value,
            until the step itself changes them.
        stream: Which stream of random numbers the step draws: int64, shape `[]`.
        share: The step's share of a global batch; None where it has the whole batch.
        totals: The sums over all shares of what `sum_over_shares` is given, in its order.

    Attributes:
        applied: Optimizers and what each was given, with a share: then nothing is applied.
        counts: What `sum_over_shares` was given.
    """

    def __init__(
        self,
        own: Sequence[tuple[keras.Variable, tf.Tensor]],
        stream: tf.Tensor,
        read_once: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
        share: Share | None = None,
        totals: Sequence[tf.Tensor] | None = None,
    ):
        super().__init__(
            # Without it, what layers add to the loss would be forgotten.
            collect_losses=True,
            state_mapping=[*own, *read_once],
            initialize_variables=False,
        )
        self._own = {id(variable) for variable, _ in own}
        self._read_once = {id(variable): value for variable, value in read_once}
        self.stream = stream
        self.share = share
        self.applied: list[tuple[keras.Optimizer, list]] = []
        self.counts: list[tf.Tensor] = []
        self._totals = totals

    def __enter__(self) -> "StepScope":
        self._tracing = tracing(scope=self)
        self._tracing.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._tracing.__exit__(*error)

    @property
    def gradients(self) -> list:
        """What the step's optimizer was given first."""
        return self.applied[0][1]

    def owns(self, variable: keras.Variable) -> bool:
        """Returns whether a variable is the step's own."""
        return id(variable) in self._own

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns a variable's value in the scope: for one on a server, the variable there."""
        value = super().get_current_value(variable)
        return variable._value if value is None else value

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Keeps the value of a variable of the step's own; sends others' to their server."""
        variable, value = update
        if self.owns(variable):
            super().add_update(update)
        else:
            self.forget(variable)
            variable._direct_assign(value)

    def forget(self, variable: keras.Variable) -> None:
        """Lets a variable's value be what its server has, from here on."""
        self.state_mapping.pop(id(variable), None)

    def remember(self) -> None:
        """Takes back `forget`: for a branch that is traced after the one which forgot."""
        self.state_mapping.update(self._read_once)

    def sum_over_shares(self, count: tf.Tensor) -> tf.Tensor:
        """Returns the sum over all shares of a scalar that follows from the data alone."""
        self.counts.append(count)
        if self._totals is None:
            return count
        return tf.cast(self._totals[len(self.counts) - 1], count.dtype)


def current_step() -> StepScope | None:
    """Returns the scope of the step that is being traced."""
    return traced().scope


def add_on_server(variable: keras.Variable, value: Any) -> tf.Tensor:
    """Adds to a variable where it is; nothing that others add meanwhile is lost."""
    step = current_step()
    if step is not None:
        step.forget(variable)
    return variable._value.assign_add(tf.cast(value, variable._value.dtype))


def add_rows_on_server(variable: Any, rows: tf.IndexedSlices) -> tf.Operation:
    """Adds to rows of a variable where it is; nothing that others add meanwhile is lost.

    Args:
        variable: Keras's or TensorFlow's.
        rows: What is added. Of a row that comes twice, both.
    """
    return tf.raw_ops.ResourceScatterNdAdd(**_scattered(variable, rows))


def subtract_rows_on_server(variable: Any, rows: tf.IndexedSlices) -> tf.Operation:
    """Subtracts in the same way."""
    return tf.raw_ops.ResourceScatterNdSub(**_scattered(variable, rows))


def _scattered(variable: Any, rows: tf.IndexedSlices) -> dict[str, tf.Tensor]:
    # By these operations: `scatter_add` shares its lock with other additions to the same rows.
    variable = variable._value if isinstance(variable, keras.Variable) else variable
    return {
        "ref": variable.handle,
        "indices": tf.expand_dims(rows.indices, -1),
        "updates": tf.cast(rows.values, variable.dtype),
    }
