"""Sizes as values of options: of images, and of memory."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def image_size(text: str | None, option: str) -> tuple[int, int] | None:
    """Returns the height and width that an option's value stands for; None without a value.

    Args:
        text: Value such as "224x224".
        option: Name of the option, for the message.

    Raises:
        ValueError: If the value has another form.
    """
    if text is None:
        return None
    height, x, width = text.lower().partition("x")
    if not (x and height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise ValueError(f"`{option}` must be HEIGHTxWIDTH, such as 224x224. Received: {text!r}.")
    return int(height), int(width)


def byte_size(text: str, option: str) -> int:
    """Returns the bytes that an option's value stands for.

    Args:
        text: Value such as "16GB" or "14.5 GiB".
        option: Name of the option, for the message.

    Raises:
        ValueError: If the value has another form, or is not positive.
    """
    number = text.strip().lower().rstrip("bgikmt ")
    unit = text.strip().lower()[len(number) :].strip()
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError(f"`{option}` must be a size, such as 16GB. Received: {text!r}.")
    return size


def whole_numbers(text: str, option: str) -> list[int]:
    """Returns the positive numbers that an option's value stands for.

    Args:
        text: Value such as "1,2,4".
        option: Name of the option, for the message.

    Raises:
        ValueError: If the value has another form.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"`{option}` must be positive numbers, such as 1,2,4. Received: {text!r}.")
    return [int(part) for part in parts]
