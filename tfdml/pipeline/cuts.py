"""Where a model is cut into stages: by the costs of its calls, or by names of layers."""

import difflib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np

from tfdml.pipeline.layer_graph import LayerGraph
from tfdml.reports import in_words

# Sums of the same numbers in another order differ by less.
_ROUNDING = 1e-9


class SentTensor(NamedTuple):
    """A tensor that goes from one stage to another.

    Attributes:
        tensor: The symbolic tensor.
        maker: The stage that makes it.
        user: A later stage that uses it.
    """

    tensor: keras.KerasTensor
    maker: int
    user: int


def cut_by_cost(
    costs: Sequence[float],
    num_stages: int,
    memory: Sequence[float] | Callable[[int, int, int], float] | None = None,
    limits: Sequence[float] | None = None,
    transfer: Sequence[float] | None = None,
    names: Sequence[str] | None = None,
) -> list[int]:
    """Cuts calls into stages so that the slowest stage is as fast as possible.

    A stage takes the time of its calls, and of the transfers at both of its ends. Of several such
    cuts, the most even one is chosen, that with the smallest sum of squares of the stages' times;
    of several of these, that whose last stage begins first, then the last but one, and so on.

    Dynamic programming over the first calls of stages: O(n² p) for n calls and p stages.

    Args:
        costs: Seconds of each call.
        num_stages: The number of stages. None of them is empty.
        memory: Bytes of each call; or a function that returns the bytes of the stage of a number
            with the calls from `begin` up to `end`: `memory(stage, begin, end)`. It must not
            decrease with more calls.
        limits: The most bytes of each stage; None for no limits.
        transfer: For each call, seconds that a cut before it costs the stages on both sides; None
            for 0. The first is not used.
        names: Names of the calls, for messages.

    Returns:
        The number of the first call of each stage; the first is 0.

    Raises:
        ValueError: If there are fewer calls than stages, or no cut is within the limits.
    """
    count = len(costs)
    _check_numbers(count, num_stages, memory, limits, transfer)
    seconds = _seconds(costs, transfer or [0.0] * count)
    allowed = [seconds] * num_stages
    if limits is not None:
        taken = _bytes_of(memory, num_stages, count)
        allowed = [
            np.where(table <= limit, seconds, np.inf)
            for table, limit in zip(taken, limits, strict=True)
        ]
        _check_limits(taken, limits, names or [f"call {n}" for n in range(count)])
    # best[j]: the slowest of the stages so far, if they end before call j.
    best = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    for table in allowed:
        best = np.maximum(best[:, None], table).min(axis=0)
    slowest = best[count] * (1 + _ROUNDING)
    begins = []
    even = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    for table in allowed:
        sums = even[:, None] + np.where(table <= slowest, table, np.inf) ** 2
        begins.append(sums.argmin(axis=0))
        even = sums.min(axis=0)
    cuts, end = [], count
    for begin in reversed(begins):
        end = int(begin[end])
        cuts.insert(0, end)
    return cuts


def stages_of(cuts: Sequence[int], count: int) -> list[int]:
    """Returns the stage of each call.

    Args:
        cuts: The first call of each stage.
        count: The number of calls.
    """
    return [int(np.searchsorted(cuts, number, side="right")) - 1 for number in range(count)]


def cut_by_names(graph: LayerGraph, stages: Sequence[Sequence[str]]) -> list[int]:
    """Cuts a model into stages with given layers.

    Every layer with weights must be in a stage. Other calls go where what they depend on is: to the
    latest stage of it. So do further calls of a layer that is called several times, but not to a
    stage before that of the layer.

    Args:
        graph: The model's calls.
        stages: Names of the layers of each stage; operations without weights may be named as well.

    Returns:
        The stage of each call. No call is in an earlier stage than one that it depends on.

    Raises:
        ValueError: If a name is unknown or there twice, a layer with weights is missing, a stage is
            empty, or a stage needs the result of a later one.
    """
    stage_of = _named_stages(graph, stages)
    assignment: list[int] = []
    # For each call, the named layer that has determined its stage.
    decided_by: list[str | None] = []
    seen: set[str] = set()
    for name, call in zip(graph.names, graph.calls, strict=True):
        makers = [m for m in map(graph.maker, call.input_tensors) if m >= 0]
        latest = max(makers, key=lambda m: assignment[m], default=None)
        needed = 0 if latest is None else assignment[latest]
        own = stage_of.get(name)
        if own is not None and name not in seen and needed > own:
            raise ValueError(
                f"A tensor must not go back to an earlier stage. Received: `stages` with "
                f"{name!r} in stage {own}, which uses what {decided_by[latest]!r} in stage "
                f"{needed} makes. Move {name!r} to stage {needed} or later, or "
                f"{decided_by[latest]!r} to stage {own} or earlier."
            )
        seen.add(name)
        if own is not None and own >= needed:
            assignment.append(own)
            decided_by.append(name)
        else:
            assignment.append(needed)
            decided_by.append(None if latest is None else decided_by[latest])
    return assignment


