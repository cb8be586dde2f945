"""A replica's step in microbatches, whose gradients it sums for one update."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.collectives.sparse_gradients import Gradient
from tfdml.row_split import LocalReplicas
from tfdml.strategies.input.local_batch import ShareInfo, count_rows, take_rows
from tfdml.strategies.keras_seam.current import current_share, get_extended
from tfdml.strategies.keras_seam.pipeline.cutting import get_stages
from tfdml.strategies.keras_seam.pipeline.stages import Stages
from tfdml.strategies.keras_seam.pipeline.task_order import TaskOrder
from tfdml.strategies.keras_seam.step.compiled import Update
from tfdml.strategies.replicas.replica_step import metric_variables
from tfdml.strategies.traced import tracing


def pipelined(model: keras.Model, step: Callable) -> Callable:
    """Returns a replica's step that works on its rows in microbatches, through the model's stages.

    Each microbatch is a share of the global batch, for which Keras's own step is run. Only the
    update is made once, from the sum of the gradients.

    Args:
        model: The Keras model.
        step: Its `train_step`, `test_step` or `predict_step`.

    Raises:
        ValueError: If the model overrides `train_step`.
    """
    if step.__name__ == "train_step" and type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            "`pipeline` must not be used for a model with a custom `train_step`, because the "
            "update is made after all microbatches, so that code of the step that needs the new "
            "weights would get the old ones. Received: "
            f"{type(model).__name__}.train_step. Override `compute_loss` or `compute_metrics` "
            "instead."
        )
    extended = get_extended(model._distribute_strategy)
    pipeline = extended.options.pipeline

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(step)
    def step_in_microbatches(data: Any) -> Any:
        replica = tf.distribute.get_replica_context()._local_replica_id
        devices = extended.device_groups[replica]
        graph, assignment = get_stages(model, extended)
        stages = Stages(graph, assignment, devices, bool(model.jit_compile))
        order = TaskOrder(devices, pipeline.num_microbatches, pipeline.schedule)
        shares, all_outputs, total = [], [], []
        for number, (rows, share) in enumerate(microbatches(data, pipeline.num_microbatches)):
            updates: list[Update] = []
            # Losses and metrics are computed where the outputs are.
            with (
                tf.device(devices[-1]),
                tracing(held_back=updates, share=share, stages=stages),
                # The first has rows if the replica has.
                _without_empty(metric_variables(model) if number else [], share),
            ):
                all_outputs.append(step(rows))
            order.note(number)
            shares.append(share)
            total = _added_up(total, updates)
        order.add()
        for update in total:
            update.make(update.gradients)
        if step.__name__ == "predict_step":
            return _rows_of_all(all_outputs, shares)
        return _means(all_outputs, shares)

    return step_in_microbatches


@contextlib.contextmanager
def _without_empty(variables: Sequence[keras.Variable], share: ShareInfo) -> Iterator[None]:
    """Context manager: metrics keep their values if the microbatch has no rows.

    Args:
        variables: The metrics' variables.
        share: The microbatch's share.
    """
    before = [tf.identity(variable) for variable in variables]
    yield
    for variable, value in zip(variables, before, strict=True):
        variable.assign(tf.where(share.rows > 0, tf.convert_to_tensor(variable), value))


def microbatches(data: Any, number: int) -> list[tuple[Any, ShareInfo]]:
    """Divides a replica's rows into microbatches: the rows and the share of each.

    If there are fewer rows than microbatches, some get no rows: they compute on another's row, and
    count nothing.

    Args:
        data: The replica's rows: a structure of tensors of shape `[rows, ...]`.
        number: The number of microbatches.
    """
    share = current_share()
    edges = LocalReplicas(0, number, number).bounds(share.rows)
    last = tf.convert_to_tensor(count_rows(data), tf.int64) - 1
    found = []
    for begin, end in zip(tf.unstack(edges)[:-1], tf.unstack(edges)[1:], strict=True):
        # The replica itself may compute on a row that is not its own.
        first = tf.minimum(begin, last)
        rows = take_rows(data, first, tf.maximum(end, first + 1))
        found.append((rows, ShareInfo(end - begin, share.global_rows)))
    return found


def _added_up(total: list[Update], updates: list[Update]) -> list[Update]:
    """Returns the updates with the gradients of one more microbatch."""
    if not total:
        return updates
    return [
        Update(one.make, [_sum(a, b) for a, b in zip(one.gradients, more.gradients, strict=True)])
        for one, more in zip(total, updates, strict=True)
    ]


def _sum(one: Gradient | None, more: Gradient | None) -> Gradient | None:
    """Returns the sum of two gradients of a variable, computed where the second one is."""
    if one is None or more is None:
        return more if one is None else one
    with tf.device((more.values if isinstance(more, tf.IndexedSlices) else more).device):
        if isinstance(one, tf.IndexedSlices) and isinstance(more, tf.IndexedSlices):
            values = tf.concat([one.values, more.values], 0)
            indices = tf.concat([one.indices, more.indices], 0)
            return tf.IndexedSlices(values, indices, more.dense_shape)
        return tf.convert_to_tensor(one) + tf.convert_to_tensor(more)


def _means(all_outputs: Sequence, shares: Sequence[ShareInfo]) -> Any:
    """Returns the mean of the microbatches' outputs, weighted by their rows."""
    rows = tf.maximum(tf.add_n([share.rows for share in shares]), 1)

    def mean(*values: Any) -> Any:
        tensors = [tf.convert_to_tensor(value) for value in values]
        dtype = tensors[0].dtype if tensors[0].dtype.is_floating else tf.float32
        return tf.add_n(
            [
                tf.where(share.rows > 0, tf.cast(t, dtype), tf.zeros([], dtype))
                * tf.cast(share.rows / rows, dtype)
                for t, share in zip(tensors, shares, strict=True)
            ]
        )

    return tf.nest.map_structure(mean, *all_outputs)


def _rows_of_all(all_outputs: Sequence, shares: Sequence[ShareInfo]) -> Any:
    """Returns the rows of all microbatches' predictions; a padded replica keeps its row."""
    own = tf.add_n([share.rows for share in shares])

    def rows(*parts: tf.Tensor) -> tf.Tensor:
        first = tf.where(own > 0, shares[0].rows, 1)
        kept = [parts[0][:first]]
        kept += [share.drop_padding(t) for t, share in zip(parts[1:], shares[1:], strict=True)]
        return tf.concat(kept, 0)

    return tf.nest.map_structure(rows, *all_outputs)
