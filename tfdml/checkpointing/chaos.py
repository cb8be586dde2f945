"""Fault injection: the same program, ended or hindered at a chosen point of its training.

`tfdml chaos` passes the directory of the checkpoints and the fault to a program in the variable
TFDML_CHAOS. `FaultTolerantCheckpoint` reads it; the program needs no change.
"""

import dataclasses
import errno
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.checkpointing.commit import PARTIAL
from tfdml.checkpointing.directory import Checkpoint, CheckpointDirectory
from tfdml.checkpointing.files import Files

VARIABLE = "TFDML_CHAOS"
# Ways in which a process ends: a signal, or a power failure, which loses data not made durable.
ENDINGS = ("SIGKILL", "SIGTERM", "SIGSTOP", "power")
# Ways in which an operation on files fails.
FAILURES = ("ENOSPC", "EIO", "short write")
# Damage to a file of the newest checkpoint between two runs.
DAMAGES = ("bit flip", "truncation")
_TENSORS_OF_THE_PROCESS = "rank/random/tensorflow"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and the point at which it happens.

    Attributes:
        kind: One of `ENDINGS`, `FAILURES` or `DAMAGES`.
        where: Point of the fault: "operation" on files, "step" of training, "restore", "time" after
            the first step, or "between" two runs.
        number: Index of that point, from 0; for "time" milliseconds.
    """

    kind: str
    where: str
    number: int = 0


@dataclasses.dataclass(frozen=True)
class FaultPlan:
    """Instructions for one run of a program.

    Attributes:
        directory: Directory of its checkpoints.
        fault: Fault to inject; None for none.
        rank: Rank that gets the fault.
    """

    directory: str
    fault: Fault | None = None
    rank: int = 0

    def to_json(self) -> str:
        """Returns the value of the variable."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "FaultPlan":
        """Returns the plan in a value of the variable."""
        fields = json.loads(text)
        fault = Fault(**fields.pop("fault")) if fields["fault"] else None
        return FaultPlan(**{**fields, "fault": fault})


