"""Conversion of an input to shards and a manifest: one at a time, in many processes, resumable."""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import platformdirs

import tfdml
from tfdml.data.format import index, storage
from tfdml.data.format.manifest import DatasetManifest, Shard
from tfdml.data.sources.source import Source
from tfdml.data.write import checks as checks
from tfdml.data.write import tasks, tfds_metadata
from tfdml.data.write.plan import ConversionOptions, ConversionPlan
from tfdml.data.write.rejects import errors_in, reasons
from tfdml.data.write.rejects import save as save_rejects
from tfdml.data.write.tasks import CONVERT, MERGE, PARTITION, ConversionJob
from tfdml.data.write.workers import Progress, workers

# Amount of input that is worth the start of another process.
PROCESS_BYTES = 16 << 20


def convert(
    source: Source,
    output: str,
    options: ConversionOptions,
    *,
    processes: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> DatasetManifest:
    """Converts an input to sharded TFRecords.

    Shards appear whole; the manifest appears last. Finished steps are noted in a work directory, so
    `resume` can continue a conversion, whatever interrupted it.

    Args:
        source: Input to convert.
        output: Directory to write to.
        options: Options of the conversion.
        processes: Number of processes; by default that of the cores, or fewer for a small input.
            The bytes written are the same for any number.
        resume: Whether to continue a conversion that was interrupted.
        overwrite: Whether to remove a data set of this name first.
        progress: Function called from time to time with the number of rows that are done, and the
            number of all rows.

    Returns:
        Manifest of the data set.

    Raises:
        ValueError: If the output is not empty, is within the input, is being written, or lacks
            space; if a row cannot be converted, or too many; if the input changes meanwhile.
    """
    checks.check_locations(source, output)
    new = checks.make_output(output)
    work = _work_directory(output, options.name)
    with _exclusive(work, output):
        try:
            manifest = _convert(
                ConversionJob(source, options, output, work), processes, resume, overwrite, progress
            )
        except (ValueError, OSError):
            _clean_up(output, work, new)
            raise
        shutil.rmtree(work, ignore_errors=True)
        # A process that has opened this very file finds a data set, and refuses.
        Path(f"{work}.lock").unlink(missing_ok=True)
    return manifest


def _convert(
    job: ConversionJob,
    processes: int | None,
    resume: bool,
    overwrite: bool,
    progress: Progress | None,
) -> DatasetManifest:
    source, options, output, work = job
    checks.check_output(output, work, options.name, resume, overwrite)
    plan = tasks.make_plan(job)
    before = {path: storage.fingerprint(path) for path in source.files}
    checks.check_space(output, work, plan, options)
    os.makedirs(work, exist_ok=True)
    checks.note_plan(work, checks.identity(source, options, plan, before))
    if processes is None:
        processes = min(os.cpu_count() or 1, -(-plan.bytes // PROCESS_BYTES))
    manifest, rejects = _run(job, plan, processes, progress)
    checks.check_unchanged(before)
    _finish(manifest, rejects)
    return manifest


def _clean_up(output: str, work: str, new: bool) -> None:
    """Removes what a failed conversion has left, unless finished steps can be resumed."""
    if tasks.has_notes(work):
        return
    shutil.rmtree(work, ignore_errors=True)
    Path(f"{work}.lock").unlink(missing_ok=True)
    if new:
        # It is not empty if anything else has been put there.
        with contextlib.suppress(OSError):
            os.rmdir(output)


def _work_directory(output: str, name: str) -> str:
    if storage.is_local(output):
        return os.path.join(output, f".{name}.converting")
    # A store can be neither locked nor appended to.
    digest = hashlib.sha256(f"{output}/{name}".encode()).hexdigest()[:16]
    return os.path.join(platformdirs.user_cache_dir("tfdml"), f"converting-{digest}")


@contextmanager
def _exclusive(work: str, output: str) -> Iterator[None]:
    """Context manager: holds a lock that ends with the process, however that ends.

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
            f"another conversion is writing. Wait for it, or choose another directory."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _run(
    job: ConversionJob, plan: ConversionPlan, processes: int, progress: Progress | None
) -> tuple[DatasetManifest, list[dict[str, Any]]]:
    """Runs all steps; returns the manifest and the rows that were skipped."""
    first = PARTITION if job.options.needs_shuffle else CONVERT
    with workers(job, processes) as do:
        done = do(first, len(plan.ranges), progress, plan.rows)
        rejects = [reject for noted in done for reject in noted["rejects"]]
        if first == PARTITION:
            done = do(MERGE, len(plan.targets), None, plan.rows)
    splits: dict[str, list[Shard]] = {}
    for target, noted in zip(plan.targets, done, strict=True):
        splits.setdefault(target.split, []).append(Shard(**noted["shard"]))
    written = sum(shard.records for shards in splits.values() for shard in shards)
    if written + len(rejects) != plan.rows:
        raise ValueError(
            f"All {plan.rows} rows must be written or skipped. Received: {written} written, "
            f"{len(rejects)} skipped. The input has changed; start over with --overwrite."
        )
    if not written:
        _remove_shards(job, plan)
        raise ValueError(
            f"An input must have rows that can be converted. Received: {plan.rows} rows, all "
            f"refused: {'; '.join(f'{n} x {reason}' for reason, n in reasons(rejects)[:3])}."
        )
    errors = len(errors_in(rejects))
    counts = {"in": plan.rows, "written": written, "rejected": errors}
    counts["skipped"] = len(rejects) - errors
    return _manifest(job, splits, counts), rejects


def _remove_shards(job: ConversionJob, plan: ConversionPlan) -> None:
    shutil.rmtree(job.work, ignore_errors=True)
    for target in plan.targets:
        for path in (target.name, target.name + index.SUFFIX):
            storage.remove(storage.join(job.output, path))


def _manifest(
    job: ConversionJob, splits: dict[str, list[Shard]], counts: dict[str, int]
) -> DatasetManifest:
    names = [path.rsplit("/", 1)[-1] for path in job.source.files]
    source = {
        "kind": job.source.kind,
        "files": names[:100],
        "number_of_files": len(names),
        "options": dataclasses.asdict(job.options),
    }
    source = json.loads(json.dumps(source))
    return DatasetManifest(
        job.output, job.options.name, job.source.schema, splits, source, tfdml.__version__, counts
    )


def _finish(manifest: DatasetManifest, rejects: list[dict[str, Any]]) -> None:
    if rejects:
        save_rejects(manifest, rejects)
    tfds_metadata.write(manifest)
    manifest.save()
