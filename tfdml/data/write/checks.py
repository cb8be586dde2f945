"""Checks before and after a conversion: disk space, an output to write to, an unchanged input."""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import tfdml
from tfdml.data.format import storage
from tfdml.data.format.manifest import SUFFIX
from tfdml.data.sources.source import Source
from tfdml.data.write import tfds_metadata
from tfdml.data.write.plan import ConversionOptions, ConversionPlan


def check_locations(source: Source, output: str) -> None:
    """Raises a ValueError if the output is within the input."""
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


def make_output(output: str) -> bool:
    """Makes the directory of the output; returns whether it is new.

    Raises:
        ValueError: If it cannot be made, or cannot be written to.
    """
    new = storage.is_local(output) and not os.path.exists(output)
    try:
        storage.make_directory(output)
        if storage.is_local(output) and not os.access(output, os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied or read-only", output)
    except OSError as error:
        raise ValueError(
            f"`output` must be a directory that can be written to. Received: {output!r}; "
            f"{error.strerror or error}."
        ) from error
    return new


def check_output(output: str, work: str, name: str, resume: bool, overwrite: bool) -> None:
    """Raises a ValueError if the output holds other files; removes files to be overwritten."""
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
                f"`resume` must be given only for an interrupted conversion. Received: {output!r}, "
                f"which has {'a finished one' if name + SUFFIX in there else 'none'}."
            )
        for file in there:
            if file.endswith(storage.PARTIAL):
                storage.remove(storage.join(output, file))
    elif os.path.isdir(work):
        raise ValueError(
            f"`output` must not have an interrupted conversion. Received: {output!r}. Continue it "
            f"with --resume, or start over with --overwrite."
        )
    elif there:
        raise ValueError(
            f"`output` must be empty. Received: {output!r}, with {there[:3]}. Choose another "
            f"directory, or remove its data set {name!r} with --overwrite."
        )


def identity(
    source: Source, options: ConversionOptions, plan: ConversionPlan, files: dict
) -> dict[str, Any]:
    """Returns the properties that must be the same when a conversion is resumed."""
    prints = hashlib.sha256(json.dumps(files, sort_keys=True, default=str).encode()).hexdigest()
    return {
        "tool": tfdml.__version__,
        "rows": plan.rows,
        "files": prints,
        "options": dataclasses.asdict(options) | {"max_errors": None, "on_error": None},
        "input options": dict(source.settings),
        "schema": source.schema.to_json(),
    }


def note_plan(work: str, identity: dict[str, Any]) -> None:
    """Notes what is converted; raises a ValueError if an earlier note differs."""
    plan_file = Path(work, "plan.json")
    plan = json.loads(json.dumps(identity))
    if not plan_file.exists():
        storage.write_bytes(str(plan_file), json.dumps(plan).encode())
        return
    before = json.loads(plan_file.read_text())
    differ = sorted(key for key in plan if plan[key] != before.get(key))
    if differ:
        raise ValueError(
            f"`resume` must be used with the same input and options. Received: "
            f"a different {', '.join(differ)}. Start over with --overwrite."
        )


def check_space(output: str, work: str, plan: ConversionPlan, options: ConversionOptions) -> None:
    """Raises a ValueError if a disk has less free space than what is about to be written."""
    done = sum(f.stat().st_size for f in Path(work).glob("dealt-*"))
    needed = {os.path.dirname(work): max(0, plan.bytes - done) if options.needs_shuffle else 0}
    if storage.is_local(output) and not options.compressed:
        needed[output] = needed.get(output, 0) + plan.bytes
        needed[output] -= sum(
            os.path.getsize(os.path.join(output, n)) for n in storage.names_in(output)
        )
    for directory, wanted in needed.items():
        free = shutil.disk_usage(directory).free
        if wanted > free:
            raise ValueError(
                f"`output` must have room for about {_size(wanted)}. Received: {_size(free)} free "
                f"at {directory}."
            )


def _size(count: int) -> str:
    """Returns a number of bytes with a unit, such as "1.5 MB"."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return f"{count} bytes"


def check_unchanged(before: dict[str, list]) -> None:
    """Raises a ValueError if a file has changed since its fingerprint was taken."""
    changed = []
    for path, printed in before.items():
        if not storage.exists(path) or storage.fingerprint(path) != printed:
            changed.append(path)
    if changed:
        raise ValueError(
            f"The input must not change while it is converted. Received: {len(changed)} changed "
            f"files, such as {changed[0]}. Start over with --overwrite."
        )
