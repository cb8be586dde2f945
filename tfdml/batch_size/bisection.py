"""Search for the largest number of rows that fits, by doubling and bisection."""

from collections.abc import Callable

# Bisection ends when the answer is within this part of the largest number that fits.
_PRECISION = 8


def largest_fitting(fits: Callable[[int], bool], start: int, least: int, limit: int) -> int:
    """Returns the largest number of rows that fits, to an eighth; 0 if `least` does not fit.

    Doubles from `start` while rows fit, or halves until they do, then bisects. The answer has been
    tried. All its steps depend on `fits` alone, so ranks that agree on that stay together.

    Args:
        fits: Function that tries a number of rows.
        start: First number to try.
        least: Smallest number to try.
        limit: Largest number to try.
    """
    rows, fitting, failing = max(least, min(start, limit)), 0, limit + 1
    while rows < failing:
        if fits(rows):
            fitting = rows
        else:
            failing = rows
        if fitting == 0:
            rows = max(failing // 2, least)
        elif failing > limit:
            rows = failing if fitting == limit else min(2 * fitting, limit)
        elif failing - fitting <= max(1, fitting // _PRECISION):
            break
        else:
            rows = (fitting + failing) // 2
    return fitting
