"""Times what the observers of `PerformanceMetrics` add to a train step, in one process.

    python -m tools.bench.monitoring
    python -m tools.bench.monitoring --rounds 20 --steps 500

A model of 24 dense layers, so 48 gradients, whose steps are short, so that what is added to one can
be seen: that does not depend on what the step computes. Epochs with the callback and without it
take turns; times are the fastest quarter's, because other load only adds to a time. The norm of the
gradients depends on their size, and is taken in one of `window` steps: it is left out of the first
row of each kind, and taken in every step in the second.
"""

import contextlib
import resource
import time
from typing import Annotated

import typer

from tools.bench.harness import conditions, start

LAYERS, WIDTH, ROWS = 24, 64, 32
# A step of this many seconds is what the cost is compared with.
STEP = 0.02
# Steps from one norm to the next: none but the first, and each.
WINDOWS = {"times and bytes": 1_000_000, "and a norm in each step": 1}


def _model(scope: contextlib.AbstractContextManager):
    import keras

    with scope:
        hidden = [keras.layers.Dense(WIDTH, "tanh") for _ in range(LAYERS)]
        model = keras.Sequential([keras.layers.Input((WIDTH,)), *hidden])
        model.compile("sgd", "mse", jit_compile=False)
    return model


def _epoch(model, data, steps: int, callbacks: list) -> tuple[float, float]:
    """Returns the seconds and the processor seconds of a step, without those of the epoch's end."""
    import keras

    noted = []

    def note(*_):
        used = resource.getrusage(resource.RUSAGE_SELF)
        noted.append((time.perf_counter(), used.ru_utime + used.ru_stime))

    clock = keras.callbacks.LambdaCallback(on_epoch_begin=note)
    model.fit(
        data, steps_per_epoch=steps, epochs=2, verbose=0, callbacks=[*callbacks, clock]
    )  # The second epoch's begin is after the first one's end.
    (began, used), (ended, used_then) = noted
    return (ended - began) / steps, (used_then - used) / steps


def _measure(make_scope, rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    import numpy as np
    import tensorflow as tf

    from tfdml.callbacks import PerformanceMetrics

    x = np.zeros((ROWS, WIDTH), "float32")
    data = tf.data.Dataset.from_tensors((x, x)).repeat()
    candidates = {"without": (_model(make_scope()), [])}
    for name, window in WINDOWS.items():
        candidates[name] = (_model(make_scope()), [PerformanceMetrics(window=window)])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, (model, callbacks) in candidates.items():
            seconds = _epoch(model, data, steps, callbacks)
            if number:  # The first round traces.
                found[name].append(seconds)
    return found


def _fastest(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Returns the means of the fastest quarter, in µs: of the time, and of the processor's."""
    count = max(1, len(times) // 4)
    wall, cpu = (sorted(column)[:count] for column in zip(*times, strict=True))
    return 1e6 * sum(wall) / count, 1e6 * sum(cpu) / count


def main(
    rounds: Annotated[int, typer.Option(help="Epochs of each candidate.")] = 12,
    steps: Annotated[int, typer.Option(help="Steps of an epoch.")] = 300,
) -> None:
    """Prints what is added to a step of one replica, and of two in one process."""
    import tensorflow as tf

    import tfdml

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    one, two = (tfdml.MirroredStrategy(["CPU:0", "CPU:1"][:n]) for n in (1, 2))
    print(f"Measured with {conditions()}.\n")
    for kind, strategy in (("one replica", one), ("two replicas of a process", two)):
        found = _measure(strategy.scope, rounds, steps)
        wall, used = _fastest(found.pop("without"))
        print(f"{kind}: a step without takes {wall:.0f} µs, {used:.0f} of the processors")
        for name, times in found.items():
            more, more_used = (
                own - base for own, base in zip(_fastest(times), (wall, used), strict=True)
            )
            print(
                f"  {name}: {more:+.0f} µs ({more / 1e6 / STEP:+.2%} of 20 ms), {more_used:+.0f} "
                f"of the processors"
            )


if __name__ == "__main__":
    start(__doc__, main)
