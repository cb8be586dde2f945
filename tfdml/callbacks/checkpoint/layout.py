"""Comparison of a training's variables and optimizers with those of a checkpoint."""

import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

MODEL = "model"


@dataclasses.dataclass(frozen=True)
class LayoutChange:
    """A difference between a training and a checkpoint.

    Attributes:
        group: Group of variables: "model", "metrics", or the attribute of an optimizer.
        what: The difference, now and before, in words.
        fits: Whether the checkpoint's values fit the group's variables nevertheless.
    """

    group: str
    what: str
    fits: bool


def layout_changes(now: dict[str, Any], saved: dict[str, Any]) -> list[LayoutChange]:
    """Returns the first difference of each group of variables and of each optimizer.

    Keras numbers the objects of a class in a process: a model that was built several times, as in a
    notebook, has other numbers than after a restart. So numbers count by their order only.

    Args:
        now: Result of `ModelState.layout`.
        saved: The same of the checkpoint.
    """
    found = []
    for group in sorted(now["variables"].keys() | saved["variables"].keys()):
        change = _change_of(group, *(s["variables"].get(group, []) for s in (now, saved)))
        if change is not None:
            found.append(change)
    for name, config in now["optimizers"].items():
        before = saved["optimizers"].get(name, {})
        for key in sorted(config.keys() | before.keys()):
            if config.get(key) != before.get(key):
                what = f"{name} with {key}={_short(config.get(key))}"
                what += f", before {_short(before.get(key))}"
                found.append(LayoutChange(name, what, fits=True))
    return found


def _change_of(group: str, own: Sequence[list], other: Sequence[list]) -> LayoutChange | None:
    for mine, theirs in zip(own, other, strict=False):
        if mine[1:] != theirs[1:] or _without_numbers(mine[0]) != _without_numbers(theirs[0]):
            return LayoutChange(group, f"{_in_words(mine)}, before {_in_words(theirs)}", False)
    if len(own) != len(other):
        return LayoutChange(group, f"{len(own)} variables of {group}, before {len(other)}", False)
    # Optimizers join the parts of a variable's path, so only the model's show what has a number.
    if group == MODEL:
        pairs = zip(_with_orders(own), _with_orders(other), strict=True)
        for i, (mine, theirs) in enumerate(pairs):
            if mine != theirs:
                what = f"other names, {own[i][0]}, before {other[i][0]}"
                return LayoutChange(group, what, fits=True)
    return None


def _without_numbers(path: str) -> str:
    """Returns a path without the numbers that distinguish objects of a class in one process."""
    return re.sub(r"_\d+(?=[_/]|$)", "", path)


_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")


def _with_orders(variables: Sequence[list]) -> list[list[tuple[str, int]]]:
    """Returns the variables' paths, with the order of each number among those of its name."""
    paths = [
        [(m[1], int(m[2] or 0)) for m in map(_NUMBERED.fullmatch, path.split("/"))]
        for path, *_ in variables
    ]
    numbers: dict[str, set[int]] = collections.defaultdict(set)
    for path in paths:
        for name, number in path:
            numbers[name].add(number)
    orders = {name: sorted(found) for name, found in numbers.items()}
    return [[(name, orders[name].index(number)) for name, number in path] for path in paths]


def _short(value: Any) -> str:
    """Returns a value as messages show it: float32 numbers as they were written."""
    return f"{value:.7g}" if isinstance(value, float) else repr(value)


def _in_words(variable: list) -> str:
    path, shape, dtype = variable
    return f"{path} of shape {tuple(shape)} and dtype {dtype}"
