"""Times the cost of the guard: steps with and without it, in alternating epochs on 2 processes.

    python -m tools.bench.guard

What the guard adds is counted: what the main thread and the graph note at each step is timed alone,
and the processor time of the guard's threads is read from their own clocks; noise from other
processes does not reach either. Beside them, epochs with what the main thread notes by epochs
without it, in turn.
"""

import statistics
import threading
import time
from collections.abc import Callable
from typing import Annotated

import typer

from tools.bench.figures import in_words, ratios
from tools.bench.harness import conditions, report, run_job, start
from tools.bench.strategies import compiled, fitting, images

EPOCHS = 40
STEPS = 40


def run() -> None:
    """Trains in this rank; rank 0 reports the seconds of the epochs."""
    import keras
    import psutil

    import tfdml

    strategy = tfdml.HorovodStrategy()
    extended = strategy.extended
    guard = extended.guard
    x, y = images(STEPS)
    with strategy.scope():
        epoch = fitting(compiled("CNN", keras), x, y)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    epoch()  # Creates the optimizer's variables, with the guard.
    process = psutil.Process()
    used, lasted = 0.0, 0.0
    for number in range(EPOCHS + 2):
        for who in ("with", "without") if number % 2 else ("without", "with"):
            extended.guard = guard if who == "with" else None
            before = _cpu(process)
            epoch_seconds, _ = epoch()
            if who == "with":
                used, lasted = used + _cpu(process) - before, lasted + epoch_seconds
            seconds[who].append(epoch_seconds)
    if strategy.is_chief:
        result = {who: s[2:] for who, s in seconds.items()}
        exchanges = len(guard.activity.collectives["train_step"])
        counted = {"share": used / lasted, "noting": _noting(extended)}
        report({**result, **counted, "exchanges": exchanges, "note": _note_of_an_exchange()})


def _cpu(process) -> float:
    """Returns the CPU seconds that the guard's threads have used."""
    names = ("tfdml-guard", "tfdml-exchanges")
    native = {thread.native_id for thread in threading.enumerate() if thread.name in names}
    return sum(t.user_time + t.system_time for t in process.threads() if t.id in native)


def _noting(extended) -> float:
    """Returns the seconds that the main thread takes to record a step for the guard."""
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(1000):
            with extended.collective_step("the exchange of train_step", 1):
                pass
        times.append((time.perf_counter() - begin) / 1000)
    return statistics.median(times)


def _note_of_an_exchange() -> float:
    """Returns the seconds by which the notes of an exchange's begin and end lengthen a graph."""
    import tensorflow as tf

    from tfdml.runtime.hang_report.exchange_log import EXCHANGE_LOG

    count = 20

    def chain(noted: bool) -> Callable:
        @tf.function(autograph=False)
        def run_chain(value: tf.Tensor) -> tf.Tensor:
            for number in range(count):
                before, value = value, tf.math.sin(value)
                if noted:
                    EXCHANGE_LOG.note_in_graph(f"bench_{number}", [before], [value])
            return value

        return run_chain

    chains, value = [chain(noted=False), chain(noted=True)], tf.constant(1.0)
    added = []
    for _ in range(60):
        seconds = []
        for run_chain in chains:
            begin = time.perf_counter()
            for _ in range(100):
                run_chain(value)
            seconds.append((time.perf_counter() - begin) / 100)
        added.append((seconds[1] - seconds[0]) / count)
        EXCHANGE_LOG.collect()
    return statistics.median(added[20:])


def main(
    rank: Annotated[bool, typer.Option(hidden=True, help="What a job starts.")] = False,
) -> None:
    """Prints a row for the benchmarks' table."""
    if rank:
        return run()
    result = run_job(__spec__.name, "--rank")
    step = statistics.median(result["with"]) / STEPS
    noted = result["noting"] + result["exchanges"] * result["note"]
    print(f"Measured with {conditions()}.\n")
    print(
        f"{step * 1000:.2f} ms a step; the main thread notes a step in "
        f"{result['noting'] * 1e6:.1f} µs, its graph each of {result['exchanges']} exchanges in "
        f"{result['note'] * 1e6:.1f} µs ({noted / 0.02:.3%} of 20 ms together); the guard's "
        f"threads use {result['share']:.3%} of a processor on rank 0; epochs with the guard by "
        f"epochs without: {in_words(ratios(result['with'], result['without']))}"
    )


if __name__ == "__main__":
    start(__doc__, main)
