"""Times `HorovodStrategy` against its peers in one run, epochs in turn.

    python -m tools.bench.strategies --processes 2

One process: `fit` in the strategy's scope against plain Keras `fit`, the same model. Two processes:
`fit` against a hand-written `tf.function` loop with Horovod's grouped all-reduce, the same model
and the same global batch. A ratio is ours by the peer's, epoch by epoch; below 1 we are faster.
What a call of `fit` does before and after its epoch is timed apart.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.bench.figures import in_words, ratios
from tools.bench.harness import conditions, report, run_job, start

EPOCHS = 16
STEPS = 60
STEPS_PER_EXECUTION = (1, 10)
GLOBAL_BATCH = 128


def build(name: str, keras: Any):
    """Returns a new, uncompiled model of any Keras."""
    layers = keras.layers
    if name == "CNN":
        return keras.Sequential(
            [
                layers.Input((28, 28, 1)),
                layers.Conv2D(16, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )
    hidden = [layers.Dense(1024, activation="relu") for _ in range(4)]
    return keras.Sequential(
        [layers.Input((28, 28, 1)), layers.Flatten(), *hidden, layers.Dense(10)]
    )


def compiled(name: str, keras: Any, steps_per_execution: int = 1):
    """Returns a new model of any Keras, compiled with Adam, a loss and an accuracy."""
    model = build(name, keras)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.Adam(),
        loss,
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    return model


def images(steps: int) -> tuple:
    """Returns the images and labels of some steps: noise."""
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(GLOBAL_BATCH * steps, 28, 28, 1)).astype("float32")
    return x, rng.integers(0, 10, len(x))


def fitting(model, x, y) -> Callable[[], tuple[float, float]]:
    """Returns a callable that trains an epoch by `fit` and returns seconds of epoch and call."""
    import keras

    times = {}
    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: times.update(begin=time.perf_counter()),
        on_epoch_end=lambda epoch, logs: times.update(end=time.perf_counter()),
    )

    def epoch() -> tuple[float, float]:
        begin = time.perf_counter()
        model.fit(x, y, batch_size=GLOBAL_BATCH, epochs=1, verbose=0, callbacks=[clock])
        return times["end"] - times["begin"], time.perf_counter() - begin

    return epoch


def hand_written(name: str, x, y) -> Callable[[], tuple[float, float]]:
    """Returns a callable that trains an epoch by a loop over Horovod, each rank on its half."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    model = build(name, keras)
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = [keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()]
    for variable in [*model.variables, *optimizer.variables]:
        variable.assign(hvd.broadcast(variable.value, 0))
    own = slice(hvd.rank(), None, hvd.size())
    batches = (
        tf.data.Dataset.from_tensor_slices((x[own], y[own]))
        .shuffle(len(x))
        .batch(GLOBAL_BATCH // hvd.size(), drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_function(y, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = hvd.grouped_allreduce(gradients, op=hvd.Average)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metrics[0].update_state(loss)
        metrics[1].update_state(y, logits)

    def epoch() -> tuple[float, float]:
        begin = time.perf_counter()
        for x, y in batches:
            step(x, y)
        for metric in metrics:
            metric.result().numpy()
        seconds = time.perf_counter() - begin
        return seconds, seconds

    return epoch


def run(name: str, steps_per_execution: int) -> None:
    """Times one model on this process's job; rank 0 prints the seconds of each epoch."""
    import keras

    import tfdml

    strategy = tfdml.HorovodStrategy()
    x, y = images(STEPS)
    with strategy.scope():
        ours = fitting(compiled(name, keras, steps_per_execution), x, y)
    if strategy.size == 1:
        peer = fitting(compiled(name, keras, steps_per_execution), x, y)
    else:
        peer = hand_written(name, x, y)
    seconds: dict[str, list[tuple[float, float]]] = {"ours": [], "peer": []}
    for number in range(EPOCHS + 2):
        # In turn and in alternating order, so that heat or load affects both equally.
        turn = [("ours", ours), ("peer", peer)]
        for who, epoch in turn if number % 2 else turn[::-1]:
            seconds[who].append(epoch())
    if strategy.is_chief:
        # The first two epochs trace and warm up.
        report({who: s[2:] for who, s in seconds.items()})


def measure(name: str, processes: int, steps_per_execution: int) -> dict:
    """Starts a job; returns the median step times in milliseconds and the ratio."""
    seconds = run_job(
        __spec__.name,
        "--run",
        name,
        "--steps-per-execution",
        str(steps_per_execution),
        processes=processes,
        timeout=1800,
    )
    epochs = {who: [epoch for epoch, _ in s] for who, s in seconds.items()}
    around = {who: [call - epoch for epoch, call in s] for who, s in seconds.items()}
    return {
        "model": name,
        "processes": processes,
        "steps_per_execution": steps_per_execution,
        "ours": statistics.median(epochs["ours"]) / STEPS * 1000,
        "peer": statistics.median(epochs["peer"]) / STEPS * 1000,
        "ratio": ratios(epochs["ours"], epochs["peer"]),
        "around": {who: statistics.median(s) for who, s in around.items()},
    }


def table(rows: list[dict]) -> str:
    """Returns the rows as a Markdown table."""
    columns = [
        "processes",
        "model",
        "steps per execution",
        "peer",
        "ours, ms a step",
        "peer, ms a step",
        "ratio (quartiles)",
        "around the epoch: ours, peer",
    ]
    lines = [columns, ["---"] * len(columns)]
    for r in rows:
        lines.append(
            [
                str(r["processes"]),
                r["model"],
                str(r["steps_per_execution"]),
                "plain Keras `fit`" if r["processes"] == 1 else "hand-written loop",
                f"{r['ours']:.2f}",
                f"{r['peer']:.2f}",
                in_words(r["ratio"]),
                f"{r['around']['ours']:.2f} s, {r['around']['peer']:.2f} s",
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(
    write: Annotated[Path | None, typer.Option(help="Write the table to this file, too.")] = None,
    run_model: Annotated[str, typer.Option("--run", hidden=True, help="What a job starts.")] = "",
    steps_per_execution: Annotated[int, typer.Option(hidden=True, help="Of `--run`.")] = 1,
    processes: Annotated[list[int], typer.Option(help="Numbers of processes to measure.")] = [1, 2],  # noqa: B006
) -> None:
    """Times the strategy against its peers and prints the table."""
    if run_model:
        return run(run_model, steps_per_execution)
    rows = [
        measure(name, count, steps)
        for count in processes
        for name in ("CNN", "MLP")
        for steps in STEPS_PER_EXECUTION
    ]
    text = f"Measured with {conditions()}.\n\n{table(rows)}\n"
    print(text)
    if write is not None:
        write.write_text(text)


if __name__ == "__main__":
    start(__doc__, main)
