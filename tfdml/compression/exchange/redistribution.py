"""Redistribution of the ranks' compression state over another number of ranks, or other hosts."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from tfdml.collectives.hosts import Hosts
from tfdml.compression.exchange.host_part import HostPart
from tfdml.compression.exchange.native_stages import chunk_length

_DEVICE = re.compile(r"device_(\d+)/")
# State of each rank that will enter the sum over the ranks.
_OWN = ("residual/", "velocity/")
# State of each rank that stays with it; a new rank gets that of an earlier one.
OF_RANK = "momentum/"
# The chunk owners' residuals of a part of a bucket, and the part's length and block size.
OWNER_RESIDUAL, CHUNK_LAYOUT = "server_residual/", "part/"
# The host of each rank; whether an optimizer's gradients are summed by hosts; how a part of a
# bucket is then divided, and the end of the names of what a rank keeps of its slice and its chunk.
HOSTS, WAY, HOST_PART, OF_SLICE = "hosts", "by_hosts/", "host_part/", "@slice"


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
    chunk owners' residuals are concatenated and cut into new chunks; a rank's momentum stays with
    it; the rest is the same on all ranks.

    Args:
        states: `CompressedAggregator.state` of each rank, in the order of the ranks.
        size: The new number of ranks.

    Raises:
        ValueError: If the states do not have the same names, or `size` is not positive.
    """
    states = without_hosts(states)
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
        elif name.startswith(OF_RANK):
            parts = [values[rank % len(values)] for rank in range(size)]
        else:
            parts = values[:1] * size
        for rank, part in enumerate(parts):
            new[rank][name] = part
    return new


def without_hosts(states: Sequence[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Returns the states as ranks would have them whose gradients are not summed by hosts.

    Args:
        states: `CompressedAggregator.state` of each rank, in the order of the ranks.
    """
    if HOSTS not in states[0]:
        return list(states)
    hosts = Hosts.of(states[0][HOSTS].tolist())
    flat = [{name: v for name, v in state.items() if not _is_of_hosts(name)} for state in states]
    for name, packed in states[0].items():
        if not name.startswith(HOST_PART):
            continue
        name, part = name.removeprefix(HOST_PART), HostPart.unpacked(packed)
        for key in _OWN:
            if f"{key}{name}{OF_SLICE}" in states[0]:
                # Peers keep residuals of the same slice, so these are summed over the hosts.
                whole = sum(
                    np.concatenate(
                        [states[r][f"{key}{name}{OF_SLICE}"] for r in own[: part.owners]]
                    )
                    for own in hosts.ranks
                )
                _share_out(whole[: part.length] / len(states), part, key, flat)
        if f"{OWNER_RESIDUAL}{name}{OF_SLICE}" in states[0]:
            chunks = {
                part.chunk_number(host, index): states[own[index]]
                for host, own in enumerate(hosts.ranks)
                for index in range(part.owners)
            }
            residual = [chunks[n][f"{OWNER_RESIDUAL}{name}{OF_SLICE}"] for n in sorted(chunks)]
            cut = _cut(np.concatenate(residual)[: part.length], part.block, len(states))
            for state, chunk in zip(flat, cut, strict=True):
                state[f"{OWNER_RESIDUAL}{name}"] = chunk
                state[f"{CHUNK_LAYOUT}{name}"] = np.array([part.length, part.block], np.int32)
    return flat


def _is_of_hosts(name: str) -> bool:
    return name == HOSTS or name.startswith((WAY, HOST_PART)) or name.endswith(OF_SLICE)


def _share_out(
    whole: np.ndarray, part: HostPart, key: str, states: Sequence[dict[str, np.ndarray]]
) -> None:
    """Adds a rank's share of a part's values to the state of each gradient, on all ranks."""
    ends = np.cumsum([int(np.prod(shape)) for shape in part.shapes])[:-1]
    for name, shape, values in zip(part.names, part.shapes, np.split(whole, ends), strict=True):
        for state in states:
            own = state.get(f"{key}{name}", np.zeros(shape, whole.dtype))
            state[f"{key}{name}"] = own + values.reshape(shape).astype(own.dtype)


def _cut(whole: np.ndarray, block: int, size: int) -> list[np.ndarray]:
    chunk = chunk_length(len(whole), size, block)
    return list(np.pad(whole, (0, size * chunk - len(whole))).reshape(size, chunk))
