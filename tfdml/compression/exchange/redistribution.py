"""Redistribution of the compression state of the ranks over another number of ranks."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from tfdml.compression.exchange.two_phase import chunk_length

_DEVICE = re.compile(r"device_(\d+)/")
# State of each rank that will enter the sum over the ranks.
_OWN = ("residual/", "velocity/")
# The chunk owners' residuals of a part of a bucket, and the part's length and block size.
OWNER_RESIDUAL, CHUNK_LAYOUT = "server_residual/", "part/"


def states_by_rank(
    states: Sequence[Mapping[str, np.ndarray]],
) -> list[dict[str, np.ndarray]]:
    """Returns one state per rank, splitting the states of processes with several devices.

    A process may hold the states of several devices, each of them a rank.

    Args:
        states: Each process's state.
    """
    ranks = []
    for state in states:
        devices: dict[int, dict[str, np.ndarray]] = {}
        for name, value in state.items():
            if found := _DEVICE.match(name):
                devices.setdefault(int(found[1]), {})[name[found.end() :]] = value
        ranks += [devices[number] for number in sorted(devices)] or [dict(state)]
    return ranks


def redistributed(
    states: Sequence[dict[str, np.ndarray]], size: int
) -> list[dict[str, np.ndarray]]:
    """Returns the states for another number of ranks; no residual is lost.

    Gradients are summed over the ranks, so the unsent part is the sum of all ranks' residuals, and
    each new rank gets an equal share of it. (Where ranks average gradients, that is the mean.) The
    chunk owners' residuals are concatenated and cut into new chunks; the rest is the same on all
    ranks.

    Args:
        states: `CompressedAggregator.state` of each rank, in the order of the ranks.
        size: The new number of ranks.

    Raises:
        ValueError: If the states do not have the same names, or `size` is not positive.
    """
    names = states[0].keys()
    if any(s.keys() != names for s in states):
        raise ValueError(
            "`states` must be those of all ranks of one job, at the same step. "
            "Received: states with different names."
        )
    if size < 1:
        raise ValueError(f"`size` must be a positive number of ranks. Received: size={size}.")
    new: list[dict[str, np.ndarray]] = [{} for _ in range(size)]
    for name in names:
        values = [state[name] for state in states]
        if name.startswith(_OWN):
            parts = [np.sum(values, 0, dtype=values[0].dtype) / values[0].dtype.type(size)] * size
        elif name.startswith(OWNER_RESIDUAL):
            length, block = map(int, states[0][CHUNK_LAYOUT + name.removeprefix(OWNER_RESIDUAL)])
            parts = _cut(np.concatenate(values)[:length], block, size)
        else:
            parts = values[:1] * size
        for rank, part in enumerate(parts):
            new[rank][name] = part
    return new


def _cut(whole: np.ndarray, block: int, size: int) -> list[np.ndarray]:
    chunk = chunk_length(len(whole), size, block)
    return list(np.pad(whole, (0, size * chunk - len(whole))).reshape(size, chunk))
