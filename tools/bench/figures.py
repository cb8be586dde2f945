"""Functions that store, compare and format the benchmarks' numbers."""

import json
import statistics
from pathlib import Path


def stored_rows(path: Path) -> list[list]:
    """Returns the stored rows of a table."""
    return json.loads(path.read_text()) if path.exists() else []


def note(rows: list[list], path: Path) -> None:
    """Stores the rows of a table, one per line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{lines}\n]\n")


def spread(values: list[float]) -> str:
    """Returns the mean, the lowest and the highest as text, in percent."""
    percent = [100 * v for v in values]
    mean = sum(percent) / len(percent)
    return f"{mean:.2f} ({min(percent):.2f}–{max(percent):.2f})"


def ratios(ours: list[float], peer: list[float]) -> tuple[float, float, float]:
    """Returns the median and the quartiles of `ours` by `peer`, measured in pairs."""
    pairs = sorted(a / b for a, b in zip(ours, peer, strict=True))
    return statistics.median(pairs), pairs[len(pairs) // 4], pairs[-1 - len(pairs) // 4]


def fastest(ours: list[float], peer: list[float]) -> float:
    """Returns the ratio of the means of each one's fastest quarter.

    Other load on the machine only adds to a time, so under heavy load this is more reliable than
    the median.
    """
    quarter = max(1, len(ours) // 4)
    return sum(sorted(ours)[:quarter]) / sum(sorted(peer)[:quarter])


def in_words(ratio: tuple[float, float, float], digits: int = 3) -> str:
    """Returns such a ratio as text."""
    median, low, high = ratio
    return f"{median:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"
