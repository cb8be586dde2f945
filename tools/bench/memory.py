"""Checks `tfdml.estimate_memory` against the peaks of fresh processes, on five models.

    python -m tools.bench.memory
    python -m tools.bench.memory --only convnet
    python -m tools.bench.memory --divided
    python -m tools.bench.memory --plot tools/benchmarks/memory.png

Each number comes from fresh processes, one after the other. Weights and slots are what a process
holds more after making them than before; gradients are what it gives back when it drops them.
Activations are proportional to rows, so they are twice what a forward and backward pass of a batch
takes more than one of half the batch. The peak is that of `fit`.

TensorFlow and Keras keep 30 to 80 KB for each variable apart from its numbers. So the models have
few variables for their size.

glibc's allocator returns every block of 64 KiB or more to the system when it is freed, and has one
arena, so that fragmentation does not hide what is measured. Pages of libraries are not counted, and
a small model has been trained before, so that what TensorFlow sets up once is there. oneDNN, which
TensorFlow uses by default on some processors, is off: its allocator keeps all memory that is freed.

`--divided` measures rank 0 of a job of two ranks, among which a table is divided.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.bench.harness import (
    conditions,
    environment,
    horovodrun,
    module_command,
    report,
    result_of,
    start,
    threads_each,
)

# Rows of a batch by model; each takes 1 GB or more above the process.
MODELS = {"mlp": 1024, "convnet": 16, "transformer": 8, "recurrent": 32, "embedding": 8192}
# Models whose gradients depend on the rows.
ROWS_ARE_GRADIENTS = ("embedding", "recurrent", "transformer")
PARTS = ("weights", "slots", "gradients", "activations", "peak")
BARS = {"weights": 5, "slots": 5, "gradients": 5, "activations": 15}
# Each block from 64 KiB on is mapped, and unmapped when it is freed.
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 16),
    "MALLOC_MMAP_MAX_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
    # Its allocator gives nothing back.
    "TF_ENABLE_ONEDNN_OPTS": "0",
}
# Jobs of two ranks with a divided table: the optimizer, the encoding of rows, rows of a batch.
DIVIDED = (
    ("RowWiseAdagrad", "", 65_536),
    ("RowWiseAdagrad", "int8", 65_536),
    ("LazyAdam", "", 65_536),
    ("Adam", "", 4096),
)
_VOCABULARY, _TOKENS = 8000, 128
_SIDE, _CLASSES = 112, 1000


# -- Models ----------------------------------------------------------------------------------------


def made(name: str) -> tuple[Any, Callable[[int], tuple]]:
    """Returns a compiled model, and a function that makes a batch of some rows."""
    import keras
    import numpy as np

    rng = np.random.default_rng(0)
    make, shape, highest = {
        "mlp": (mlp, (1024,), None),
        "convnet": (convnet, (_SIDE, _SIDE, 3), None),
        "transformer": (transformer, (_TOKENS,), _VOCABULARY),
        "recurrent": (recurrent, (_TOKENS,), _VOCABULARY),
        "embedding": (embedding, (32,), 1_000_000),
    }[name]

    def batch(rows: int) -> tuple:
        if highest is None:
            x = rng.random((rows, *shape), "float32")
        else:
            x = rng.integers(0, highest, (rows, *shape)).astype("int32")
        if name in ("transformer", "recurrent"):
            return x, x
        return x, rng.integers(0, _CLASSES, rows).astype("int32")

    model = make(keras)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss)
    return model, batch


def mlp(keras: Any) -> Any:
    """Returns 7 wide layers: 92 million parameters."""
    wide = [keras.layers.Dense(4096, "gelu") for _ in range(6)]
    return keras.Sequential([keras.Input((1024,)), *wide, keras.layers.Dense(_CLASSES)])


def convnet(keras: Any) -> Any:
    """Returns VGG-16 with normalization of batches, for small images: 54 million parameters."""
    layers = keras.layers
    body: list = []
    for filters, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            body += [layers.Conv2D(filters, 3, padding="same", use_bias=False)]
            body += [layers.BatchNormalization(), layers.ReLU()]
        body.append(layers.MaxPooling2D())
    body += [layers.Flatten(), layers.Dense(4096, "relu"), layers.Dense(4096, "relu")]
    return keras.Sequential([keras.Input((_SIDE, _SIDE, 3)), *body, layers.Dense(_CLASSES)])


def recurrent(keras: Any) -> Any:
    """Returns a language model of two LSTMs: 27 million parameters."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((_TOKENS,), dtype="int32"),
            layers.Embedding(_VOCABULARY, 512),
            layers.LSTM(1024, return_sequences=True),
            layers.LSTM(1024, return_sequences=True),
            layers.Dense(_VOCABULARY),
        ]
    )


