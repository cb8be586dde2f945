"""Finds copies between a GPU and the host in a trace of TensorFlow's profiler."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

# Prefix of the names of a GPU's planes; the host's is "/host:CPU".
GPU_PLANE = "/device:GPU"
# Names of CUPTI's copy events and their directions; other copies stay on a GPU.
_DIRECTIONS = {"MemcpyH2D": "host to device", "MemcpyD2H": "device to host"}
_SIZE = re.compile(r"\bsize:(\d+)")


@dataclasses.dataclass(frozen=True)
class Copy:
    """Copy between a GPU and the host.

    Attributes:
        direction: "host to device" or "device to host".
        size: Size in bytes.
    """

    direction: str
    size: int


def read(directory: Path):
    """Returns a profile, as TensorFlow's protocol buffer `XSpace`.

    Args:
        directory: The profile's log directory.

    Raises:
        ValueError: If it does not hold exactly one profile.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    files = list(directory.rglob("*.xplane.pb"))
    if len(files) != 1:
        raise ValueError(
            f"`directory` must hold one profile. Received: {len(files)} in {directory}. Give each "
            f"profile a directory of its own."
        )
    space = xplane_pb2.XSpace()
    space.ParseFromString(files[0].read_bytes())
    return space


def events(space, prefix: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the name and the texts of each event of the planes whose names begin with a prefix."""
    for plane in space.planes:
        if not plane.name.startswith(prefix):
            continue
        names = {number: meta.name for number, meta in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                stats = {}
                for stat in event.stats:
                    value = stat.str_value
                    if stat.WhichOneof("value") == "ref_value":
                        value = names.get(stat.ref_value, "")
                    stats[names.get(stat.metadata_id, "")] = value
                yield plane.event_metadata[event.metadata_id].name, stats


def host_copies(space) -> list[Copy]:
    """Returns the copies between GPUs and the host.

    Raises:
        ValueError: If the profile has no GPU, or a copy has no size.
    """
    if not any(plane.name.startswith(GPU_PLANE) for plane in space.planes):
        raise ValueError(
            f"`space` must have a plane of a GPU. Received: "
            f"{', '.join(plane.name for plane in space.planes)}. Profile on a machine with a GPU, "
            f"with nvidia-cuda-cupti installed and leave to use its counters."
        )
    found = []
    for name, stats in events(space, GPU_PLANE):
        if name not in _DIRECTIONS:
            continue
        size = _SIZE.search(stats.get("memcpy_details", ""))
        if size is None:
            raise ValueError(f"A copy must tell its size. Received: {name} {stats}.")
        found.append(Copy(_DIRECTIONS[name], int(size.group(1))))
    return found
