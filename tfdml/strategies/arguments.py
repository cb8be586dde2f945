"""What the constructors of all strategies check."""

from collections.abc import Sequence


def check(
    devices: Sequence[str] | None,
    compression: None,
    silence_limit: float = 60.0,
    check_desync: int = 0,
) -> None:
    """Checks the arguments that the strategies share.

    Args:
        devices: Names of this process's devices, or None.
        compression: None.
        silence_limit: Seconds.
        check_desync: Steps.

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
    if not isinstance(silence_limit, int | float) or not silence_limit > 0:
        raise ValueError(
            f"`silence_limit` must be a positive number of seconds. Received: "
            f"silence_limit={silence_limit!r}."
        )
    if not isinstance(check_desync, int) or check_desync < 0:
        raise ValueError(
            f"`check_desync` must be a number of steps, or 0 for no check. Received: "
            f"check_desync={check_desync!r}."
        )