def embedding(keras: Any) -> Any:
    """Returns a model of a large table: 68 million parameters."""
    layers = keras.layers
    wide = [layers.Dense(1024, "relu"), layers.Dense(1024, "relu")]
    table = [keras.Input((32,), dtype="int32"), layers.Embedding(1_000_000, 64), layers.Flatten()]
    return keras.Sequential([*table, *wide, layers.Dense(_CLASSES)])


def transformer(keras: Any) -> Any:
    """Returns a language model of 6 blocks of Keras's layers: 92 million parameters."""
    layers, width = keras.layers, 1024
    x = tokens = keras.Input((_TOKENS,), dtype="int32")
    x = layers.Embedding(_VOCABULARY, width)(x)
    for _ in range(6):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(16, width // 16)(y, y, use_causal_mask=True)
        x = layers.Add()([x, layers.Dropout(0.1)(y)])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, "gelu")(y)
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(width)(y))])
    x = layers.LayerNormalization()(x)
    return keras.Model(tokens, layers.Dense(_VOCABULARY)(x), name="transformer")


# -- What a process measures -----------------------------------------------------------------------


def _memory(key: str) -> int:
    """Returns a line of this process's status, in bytes.

    RssAnon is memory that it holds now, RssFile pages of libraries, VmHWM the most of both so far.
    """
    with open("/proc/self/status", encoding="ascii") as status:
        (line,) = (line for line in status if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


def _settled() -> int:
    """Returns the bytes that this process holds."""
    import ctypes

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _memory("RssAnon")


def _forget_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _peak() -> int:
    """Returns the most that this process has held; of libraries' pages, none has been given up."""
    return _memory("VmHWM") - _memory("RssFile") - _memory("RssShmem")


def _warm() -> None:
    """Trains a small model, for which TensorFlow loads code and starts threads."""
    import keras
    import numpy as np

    layers = keras.layers
    tail = [layers.Flatten(), layers.Dense(8, "gelu"), layers.Dense(4)]
    head = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()]
    model = keras.Sequential([keras.Input((8, 8, 3)), *head, *tail])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss)
    model.fit(np.zeros((4, 8, 8, 3), "float32"), np.zeros(4, "int32"), verbose=0)


def measured(part: str, name: str, rows: int) -> Any:
    """Returns the bytes of a part in this process; those of several for the "state"."""
    import tensorflow as tf

    _warm()
    base = _settled()
    model, batch = made(name)
    gradients = _gradients(model)
    if part == "state":
        found = {"weights": _settled() - base}
        before = _settled()
        model.optimizer.build(model.trainable_variables)
        found["slots"] = _settled() - before
        given = map(tf.constant, batch(rows if name in ROWS_ARE_GRADIENTS else 2))
        kept = gradients(*given)
        held = _settled()
        del kept
        return found | {"gradients": held - _settled()}
    if part == "peak":
        x, y = batch(rows)
        base += x.nbytes + y.nbytes
        _forget_peak()
        model.fit(x, y, batch_size=rows, verbose=0)
        return _peak() - base
    x, y = map(tf.constant, batch(rows))
    sums = tf.function(lambda x, y: [tf.reduce_sum(_values(g)) for g in gradients(x, y)])
    _settled()
    _forget_peak()
    sums(x, y)
    return _peak()


def _gradients(model: Any) -> Callable:
    """Returns a function that computes a batch's gradients as `train_step` does."""
    import tensorflow as tf

    @tf.function
    def gradients(x: Any, y: Any) -> list:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    return gradients


def _values(gradient: Any) -> Any:
    return getattr(gradient, "values", gradient)


def estimated(name: str, rows: int) -> dict[str, float]:
    """Returns the estimate of all parts, and the seconds that it takes."""
    import time

    import tfdml

    model, _ = made(name)
    begin = time.perf_counter()
    choice = tfdml.estimate_memory(model, rows, ranks=[1]).choices[0]
    seconds = time.perf_counter() - begin
    return {part: getattr(choice, part) for part in PARTS} | {"seconds": seconds}


# -- A job with a divided table -------------------------------------------------------------------


