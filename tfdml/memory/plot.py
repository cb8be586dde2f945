"""The bar plot of a report."""

from pathlib import Path
from typing import TYPE_CHECKING

from tfdml.reports import new_figure

if TYPE_CHECKING:
    from tfdml.memory.report import MemoryReport

# Colours of the parts that colour-blind readers can distinguish (Okabe and Ito).
_COLOURS = {
    "weights": "#0072B2",
    "slots": "#56B4E9",
    "residuals": "#CC79A7",
    "gradients": "#E69F00",
    "activations": "#009E73",
    "exchange": "#D55E00",
}


def write_plot(report: "MemoryReport", path: str | Path) -> None:
    """Writes a bar for each choice, divided into its parts, with a mark at its peak.

    Args:
        report: The report.
        path: The file.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    count = len(report.choices)
    figure = new_figure(8, 1.2 + 0.32 * count)
    axes = figure.subplots()
    places = range(count)
    left = [0.0] * count
    for part, colour in _COLOURS.items():
        widths = [getattr(choice, part) / 1e9 for choice in report.choices]
        if any(widths):
            axes.barh(places, widths, left=left, color=colour, label=part, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    peaks = [choice.peak / 1e9 for choice in report.choices]
    axes.plot(peaks, places, "|", color="black", markersize=14, markeredgewidth=2, label="peak")
    axes.set_yticks(places, [choice.name for choice in report.choices])
    axes.invert_yaxis()
    axes.set_xlabel("GB on each rank")
    axes.set_title(f"{report.model}, global batch of {report.batch_size}")
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=150)
