"""Puts two runs of recipes/fashion_mnist.py next to each other: a table, and a plot of both.

python tools/compare_runs.py demo/one demo/two --plot demo/learning_curves.png

With `--killed` a third run, one of whose ranks was killed, must have ended with the second's bits;
with `--slow` twice, two runs of recipes/compressed.py on a slow network are put beside each other.
"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

# Training amplifies rounding: scaling the initial weights by 1 + 1e-6 moved the losses of this
# recipe by up to 4.5e-3 within two epochs. This bound only catches gross disagreement; the tests of
# the strategies compare a few steps at float32 rounding.
LOSS_TOLERANCE = 2e-2


@dataclasses.dataclass(frozen=True)
class Run:
    """Output of one run.

    Attributes:
        facts: Content of history.json.
        weights: Final weights by name.
    """

    facts: dict
    weights: dict[str, np.ndarray]

    @property
    def label(self) -> str:
        """Number of processes as text."""
        count = self.facts["processes"]
        return f"{count} process{'es' if count > 1 else ''}"

    def curve(self, name: str) -> np.ndarray:
        """Returns a value of each epoch, such as `loss` or `val_accuracy`."""
        return np.asarray(self.facts["history"][name])


def read_run(directory: Path) -> Run:
    """Reads the output of the recipe's `--output`.

    Args:
        directory: Directory given to the recipe.
    """
    facts = json.loads((directory / "history.json").read_text(encoding="utf-8"))
    with np.load(directory / "weights.npz") as stored:
        return Run(facts, {name: stored[name] for name in stored.files})


def weight_difference(one: Run, two: Run) -> float:
    """Returns the largest difference of any weight of two runs of the same model.

    Raises:
        ValueError: If the runs do not have weights of the same shapes.
    """
    ours = [array.shape for array in one.weights.values()]
    theirs = [array.shape for array in two.weights.values()]
    if ours != theirs:
        raise ValueError(f"both runs must have the same weights. Received: {ours} and {theirs}")
    pairs = zip(one.weights.values(), two.weights.values(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def loss_difference(one: Run, two: Run) -> float:
    """Returns the largest difference of the losses, training and validation, of any epoch."""
    return max(float(np.abs(one.curve(n) - two.curve(n)).max()) for n in ("loss", "val_loss"))


def comparison(one: Run, two: Run) -> Table:
    """Builds the table of both runs."""
    table = Table("", one.label, two.label, "difference", title=one.facts["data"])
    for title, name in (
        ("training loss", "loss"),
        ("validation loss", "val_loss"),
        ("training accuracy", "accuracy"),
        ("validation accuracy", "val_accuracy"),
    ):
        a, b = one.curve(name)[-1], two.curve(name)[-1]
        table.add_row(title, f"{a:.5f}", f"{b:.5f}", f"{abs(a - b):.1e}")
    table.add_row(
        "largest difference of a loss, all epochs", "", "", f"{loss_difference(one, two):.1e}"
    )
    table.add_row("largest difference of a weight", "", "", f"{weight_difference(one, two):.1e}")
    rates = [run.facts["samples_per_second"] for run in (one, two)]
    ratio = f"{rates[1] / rates[0]:.2f} times"
    table.add_row("samples/s, without tracing", *(f"{rate:,.0f}" for rate in rates), ratio)
    return table


def plot(one: Run, two: Run, path: Path) -> None:
    """Draws the learning curves of both runs on top of each other.

    Args:
        one: Run drawn as a thick solid line.
        two: Run drawn as a thin dashed line over it.
        path: Picture file to write.
    """
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, what in zip(axes, ("loss", "accuracy"), strict=True):
        for prefix, colour, title in (
            ("", "tab:blue", "training"),
            ("val_", "tab:orange", "validation"),
        ):
            epochs = np.arange(1, len(one.curve("loss")) + 1)
            label = f"{title}, {one.label}"
            axis.plot(epochs, one.curve(prefix + what), color=colour, lw=6, alpha=0.4, label=label)
            label = f"{title}, {two.label}"
            axis.plot(
                epochs,
                two.curve(prefix + what),
                "k--",
                lw=1.4,
                label=label,
                marker="." if prefix else "x",
            )
        axis.set(xlabel="epoch", ylabel=what, xticks=epochs)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{one.facts['data']}: same global batch, same curves", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def same_bits(one: Run, two: Run) -> bool:
    """Returns whether two runs ended with the same weights and history, bit for bit."""
    return (
        one.facts["history"] == two.facts["history"]
        and one.weights.keys() == two.weights.keys()
        and all(one.weights[n].tobytes() == two.weights[n].tobytes() for n in one.weights)
    )


def networks(slow: list[Path]) -> str:
    """Returns a sentence on runs of recipes/compressed.py, without compression and with it.

    Args:
        slow: `--output` directories of both runs, the run without compression first.
    """
    plain, small = (json.loads(path.read_text(encoding="utf-8")) for path in slow)
    return (
        f"With {small['compression']} a step took {small['milliseconds']:,.0f} ms over 100 Mbit/s "
        f"instead of {plain['milliseconds']:,.0f} ms, for {plain['bytes'] / 1e6:.1f} MB of "
        f"gradients ({100 * small['accuracy']:.0f} and {100 * plain['accuracy']:.0f} % right)."
    )


def main(
    one: Annotated[Path, typer.Argument(help="What the first run wrote.")],
    two: Annotated[Path, typer.Argument(help="What the second run wrote.")],
    picture: Annotated[Path, typer.Option("--plot", help="The plot to write.")],
    killed: Annotated[
        Path | None, typer.Option(help="What the second run wrote, with a rank killed.")
    ] = None,
    slow: Annotated[
        list[Path] | None, typer.Option(help="Without compression and with it, twice given.")
    ] = None,
) -> None:
    """Compare two runs of the recipe; exit 1 when they do not agree."""
    first, second = read_run(one), read_run(two)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    Console(highlight=False).print(comparison(first, second))
    plot(first, second, picture)
    console.print(f"Both learning curves: {picture}")
    apart = loss_difference(first, second)
    agree = apart <= LOSS_TOLERANCE
    same_after_kill = killed is None or same_bits(second, read_run(killed))
    if not agree:
        console.print(f"error: the losses differ by {apart:.1e}, more than {LOSS_TOLERANCE:.0e}")
    if not same_after_kill:
        console.print("error: after a kill, weights or history are not the same bits")
    if not (agree and same_after_kill):
        raise typer.Exit(1)
    console.print(f"{second.label} trained as {first.label} did: losses within {apart:.0e}.")
    if killed is not None:
        console.print("With a rank killed in the middle they ended with the same bits.")
    if slow:
        console.print(networks(slow))


if __name__ == "__main__":
    typer.run(main)
