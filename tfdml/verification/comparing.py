"""Comparison of two runs, tensor by tensor; what rounding explains is no difference."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdml.verification import record
from tfdml.verification.aligning import Key, RecordedRun, order_of_rows

# A tensor differs if it is this many times as far off as a change in the last place makes it.
MARGIN = 10.0
# Distance that rounding may have by chance, by dtype of the layers: about 100 units of the last
# place, fewer of the short ones.
_BY_CHANCE = {"float64": 2e-14, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
# A run that is changed in the last place moves a layer's output in the first step by far less.
_REPEATABLE = 1e-2


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Comparison of a tensor in two runs.

    Attributes:
        key: Step, kind and name.
        distance: Largest distance of two numbers, relative to the largest number of the reference;
            infinite if the runs do not have the same tensor.
        rounding: The distance that rounding explains.
        replicas: The replicas (of gradients' sums, weights and metrics the ranks) that differ.
        differs: Whether the distance is too large.
    """

    key: Key
    distance: float
    rounding: float
    replicas: tuple[int, ...] = ()
    differs: bool = False


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Comparison of a run on several replicas with the same run on one.

    Attributes:
        one: The run on one replica.
        again: The same, changed in the last place.
        several: The run on several replicas.
        tensors: The compared tensors, in the order in which steps compute them, up to the first
            step whose rows differ.
    """

    one: RecordedRun
    again: RecordedRun
    several: RecordedRun
    tensors: Sequence[Tensor]

    @property
    def first(self) -> Tensor | None:
        """The first tensor that differs; None if none does."""
        return next((t for t in self.tensors if t.differs), None)


def compare(one: RecordedRun, again: RecordedRun, several: RecordedRun) -> Comparison:
    """Compares a run on several replicas with the same run on one.

    Args:
        one: The run on one replica.
        again: The same, with inputs and initial weights changed in the last place.
        several: The run on several replicas.
    """
    by_chance = _BY_CHANCE[one.facts["precision"]]
    noises = _noises(one, again)
    usual = _usual(noises)
    tensors: list[Tensor] = []
    step, order = None, None
    for key in _keys(one, several):
        if key[0] != step:
            step = key[0]
            order = order_of_rows(several.rows(step), one.rows(step))
            if order is None or order_of_rows(again.rows(step), one.rows(step)) is None:
                replicas = _with_other_rows(several, one, step)
                tensors.append(Tensor(key, np.inf, 0.0, replicas, differs=True))
                return Comparison(one, again, several, tensors)
        if key[1] == record.ROWS:
            tensors.append(Tensor(key, 0.0, 0.0))
            continue
        if not _is_comparable(one, several, key):
            continue
        noise = noises.get(key, 0.0)
        rounding = max(noise, usual.get(key[:2], 0.0), by_chance / MARGIN)
        found = _distance(one, several, key, order)
        # A layer that draws other numbers in each run is off by as much on one replica.
        is_random = key[:2] == (0, record.OUTPUT) and noise > _REPEATABLE and _draws(one, key[2])
        limit = by_chance if is_random else MARGIN * rounding
        differs = not found <= limit
        replicas = _differing(one, several, key, order, limit) if differs else ()
        tensors.append(Tensor(key, found, limit, replicas, differs))
    return Comparison(one, again, several, tensors)


def _noises(one: RecordedRun, again: RecordedRun) -> dict[Key, float]:
    """Returns by how much a change in the last place has moved each tensor."""
    found, step, order = {}, None, None
    for key in one.tensors:
        if key[0] != step:
            step, order = key[0], order_of_rows(again.rows(key[0]), one.rows(key[0]))
        if key[1] != record.ROWS and order is not None:
            noise = _distance(one, again, key, order)
            found[key] = noise if np.isfinite(noise) else 0.0
    return found


def _usual(noises: dict[Key, float]) -> dict[tuple[int, str], float]:
    """Returns the largest noise of each kind of tensors in each step, random layers aside.

    A tensor of few numbers may move less than the others by chance.
    """
    usual: dict[tuple[int, str], float] = {}
    for (step, kind, _), noise in noises.items():
        if noise <= _REPEATABLE:
            usual[step, kind] = max(noise, usual.get((step, kind), 0.0))
    return usual


def _is_comparable(one: RecordedRun, several: RecordedRun, key: Key) -> bool:
    """Returns whether a tensor of a step has the same numbers for each row in both runs.

    The rows of a layer's output are not told apart from another first axis, such as positions,
    whose length may be a multiple of a replica's rows.
    """
    entries = [*one.tensors.get(key, ()), *several.tensors.get(key, ())]
    is_of_step = key[1] in (record.OUTPUT, record.LOSS)
    return not is_of_step or len({(e.layout, e.size) for e in entries}) == 1


def _draws(run: RecordedRun, output: str) -> bool:
    """Returns whether the layer of an output draws random numbers."""
    return "draws" in run.facts["layers"].get(layer_of(output), {})


def layer_of(output: str) -> str:
    """Returns the name of the layer of an output."""
    return output.partition(",")[0].partition("[")[0]


def _keys(one: RecordedRun, several: RecordedRun) -> list[Key]:
    """Returns the tensors of both runs, those that one run alone has after the one before them."""
    keys = list(one.tensors)
    known = set(keys)
    for position, key in enumerate(several.tensors):
        if key not in known:
            keys.insert(position, key)
    return sorted(keys, key=lambda key: key[0])


def _distance(one: RecordedRun, other: RecordedRun, key: Key, order: np.ndarray | None) -> float:
    """Returns the largest distance of a tensor of two runs, relative to its largest number."""
    if key not in one.tensors or not _is_complete(other, key):
        return np.inf
    reference, scale = one.whole(key)[0], None
    if key[1] in (record.GRADIENT, record.SUM):
        # Some gradients are zero but for rounding: they are compared with the largest.
        scale = one.largest_gradient(key[0])
    found = other.whole(key)
    return max(relative(_ordered(v, key, other, order), reference, scale) for v in found)


def _is_complete(run: RecordedRun, key: Key) -> bool:
    """Returns whether each replica or rank with rows has a tensor."""
    there = len(run.tensors.get(key, ()))
    is_of_ranks = key[1] in (record.WEIGHT, record.METRIC)
    return there == (len(run.records) if is_of_ranks else len(run.digests(key[0])))


def _ordered(
    values: np.ndarray, key: Key, run: RecordedRun, order: np.ndarray | None
) -> np.ndarray:
    by_rows = run.tensors[key][0].layout == record.BY_ROWS
    return values[order] if by_rows and order is not None and len(values) == len(order) else values


def relative(values: np.ndarray, reference: np.ndarray, scale: float | None = None) -> float:
    """Returns the largest distance of numbers, relative to the largest number of the reference.

    Args:
        values: The numbers.
        reference: The reference's numbers.
        scale: Number that the distance is relative to instead.
    """
    if values.shape != reference.shape:
        return np.inf
    alike = (values == reference) | (np.isnan(values) & np.isnan(reference))
    if alike.all():
        return 0.0
    if scale is None:
        scale = np.max(np.abs(reference), initial=0.0, where=np.isfinite(reference))
    with np.errstate(invalid="ignore", over="ignore"):
        farthest = np.max(np.where(alike, 0.0, np.abs(values - reference)))
    return float(farthest / scale) if scale and np.isfinite(farthest) else np.inf


def _differing(
    one: RecordedRun, several: RecordedRun, key: Key, order: Any, limit: float
) -> tuple[int, ...]:
    """Returns the replicas whose part of a tensor differs; all of them if parts cannot be told."""
    entries = several.tensors.get(key, [])
    everyone = tuple(e.replica for e in entries)
    if key not in one.tensors or not entries:
        return everyone
    reference = one.whole(key)[0]
    if entries[0].layout == record.AS_SAME:
        return tuple(e.replica for e in entries if not relative(e.values, reference) <= limit)
    if entries[0].layout != record.BY_ROWS or len(reference) != len(order):
        return everyone
    # Where the reference's rows are that a replica has.
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    scale, begin, found = np.max(np.abs(reference), initial=0.0), 0, []
    for entry in entries:
        own = reference[places[begin : begin + len(entry.values)]]
        begin += len(entry.values)
        same_shape = own.shape == entry.values.shape
        if not same_shape or not np.max(np.abs(entry.values - own), initial=0.0) <= limit * scale:
            found.append(entry.replica)
    return tuple(found)


def _with_other_rows(several: RecordedRun, one: RecordedRun, step: int) -> tuple[int, ...]:
    """Returns the replicas that have rows in a step that the reference does not have."""
    known = one.rows(step)
    return tuple(
        replica
        for replica, rows in enumerate(several.digests(step))
        if not np.isin(rows, known).all()
    )
