"""Groups of devices: each is one replica, with a stage of the model on each device."""

from collections.abc import Callable, Sequence
from typing import Any

from tfdml.pipeline.parallel import PipelineParallel


def check_device_groups(devices: Any, pipeline: PipelineParallel | None) -> None:
    """Checks that `devices` are groups if there is a pipeline, and names otherwise.

    Args:
        devices: The strategy's argument, None for its default.
        pipeline: The strategy's argument.

    Raises:
        ValueError: If they do not fit together.
    """
    if pipeline is not None and not isinstance(pipeline, PipelineParallel):
        raise ValueError(
            f"`pipeline` must be a `tfdml.PipelineParallel`, or None. Received: "
            f"pipeline={pipeline!r}. Use for example tfdml.PipelineParallel(num_microbatches=8)."
        )
    grouped = [_is_list(group) for group in devices or ()]
    if pipeline is None:
        if any(grouped):
            raise ValueError(
                f"`devices` must be a list of names without `pipeline`: lists of names are groups "
                f"of devices, each with one replica's stages. Received: devices={devices!r}. Pass "
                f"pipeline=tfdml.PipelineParallel(), too."
            )
        return
    example = "Use for example [['GPU:0', 'GPU:1'], ['GPU:2', 'GPU:3']]."
    names = flat_devices(devices) or []
    if not grouped or not all(grouped) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"`devices` must be a list of groups with `pipeline`, each a list of device names. "
            f"Received: devices={devices!r}. {example}"
        )
    if len({len(group) for group in devices}) != 1 or not devices[0]:
        raise ValueError(
            f"`devices` must be groups of the same number of devices, because each has the same "
            f"stages. Received: devices={devices!r}. {example}"
        )
    full = list(map(_full_name, names))
    twice = sorted({n for n, own in zip(names, full, strict=True) if full.count(own) > 1})
    if twice:
        raise ValueError(
            f"`devices` must name each device once. Received: devices={devices!r}, with "
            f"{', '.join(twice)} in two places. {example}"
        )
    if pipeline.stages is not None and len(pipeline.stages) != len(devices[0]):
        raise ValueError(
            f"`stages` must have one list of layers for each device of a group. Received: "
            f"{len(pipeline.stages)} lists for groups of {len(devices[0])} devices. Use as many "
            f"lists as devices, or leave out `stages`."
        )
    if pipeline.memory_limits is not None and len(pipeline.memory_limits) != len(devices[0]):
        raise ValueError(
            f"`memory_limits` must have one number for each device of a group. Received: "
            f"{len(pipeline.memory_limits)} numbers for groups of {len(devices[0])} devices. Use "
            f"as many numbers as devices."
        )


def flat_devices(devices: Sequence | None) -> list[str] | None:
    """Returns the names of all devices, in order; None for None."""
    if devices is None:
        return None
    return [name for group in devices for name in (group if _is_list(group) else [group])]


def grouped_like(names: Sequence[str], devices: Sequence | None) -> list:
    """Returns names of devices in groups as large as those of the argument `devices`, if any."""
    remaining = iter(names)
    if not any(_is_list(group) for group in devices or ()):
        return list(names)
    return [[next(remaining) for _ in group] for group in devices]


def each_device(function: Callable[[str], str], devices: Sequence) -> list:
    """Returns devices, or groups of them, with another name for each."""
    return [list(map(function, own)) if _is_list(own) else function(own) for own in devices]


def replica_devices(devices: Sequence) -> list[str]:
    """Returns the device of each replica: its own, or the first of its group."""
    return [own[0] if _is_list(own) else own for own in devices]


def _full_name(name: str) -> str:
    """Returns the one name of a device that may be written as "gpu:0", "GPU:0" or "/GPU:0"."""
    kind = name.rsplit("/", 1)[-1].removeprefix("device:")
    return f"{name.rpartition('/')[0]}/device:{kind.upper()}"


def _is_list(group: Any) -> bool:
    return isinstance(group, Sequence) and not isinstance(group, str)
