"""Measures what gradient checkpointing saves and costs, beside PyTorch and Keras on JAX.

    python -m tools.bench.remat
    python -m tools.bench.remat --rounds 5
    python -m tools.bench.remat --only TensorFlow

Each measurement is a fresh process; the candidates take turns. PyTorch runs in an environment that
this tool makes, as `tools.bench.compression` does (.venv-torch in the checkout). Every row is
compared with the same library without checkpointing, measured in the same round.
"""

import statistics
import sys
from typing import Annotated

import typer

from tools.bench.compression.__main__ import torch_python
from tools.bench.harness import conditions, environment, module_command, result_of, start
from tools.bench.remat.model import BLOCKS, INNER, ROWS, WIDTH

KERAS, TORCH = "tools.bench.remat.keras_job", "tools.bench.remat.torch_job"
NONE = "none"
# Candidates by library: their arguments by what is checkpointed, without first.
LIBRARIES: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "Keras on TensorFlow, graph": (
        KERAS,
        {
            NONE: (NONE, "graph"),
            "`tfdml.remat`": ("tfdml.remat", "graph"),
        },
    ),
    "Keras on TensorFlow, `jit_compile`": (
        KERAS,
        {
            NONE: (NONE, "jit"),
            "`tfdml.remat`": ("tfdml.remat", "jit"),
        },
    ),
    "Keras on JAX": (
        KERAS,
        {
            NONE: (NONE, "jit"),
            "`keras.RematScope`": ("keras.RematScope", "jit"),
        },
    ),
    "PyTorch": (
        TORCH,
        {
            NONE: (NONE,),
            "`torch.utils.checkpoint`": ("torch.utils.checkpoint",),
        },
    ),
}
# Large tensors are given back when they are freed, so that the peak is that of what is in use.
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}


def measure(library: str, arguments: tuple[str, ...]) -> dict[str, float] | None:
    """Measures one candidate in a fresh process; None if its library is missing."""
    module, _ = LIBRARIES[library]
    python = torch_python() if module == TORCH else sys.executable
    if python is None:
        return None
    backend = "jax" if "JAX" in library else "tensorflow"
    variables = environment(2, KERAS_BACKEND=backend, **AT_ONCE)
    return result_of(module_command(module, *arguments, python=python), variables, 600.0)


def table(rounds: list[dict[tuple[str, str], dict[str, float]]]) -> str:
    """Returns the medians of all rounds as a Markdown table."""
    lines = [
        "| | checkpointed | MiB at the peak | of none | ms a step | of none |",
        "|---|---|---|---|---|---|",
    ]
    for library, name in rounds[0]:
        own = [r[library, name] for r in rounds]
        none = [r[library, NONE] for r in rounds]
        cells = []
        for what, factor in (("mib", 1), ("seconds", 1000)):
            values = [factor * one[what] for one in own]
            pairs = [a[what] / b[what] for a, b in zip(own, none, strict=True)]
            cells.append(f"{statistics.median(values):.0f} | {statistics.median(pairs):.2f}")
        lines.append(f"| {library} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each candidate.")] = 3,
    only: Annotated[str, typer.Option(help="Libraries whose name contains this.")] = "",
) -> None:
    """Prints the table."""
    results: list[dict[tuple[str, str], dict[str, float]]] = []
    for number in range(rounds):
        results.append({})
        for library, (_, ways) in LIBRARIES.items():
            for name, arguments in ways.items() if only in library else ():
                found = measure(library, arguments)
                if found is not None:
                    results[-1][library, name] = found
                    print(f"round {number + 1}: {library}, {name}: {found}", file=sys.stderr)
    versions = conditions(("tensorflow-cpu", "keras", "jax"), load=True)
    print(f"Measured with {versions}: {BLOCKS} blocks of {WIDTH} and {INNER}, {ROWS} rows.\n")
    print(table(results))


if __name__ == "__main__":
    start(__doc__, main)