def sent_tensors(graph: LayerGraph, assignment: Sequence[int]) -> list[SentTensor]:
    """Returns the tensors that stages send, in order of making: once to each stage that uses it.

    The model's outputs are used in the last stage, where the losses are. Its inputs are not among
    them: a stage takes them from the batch.

    Args:
        graph: The model's calls.
        assignment: The stage of each call.
    """
    users: dict[int, set[int]] = {id(tensor): {max(assignment)} for tensor in graph.outputs}
    for call, stage in zip(graph.calls, assignment, strict=True):
        for tensor in call.input_tensors:
            users.setdefault(id(tensor), set()).add(stage)
    return [
        SentTensor(tensor, stage, user)
        for call, stage in zip(graph.calls, assignment, strict=True)
        for tensor in call.outputs
        for user in sorted(users.get(id(tensor), ()))
        if user != stage
    ]


# -- By cost -------------------------------------------------------------------------------------


def _check_numbers(
    count: int,
    num_stages: int,
    memory: Sequence[float] | Callable | None,
    limits: Sequence[float] | None,
    transfer: Sequence[float] | None,
) -> None:
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise ValueError(
            f"`num_stages` must be a positive number. Received: num_stages={num_stages!r}."
        )
    if num_stages > count:
        raise ValueError(
            f"Every stage needs a call of a layer. Received: num_stages={num_stages} and a model "
            f"with {count} calls. Use at most {count} devices in a group."
        )
    if (memory is None) != (limits is None):
        raise ValueError(
            f"`memory` and `limits` go together. Received: memory={memory!r}, limits={limits!r}."
        )
    expected = {"limits": (limits, num_stages), "transfer": (transfer, count)}
    if not callable(memory):
        expected["memory"] = memory, count
    for name, (given, length) in expected.items():
        if given is not None and len(given) != length:
            raise ValueError(
                f"`{name}` must have {length} numbers, one for each "
                f"{'stage' if name == 'limits' else 'call'}. Received: {len(given)}."
            )


def _seconds(costs: Sequence[float], transfer: Sequence[float]) -> np.ndarray:
    """Returns for each begin and end the seconds of such a stage; infinity for an empty one."""
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
    at_ends = np.append(np.asarray(transfer, float), 0.0)
    at_ends[0] = 0.0
    return _where_filled(ends[None, :] - ends[:, None] + at_ends[:, None] + at_ends[None, :])


def _bytes_of(
    memory: Sequence[float] | Callable[[int, int, int], float], num_stages: int, count: int
) -> list[np.ndarray]:
    """Returns for each stage, by begin and end, its bytes; infinity for an empty one."""
    if not callable(memory):
        ends = np.concatenate([[0.0], np.cumsum(np.asarray(memory, float))])
        return [_where_filled(ends[None, :] - ends[:, None])] * num_stages
    tables = []
    for stage in range(num_stages):
        table = np.full((count + 1, count + 1), np.inf)
        for begin in range(count):
            for end in range(begin + 1, count + 1):
                table[begin, end] = memory(stage, begin, end)
        tables.append(table)
    return tables


def _where_filled(table: np.ndarray) -> np.ndarray:
    """Returns a table by begin and end with infinity where the end is not after the begin."""
    return np.where(np.triu(np.ones(table.shape, bool), k=1), table, np.inf)


