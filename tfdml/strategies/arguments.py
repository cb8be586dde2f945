"""What the constructors of all strategies check."""

from collections.abc import Sequence

from tfdml.collectives.buckets import BUCKET_BYTES
from tfdml.compression import Compressor, get


def check(
    devices: Sequence[str] | None,
    compression: Compressor | str | None,
    silence_limit: float = 60.0,
    check_desync: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
) -> Compressor | None:
    """Checks the arguments that the strategies share; returns the compressor.

    Args:
        devices: Names of this process's devices, or None.
        compression: A compressor, its name, or None.
        silence_limit: Seconds.
        check_desync: Steps.
        bucket_bytes: Bytes of gradients.

    Raises:
        ValueError: If one is wrong.
    """
    if devices is not None and (isinstance(devices, str) or not devices):
        raise ValueError(
            f"`devices` must be a non-empty list of device names, or None for the default. "
            f"Received: devices={devices!r}. Use for example ['GPU:0']."
        )
    check_seconds("silence_limit", silence_limit)
    if not isinstance(check_desync, int) or check_desync < 0:
        raise ValueError(
            f"`check_desync` must be a number of steps, or 0 for no check. Received: "
            f"check_desync={check_desync!r}."
        )
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(
            f"`bucket_bytes` must be a positive number of bytes. Received: "
            f"bucket_bytes={bucket_bytes!r}. Use for example {BUCKET_BYTES}, the default."
        )
    return get(compression)


def check_seconds(name: str, seconds: float) -> None:
    """Checks an argument that is a number of seconds.

    Args:
        name: The argument's name.
        seconds: What was given.

    Raises:
        ValueError: If it is not a positive number.
    """
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(
            f"`{name}` must be a positive number of seconds. Received: {name}={seconds!r}."
        )
