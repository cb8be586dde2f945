"""What ranks keep between steps, given to the ranks of another job, also to fewer or more."""

from collections.abc import Mapping, Sequence

import numpy as np


def kept_by(
    rank: int, size: int, name: str, before: Sequence[Mapping[str, np.ndarray]], length: int
) -> np.ndarray:
    """Returns what a rank takes up of a tensor that the ranks of before have kept.

    With as many ranks as before each takes its own. Else what gradients have left over
    (`residual/...`) is dealt out, so that its sum over the ranks stays; what each rank keeps of the
    sum (`server_residual/...`, one piece after the other) is cut anew; the rest is alike on all.

    Args:
        rank: The rank.
        size: The number of ranks now.
        name: The tensor's name.
        before: What each rank of before has kept, by name.
        length: The tensor's size in numbers on this rank now.
    """
    if len(before) == size:
        return before[rank][name]
    if name.startswith("residual/"):
        parts = [before[i][name] for i in range(rank, len(before), size)]
        return np.sum(parts, 0, dtype=before[0][name].dtype) if parts else before[0][name] * 0
    if name.startswith("server_residual/"):
        whole = np.concatenate([kept[name] for kept in before])
        own = np.zeros(length, whole.dtype)
        piece = whole[rank * length : (rank + 1) * length]
        own[: len(piece)] = piece
        return own
    return before[0][name]