def _check_limits(
    taken: Sequence[np.ndarray], limits: Sequence[float], names: Sequence[str]
) -> None:
    """Raises if no cut is within the limits.

    Raises:
        ValueError: The error, with the stage and the layer.
    """
    count = len(names)
    fix = "Use more stages, more microbatches of fewer rows, or a smaller optimizer."
    for number, name in enumerate(names):
        least = min(table[number, number + 1] for table in taken)
        if all(
            table[number, number + 1] > limit for table, limit in zip(taken, limits, strict=True)
        ):
            raise ValueError(
                f"A stage must be within its memory limit. {name!r} alone takes at least "
                f"{in_words(int(least))}, and the largest limit is {in_words(int(max(limits)))}. A "
                f"layer is not divided: raise the limit or make the layer smaller."
            )
    reachable = np.arange(count + 1) == 0
    for stage, (table, limit) in enumerate(zip(taken, limits, strict=True)):
        first = int(np.flatnonzero(reachable)[-1])
        reachable = (reachable[:, None] & (table <= limit)).any(axis=0)
        if not reachable.any():
            raise ValueError(
                f"Each stage must be within its memory limit. Stage {stage} of {len(limits)}, with "
                f"a limit of {in_words(int(limit))}, has to begin with "
                f"{names[min(first, count - 1)]!r} or an earlier call, and can hold none of them. "
                f"{fix}"
            )
    if not reachable[count]:
        first = int(np.flatnonzero(reachable)[-1])
        raise ValueError(
            f"Each stage must be within its memory limit. {len(limits)} stages with limits of "
            f"{', '.join(in_words(int(limit)) for limit in limits)} hold at most the calls before "
            f"{names[first]!r}, which would take {in_words(int(taken[-1][first, first + 1]))} of "
            f"stage {len(limits) - 1}. {fix}"
        )


# -- By names ------------------------------------------------------------------------------------


def _named_stages(graph: LayerGraph, stages: Sequence[Sequence[str]]) -> dict[str, int]:
    """Returns the stage of each named layer.

    Raises:
        ValueError: If `stages` does not name each layer with weights once.
    """
    known = list(dict.fromkeys(graph.names))
    found: dict[str, int] = {}
    if isinstance(stages, str) or not stages:
        raise ValueError(f"{_RULE} Received: stages={stages!r}. {_EXAMPLE}")
    for stage, names in enumerate(stages):
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{_RULE} Received: {names!r} for stage {stage}. {_EXAMPLE}")
        if not names:
            raise ValueError(
                f"No stage may be empty. Received: `stages` with no layer in stage {stage}. Name a "
                f"layer, or use one device less."
            )
        for name in names:
            if name not in known:
                raise ValueError(
                    f"`stages` must name layers of the model. Received: {name!r} in stage {stage}. "
                    f"{_suggestion(graph, name)}"
                )
            if name in found:
                raise ValueError(
                    f"`stages` must name a layer once. Received: {name!r} in stage {found[name]} "
                    f"and in stage {stage}. A layer that is called several times is named for its "
                    f"first call."
                )
            found[name] = stage
    with_weights = dict.fromkeys(
        call.operation.name for call in graph.calls if getattr(call.operation, "weights", ())
    )
    missing = [name for name in with_weights if name not in found]
    if missing:
        raise ValueError(
            f"`stages` must name every layer with weights. Missing: "
            f"{', '.join(map(repr, missing))}. Add each to the stage that shall have its weights."
        )
    return found


_RULE = "`stages` must be lists of names of layers, one for each stage."
_EXAMPLE = 'Use for example [["embed", "block_0"], ["block_1", "head"]].'


def _suggestion(graph: LayerGraph, name: str) -> str:
    for call in graph.calls:
        inside = getattr(call.operation, "_flatten_layers", lambda **_: ())(include_self=False)
        if any(layer.name == name for layer in inside):
            return f"It is inside of {call.operation.name!r}, which is not divided: name that."
    if any(name == tensor.name for tensor in graph.inputs):
        return "It is an input, which goes to the stages that read it: leave it out."
    close = difflib.get_close_matches(name, graph.names)
    if close:
        return f"Close names are {', '.join(map(repr, dict.fromkeys(close)))}."
    return f"The model's are {', '.join(map(repr, dict.fromkeys(graph.names)))}."
