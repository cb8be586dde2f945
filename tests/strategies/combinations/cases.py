"""Cases run by ranks: one training with any of the features that `table` names.

Each feature keeps the results equal: gradients of two half batches are those of the batch, an
overflow skips a batch that the plain training does not have, own shares hold the rows that the
rank would get anyway. So any two of them must give the result of neither, and a codec with one of
them the result of the codec alone.
"""

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdml
from tests.harness import rank_job
from tests.strategies.cases import data, seed_ranks_apart
from tfdml import compression, topology
from tfdml.callbacks.checkpoint.directory_use import leave_directory
from tfdml.compression.auto import auto_aggregator
from tfdml.compression.exchange import compressed_aggregator
from tfdml.strategies.parameter_server.strategy import ParameterServerStrategy

ROWS, BATCH, RATE, MOMENTUM = 96, 12, 0.05, 0.9
# Of a process with a pipeline, in which each replica has two stages.
GROUPS = [["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]]
# Rows of a table.
IDS = 13
# Step after which a training that resumes is interrupted: in the middle of two half batches.
ENDS_AT = 5
# The overflowing batch comes before this one.
OVERFLOWS_AT = 2

# One compressor of each family: families differ in their state and in what they send.
CODECS = {
    "cast": compression.Float16(),
    "quantising": compression.QSGD(4),
    "sign": compression.OneBit(),
    "sparse": compression.TopK(0.1),
    "low_rank": compression.PowerSGD(2),
    "momentum": compression.DeepGradientCompression(0.1, momentum=MOMENTUM),
    "auto": compression.Auto([compression.TopK(0.1)]),
}
# On two hosts values are selected in each of four chunks instead of two, and with sharding in each
# owner's part: there all are selected, and so they are in the reference, which is trained with
# "all_values".
SELECTING_ALL = {
    "sparse": compression.TopK(1.0),
    "momentum": compression.DeepGradientCompression(1.0, momentum=MOMENTUM),
    "auto": compression.Auto([compression.TopK(1.0)]),
}
# Parameter servers need an unbiased codec or mere rounding.
FOR_SERVERS = CODECS | {"quantising": compression.QSGD(8, stochastic=True)}


class Rows(layers.Layer):
    """Appends rows of a table to numbers, from which it makes the rows' ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(IDS, 4)
        self.flat = layers.Flatten()

    def call(self, x):
        """Returns the numbers and the rows."""
        # An overflowing batch has numbers that are no ids.
        finite = tf.where(tf.math.is_finite(x), x, tf.zeros_like(x))
        ids = tf.cast(tf.abs(finite) * 4.0, tf.int64) % IDS
        return tf.concat([x, self.flat(self.table(ids))], 1)

    def compute_output_shape(self, shape):
        """Returns the shape of the numbers and the rows."""
        return shape[0], shape[1] * 5


class Decided(auto_aggregator.CandidateChoice):
    """A choice that always considers the candidate the fastest, whatever the step times."""

    def __init__(self, *measured):
        super().__init__(*measured)
        self.current = 1

    def after(self, seconds: float) -> bool:
        """Never changes the choice."""
        return False


def compressor(features: Iterable[str], servers: bool = False) -> compression.Compressor | None:
    """Returns the strategy's argument `compression`."""
    families = [name for name in CODECS if name in features]
    if len(families) == 2 and "auto" in families:
        (other,) = set(families) - {"auto"}
        return compression.Auto([CODECS[other]])
    if not families:
        # Gradients are summed by hosts only if they are compressed.
        by_hosts = "hosts" in features and not {"sharding", "robust"} & set(features)
        encodes = by_hosts and not servers
        return CODECS["quantising"] if encodes else None
    if len(families) > 1:
        return [CODECS[name] for name in families]
    if {"hosts", "synchronous_hosts", "sharding", "all_values"} & set(features):
        return (CODECS | SELECTING_ALL)[families[0]]
    return (FOR_SERVERS if servers else CODECS)[families[0]]


def make_strategy(features: Iterable[str]) -> tf.distribute.Strategy:
    """Returns a new strategy with those features that belong to the strategy."""
    given = {"devices": 2} if "local_devices" in features else {}
    if "pipeline" in features:
        groups = GROUPS[: given.get("devices", 1)]
        given = {"pipeline": tfdml.PipelineParallel(num_microbatches=3), "devices": groups}
    if "robust" in features:
        given["gradient_aggregation"] = tfdml.aggregation.TrimmedMean(0)
    servers = {"ps_sync", "ps_async"} & set(features)
    if {"sharding", "tables"} & set(features):
        given["sharding"] = tfdml.Sharding(
            optimizer_state="sharding" in features,
            replicated=topology.is_elastic(),
            embeddings="tables" in features,
            min_embedding_bytes=0,
        )
    together = "synchronous_hosts" in features
    if together or "local_updates" in features:
        given["local_updates"] = tfdml.local_updates.LocalSGD(
            1, average_slots=True, synchronous_hosts=together
        )
    if "batch_split" in features:
        measured = {*CODECS, "hosts"} & set(features) or topology.is_elastic()
        parts = [3, 1, 2, 2] if {"local_devices", "synchronous_hosts"} & set(features) else [3, 1]
        given["batch_split"] = "auto" if measured else parts
    if servers:
        if "local_devices" in features:
            given["devices"] = ["CPU:0", "CPU:1"]
        given["synchronous"] = "ps_sync" in features
        if servers == {"ps_sync", "ps_async"}:
            given["max_staleness"] = 1  # For an asynchronous strategy.
        return ParameterServerStrategy(compression=compressor(features, True), **given)
    return rank_job.strategy(compression=compressor(features), **given)


def model_of(features: Iterable[str], strategy: tf.distribute.Strategy) -> keras.Model:
    """Returns a compiled model, one of whose matrices is large enough for a codec."""
    blocks = keras.RematScope("full" if "remat" in features else None)
    looks_up = bool({"tables", "whole_tables"} & set(features))
    with strategy.scope(), blocks:
        seed_ranks_apart()
        model = keras.Sequential(
            [
                layers.Input((6,)),
                *([Rows()] if looks_up else []),
                layers.Dense(64, activation="tanh"),
                layers.Dense(64, activation="tanh"),
                layers.Dense(5),
            ]
        )
        steps = 2 if "accumulation" in features else None
        momentum = 0.0 if _is_without_momentum(features) else MOMENTUM
        optimizer = keras.optimizers.SGD(RATE, momentum=momentum, gradient_accumulation_steps=steps)
        if "loss_scaling" in features:
            optimizer = tfdml.mixed_precision.LossScaleOptimizer(
                optimizer, initial_scale=2.0**10, dynamic_growth_steps=3
            )
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile="jit" in features,
        )
    return model


def _is_without_momentum(features: Iterable[str]) -> bool:
    """Returns whether training has no momentum.

    With local updates, a codec encodes what weights have moved by: without momentum, that is the
    gradient times the rate.
    """
    encodes = bool({*CODECS, "hosts"} & set(features))
    is_local = bool({"local_updates", "synchronous_hosts"} & set(features))
    return "no_momentum" in features or (is_local and encodes)


def write_mixture(directory: str) -> None:
    """Writes two data sets that are mixed."""
    for name, rows, seed in (("large", 60, 1), ("small", 25, 2)):
        x, y = data(rows, seed)
        records = ({"x": a, "y": int(b)} for a, b in zip(x, y, strict=True))
        tfdml.data.write_tfrecords(records, f"{directory}/{name}", shards=2)


def _mixture(records: str, batch: int) -> tf.data.Dataset:
    return tfdml.data.read_tfrecords(
        [f"{records}/large", f"{records}/small"],
        batch,
        features=["x"],
        label="y",
        ratios=[0.5, 0.5],
        epoch_records=ROWS,
        seed=5,
    )


def _rows(features: Iterable[str], records: str | None) -> tuple[np.ndarray, np.ndarray]:
    if "mixed_rows" in features:
        parts = [[t.numpy() for t in batch] for batch in _mixture(records, BATCH)]
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))
    x, y = data(ROWS)
    if "loss_scaling" in features:
        at = slice(OVERFLOWS_AT * BATCH, (OVERFLOWS_AT + 1) * BATCH)
        added = x[at].copy()
        # The last replica's row; with local updates, each rank decides for itself.
        is_local = {"local_updates", "synchronous_hosts"} & set(features)
        added[slice(None) if is_local else -1] = np.inf
        x, y = np.insert(x, [at.start], added, 0), np.insert(y, [at.start], y[at], 0)
    if "accumulation" in features:
        # In two half batches, each of two ranks has the same rows as in one batch.
        order = np.arange(len(x)).reshape(-1, 2, 2, BATCH // 4).swapaxes(1, 2).ravel()
        x, y = x[order], y[order]
    return x, y


def data_of(features: Iterable[str], strategy: tf.distribute.Strategy, records: str | None) -> dict:
    """Returns the data for `fit`.

    Args:
        features: Features; with "mixed_rows", the rows of the mixture come from memory.
        strategy: Strategy whose ranks read their own shares, if they do.
        records: Directory filled by `write_mixture`.
    """
    batch = BATCH // 2 if "accumulation" in features else BATCH
    if "mixed_data" in features:
        own = strategy.scope() if "sharded_input" in features else contextlib.nullcontext()
        with own:
            made = _mixture(records, batch)
        steps = ROWS // batch
    else:
        x, y = _rows(features, records)
        steps = len(x) // batch
        if "sharded_input" in features and not isinstance(strategy, ParameterServerStrategy):
            own = strategy.extended.splitter.rows(batch)
            x, y = (v.reshape(steps, batch, *v.shape[1:])[:, own] for v in (x, y))
            x, y = (v.reshape(-1, *v.shape[2:]) for v in (x, y))
        made = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
        if "sharded_input" in features:
            options = tf.data.Options()
            off = tf.data.experimental.AutoShardPolicy.OFF
            options.experimental_distribute.auto_shard_policy = off
            made = made.with_options(options)
    return {"x": made} | ({"steps_per_epoch": steps} if "ps_async" in features else {})


@contextlib.contextmanager
def deciding(features: Iterable[str]) -> Iterator[None]:
    """Context manager: no timing decides a test.

    `Auto` uses its given candidate, and gradients are summed by hosts where hosts have several
    processes.
    """
    with contextlib.ExitStack() as decided:
        if "auto" in features:
            decided.enter_context(mock.patch.object(auto_aggregator, "CandidateChoice", Decided))
        if {"hosts", "synchronous_hosts"} & set(features):
            decided.enter_context(
                mock.patch.object(compressed_aggregator, "is_faster_by_hosts", return_value=True)
            )
        yield


def outcome_of(features: Iterable[str], model: keras.Model, history: keras.callbacks.History):
    """Returns the results that must be equal with any two features."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    values = list(optimizer.variables)
    if {"sharding", "tables"} & set(features):
        whole: dict[str, np.ndarray] = {}
        optimizer.save_own_variables(whole)
        values = [whole[str(i)] for i in range(len(values))]
    slots = zip(optimizer.variables, values, strict=True)
    result = {
        "weights": _whole_weights(model)
        if "tables" in features
        else [v.numpy() for v in model.weights],
        "slots": [np.asarray(value) for v, value in slots if _is_compared(v, features)],
    }
    if "loss_scaling" not in features:  # The overflowing batch has no loss.
        result["history"] = {k: np.array(v) for k, v in history.history.items()}
    return result


def _is_compared(variable: keras.Variable, features: Iterable[str]) -> bool:
    """Returns whether a variable of an optimizer is a slot that must be equal.

    `DeepGradientCompression` keeps the momentum of whole tables itself, and none of those in parts.
    """
    of_table = "momentum" in features and "embedding" in variable.path
    return "momentum" in variable.path and not of_table


def _whole_weights(model: keras.Model) -> list[np.ndarray]:
    weights = []
    for layer in model._flatten_layers(include_self=False):
        stored: dict[str, np.ndarray] = {}
        layer.save_own_variables(stored)
        weights += [np.asarray(stored[str(i)]) for i in range(len(stored))]
    return weights


def trained(
    features: tuple[str, ...], records: str | None = None, directory: str | None = None
) -> dict:
    """Trains for an epoch of eight updates.

    Args:
        features: Names from `table.FEATURES`, or "mixed_rows".
        records: Directory filled by `write_mixture`.
        directory: Directory for checkpoints.
    """
    with deciding(features):
        if "checkpoint_resume" in features:
            assert _life(features, records, directory, ENDS_AT) is None
            keras.backend.clear_session()
        return _life(features, records, directory)


def _life(
    features: tuple[str, ...],
    records: str | None,
    directory: str | None,
    ends_at: int | None = None,
) -> dict | None:
    """Trains to the end, or sends this process a termination signal and returns None."""
    strategy = make_strategy(features)
    model = model_of(features, strategy)
    callbacks = []
    if "checkpoint_resume" in features:
        callbacks.append(tfdml.callbacks.FaultTolerantCheckpoint(directory))
    seen = []

    def end(batch: int, logs: dict) -> None:
        seen.append(batch)
        if batch + 1 == ends_at:
            os.kill(os.getpid(), signal.SIGTERM)

    callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_end=end))
    code = None
    try:
        given = data_of(features, strategy, records)
        history = model.fit(**given, epochs=1, verbose=0, callbacks=callbacks)
    except SystemExit as ended:
        code = ended.code
    finally:
        if directory is not None:
            leave_directory(directory)
    if ends_at is not None:
        assert code == 75, "It was asked to end, and is to be started again."
        return None
    if "checkpoint_resume" in features:
        assert seen[0] in (ENDS_AT, ENDS_AT + 1), "It resumes; it does not begin."
    return outcome_of(features, model, history)


def joined(features: tuple[str, ...], at: int) -> dict:
    """Trains with a codec that is enabled after some steps, without state.

    It is the reference for an elastic job that a second rank joins: one process does not compress.

    Args:
        features: A codec.
        at: Number of steps before the codec is enabled.
    """
    x, y = data(ROWS)
    with deciding(features):
        plain = model_of((), make_strategy(()))
        rows = slice(None, at * BATCH)
        plain.fit(x[rows], y[rows], batch_size=BATCH, shuffle=False, verbose=0)
        # PowerSGD's initial matrices depend on the variables' names.
        keras.backend.clear_session()
        strategy = make_strategy(features)
        model = model_of(features, strategy)
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        model.set_weights(plain.get_weights())
        for own, before in zip(model.optimizer.variables, plain.optimizer.variables, strict=True):
            own.assign(before.numpy())
        rows = slice(at * BATCH, None)
        history = model.fit(x[rows], y[rows], batch_size=BATCH, shuffle=False, verbose=0)
        return outcome_of(features, model, history)


def elastic_on_servers(synchronous: bool) -> str:
    """Returns the error of `tfdml.elastic` for a model on parameter servers."""
    features = ("ps_sync" if synchronous else "ps_async",)
    strategy = make_strategy(features)
    model = model_of(features, strategy)

    @tfdml.elastic.run
    def train(state: tfdml.elastic.KerasState) -> None:
        given = data_of(features, strategy, None)
        model.fit(**given, epochs=1, verbose=0, callbacks=[state.committer(steps=3)])

    try:
        train(tfdml.elastic.KerasState(model))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def error_of(features: tuple[str, ...], records: str | None = None) -> str:
    """Returns the error message for features that are refused."""
    try:
        trained(features, records)
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing was raised"
