"""Processes that run the steps of a conversion, and end when the process that started them does."""

import concurrent.futures
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tfdml.data.write import rejects, tasks
from tfdml.data.write.tasks import ConversionJob

# Called with the number of rows that are done, and the number of all rows.
Progress = Callable[[int, int], None]


@contextmanager
def workers(job: ConversionJob, processes: int) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Context manager: yields a function that runs all steps of a kind and returns their notes."""
    if processes == 1:
        yield lambda step, count, progress, rows: _run_in_process(job, step, count, progress, rows)
        return
    # Spawned, not forked: libraries that the caller has loaded may have threads.
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    with concurrent.futures.ProcessPoolExecutor(
        processes, context, _initialise, (job, counter)
    ) as pool:
        yield lambda step, count, progress, rows: _run_in_pool(
            pool, counter, job, step, count, progress, rows
        )


def _run_in_process(
    job: ConversionJob, step: str, count: int, progress: Progress | None, rows: int
) -> list[dict]:
    total = 0

    def add(done: int) -> None:
        nonlocal total
        total += done
        if progress:
            progress(total, rows)

    found, errors = [], 0
    for number in range(count):
        found.append(tasks.run(job, step, number, add))
        errors = _check_errors(job, errors, found[-1])
    return found


def _run_in_pool(
    pool: concurrent.futures.Executor,
    counter: Any,
    job: ConversionJob,
    step: str,
    count: int,
    progress: Progress | None,
    rows: int,
) -> list[dict[str, Any]]:
    counter.value = 0
    futures = [pool.submit(_work, step, number) for number in range(count)]
    waiting, errors = set(futures), 0
    try:
        while waiting:
            done, waiting = concurrent.futures.wait(
                waiting, 0.5, concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                errors = _check_errors(job, errors, future.result())
            if progress:
                progress(counter.value, rows)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return [future.result() for future in futures]


def _check_errors(job: ConversionJob, before: int, noted: dict[str, Any]) -> int:
    """Returns the number of rows with errors up to a finished step; raises if they are too many."""
    found = rejects.errors_in(noted["rejects"])
    if found:
        rejects.check_errors(job.options, before + len(found), found[-1])
    return before + len(found)


_own: dict[str, Any] = {}


def _initialise(job: ConversionJob, counter: Any) -> None:
    """Prepares a worker process: stores the job, and ends when the process that started it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _own.update(job=job, counter=counter)
    # Not `os.getppid()`: the process that started this one may be gone already.
    parent = multiprocessing.parent_process().pid
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _work(step: str, number: int) -> dict[str, Any]:
    def add(done: int) -> None:
        with _own["counter"].get_lock():
            _own["counter"].value += done

    return tasks.run(_own["job"], step, number, add)
