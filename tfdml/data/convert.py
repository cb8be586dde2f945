"""A conversion from its beginning to its manifest: one at a time, in many processes, resumable."""

import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import platformdirs

import tfdml
from tfdml.data import encoding, storage, tasks, tfds_metadata
from tfdml.data.manifest import SUFFIX, Manifest, Shard
from tfdml.data.plan import Options, Plan
from tfdml.data.sources.source import Source
from tfdml.data.tasks import Job

REJECTS = ".rejects.jsonl"
# Input for which the start of another process pays.
PROCESS_BYTES = 16 << 20
# Called with the rows that are done, and with all.
Progress = Callable[[int, int], None]


def convert(
    source: Source,
    output: str,
    options: Options,
    *,
    processes: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Converts an input to sharded TFRecords.

    Shards appear whole; the manifest appears last. What is done is noted in a directory beside
    them, so a conversion that was ended, whatever ended it, is gone on with by `resume`.

    Args:
        source: The input.
        output: The directory to write to.
        options: What is asked for.
        processes: How many processes work, as many as there are cores by default, and one where
            there is little to do; the bytes written are the same for any number.
        resume: Whether to go on with a conversion that was ended.
        overwrite: Whether to remove a data set of this name first.
        progress: Called now and then.

    Returns:
        The manifest.

    Raises:
        ValueError: If the output holds something, is within the input, is being written, or has no
            room; if a row cannot be converted, or too many; if the input changes meanwhile.
    """
    _check_places(source, output)
    storage.make_directory(output)
    work = _work_directory(output, options.name)
    with _only_one(work, output):
        _check_output(output, work, options.name, resume, overwrite)
        os.makedirs(work, exist_ok=True)
        job = Job(source, options, output, work)
        plan = tasks.plan_of(job)
        before = {path: storage.fingerprint(path) for path in source.files}
        _note_plan(work, _identity(source, options, plan, before))
        _check_space(output, work, plan, options)
        if processes is None:
            processes = min(os.cpu_count() or 1, -(-plan.bytes // PROCESS_BYTES))
        manifest, rejects = _run(job, plan, processes, progress)
        _check_unchanged(before)
        _finish(job, manifest, rejects)
        shutil.rmtree(work, ignore_errors=True)
        # A process that waits for this very file finds a data set, and refuses.
        Path(f"{work}.lock").unlink(missing_ok=True)
    return manifest


def _work_directory(output: str, name: str) -> str:
    if storage.is_local(output):
        return os.path.join(output, f".{name}.converting")
    # A store cannot be locked, nor appended to.
    digest = hashlib.sha256(f"{output}/{name}".encode()).hexdigest()[:16]
    return os.path.join(platformdirs.user_cache_dir("tfdml"), f"converting-{digest}")


@contextmanager
def _only_one(work: str, output: str) -> Iterator[None]:
    """Holds a lock that ends with the process, however that ends.

    Raises:
        ValueError: If another process holds it.
    """
    os.makedirs(os.path.dirname(work), exist_ok=True)
    lock = filelock.FileLock(f"{work}.lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise ValueError(
            f"`output` must be written by one conversion at a time. Received: {output!r}, which "
            f"another one is writing. Wait for it, or choose another directory."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _check_places(source: Source, output: str) -> None:
    if not storage.is_local(output):
        return
    real = os.path.realpath(output)
    folder = source.folder
    if folder is not None and storage.is_local(folder):
        inside = os.path.realpath(folder)
        if real == inside or real.startswith(inside + os.sep):
            raise ValueError(
                f"`output` must not be within the input. Received: {output!r}, in {folder!r}."
            )


def _check_output(output: str, work: str, name: str, resume: bool, overwrite: bool) -> None:
    own = [os.path.basename(work), os.path.basename(f"{work}.lock")]
    there = [n for n in storage.names_in(output) if n not in own]
    if overwrite:
        for file in there:
            if file.startswith((f"{name}-", f"{name}.")) or file in tfds_metadata.FILES:
                storage.remove(storage.join(output, file))
        shutil.rmtree(work, ignore_errors=True)
        there = []
    if resume:
        if name + SUFFIX in there or not os.path.isdir(work):
            raise ValueError(
                f"`resume` must be given for a conversion that was ended. Received: {output!r}, "
                f"which has {'a finished one' if name + SUFFIX in there else 'none'}."
            )
        for file in there:
            if file.endswith(storage.PARTIAL):
                storage.remove(storage.join(output, file))
    elif os.path.isdir(work):
        raise ValueError(
            f"`output` has a conversion that was ended. Received: {output!r}. Go on with it by "
            f"--resume, or begin anew by --overwrite."
        )
    elif there:
        raise ValueError(
            f"`output` must be empty. Received: {output!r}, with {there[:3]}. Choose another "
            f"directory, or remove its data set {name!r} by --overwrite."
        )


def _identity(source: Source, options: Options, plan: Plan, files: dict) -> dict[str, Any]:
    """Returns what must be the same when a conversion is gone on with."""
    prints = hashlib.sha256(json.dumps(files, sort_keys=True, default=str).encode()).hexdigest()
    return {
        "tool": tfdml.__version__,
        "rows": plan.rows,
        "files": prints,
        "options": dataclasses.asdict(options) | {"max_errors": None, "on_error": None},
        "schema": source.schema.to_json(),
    }


def _note_plan(work: str, identity: dict[str, Any]) -> None:
    noted = Path(work, "plan.json")
    said = json.loads(json.dumps(identity))
    if not noted.exists():
        storage.write_bytes(str(noted), json.dumps(said).encode())
        return
    before = json.loads(noted.read_text())
    differ = sorted(key for key in said if said[key] != before.get(key))
    if differ:
        raise ValueError(
            f"`resume` must go on with the same input and options. Received: another "
            f"{', '.join(differ)}. Begin anew by --overwrite."
        )


def _check_space(output: str, work: str, plan: Plan, options: Options) -> None:
    """Raises if a disk has less room than what is about to be written."""
    done = sum(f.stat().st_size for f in Path(work).glob("dealt-*"))
    needed = {os.path.dirname(work): max(0, plan.bytes - done) if options.deals else 0}
    if storage.is_local(output) and not options.compressed:
        needed[output] = needed.get(output, 0) + plan.bytes
        needed[output] -= sum(
            os.path.getsize(os.path.join(output, n)) for n in storage.names_in(output)
        )
    for directory, wanted in needed.items():
        free = shutil.disk_usage(directory).free
        if wanted > free:
            raise ValueError(
                f"`output` must have room for about {wanted / 1e9:.1f} GB. Received: "
                f"{free / 1e9:.1f} GB free at {directory}."
            )


def _run(
    job: Job, plan: Plan, processes: int, progress: Progress | None
) -> tuple[Manifest, list[dict[str, str]]]:
    """Does all steps; returns the manifest and the rows that were skipped."""
    first = "deal" if job.options.deals else "convert"
    with _workers(job, processes) as do:
        done = do(first, len(plan.ranges), progress, plan.rows)
        rejects = [reject for noted in done for reject in noted["rejects"]]
        if first == "deal":
            done = do("collect", len(plan.targets), None, plan.rows)
    splits: dict[str, list[Shard]] = {}
    for target, noted in zip(plan.targets, done, strict=True):
        splits.setdefault(target.split, []).append(Shard(**noted["shard"]))
    written = sum(shard.records for shards in splits.values() for shard in shards)
    if written + len(rejects) != plan.rows:
        raise ValueError(
            f"All {plan.rows} rows must be written or skipped. Received: {written} written, "
            f"{len(rejects)} skipped. The input has changed; begin anew by --overwrite."
        )
    counts = {"in": plan.rows, "written": written, "rejected": len(rejects)}
    return _manifest(job, splits, counts), rejects


def _manifest(job: Job, splits: dict[str, list[Shard]], counts: dict[str, int]) -> Manifest:
    names = [path.rsplit("/", 1)[-1] for path in job.source.files]
    said = {
        "kind": type(job.source).__name__.removesuffix("Source").lower(),
        "files": names[:100],
        "number_of_files": len(names),
        "options": dataclasses.asdict(job.options),
    }
    said = json.loads(json.dumps(said))
    return Manifest(
        job.output, job.options.name, job.source.schema, splits, said, tfdml.__version__, counts
    )


def _check_unchanged(before: dict[str, list]) -> None:
    changed = []
    for path, printed in before.items():
        if not storage.exists(path) or storage.fingerprint(path) != printed:
            changed.append(path)
    if changed:
        raise ValueError(
            f"The input must not change while it is converted. Received: {len(changed)} changed "
            f"files, such as {changed[0]}. Begin anew by --overwrite."
        )


def _finish(job: Job, manifest: Manifest, rejects: list[dict[str, str]]) -> None:
    if rejects:
        lines = "".join(json.dumps(reject) + "\n" for reject in rejects)
        path = storage.join(job.output, job.options.name + REJECTS)
        storage.write_bytes(path, lines.encode())
    tfds_metadata.write(manifest)
    manifest.save()


@contextmanager
def _workers(job: Job, processes: int) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Yields what does all steps of a kind and returns what is noted of each."""
    if processes == 1:
        yield lambda step, count, progress, rows: _alone(job, step, count, progress, rows)
        return
    # Spawned, not forked: what the caller has loaded may have threads.
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    with concurrent.futures.ProcessPoolExecutor(
        processes, context, _initialise, (job, counter)
    ) as pool:
        yield lambda step, count, progress, rows: _together(
            pool, counter, job, step, count, progress, rows
        )


def _alone(job: Job, step: str, count: int, progress: Progress | None, rows: int) -> list[dict]:
    total = 0

    def add(done: int) -> None:
        nonlocal total
        total += done
        if progress:
            progress(total, rows)

    found, rejected = [], 0
    for number in range(count):
        found.append(tasks.run(job, step, number, add))
        rejected += len(found[-1]["rejects"])
        if found[-1]["rejects"]:
            encoding.check_errors(job.options, rejected, found[-1]["rejects"][-1])
    return found


def _together(
    pool: concurrent.futures.Executor,
    counter: Any,
    job: Job,
    step: str,
    count: int,
    progress: Progress | None,
    rows: int,
) -> list[dict[str, Any]]:
    counter.value = 0
    futures = [pool.submit(_work, step, number) for number in range(count)]
    waiting, rejected = set(futures), 0
    try:
        while waiting:
            done, waiting = concurrent.futures.wait(
                waiting, 0.5, concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                rejects = future.result()["rejects"]
                rejected += len(rejects)
                if rejects:
                    encoding.check_errors(job.options, rejected, rejects[-1])
            if progress:
                progress(counter.value, rows)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return [future.result() for future in futures]


_own: dict[str, Any] = {}


def _initialise(job: Job, counter: Any) -> None:
    """Makes a worker of this process: it has the job, and ends with the one that started it."""
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
