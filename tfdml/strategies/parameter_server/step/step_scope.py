"""Scope of a step on a worker, in which some Keras variables are local and others on servers.

In the scope, a step's metrics start at 0 and stay in its graph, so that the step returns its
contributions to them. Other variables are read from the servers and updated there. Keras's
`assign_add` would read a value, send it to the worker, add there and send it back, and so lose the
additions of other workers meanwhile.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.strategies.input.local_batch import ShareInfo
from tfdml.strategies.traced import traced, tracing

# Distance between the random streams of two workers.
STREAM_STRIDE = 1_000_003


class StepScope(keras.StatelessScope):
    """Scope of one step.

    Args:
        own: Variables local to the step, each with its initial value.
        stream: Number of the step's stream of random numbers: int64, shape `[]`.
        read_once: Variables on servers, each with the value read at the start; the step sees that
            value until it changes the variable itself.
        share: The step's share of a global batch; None if the step has the whole batch.
        totals: Sums over all shares of the arguments of `sum_over_shares`, in the order of calls.

    Attributes:
        applied: Pairs of an optimizer and its gradients. Filled only in a step with a share, which
            does not apply them.
        counts: The arguments of `sum_over_shares`.
    """

    def __init__(
        self,
        own: Sequence[tuple[keras.Variable, tf.Tensor]],
        stream: tf.Tensor,
        read_once: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
        share: ShareInfo | None = None,
        totals: Sequence[tf.Tensor] | None = None,
    ):
        super().__init__(
            # Otherwise losses that layers add would be dropped.
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
        """The gradients of the step's first update."""
        return self.applied[0][1]

    def owns(self, variable: keras.Variable) -> bool:
        """Returns whether a variable is local to the step."""
        return id(variable) in self._own

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns a variable's value in the scope; if it is on a server, the server's variable."""
        value = super().get_current_value(variable)
        return variable._value if value is None else value

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Keeps the new value of a local variable; assigns other variables on their server."""
        variable, value = update
        if self.owns(variable):
            super().add_update(update)
        else:
            self.forget(variable)
            variable._direct_assign(value)

    def forget(self, variable: keras.Variable) -> None:
        """Makes further reads of a variable return its server's value."""
        self.state_mapping.pop(id(variable), None)

    def remember(self) -> None:
        """Undoes `forget`, for a branch that is traced after a branch that called it."""
        self.state_mapping.update(self._read_once)

    def sum_over_shares(self, count: tf.Tensor) -> tf.Tensor:
        """Returns the sum over all shares of a scalar that depends only on the data."""
        self.counts.append(count)
        if self._totals is None:
            return count
        return tf.cast(self._totals[len(self.counts) - 1], count.dtype)


def current_step() -> StepScope | None:
    """Returns the scope of the step being traced, or None."""
    return traced().scope


def add_on_server(variable: keras.Variable, value: Any) -> tf.Tensor:
    """Adds to a variable on its server, so that no concurrent addition is lost."""
    step = current_step()
    if step is not None:
        step.forget(variable)
    return variable._value.assign_add(tf.cast(value, variable._value.dtype))


def add_rows_on_server(variable: Any, rows: tf.IndexedSlices) -> tf.Operation:
    """Adds to rows of a variable on its server, so that no concurrent addition is lost.

    Args:
        variable: A Keras or TensorFlow variable.
        rows: Rows to add; repeated rows are all added.
    """
    return tf.raw_ops.ResourceScatterNdAdd(**_scattered(variable, rows))


def subtract_rows_on_server(variable: Any, rows: tf.IndexedSlices) -> tf.Operation:
    """Subtracts from rows of a variable; see `add_rows_on_server`."""
    return tf.raw_ops.ResourceScatterNdSub(**_scattered(variable, rows))


def _scattered(variable: Any, rows: tf.IndexedSlices) -> dict[str, tf.Tensor]:
    # Not `scatter_add`: it takes a shared lock, so additions to the same rows could race.
    variable = variable._value if isinstance(variable, keras.Variable) else variable
    return {
        "ref": variable.handle,
        "indices": tf.expand_dims(rows.indices, -1),
        "updates": tf.cast(rows.values, variable.dtype),
    }
