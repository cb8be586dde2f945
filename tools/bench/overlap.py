"""Shows that gradients are exchanged while the backward pass still runs, from Horovod's timeline.

    python -m tools.bench.overlap --picture overlap.png

Trains an 8-layer network on 2 processes with `horovodrun --timeline-filename`, and reads when each
bucket of gradients was ready and when its exchange began and ended, in the median step.
"""

import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from tools.bench.harness import (
    environment,
    finish,
    horovodrun,
    module_command,
    start,
    threads_each,
)


class Exchange(NamedTuple):
    """One bucket of one step, in milliseconds since the step's first bucket was ready.

    Attributes:
        bucket: Number of the bucket.
        ready: Time at which the first process had its gradients.
        begin: Time at which all processes had them, and the exchange began.
        end: Time at which the exchange ended.
    """

    bucket: int
    ready: float
    begin: float
    end: float


def read_steps(timeline: Path) -> list[list[Exchange]]:
    """Reads the exchanges of each step from a timeline of Horovod.

    Args:
        timeline: The file that `horovodrun --timeline-filename` wrote.

    Returns:
        For each training step the exchanges of its buckets, in the order of their numbers.
    """
    text = timeline.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    names = {
        e["pid"]: e["args"]["name"]
        for e in events
        if e.get("name") == "process_name" and "name" in e["args"]
    }
    # A bucket's first tensor stands for all: a group is exchanged as one.
    spans: dict[int, list[list[float]]] = defaultdict(list)
    open_events: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for event in events:
        name = names.get(event.get("pid"), "")
        if not name.startswith("gradients.") or "_1of" not in name:
            continue
        bucket = int(name.rsplit("bucket_", 1)[1].split("_")[0])
        if event["ph"] == "B":
            open_events[bucket].append((event["name"], event["ts"] / 1000))
        elif event["ph"] == "E" and open_events[bucket]:
            kind, begin = open_events[bucket].pop()
            if kind.startswith("NEGOTIATE"):
                spans[bucket].append([begin])
            elif kind == "ALLREDUCE" and spans[bucket]:
                spans[bucket][-1] += [begin, event["ts"] / 1000]
    whole = [[s for s in spans[b] if len(s) == 3] for b in sorted(spans)]
    steps = []
    for step in zip(*whole, strict=False):
        zero = min(ready for ready, _, _ in step)
        steps.append([Exchange(b, *(t - zero for t in times)) for b, times in enumerate(step)])
    return steps


def median_step(steps: list[list[Exchange]]) -> list[Exchange]:
    """Returns the median of each time over the steps, without the first, which traces."""
    return [
        Exchange(same[0].bucket, *(statistics.median(e[i] for e in same) for i in (1, 2, 3)))
        for same in zip(*steps[1:], strict=True)
    ]


def train(layers: int = 8, width: int = 1024, steps: int = 12) -> None:
    """Trains a network of equal layers; run by `horovodrun`."""
    import keras
    import numpy as np

    import tfdml

    with tfdml.HorovodStrategy().scope():
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
        model = keras.Sequential([keras.layers.Input((width,)), *hidden, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
    x = np.random.default_rng(0).normal(size=(128 * steps, width)).astype("float32")
    model.fit(x, np.zeros(len(x), "int64"), batch_size=128, verbose=0)


def record(timeline: Path, processes: int = 2, timeout: float = 120.0) -> list[list[Exchange]]:
    """Runs the training with a timeline; returns its steps.

    Raises:
        RuntimeError: If the training fails.
        subprocess.TimeoutExpired: If it takes longer than `timeout` seconds.
    """
    options = ["-np", str(processes), "--timeline-filename", str(timeline)]
    command = [*horovodrun(*options), *module_command(__spec__.name, "--train")]
    finish(command, environment(threads_each(1)), timeout)
    return read_steps(timeline)


def draw(step: list[Exchange], picture: Path) -> None:
    """Draws when each bucket was ready and exchanged."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    for e in step:
        axes.barh(e.bucket, e.begin - e.ready, left=e.ready, color="#d9d9d9")
        axes.barh(e.bucket, e.end - e.begin, left=e.begin, color="#3b75af")
    last = max(e.ready for e in step)
    axes.axvline(last, color="#c44e52", linestyle="--", label="backward pass has ended")
    axes.set(xlabel="milliseconds", ylabel="bucket", title="Exchange (blue) of each bucket")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(picture, dpi=120)


def main(
    picture: Annotated[Path | None, typer.Option(help="Draw the step into this file.")] = None,
    train_only: Annotated[
        bool, typer.Option("--train", hidden=True, help="What a job starts.")
    ] = False,
) -> None:
    """Shows when each bucket of gradients was ready and exchanged, in the median step."""
    if train_only:
        return train()
    with tempfile.TemporaryDirectory() as directory:
        step = median_step(record(Path(directory, "timeline.json")))
    last = max(e.ready for e in step)
    print("bucket  ready ms  exchange ms      before the backward pass had ended")
    for e in step:
        print(f"{e.bucket:6}  {e.ready:8.1f}  {e.begin:5.1f} - {e.end:5.1f}  {e.begin < last}")
    if picture is not None:
        draw(step, picture)


if __name__ == "__main__":
    start(__doc__, main)