def measured_divided(optimizer: str, row_codec: str, rows: int) -> dict[str, list[int]] | None:
    """Returns rank 0's weights and peak, estimated and measured; None on the other rank."""
    import keras
    import numpy as np

    import tfdml

    sharding = tfdml.Sharding(
        optimizer_state=False,
        embeddings=True,
        min_embedding_bytes=1 << 20,
        row_codec=row_codec or None,
    )
    strategy = tfdml.HorovodStrategy(sharding=sharding)
    rng = np.random.default_rng(0)

    def model(table_rows: int, width: int) -> Any:
        kind = getattr(tfdml.optimizers, optimizer, None) or getattr(keras.optimizers, optimizer)
        with strategy.scope():
            body = [keras.layers.Embedding(table_rows, width), keras.layers.Flatten()]
            body += [keras.layers.Dense(64, "relu"), keras.layers.Dense(1)]
            made = keras.Sequential([keras.Input((8,), dtype="int32"), *body])
            made.compile(kind(0.01), "mse")
        return made

    def fit(made: Any, ids: Any, batch: int) -> None:
        y = np.zeros((len(ids), 1), "float32")
        made.fit(ids, y, batch_size=batch, shuffle=False, verbose=0)

    fit(model(40_000, 8), rng.integers(0, 40_000, (64, 8)).astype("int32"), 32)
    ids = rng.integers(0, 2_000_000, (3 * rows, 8)).astype("int32")
    base = _settled()
    made = model(2_000_000, 64)
    weights = _settled() - base
    _forget_peak()
    fit(made, ids, rows)
    peak = _peak() - base
    choices = tfdml.estimate_memory(made, rows, ranks=[2]).choices
    (choice,) = (c for c in choices if c.divided_tables and not c.sharding and not c.checkpointing)
    found = {"weights": [choice.weights, weights], "peak": [choice.peak, peak]}
    return found if strategy.is_chief else None


def row_of_divided(optimizer: str, row_codec: str, rows: int) -> str:
    """Measures a job with a divided table; returns its row of the table."""
    arguments = ("--part", "divided", "--only", f"{optimizer},{row_codec}", "--rows", str(rows))
    command = [*horovodrun("-np", "2"), *module_command(__spec__.name, *arguments)]
    found = result_of(command, environment(threads_each(2), **_ALLOCATOR), 500)
    cells = [_cell(*found[part]) for part in ("weights", "peak")]
    codec = f", {row_codec}" if row_codec else ""
    return f"| {optimizer}{codec}, {rows:,} rows | {' | '.join(cells)} |"


def _cell(estimate: float, measured: float) -> str:
    error = 100 * (estimate / measured - 1)
    return f"{estimate / 1e6:,.0f} / {measured / 1e6:,.0f} ({error:+.1f} %)"


# -- The table -------------------------------------------------------------------------------------


def _of_process(part: str, name: str, rows: int) -> Any:
    command = module_command(__spec__.name, "--part", part, "--only", name, "--rows", str(rows))
    return result_of(command, environment(threads_each(1), **_ALLOCATOR), 500)


def row(name: str) -> str:
    """Measures a model; returns its row of the table."""
    rows = MODELS[name]
    estimate = _of_process("estimate", name, rows)
    found = _of_process("state", name, rows) | {"peak": _of_process("peak", name, rows)}
    whole, half = (_of_process("activations", name, n) for n in (rows, rows // 2))
    found["activations"] = 2 * (whole - half)
    cells = [f"{name}, {rows} rows"]
    for part in PARTS:
        missed = part in BARS and 100 * abs(estimate[part] / found[part] - 1) > BARS[part]
        cell = _cell(estimate[part], found[part])
        cells.append(f"**{cell}**" if missed else cell)
    cells.append(f"{estimate['seconds']:.0f}")
    return f"| {' | '.join(cells)} |"


def main(
    only: Annotated[str, typer.Option(help="One of the models.", metavar="MODEL")] = "",
    plot: Annotated[
        Path | None,
        typer.Option(help="Only plot the transformer's estimate, for 256 rows, to this file."),
    ] = None,
    divided: Annotated[
        bool, typer.Option("--divided", help="Measure jobs with a divided table instead.")
    ] = False,
    part: Annotated[str, typer.Option(hidden=True, help="What a process measures.")] = "",
    rows: Annotated[int, typer.Option(hidden=True, help="Rows of its batch.")] = 0,
) -> None:
    """Prints the table: MB estimated / measured (error); bars that are missed are bold."""
    if plot is not None:
        import tfdml

        return tfdml.estimate_memory(made("transformer")[0], 256).plot(plot)
    if part == "divided":
        found = measured_divided(*only.split(","), rows)
        return report(found) if found else None
    if part:
        measure = estimated if part == "estimate" else None
        return report(measure(only, rows) if measure else measured(part, only, rows))
    print(f"Measured with {conditions()}.\n")
    if divided:
        print("| two ranks | weights | peak |\n|---|---:|---:|", flush=True)
        for job in DIVIDED:
            print(row_of_divided(*job), flush=True)
        return None
    print(f"| model | {' | '.join(PARTS)} | seconds of the estimate |")
    print(f"|---{'|---:' * (len(PARTS) + 1)}|")
    for name in [only] if only else MODELS:
        print(row(name), flush=True)


if __name__ == "__main__":
    start(__doc__, main)