class Chaos(Files):
    """Files and training steps that are counted, with a fault injected at one of them.

    Args:
        fault: Fault to inject; None for none.
        counts: Path of a file to which the counts are written at the end; None for no file.
    """

    def __init__(self, fault: Fault | None, counts: str | None = None):
        self._fault = fault
        self._counts = counts
        self._numbers = {"operation": 0, "step": 0, "restore": 0}
        # Data that a power failure would lose: files that were not synced, and the last rename.
        self._unsynced: dict[int, str] = {}
        self._lost: set[str] = set()
        self._renamed: tuple[str, str] | None = None
        self._timer: threading.Timer | None = None

    # -- Points of a training ------------------------------------------------------------------

    def restore(self) -> None:
        """Counts a restore, before a state is read."""
        self._reach("restore")

    def step(self) -> None:
        """Counts a step that has been trained."""
        if self._numbers["step"] == 0 and self._fault and self._fault.where == "time":
            self._timer = threading.Timer(self._fault.number / 1000, self._happen)
            self._timer.daemon = True
            self._timer.start()
        self._reach("step")

    def note_counts(self) -> None:
        """Writes the counts so far, after a training has ended."""
        if self._counts:
            Path(self._counts).write_text(json.dumps(self._numbers), encoding="utf-8")

    def end(self) -> None:
        """Cancels a fault that is still to come: this process's later work is not in the run."""
        if self._timer is not None:
            self._timer.cancel()

    def _reach(self, where: str) -> bool:
        """Counts a point and injects the fault if it is due; returns whether it was due."""
        number = self._numbers[where]
        self._numbers[where] += 1
        if (self._fault is None) or (self._fault.where, self._fault.number) != (where, number):
            return False
        if self._fault.kind in ENDINGS:
            self._happen()
        elif self._fault.kind in errno.errorcode.values():
            code = getattr(errno, self._fault.kind)
            raise OSError(code, os.strerror(code))
        return True

    def _happen(self) -> None:
        kind = self._fault.kind
        if kind == "power":
            for path in {*self._unsynced.values(), *self._lost}:
                if os.path.exists(path):
                    os.truncate(path, 0)
            if self._renamed is not None and os.path.exists(self._renamed[1]):
                os.rename(*reversed(self._renamed))
        os.kill(os.getpid(), getattr(signal, kind, signal.SIGKILL))
        time.sleep(0.05)  # SIGTERM and SIGSTOP reach the main thread soon, not at once.

    # -- Operations on files -------------------------------------------------------------------

    def make_directory(self, path: str) -> None:
        """See `Files`."""
        self._reach("operation")
        super().make_directory(path)

    def create(self, path: str) -> int:
        """See `Files`."""
        self._reach("operation")
        file = super().create(path)
        self._unsynced[file] = path
        return file

    def write(self, file: int, data: memoryview) -> int:
        """See `Files`."""
        short = self._reach("operation")
        return super().write(file, data[: (len(data) + 1) // 2] if short else data)

    def sync(self, file: int) -> None:
        """See `Files`."""
        self._reach("operation")
        super().sync(file)
        self._unsynced.pop(file, None)

    def close(self, file: int) -> None:
        """See `Files`."""
        super().close(file)
        if file in self._unsynced:
            self._lost.add(self._unsynced.pop(file))

    def sync_directory(self, path: str) -> None:
        """See `Files`."""
        self._reach("operation")
        super().sync_directory(path)
        self._renamed = None

    def rename(self, source: str, target: str) -> None:
        """See `Files`."""
        self._reach("operation")
        super().rename(source, target)
        commits = os.path.basename(target).startswith("fit-")
        self._renamed = (source, target) if commits else None

    def unlink(self, path: str) -> None:
        """See `Files`."""
        self._reach("operation")
        super().unlink(path)

    def remove_directory(self, path: str) -> None:
        """See `Files`."""
        self._reach("operation")
        super().remove_directory(path)


def random_fault(numbers: random.Random, counts: dict[str, int], milliseconds: int) -> Fault:
    """Returns a random fault at a random point.

    Args:
        numbers: Random generator.
        counts: Numbers of operations and steps of a run without faults.
        milliseconds: Duration of the training in milliseconds.
    """
    kind = numbers.choice(
        ["SIGKILL"] * 4 + ["power"] * 3 + ["SIGTERM", "SIGSTOP", *FAILURES, *DAMAGES]
    )
    if kind in DAMAGES:
        return Fault(kind, "between", numbers.randrange(1 << 30))
    if kind in FAILURES or kind == "power":
        return Fault(kind, "operation", numbers.randrange(counts["operation"]))
    where = numbers.choice(["operation"] * 4 + ["step", "step", "time", "restore"])
    if where == "time":
        return Fault(kind, where, numbers.randrange(max(milliseconds, 1)))
    return Fault(kind, where, numbers.randrange(max(counts.get(where, 1), 1)))


def damage(directory: str, fault: Fault) -> bool:
    """Damages a file of the newest checkpoint, if an older one is left; returns whether it did."""
    names = CheckpointDirectory(directory, Files(), print).checkpoints()
    if len(names) < 2:
        return False
    files = sorted(Path(directory, names[-1]).iterdir())
    path = files[fault.number % len(files)]
    content = bytearray(path.read_bytes())
    position = fault.number % max(len(content), 1)
    if fault.kind == "truncation":
        content = content[:position]
    else:
        content[position] ^= 1 << (fault.number % 8)
    path.write_bytes(content)
    return True


def differences(one: str, other: str) -> list[str]:
    """Returns the differences between the ends of two runs, in words; empty if bit-identical.

    Args:
        one: Directory of one run's checkpoints.
        other: Directory of the other run's checkpoints.
    """
    ends = []
    for directory in (one, other):
        own = CheckpointDirectory(directory, Files(), print)
        partial = [n for n in os.listdir(directory) if n.startswith(PARTIAL)]
        if partial:
            return [f"{directory} has partial checkpoints: {', '.join(partial)}"]
        fits = sorted({int(name.split("-")[1]) for name in own.checkpoints()})
        if not fits:
            return [f"{directory} has no checkpoint"]
        ends.append(own.newest(fits[-1]))
    return _differences(*ends)


def _differences(one: Checkpoint, other: Checkpoint) -> list[str]:
    empty = {"members": (), "server_members": (), "saved": 0.0}
    manifests = [dataclasses.replace(c.manifest, **empty) for c in (one, other)]
    first, second = (_flat(dataclasses.asdict(manifest)) for manifest in manifests)
    found = [
        f"{name} ({first.get(name)}, {second.get(name)})"
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    ]
    for (tensors, notes), (others, other_notes) in zip(one.read(), other.read(), strict=True):
        if json.dumps(notes) != json.dumps(other_notes):
            found.append("the state of random generators")
        for name in sorted(tensors.keys() | others.keys()):
            if name == _TENSORS_OF_THE_PROCESS:
                continue
            a, b = tensors.get(name), others.get(name)
            if a is None or b is None or not _same(a, b):
                found.append(name)
    tables, others = one.tables(), other.tables()
    for name in sorted(tables.keys() | others.keys()):
        a, b = tables.get(name), others.get(name)
        if a is None or b is None or not all(_same(a[rows], b[rows]) for rows in a.blocks()):
            found.append(name)
    return found


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Returns the leaves of plain data as text, by path, so that NaN equals NaN."""
    if not isinstance(value, (dict, list, tuple)) or not value:
        return {name: json.dumps(value)}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for key, part in items for k, v in _flat(part, f"{name}/{key}").items()}


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and a.tobytes() == b.tobytes()
