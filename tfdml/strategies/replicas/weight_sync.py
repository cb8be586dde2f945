"""Variables with the same values on all processes: set at the start, checked later."""

from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfdml.collectives.buckets import plan_buckets
from tfdml.collectives.collective import Collective

# Bytes of variables that are broadcast as one message, unless one has more. They take as much
# memory again until they are assigned.
_BROADCAST_BYTES = 8 << 20


def start_from_rank_0(variables: Sequence[keras.Variable], collective: Collective) -> None:
    """Broadcasts rank 0's values of the variables that differ between processes.

    A model's variables are created with the same values. They differ if one process has loaded a
    file that the others have not, as `BackupAndRestore` does on rank 0. An optimizer's slots differ
    if their initial values are random.

    Args:
        variables: Variables of a model and its optimizer, in the same order on all processes.
        collective: Collective that compares and broadcasts the values.
    """
    differing = [v for v, digests in _compared(variables, collective) if len(set(digests)) > 1]
    values = [tf.convert_to_tensor(variable.value) for variable in differing]
    sizes = [value.shape.num_elements() * value.dtype.size for value in values]
    # Many small variables in one message: over a slow network, each waits for round trips.
    parts = plan_buckets(sizes, [v.dtype for v in values], _BROADCAST_BYTES, _BROADCAST_BYTES)
    for number, part in enumerate(parts):
        own = [tf.reshape(values[i], [-1]) for i in part.indices]
        received = collective.broadcast(tf.concat(own, 0), f"start/values_{number}")
        for i, value in zip(part.indices, tf.split(received, [len(v) for v in own]), strict=True):
            differing[i].assign(tf.reshape(value, values[i].shape))


def check_values(variables: Sequence[keras.Variable], collective: Collective) -> None:
    """Checks that all processes have the same values, bit for bit.

    Args:
        variables: Variables of a model, in the same order on all processes.
        collective: Collective that compares them.

    Raises:
        RuntimeError: On every process, if values differ; names the first such variable and the
            ranks.
    """
    for variable, digests in _compared(variables, collective):
        common = max(digests, key=digests.count)
        odd = [rank for rank, digest in enumerate(digests) if digest != common]
        if odd:
            raise RuntimeError(
                f"Weights must be bit-identical on all {collective.size} ranks after every step. "
                f"Received: a different value of {variable.path} on rank "
                f"{', '.join(map(str, odd))} (this is rank {collective.rank}). Look for code that "
                f"changes weights on some ranks only, or by random numbers."
            )


def check_loaded_together(variables: Sequence[keras.Variable], collective: Collective) -> None:
    """Checks that all processes have loaded tables of which each has its own rows, or none has.

    Args:
        variables: Variables of a model, in the same order on all processes.
        collective: Collective that compares them.

    Raises:
        RuntimeError: On every process, if some have loaded rows that others have not.
    """
    tables = [v for v in variables if getattr(v, "times_loaded", None) is not None]
    if not tables:
        return
    own = tf.constant([[v.times_loaded for v in tables]], tf.int32)
    by_rank = collective.all_gather(own, "start/loaded").numpy().tolist()
    if any(times != by_rank[0] for times in by_rank):
        raise RuntimeError(
            f"Tables that are divided among the ranks must be loaded on all {collective.size} "
            f"ranks, because each reads its own rows. Received: {tables[0].path}, loaded "
            f"{', '.join(str(times[0]) for times in by_rank)} times on rank 0, 1, … Call "
            f"`load_weights` on all ranks, from files that all can read."
        )


def agree_on_number(number: int | None, collective: Collective) -> int | None:
    """Broadcasts rank 0's number (0 or more, or None) to all processes."""
    own = tf.constant([-1 if number is None else number], tf.int64)
    first = int(collective.broadcast(own, "start/number").numpy()[0])
    return None if first < 0 else first


def _compared(
    variables: Sequence[keras.Variable], collective: Collective
) -> Iterator[tuple[keras.Variable, list[int]]]:
    """Yields each variable with the 64-bit fingerprints of its values, by rank."""
    common = [v for v in variables if not hasattr(v, "ownership")]
    distinct = {id(v): v for v in common if v.dtype != "string" and 0 not in v.shape}
    found = list(distinct.values())
    if not found:
        return
    flat = [tf.reshape(tf.convert_to_tensor(v.value), [1, -1]) for v in found]
    own = tf.concat([tf.bitcast(tf.fingerprint(value), tf.int64) for value in flat], 0)
    table = collective.all_gather(own, "start/digests").numpy().reshape(collective.size, -1)
    yield from zip(found, table.T.tolist(), strict=True)
