"""Candidates that take turns in two processes, each with cores of its own.

Neither TensorFlow nor PyTorch is imported here: a process has one of them.
"""

import ctypes
import gc
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

# Seconds that a process waits for the other one, which may trace a step.
_PATIENCE = 600.0


class Candidate(NamedTuple):
    """A way to train, as one of the two processes takes part in it.

    Attributes:
        run: Makes a number of steps; returns the seconds of each.
        cores: The cores that the process may use, by their numbers from 0.
    """

    run: Callable[[int], list[float]]
    cores: tuple[int, ...]


# Candidates of a process by name; it waits while it has none of a name.
Made = Mapping[str, Candidate]


def measure(
    make: Callable[..., Made], names: Sequence[str], steps: int, rounds: int, *given: Any
) -> dict[str, list[dict]]:
    """Measures candidates in turns; each round, each makes some steps.

    Args:
        make: Function of a module that is called in both processes, with its number and `given`.
            It returns the candidates in which the process takes part.
        names: Names of the candidates, in order.
        steps: Steps of a turn.
        rounds: Number of rounds.
        *given: Arguments of `make`.

    Returns:
        For each name, what each process has measured: for each round, "seconds" of a step, their
        median, and "mib", the peak of its memory in the turn above that before. Before these, a
        turn of one step is made: its "first" is in seconds.

    Raises:
        RuntimeError: If a process fails.
    """
    context = multiprocessing.get_context("spawn")
    barrier, pipes = context.Barrier(2, timeout=_PATIENCE), [context.Pipe(False) for _ in range(2)]
    processes = [
        context.Process(
            target=_work,
            args=(make, rank, list(names), steps, rounds, given, barrier, pipes[rank][1]),
            daemon=True,
        )
        for rank in range(2)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()  # So that the end of the process ends the pipe.
    try:
        parts = _received([receiver for receiver, _ in pipes])
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {name: [part[name] for part in parts if name in part] for name in names}


def _received(pipes: list[Connection]) -> list[dict]:
    """Returns what each process sends when it has finished.

    Raises:
        RuntimeError: If one ends without; the other one may wait for it for ever.
    """
    found: dict[int, dict] = {}
    while len(found) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in found]
        for pipe in wait(waiting):
            rank = pipes.index(pipe)
            try:
                found[rank] = pipe.recv()
            except EOFError:
                raise RuntimeError(
                    f"Both processes must finish their turns. Received: process {rank} has ended "
                    f"before; its error is above."
                ) from None
    return [found[rank] for rank in range(len(pipes))]


def _work(
    make: Callable[..., Made],
    rank: int,
    names: list[str],
    steps: int,
    rounds: int,
    given: tuple,
    barrier: Any,
    sender: Connection,
) -> None:
    sender.send(_take_turns(make(rank, *given), rank, names, steps, rounds, barrier))


def _take_turns(
    made: Made, rank: int, names: Sequence[str], steps: int, rounds: int, barrier: Any
) -> dict[str, dict]:
    found: dict[str, dict] = {name: {"seconds": [], "mib": []} for name in names if name in made}
    for number in range(rounds + 1):
        for name in names:
            barrier.wait()
            if name in made:
                pin(made[name].cores)
                seconds, mib = _turn(made[name].run, 1 if number == 0 else steps)
                if number == 0:
                    found[name]["first"] = seconds[0]
                else:
                    found[name]["seconds"].append(statistics.median(seconds))
                    found[name]["mib"].append(mib)
                print(f"round {number}, process {rank}, {name}: {seconds}", file=sys.stderr)
            barrier.wait()
    return found


def _turn(run: Callable[[int], list[float]], steps: int) -> tuple[list[float], float]:
    """Returns the seconds of each step, and MiB at the peak above those before."""
    gc.collect()
    # Gives what is free back to the system.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # From now on, a new peak.
    before = _status("VmRSS")
    seconds = run(steps)
    return seconds, (_status("VmHWM") - before) / 1024


def timed(step: Callable[[], None], steps: int) -> list[float]:
    """Returns the seconds of each of several steps."""
    found = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        found.append(time.perf_counter() - begin)
    return found


def pin(cores: Sequence[int]) -> None:
    """Lets all threads of this process, and those that they start, run on some cores alone.

    Args:
        cores: Numbers from 0, of the cores that the parent process may use.
    """
    own = {_CORES[number % len(_CORES)] for number in cores}
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), own)
        except ProcessLookupError:
            continue  # It has ended.


_CORES = sorted(os.sched_getaffinity(0))


def _status(name: str) -> int:
    """Returns a size of this process in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise KeyError(name)
