"""Measures compressed training on slow networks against its peers, in the same run.

    python -m tools.bench.compression --rate 100mbit --hosts 2   # results are kept
    python -m tools.bench.compression --rate 100mbit --hosts 2 --ranks 2
    python -m tools.bench.compression --rate 1gbit --hosts 2 --ranks 2 --ways
    python -m tools.bench.compression --rate 1gbit --only none --only "PyTorch DDP" --turns 5
    python -m tools.bench.compression --rate 1gbit --latency 5ms --loss 0.1% --congestion cubic
    python -m tools.bench.compression --report                   # of what is kept

Each network is made by `tools/netlab` (root needed): hosts with one rank each, or `--ranks`. A
run of one network times, one after the other: ours under `model.fit`, each codec; hand-written
loops over raw Horovod; our MultiWorkerMirroredStrategy, and TensorFlow's own in a loop and under
the frozen Keras 2; and PyTorch's DDP with gloo, in an environment that this tool makes (.venv-torch
in the checkout). Results go to tools/benchmarks/compression.json, the report to compression.md and
compression.png beside it.
"""

import functools
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tools.bench.compression.model import (
    AT_ONCE,
    AUTO,
    BITS,
    OF_WORKERS,
    PEERS,
    RANKS,
    RATES,
    SUMMED,
)
from tools.bench.compression.report import write_report
from tools.bench.harness import BENCHMARKS, ROOT, check_choice, conditions, run_on_hosts, start

RESULTS = BENCHMARKS / "compression.json"
TORCH = ROOT / ".venv-torch"
# In order of preference: the CPU build first, without the GPU libraries.
TORCH_PACKAGES = ("torch==2.13.0+cpu", "torch")
OURS = [*BITS, *RANKS]
RAW = ["raw Horovod", "raw Horovod fp16"]
HOROVOD = ["idle", "local", *OURS, AUTO]
KERAS_2 = "MultiWorkerMirrored tf_keras"
OF_TENSORFLOW = [OF_WORKERS, "MultiWorkerMirrored RING", KERAS_2]
DDP = ["PyTorch local", *(name for name in PEERS if name.startswith("PyTorch"))]


def torch_python() -> Path | None:
    """Returns the Python of an environment with PyTorch, created if necessary; None on failure."""
    python = TORCH / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(TORCH)], check=True)
    for package in TORCH_PACKAGES:
        if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0:
            return python
        subprocess.run([python, "-m", "pip", "install", "-q", package, "numpy"], timeout=1200)
    print("PyTorch cannot be installed here: its rows are left out.", file=sys.stderr)
    return None


def measure(
    rate: str,
    far: dict[str, str],
    hosts: int,
    ranks: int,
    only: list[str],
    model: str,
    xla: bool,
    exchanges: bool,
    ways: bool,
    steps_only: bool,
) -> Iterator[dict]:
    """Yields the results on one network, by candidate: first ours and Horovod's, then others'."""
    bits = str(RATES[rate])
    network = {"hosts": hosts, "ranks": ranks, "rate": rate, "progress": True}
    network["network"] = [word for option in far.items() for word in option]
    own = [*HOROVOD, *(f"{n}{AT_ONCE}" for n in BITS if n not in SUMMED)] if ranks > 1 else HOROVOD

    def wanted(names: list[str]) -> str:
        return ";".join(name for name in names if not only or name in only)

    rank, torch_rank = "tools.bench.compression.rank", "tools.bench.compression.torch_rank"
    if ways:
        names = wanted([name for name in BITS if name not in SUMMED])
        options = ["--network", model, "--ways"]
        yield run_on_hosts(rank, names, bits, *options, job="horovod", **network)
        return
    if exchanges:
        options = ["--network", model, "--exchanges", "--no-steps-too"]
        yield run_on_hosts(rank, wanted(OURS), bits, *options, job="horovod", **network)
        return
    if names := wanted(RAW):
        options = ["--network", model, *(["--xla"] if xla else [])]
        # Horovod's own all-reduce, in place of that of tfdml's build.
        variables = {"job": "horovod", "HOROVOD_GLOO_RING": "1", **network}
        yield run_on_hosts(rank, names, bits, *options, **variables)
    if names := wanted(own):
        alone = (rate != "100mbit" or ranks > 1) and not steps_only
        options = ["--network", model] + (["--exchanges"] if alone else [])
        options += ["--xla"] if xla else []
        yield run_on_hosts(rank, names, bits, *options, job="horovod", **network)
    if model != "mlp":
        return
    # Each in processes of its own, which can be members of one cluster alone.
    for name in [] if xla else filter(None, wanted(OF_TENSORFLOW).split(";")):
        if name == KERAS_2 and importlib.util.find_spec("tf_keras") is None:
            print("Its row is left out without it: pip install --no-deps tf_keras", file=sys.stderr)
        else:
            yield run_on_hosts(rank, name, bits, job="multi-worker", **network)
    if (names := wanted(DDP)) and (python := torch_python()):
        yield run_on_hosts(torch_rank, names, bits, python=python, **network)


