"""What the constructors of all strategies check."""

from collections.abc import Sequence


def check(devices: Sequence[str] | None, compression: None) -> None:
    """Checks the arguments that the strategies share.

    Args:
        devices: Names of this process's devices, or None.
        compression: None.

    Raises:
        ValueError: If one is wrong.
    """
    if compression is not None:
        raise ValueError(
            f"`compression` must be None in this version of tfdml. Received: {compression!r}."
        )
    if devices is not None and (isinstance(devices, str) or not devices):
        raise ValueError(
            f"`devices` must be a non-empty list of device names, or None for the default. "
            f"Received: devices={devices!r}. Use for example ['GPU:0']."
        )
