"""Makes reStructuredText, which autodoc reads, of docstrings with Markdown's code."""

import re

_FENCE = re.compile(r"^( *)```(\w*)$")
# `code`, but neither ``code`` nor :role:`name` nor `text`_.
_CODE = re.compile(r"(?<![`:\w])`([^`\n]+)`(?![`_])")


def to_rst(lines: list[str]) -> list[str]:
    """Returns a docstring's lines with code as reStructuredText writes it.

    Args:
        lines: Lines with `code` in single backquotes and blocks between fences.
    """
    result: list[str] = []
    within = None
    for line in lines:
        fence = _FENCE.match(line)
        if fence and within is None:
            within = fence[1]
            result += ["", f"{within}.. code-block:: {fence[2] or 'text'}", ""]
        elif fence:
            within = None
            result.append("")
        elif within is not None:
            result.append(f"    {line}" if line.strip() else "")
        else:
            result.append(line)
    return _inline(result)


def _inline(lines: list[str]) -> list[str]:
    """Doubles the backquotes of inline code, also of code that continues in the next line."""
    text = "\n".join(lines)
    return re.sub(r"(?<![`:\w])`([^`]+?)`(?![`_])", r"``\1``", text).split("\n")