def in_turns(turns: list[dict]) -> dict:
    """Returns the results of several runs: of each candidate the median step, and each turn's."""
    merged = dict(turns[-1])
    for name, result in merged.items():
        if "median" in result:
            steps = [turn[name]["median"] for turn in turns]
            merged[name] = result | {"median": statistics.median(steps), "turns": steps}
    return merged


def main(
    rate: Annotated[
        str, typer.Option(help="100mbit, 1gbit, 10gbit, 25gbit; unshaped if empty.")
    ] = "",
    hosts: Annotated[int, typer.Option(min=2, help="Hosts.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks on each host.")] = 1,
    latency: Annotated[str, typer.Option(help="Of what leaves a host: 5ms.")] = "",
    loss: Annotated[str, typer.Option(help="Of what leaves a host: 0.1%.")] = "",
    congestion: Annotated[str, typer.Option(help="TCP's congestion control: cubic, bbr.")] = "",
    only: Annotated[list[str] | None, typer.Option(help="Candidates, by name.")] = None,
    model: Annotated[
        str, typer.Option(help="mlp; or resnet20, transformer or text, without PyTorch and RING.")
    ] = "mlp",
    xla: Annotated[
        bool, typer.Option("--xla", help="XLA compiles TensorFlow's part before the exchange.")
    ] = False,
    exchanges: Annotated[
        bool, typer.Option("--exchanges", help="Only our exchanges alone, without steps.")
    ] = False,
    ways: Annotated[
        bool,
        typer.Option("--ways", help="Only exchanges alone: by hosts and at once, in turns."),
    ] = False,
    turns: Annotated[
        int,
        typer.Option(min=1, help="Runs, ours and others' in turn; medians of steps, nothing else."),
    ] = 1,
    keep: Annotated[bool, typer.Option(help="Add to the kept results.")] = True,
    report: Annotated[bool, typer.Option("--report", help="Only write the report.")] = False,
) -> None:
    """Measures one network, or writes the report of all measured networks."""
    if report:
        write_report(json.loads(RESULTS.read_text()), RESULTS.with_suffix(".md"))
        return
    check_choice("--rate", rate, RATES)
    far = {"--latency": latency, "--loss": loss, "--congestion": congestion}
    far = {option: value for option, value in far.items() if value}
    results = {}
    run = functools.partial(measure, rate, far, hosts, ranks, only or [], model, xla)
    if turns == 1:
        parts = run(exchanges, ways, steps_only=False)
    else:
        runs = [list(run(exchanges, ways, steps_only=True)) for _ in range(turns)]
        parts = map(in_turns, map(list, zip(*runs, strict=True)))
    for part in parts:
        results |= part
        print(json.dumps(part, indent=1))
        if keep:
            stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            of_hosts = f"{hosts}*{ranks}" if ranks > 1 else f"{hosts}"
            links = " ".join([rate or "unshaped", *far.values()])
            network = f"{links} x {of_hosts} x {model}{' x XLA' if xla else ''}"
            now = conditions()
            before = stored.get(network, {})
            # Results of the same network, day and versions are kept.
            same = before["results"] if before.get("conditions") == now else {}
            merged = {
                n: same.get(n, {}) | r if isinstance(r, dict) else r for n, r in results.items()
            }
            stored[network] = {"conditions": now, "results": same | merged}
            RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    start(__doc__, main)
