"""Measures training that seldom exchanges on slow networks, against its peers in the same run.

    python -m tools.bench.slow_networks --rate 50mbit --hosts 2          # results are kept
    python -m tools.bench.slow_networks --rate 100mbit --latency 50ms --model text
    python -m tools.bench.slow_networks --rate 1gbit --only "tfdml LocalSGD(8)"
    python -m tools.bench.slow_networks --report                         # of what is kept
    python -m tools.bench.slow_networks --rate 50mbit --loss 3.4 --only "LocalSGD(16)"

Each network is made by `tools/netlab` (root needed), with one rank on each host. A run of one
network times tfdml under `model.fit`: an exchange in every step, with and without codecs, and
LocalSGD and DiLoCo, with and without 4 bits; a hand-written loop over Horovod that averages the
weights; PyTorch's `PeriodicModelAverager`; and LocalSGD and DiLoCo of torchft. The last two run on
gloo, in environments that this tool makes (.venv-torch and .venv-torchft in the checkout). All have
as many threads. A candidate's time is of whole rounds: steps and the exchange that ends them.

Each framework also times its local step alone and its exchange alone, in the same job. Results go
to tools/benchmarks/slow_networks.json; the report to slow_networks.md and slow_networks.png beside
it. With `--loss` it measures instead how long the small transformer trains to so many bits per
character of text not seen; these results go to slow_networks_loss.json, and into the same report.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.bench.compression.__main__ import TORCH_PACKAGES, torch_python
from tools.bench.compression.model import GLOBAL_BATCH
from tools.bench.harness import BENCHMARKS, ROOT, check_choice, conditions, run_on_hosts, start
from tools.bench.slow_networks.model import CANDIDATES, FRAMEWORKS, METHODS, MODELS, RATES
from tools.bench.slow_networks.report import loss_table, write_report

RESULTS = BENCHMARKS / "slow_networks.json"
LOSSES = BENCHMARKS / "slow_networks_loss.json"
RANK, TORCH_RANK, LOSS_RANK = (f"{__package__}.{n}" for n in ("rank", "torch_rank", "loss_rank"))
TORCHFT_HOME = ROOT / ".venv-torchft"
TORCHFT = "torchft==0.2.0"


def torchft_python() -> Path | None:
    """Returns the Python of an environment with torchft, made if necessary; None on failure."""
    python = TORCHFT_HOME / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(TORCHFT_HOME)], check=True)
    for torch in ("", *TORCH_PACKAGES):
        if torch:
            command = [python, "-m", "pip", "install", "-q", torch, "numpy", TORCHFT]
            subprocess.run(command, timeout=1200)
        tried = subprocess.run(
            [python, "-c", "import torchft.local_sgd"], capture_output=True, text=True
        )
        if tried.returncode == 0:
            return python
    print(f"torchft cannot run here: its rows are left out. {tried.stderr}", file=sys.stderr)
    return None


def measure(network: dict[str, Any], model: str, names: list[str]) -> Iterator[dict]:
    """Yields the results of one framework after the other.

    Args:
        network: Arguments of `run_on_hosts`.
        model: What is trained.
        names: Names of candidates.
    """
    for framework in FRAMEWORKS:
        own = ";".join(name for name in names if CANDIDATES[name].framework == framework)
        if not own:
            continue
        if framework == "tfdml":
            yield run_on_hosts(RANK, own, "--network", model, job="horovod", **network)
        elif framework == "Horovod":
            # Horovod's own all-reduce, in place of that of tfdml's build.
            variables = {"job": "horovod", "HOROVOD_GLOO_RING": "1", **network}
            yield run_on_hosts(RANK, own, "--network", model, **variables)
        elif python := torch_python() if framework == "PyTorch" else torchft_python():
            # torchft tells of each exchange otherwise.
            variables = {"RUST_LOG": "warn", "python": python, **network}
            yield run_on_hosts(TORCH_RANK, own, "--network", model, **variables)


def merged(before: dict, part: dict) -> dict:
    """Returns the results of a network with those of one more job.

    Raises:
        RuntimeError: If frameworks have trained models of different size.
    """
    now = {kind: before.get(kind, {}) | part[kind] for kind in ("bases", "results")}
    sizes = {framework: base["parameters"] for framework, base in now["bases"].items()}
    if len(set(sizes.values())) > 1:
        raise RuntimeError(f"All frameworks must train as many parameters. Received: {sizes}.")
    return now


def keep(part: dict, key: str) -> None:
    """Adds results to the kept ones, and removes those of other days or versions.

    Args:
        part: Results of one job.
        key: The network.
    """
    kept = stored(RESULTS)
    now, before = conditions(), kept.get(key, {})
    same = before if before.get("conditions") == now else {}
    kept[key] = {"conditions": now, **merged(same, part)}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def stored(path: Path) -> dict[str, dict]:
    """Returns kept results by network; none if the file does not exist yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep_loss(found: list[dict], network: str, loss: float) -> None:
    """Keeps the results of `--loss` on a network.

    Args:
        found: Results of the methods.
        network: The network.
        loss: Bits per character to which all trained.
    """
    kept = {"conditions": conditions(), "loss": loss, "results": found}
    LOSSES.write_text(json.dumps(stored(LOSSES) | {network: kept}, indent=1) + "\n")


def main(
    rate: Annotated[str, typer.Option(help=f"Of what leaves a host: {', '.join(RATES)}.")] = "",
    hosts: Annotated[int, typer.Option(min=2, help="Hosts, with a rank each.")] = 2,
    latency: Annotated[str, typer.Option(help="Of what leaves a host: 50ms.")] = "",
    model: Annotated[str, typer.Option(help=f"What is trained: {', '.join(MODELS)}.")] = "mlp",
    only: Annotated[list[str] | None, typer.Option(help="Candidates, by name.")] = None,
    keeps: Annotated[bool, typer.Option("--keep/--no-keep", help="Keep the results.")] = True,
    loss: Annotated[
        float, typer.Option(min=0.0, help="Measure the time to these bits per character.")
    ] = 0.0,
    passes: Annotated[int, typer.Option(min=1, help="Passes over the text, with --loss.")] = 1,
    report: Annotated[bool, typer.Option("--report", help="Only write the report.")] = False,
) -> None:
    """Measures one network, or writes the report of all measured networks."""
    if report:
        write_report(stored(RESULTS), stored(LOSSES), RESULTS.with_suffix(".md"))
        return
    check_choice("--rate", rate, RATES)
    check_choice("--model", model, MODELS)
    check_choice("--only", only or (), METHODS if loss else CANDIDATES)
    if GLOBAL_BATCH % hosts:
        raise typer.BadParameter(
            f"`--hosts` must divide the global batch, {GLOBAL_BATCH}: each rank has as many rows. "
            f"Received: {hosts}."
        )
    network: dict[str, Any] = {"hosts": hosts, "rate": rate, "progress": True}
    network["network"] = ["--latency", latency] if latency else []
    links = f"{rate} {latency}".strip()
    if loss:
        names = ";".join(only or METHODS)
        found = run_on_hosts(LOSS_RANK, str(loss), str(passes), names, job="horovod", **network)
        print(f"To {loss} bits per character, {hosts} hosts, {links}. {conditions(load=True)}.\n")
        print(loss_table(found))
        if keeps:
            keep_loss(found, f"{links} x {hosts}", loss)
        return
    for part in measure(network, model, only or list(CANDIDATES)):
        print(json.dumps(part, indent=1), flush=True)
        if keeps:
            keep(part, f"{links} x {hosts} x {model}")


if __name__ == "__main__":
    start(__doc__, main)
