"""All processes start from rank 0's values: what one process alone has loaded reaches them all."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdml.collectives.collective import Collective


def start_alike(variables: Sequence[keras.Variable], collective: Collective) -> None:
    """Gives every process rank 0's values, where they differ.

    Variables are made alike already. They differ where one process has loaded a file that the
    others have not, as `BackupAndRestore` does on rank 0.

    Args:
        variables: A model's, and its optimizer's: the same ones on all processes.
        collective: What compares and sends.
    """
    distinct = {id(v): v for v in variables if v.dtype != "string" and 0 not in v.shape}
    variables = list(distinct.values())
    if not variables:
        return
    digests = collective.all_gather(_digests(variables), "start/digests")
    table = tf.reshape(digests, [collective.size, len(variables)]).numpy()
    others = [v for v, column in zip(variables, table.T, strict=True) if len(set(column)) > 1]
    for number, variable in enumerate(others):
        value = tf.convert_to_tensor(variable.value)
        variable.assign(collective.broadcast(value, f"start/variable_{number}"))


def agree_on_number(number: int | None, collective: Collective) -> int | None:
    """Returns rank 0's number, from 0, or None."""
    own = tf.constant([-1 if number is None else number], tf.int64)
    first = int(collective.broadcast(own, "start/number").numpy()[0])
    return None if first < 0 else first


def _digests(variables: Sequence[keras.Variable]) -> tf.Tensor:
    """Returns 64 bits for each variable that follow from its value: int64, shape `[variables]`."""
    flat = [tf.reshape(tf.convert_to_tensor(v.value), [1, -1]) for v in variables]
    return tf.concat([tf.bitcast(tf.fingerprint(value), tf.int64) for value in flat], 0)
