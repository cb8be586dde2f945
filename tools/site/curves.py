"""Draws the loss and the metrics of each epoch that a training program has printed."""

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

# A colour that can be read on a light page and on a dark one.
GREY = "#808080"
# `Epoch 3/10: ... - loss: 0.3`, and Keras's `Epoch 3/10` with the numbers in a line below.
_METRIC = re.compile(r" - (\w+): (-?\d[\d.]*(?:e[+-]?\d+)?)")
# `epoch 3: loss 0.3`, and `round 3: accuracy 0.8` of federated learning.
_OWN = re.compile(r"(?:epoch|round) \d+: (\w+) (-?\d[\d.]*)")
_WITHIN_AN_EPOCH = re.compile(r"Epoch \d+/\d+, step ")


def read(output: str) -> dict[str, list[float]]:
    """Returns each metric's values by epoch.

    Args:
        output: Output of a program.
    """
    series: dict[str, list[float]] = {}
    for line in output.splitlines():
        if _WITHIN_AN_EPOCH.search(line):
            continue
        for name, value in _METRIC.findall(line) or _OWN.findall(line):
            series.setdefault(name, []).append(float(value))
    return {name: values for name, values in series.items() if len(values) > 1}


def draw(output: str, picture: Path) -> bool:
    """Draws the curves in an output.

    Args:
        output: Output of a program.
        picture: The SVG file to write.

    Returns:
        Whether there are curves; else nothing is written.
    """
    series = read(output)
    losses = {n: v for n, v in series.items() if "loss" in n or n in LOSS_PARTS}
    others = {n: v for n, v in series.items() if n not in losses and n not in OTHER_UNITS}
    panels = [panel for panel in (losses, others) if panel]
    if not panels:
        return False
    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "tfdml", "font.family": "sans-serif"}
        | {name: GREY for name in _COLOURED}
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 2.8), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for name, values in panel.items():
            style = "--" if name.startswith("val_") else "-"
            axis.plot(range(1, len(values) + 1), values, style, label=name, linewidth=1.8)
        axis.set_xlabel("round" if "round 1: " in output else "epoch")
        axis.patch.set_alpha(0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, labelcolor=GREY)
    figure.tight_layout()
    figure.savefig(picture, transparent=True, metadata={"Date": None})
    plt.close(figure)
    return True


# What has no place beside accuracies.
OTHER_UNITS = ("learning_rate", "gradient_noise_scale")
# What a recipe's own step returns beside its loss.
LOSS_PARTS = ("reconstruction", "divergence")
_COLOURED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
