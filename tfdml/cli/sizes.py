"""Sizes of images as values of options."""


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
