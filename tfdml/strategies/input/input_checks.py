"""Checks that all processes read the same data, and use the same batches and gradients."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.collectives.collective import Collective
from tfdml.collectives.texts import gather_texts
from tfdml.strategies.input.local_batch import digest_of

# Number of rows of an array that are compared, evenly spaced.
_SAMPLED_ROWS = 64


def check_pipeline(dataset: tf.data.Dataset, collective: Collective) -> None:
    """Checks that all processes have built the same pipeline, with the same order of samples.

    Every process reads every global batch and works on its own rows of it, so the batches must be
    identical everywhere. Compared are the stages, their shuffle seeds, the element spec and the
    cardinality. What a Python generator or a function of the pipeline does cannot be compared.

    Args:
        dataset: This process's pipeline.
        collective: Collective that compares the processes' pipelines.

    Raises:
        ValueError: If a stage shuffles without a seed or shards the data by rank, or if the
            pipelines differ.
    """
    if collective.size == 1:
        return
    parts = [str(dataset.element_spec), str(int(dataset.cardinality()))]
    for stage in _stages(dataset):
        kind = type(stage).__name__
        parts.append(kind)
        if kind == "_ShuffleDataset":
            if _is_unseeded(stage):
                raise ValueError(
                    f"`Dataset.shuffle` must have a seed, because each of the {collective.size} "
                    f"processes reads all batches and works on its own rows of them. Received on "
                    f"rank {collective.rank}: a shuffle without a seed, which gives each "
                    f"process a different order. Use `dataset.shuffle(n, seed=...)`, or call "
                    f"`keras.utils.set_random_seed(...)`, with the same number on all ranks, "
                    f"before the dataset is made."
                )
            parts.append(f"{int(stage._seed)} {int(stage._seed2)}")
        if kind == "_ShardDataset" and int(stage._num_shards) == collective.size:
            raise ValueError(
                f"`Dataset.shard` must be left out, because batches are global: the strategy "
                f"splits each one over the ranks. Received on rank {collective.rank}: a dataset "
                f"with `.shard({int(stage._num_shards)}, {int(stage._index)})`. Remove it, and "
                f"batch by the global batch size."
            )
    _check_match("\n".join(parts), "The `tf.data` pipeline", collective)


def shuffles_without_seed(dataset: tf.data.Dataset) -> bool:
    """Returns whether a stage of a pipeline shuffles without a seed, differently per process."""
    return any(_is_unseeded(stage) for stage in _stages(dataset))


def draws_without_seed(dataset: tf.data.Dataset) -> str | None:
    """Describes the pipeline stage that draws different random numbers per process, or None.

    Such a stage shuffles without a seed, or calls a function that draws without a seed or from a
    generator whose state it changes, as Keras's layers do.
    """
    for stage in _stages(dataset):
        kind = type(stage).__name__.strip("_").removesuffix("Dataset")
        if kind == "Random" and stage._seed == stage._seed2 == 0:
            return "`Dataset.random` without a seed"
        if _is_unseeded(stage):
            return "`Dataset.shuffle` without a seed"
        for part in vars(stage).values():
            graph = getattr(getattr(part, "function", None), "graph", None)
            drawn = None if graph is None else _random_operation(graph)
            if drawn:
                return f"{drawn} in the function of a {kind} stage"
    return None


def _random_operation(graph: tf.Graph) -> str | None:
    """Describes an operation of a graph that draws different numbers per process, or None."""
    for op in graph.get_operations():
        if op.type == "AssignVariableOp" or op.type.startswith("RngRead"):
            return "a generator's state"
        draws = op.op_def.is_stateful and {"seed", "seed2"} <= op.node_def.attr.keys()
        if draws and op.get_attr("seed") == op.get_attr("seed2") == 0:
            return f"{op.type} without a seed"
    for function in graph._functions.values():
        inner = getattr(function, "graph", None)
        found = None if inner is None else _random_operation(inner)
        if found:
            return found
    return None


def check_arrays(arrays: Any, collective: Collective) -> None:
    """Checks that all processes were given the same arrays.

    Args:
        arrays: A structure of arrays of shape `[samples, ...]`. Shapes, dtypes and up to 64 rows
            of each are compared.
        collective: Collective that compares them.

    Raises:
        ValueError: If the arrays differ.
    """
    if collective.size == 1:
        return
    parts = []
    for array in tf.nest.flatten(arrays):
        if array is None:
            continue
        if hasattr(array, "iloc"):  # A pandas Series or DataFrame.
            parts.append(str(getattr(array, "dtypes", None)))
            array = array.to_numpy()
        parts.append(f"{array.shape} {array.dtype}")
        if isinstance(array, (np.ndarray, tf.Tensor)) and len(array.shape) and array.shape[0]:
            rows = np.unique(np.linspace(0, array.shape[0] - 1, _SAMPLED_ROWS, dtype=np.int64))
            sample = array[rows] if isinstance(array, np.ndarray) else tf.gather(array, rows)
            digest = hashlib.sha256(_bytes(np.asarray(sample))).hexdigest()[:16]
            parts.append(f"values of digest {digest}")
    _check_match("\n".join(parts), "The arrays given as data", collective)


def _bytes(array: np.ndarray) -> bytes:
    # An object array holds memory addresses, which differ per process.
    return repr(array.tolist()).encode() if array.dtype == object else array.tobytes()


def digest_slots(digest: tf.Tensor, collective: Collective) -> tf.Tensor:
    """Returns a table with this rank's digest in its row; the sum over ranks has all digests.

    Args:
        digest: The digest of this rank's batch: float32, shape `[DIGEST_SIZE]`.
        collective: Collective that gives the rank and the number of ranks.

    Returns:
        The table, 0 in all other rows: float32, shape `[size, DIGEST_SIZE]`.
    """
    return tf.one_hot(collective.rank, collective.size)[:, None] * digest[None, :]


def check_digests(digests: tf.Tensor) -> None:
    """Adds an assertion to the step's graph that all ranks read the same batch.

    Args:
        digests: The digest of every rank's batch: float32, shape `[size, DIGEST_SIZE]`.

    Raises:
        tf.errors.InvalidArgumentError: If the digests differ; the message names the ranks.
    """
    same = tf.reduce_all(digests == digests[:1])

    def name_ranks() -> tf.Operation | None:
        equal = tf.reduce_all(digests[:, None, :] == digests[None, :, :], 2)
        common = equal[tf.argmax(tf.reduce_sum(tf.cast(equal, tf.int32), 1))]
        return tf.raw_ops.Assert(
            condition=same,
            data=[
                f"Batches must be the same on all {digests.shape[0]} ranks, because every rank "
                "reads all of them and works on its own rows. Received a different batch on ranks:",
                tf.where(~common)[:, 0],
                "Seed what draws random numbers in the pipeline, or let each rank read its own "
                "part with AutoShardPolicy.OFF.",
            ],
            summarize=64,
        )

    # Only a step that fails computes which ranks differ.
    tf.cond(same, tf.no_op, name_ranks)


def check_gradients_match(gradients: Sequence, collective: Collective) -> None:
    """Asserts that the gradients of an update outside a step are the same on all ranks.

    Args:
        gradients: Dense or sparse gradients, or None.
        collective: Collective that compares them.

    Raises:
        tf.errors.InvalidArgumentError: If they differ; the message names the ranks.
    """
    if collective.size == 1:
        return
    own = digest_of([g for g in gradients if g is not None])
    digests = collective.all_gather(own[None, :], "apply/digests")
    tf.debugging.Assert(
        tf.reduce_all(digests == digests[:1]),
        [
            f"Gradients given to `apply` outside of `strategy.run` must be the same on all "
            f"{collective.size} ranks, because every rank makes the same update. Received, on "
            f"rank {collective.rank}, gradients that differ from rank 0's on ranks:",
            tf.where(tf.reduce_any(digests != digests[:1], 1))[:, 0],
            "Call `apply` in `strategy.run`, which sums them, or sum them with `strategy.reduce`.",
        ],
        summarize=64,
    )


def _check_match(description: str, what: str, collective: Collective) -> None:
    digest = hashlib.sha256(description.encode()).digest()[:8]
    own = tf.constant(np.frombuffer(digest, np.int64))
    digests = collective.all_gather(own, "check_data").numpy().tolist()
    odd = _minority(digests)
    if not odd:
        return
    by_rank = [text.splitlines() for text in gather_texts(collective, description, "check_data")]
    rank, other = odd[0], next(r for r in range(collective.size) if r not in odd)
    lines = itertools.zip_longest(by_rank[rank], by_rank[other], fillvalue="nothing")
    own, others = next(pair for pair in lines if pair[0] != pair[1])
    raise ValueError(
        f"{what} must be the same on all {collective.size} ranks, because batches are global: "
        f"every rank reads all of them and works on its own rows. Received different data on "
        f"{_ranks(odd)}: {own[:200]} on rank {rank}, {others[:200]} on rank {other} (this is rank "
        f"{collective.rank}). Give all ranks the whole data, not a part of it, with the same seeds "
        f"and sizes."
    )


def _minority(digests: Sequence[int]) -> list[int]:
    """Returns the ranks whose digest is not the most frequent one (on a tie, the first one)."""
    common = max(dict.fromkeys(digests), key=digests.count)
    return [rank for rank, digest in enumerate(digests) if digest != common]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _is_unseeded(stage: tf.data.Dataset) -> bool:
    if type(stage).__name__ != "_ShuffleDataset":
        return False
    return int(stage._seed) == int(stage._seed2) == 0


def _stages(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    yield dataset
    for source in dataset._inputs():
        yield from _stages(source)
