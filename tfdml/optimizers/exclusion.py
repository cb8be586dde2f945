"""Selection of variables that an optimizer treats differently, by patterns on their paths."""

import re
from collections.abc import Sequence
from typing import Any

# Matches paths that end in `bias`, as in `dense/bias` or `attention/output_bias`, or in the names
# that Keras's normalisation layers give their scales and offsets.
BIASES_AND_SCALES = (r"(^|[/_])bias$", r"(^|/)(gamma|beta|scale)$")


class Exclusion:
    r"""Set of variables that are excluded by regular expressions, searched for in their paths.

    A path is Keras's `variable.path`: the names of the layers and the weight, such as
    `encoder/layer_normalization/gamma`. `"bias"` matches all paths that contain the word,
    `"/bias$"` those that end in it, and `"(^|/)encoder/"` those in layers of that name.

    Args:
        argument: The name of the optimizer's argument, for messages.
        patterns: Regular expressions; None or an empty list exclude nothing.

    Raises:
        ValueError: If `patterns` are not regular expressions.
    """

    def __init__(self, argument: str, patterns: Sequence[str] | str | None):
        given = [patterns] if isinstance(patterns, str) else list(patterns or ())
        try:
            self._matches = [re.compile(pattern).search for pattern in given]
        except (TypeError, re.error) as error:
            raise ValueError(
                f'`{argument}` must be a list of regular expressions, such as ["bias", "/gamma$"], '
                f"or [] to exclude nothing. Received: {argument}={patterns!r} ({error})."
            ) from error
        self.patterns = given

    def excludes(self, variable: Any) -> bool:
        """Returns whether a Keras or TensorFlow variable is excluded."""
        path = whole_path(variable)
        return any(matches(path) for matches in self._matches)


def whole_path(variable: Any) -> str:
    """Returns a variable's path; for a part of a partitioned variable, that of the whole."""
    path = getattr(variable, "path", None) or variable.name.partition(":")[0]
    return re.sub(r"/part_\d+$", "", path)
