"""How the benchmarks start a job and read its result; what they say of the machine."""

import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

_MARK = "RESULT "


def run_job(script: str, *arguments: str, processes: int = 2, timeout: float = 900.0) -> Any:
    """Runs a benchmark's own script on some processes; they share the cores evenly.

    Args:
        script: The script.
        *arguments: What it is given.
        processes: Their number; one is started without `horovodrun`.
        timeout: Seconds until the job is ended.

    Returns:
        What a process has passed to `report`.

    Raises:
        RuntimeError: If the job fails; with the end of what it has printed.
    """
    command = [sys.executable, script, *arguments]
    if processes > 1:
        horovodrun = str(Path(sys.executable).with_name("horovodrun"))
        command = [sys.executable, horovodrun, "-np", str(processes), *command]
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": threads,
        "OMP_NUM_THREADS": threads,
    }
    done = subprocess.run(command, env=environment, timeout=timeout, capture_output=True, text=True)
    if _MARK not in done.stdout:
        raise RuntimeError(f"{script} must report a result. Received:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.split(_MARK, 1)[1].splitlines()[0])


def report(result: Any) -> None:
    """Tells the benchmark a result; called by one process of the job."""
    print(_MARK + json.dumps(result), flush=True)


def noted(path: Path) -> list[list]:
    """Returns the rows of a table that are done already."""
    return json.loads(path.read_text()) if path.exists() else []


def note(rows: list[list], path: Path) -> None:
    """Keeps the rows that are done, one a line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{lines}\n]\n")


def spread(values: list[float]) -> str:
    """Returns the mean, the lowest and the highest as text, in percent."""
    percent = [100 * v for v in values]
    mean = sum(percent) / len(percent)
    return f"{mean:.2f} ({min(percent):.2f}–{max(percent):.2f})"


def ratios(ours: list[float], peer: list[float]) -> tuple[float, float, float]:
    """Returns the median and the quartiles of `ours` by `peer`, measured in pairs."""
    pairs = sorted(a / b for a, b in zip(ours, peer, strict=True))
    return pairs[len(pairs) // 2], pairs[len(pairs) // 4], pairs[-1 - len(pairs) // 4]


def fastest(ours: list[float], peer: list[float]) -> float:
    """Returns the ratio of the means of each one's fastest quarter.

    What else the machine does only adds to a time: where it does much, this tells more than the
    median.
    """
    quarter = max(1, len(ours) // 4)
    return sum(sorted(ours)[:quarter]) / sum(sorted(peer)[:quarter])


def in_words(ratio: tuple[float, float, float], digits: int = 3) -> str:
    """Returns such a ratio as text."""
    median, low, high = ratio
    return f"{median:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def conditions() -> str:
    """Returns the versions, the machine and the date."""
    versions = ", ".join(f"{p} {version(p)}" for p in ("tensorflow-cpu", "keras", "horovod"))
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
    return f"{versions}, Python {platform.python_version()}; {machine}; {date.today()}"
