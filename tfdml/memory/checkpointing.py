"""Activations that gradient checkpointing leaves of a step, by the best division in blocks.

Inside a checkpointed block the forward pass keeps nothing; the backward pass computes the block
again. So what is kept is each block's input, and the inside of one block at a time.
"""

import dataclasses
from collections.abc import Sequence

from tfdml.tensor_memory.graph_nodes import StepNodes
from tfdml.tensor_memory.liveness import last_uses

# Bounds on a block's inside that are tried: this many, between nothing and all that is kept.
_TRIES = 40
# Places where blocks may end: at most as many, where the fewest bytes cross.
_PLACES = 400


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A division of the forward pass.

    Attributes:
        count: The number of blocks; 1 if division gains nothing.
        kept: Bytes that the forward pass keeps for the backward pass without checkpointing.
        nbytes: Bytes that are kept with it: all blocks' inputs, and the largest inside.
    """

    count: int
    kept: int
    nbytes: int


def best_blocks(steps: StepNodes) -> Blocks:
    """Divides a step's forward pass so that the fewest bytes are kept.

    Args:
        steps: The step.

    Reference:
        Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
    """
    forward = steps.nodes[: steps.num_forward]
    last = last_uses(steps.nodes)
    last_in_forward = last_uses(forward)
    kept_at, crossing = [0] * len(forward), [0] * (len(forward) + 1)
    for index, node in enumerate(forward):
        for buffer in node.makes:
            if last[buffer] >= steps.num_forward:
                kept_at[index] += steps.sizes[buffer]
            # What is read after a cut has to be kept at the cut.
            crossing[index + 1] += steps.sizes[buffer]
            crossing[last_in_forward[buffer] + 1] -= steps.sizes[buffer]
    total, width = sum(kept_at), _sums(crossing)
    best = Blocks(1, total, total)
    inside = _sums([0, *kept_at])
    places = _places(width[1:-1], inside)
    for number in range(1, _TRIES):
        found = _divide(places, width, inside, total * number // _TRIES)
        if found is not None and found.nbytes < best.nbytes:
            best = found
    return best


def _sums(values: Sequence[int]) -> list[int]:
    sums, total = [], 0
    for value in values:
        total += value
        sums.append(total)
    return sums


def _places(width: Sequence[int], inside: Sequence[int]) -> list[int]:
    """Returns numbers of forward operations after which a block may end, and both ends.

    Of places between which nothing is kept, only the narrowest is of use.
    """
    narrowest: dict[int, int] = {}
    for index, nbytes in enumerate(width, start=1):
        at = narrowest.get(inside[index])
        if at is None or nbytes < width[at - 1]:
            narrowest[inside[index]] = index
    chosen = sorted(narrowest.values(), key=lambda i: width[i - 1])[:_PLACES]
    return [0, *sorted(chosen), len(inside) - 1]


def _divide(
    places: Sequence[int], width: Sequence[int], inside: Sequence[int], most: int
) -> Blocks | None:
    """Returns the blocks with the smallest inputs whose insides are at most `most` bytes."""
    # For each place: bytes of the inputs of the blocks before it, and their number.
    costs: list[tuple[int, int] | None] = [(0, 0)]
    for end in range(1, len(places)):
        best = None
        for begin in range(end - 1, -1, -1):
            if inside[places[end]] - inside[places[begin]] > most:
                break
            if costs[begin] is not None:
                own = width[places[begin]] if begin else 0
                cost = costs[begin][0] + own, costs[begin][1] + 1
                best = cost if best is None else min(best, cost)
        costs.append(best)
    if costs[-1] is None:
        return None
    nbytes, count = costs[-1]
    return Blocks(count, inside[-1], nbytes + most)
