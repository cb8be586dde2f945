"""Times what the guard costs: steps with it and without it, epochs in turn, on 2 processes.

    .venv/bin/python tools/bench_guard.py

The step is one of some 20 ms. "Without" leaves out what the main thread notes for the guard; a
ratio is with by without, epoch by epoch. The processor time that the guard's threads use is read
from their own clocks, which noise from other processes does not reach.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_strategies import compiled, conditions, fitting

EPOCHS = 40
STEPS = 40


def run() -> None:
    """Trains in this rank; rank 0 prints the seconds of the epochs."""
    import numpy as np
    import psutil

    import tfdml

    strategy = tfdml.HorovodStrategy()
    extended = strategy.extended
    guard = extended.guard
    rng = np.random.default_rng(0)
    x = rng.normal(size=(128 * STEPS, 28, 28, 1)).astype("float32")
    y = rng.integers(0, 10, len(x))
    with strategy.scope():
        epoch = fitting(compiled("CNN"), x, y)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    epoch()  # Makes the optimizer's variables, with the guard.
    process = psutil.Process()
    used, lasted = 0.0, 0.0
    for number in range(EPOCHS + 2):
        for who in ("with", "without") if number % 2 else ("without", "with"):
            extended.guard = guard if who == "with" else None
            before = _cpu(process, guard)
            time, _ = epoch()
            if who == "with":
                used, lasted = used + _cpu(process, guard) - before, lasted + time
            seconds[who].append(time)
    if strategy.is_chief:
        result = {who: s[2:] for who, s in seconds.items()}
        print("RESULT " + json.dumps({**result, "share": used / lasted}), flush=True)


def _cpu(process, guard) -> float:
    """Returns the processor seconds that the guard's threads have used."""
    native = {thread.native_id for thread in guard.threads}
    return sum(t.user_time + t.system_time for t in process.threads() if t.id in native)


def main(rank: bool = typer.Option(False, help="What a job starts.")) -> None:
    """Prints a row for the benchmarks' table."""
    if rank:
        return run()
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    command = [sys.executable, horovodrun, "-np", "2", sys.executable, __file__, "--rank"]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, check=True, timeout=900, capture_output=True, text=True
    )
    result = json.loads(done.stdout.split("RESULT ", 1)[1].splitlines()[0])
    ratios = sorted(a / b for a, b in zip(result["with"], result["without"], strict=True))
    median = statistics.median(result["with"]) / STEPS * 1000
    print(f"Measured with {conditions()}.\n")
    print(
        f"{median:.2f} ms a step; with the guard by without: {statistics.median(ratios):.4f} "
        f"({ratios[len(ratios) // 4]:.3f}–{ratios[-1 - len(ratios) // 4]:.3f}); the guard's "
        f"threads use {result['share']:.3%} of a processor on rank 0"
    )


if __name__ == "__main__":
    typer.run(main)
