"""Units, columns and figures of reports."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def in_words(nbytes: int) -> str:
    """Returns a number of bytes with a unit: 1000 bytes are 1 KB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= size:
            return (
                f"{nbytes / size:.3g} {unit}"
                if nbytes < 999.5 * size
                else f"{nbytes / size:.0f} {unit}"
            )
    return f"{nbytes} B"


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Returns the lines of a table with columns of equal widths.

    Args:
        heads: The columns' names.
        rows: The rows' cells.
        left: Number of columns, of the first, whose cells are aligned at the left.
    """
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heads, *rows)
    ]


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure that no window shows.

    Args:
        width: Inches.
        height: Inches.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "A plot needs matplotlib, which is not installed. Run `pip install matplotlib`."
        ) from error
    return Figure(figsize=(width, height), layout="constrained")
