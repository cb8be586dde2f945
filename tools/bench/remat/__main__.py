"""Measures what gradient checkpointing saves and costs, beside PyTorch and Keras on JAX.

    python -m tools.bench.remat
    python -m tools.bench.remat --rounds 5
    python -m tools.bench.remat --only TensorFlow --results remat.json

Each measurement is a fresh process; the candidates take turns. PyTorch and JAX run in environments
that this tool makes (.venv-torch and .venv-jax in the checkout). Every row is compared with the
same library without checkpointing, measured in the same round. With `--results`, the libraries of a
run are added to those of runs before, so that one that is cut off goes on with the next library.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from tools.bench.compression.__main__ import torch_python
from tools.bench.harness import ROOT, conditions, environment, module_command, result_of, start
from tools.bench.remat.model import BLOCKS, INNER, ROWS, WIDTH

KERAS, TORCH = "tools.bench.remat.keras_job", "tools.bench.remat.torch_job"
NONE = "none"
JAX = ROOT / ".venv-jax"
JAX_PACKAGES = ("jax==0.10.2", "keras==3.15.1", "numpy")
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
    "Keras on JAX, no dropout": (
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


def jax_python() -> Path | None:
    """Returns the Python of an environment with Keras on JAX, created if necessary; else None."""
    python = JAX / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(JAX)], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *JAX_PACKAGES], timeout=1200)
    probe, variables = [python, "-c", "import keras"], environment(1, KERAS_BACKEND="jax")
    if subprocess.run(probe, env=variables, capture_output=True).returncode == 0:
        return python
    print("JAX cannot be installed here: its rows are left out.", file=sys.stderr)
    return None


def measure(library: str, arguments: tuple[str, ...]) -> dict[str, float] | None:
    """Measures one candidate in a fresh process; None if its library is missing."""
    module, _ = LIBRARIES[library]
    backend = "jax" if "JAX" in library else "tensorflow"
    if module == TORCH:
        python = torch_python()
    else:
        python = jax_python() if backend == "jax" else sys.executable
    if python is None:
        return None
    variables = environment(2, KERAS_BACKEND=backend, **AT_ONCE)
    return result_of(module_command(module, *arguments, python=python), variables, 600.0)


# What was measured in a round, by the candidate's library and name.
Round = dict[str, dict[str, dict[str, float]]]


def table(rounds: list[Round]) -> str:
    """Returns the medians of all rounds as a Markdown table."""
    lines = [
        "| | checkpointed | MiB at the peak | of none | ms a step | of none "
        "| ms of processors | of none |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for library, (_, ways) in LIBRARIES.items():
        found = [r[library] for r in rounds if library in r]
        for name in ways if found else ():
            cells = []
            for what, factor in (("mib", 1), ("seconds", 1000), ("processor_seconds", 1000)):
                values = [factor * one[name][what] for one in found]
                ratios = [one[name][what] / one[NONE][what] for one in found]
                cells.append(f"{statistics.median(values):.0f} | {statistics.median(ratios):.2f}")
            lines.append(f"| {library} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each candidate.")] = 3,
    only: Annotated[str, typer.Option(help="Libraries whose name contains this.")] = "",
    results: Annotated[
        Path | None, typer.Option(help="File that keeps what was measured, also before.")
    ] = None,
) -> None:
    """Prints the table."""
    kept = results is not None and results.exists()
    done: list[Round] = json.loads(results.read_text()) if kept else []
    for number in range(rounds):
        if number == len(done):
            done.append({})
        for library, (_, ways) in LIBRARIES.items():
            if only not in library or library in done[number]:
                continue
            found = {name: measure(library, arguments) for name, arguments in ways.items()}
            print(f"round {number + 1}: {library}: {found}", file=sys.stderr, flush=True)
            if None not in found.values():
                done[number][library] = found
            if results is not None:
                results.write_text(json.dumps(done, indent=1) + "\n")
    versions = conditions(("tensorflow-cpu", "keras", "jax"), load=True)
    print(f"Measured with {versions}: {BLOCKS} blocks of {WIDTH} and {INNER}, {ROWS} rows.\n")
    print(table(done))


if __name__ == "__main__":
    start(__doc__, main)
