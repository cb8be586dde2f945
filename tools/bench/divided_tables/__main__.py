"""Times steps of a recommender whose tables are on every rank, or divided among ranks or servers.

    python -m tools.bench.divided_tables --rate 1gbit --hosts 2
    python -m tools.bench.divided_tables --rate 100mbit --hosts 4
    python -m tools.bench.divided_tables --rate 100mbit --hosts 4 --rows 100000 --ids-each 32

The model is like DLRM: 8 tables of a million rows of 64 numbers, 2 GB in sum, whose rows are
multiplied with one another, and layers below and above. A global batch has 1,024 samples, each with
an id for each table, or several whose rows are added up; a few ids are frequent. The optimizer is
SGD. Each candidate is a job of its own, on hosts of a network lab with a rank each (root needed).

The peers are TorchRec, whose ranks keep parts of each table or some of the tables (on gloo, in an
environment that this tool makes, .venv-torchrec in the checkout), and a hand-written loop over
Horovod, which has whole tables and gathers the gradients of their rows. Before TorchRec is timed,
it trains a small model, and must get the losses and values of plain Keras. For parameter servers
each host has a worker and a server, and the first one the chief; the peak is a server's, and an
asynchronous step is a batch of one worker.

Beside the ids of a rank in a second of steps are the ids that its framework looks up and updates
without network or layers, in a table of as many rows, and the rows that NumPy copies from such a
table in the same process: the limit of the memory. Both draw ids evenly.

Beside the bytes that leave the first host are those that it has to send for its ids, by a formula
where there is a clear one (`traffic.py`): ids, rows and gradients. The rest is what the network and
the implementation add.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.bench.divided_tables import traffic
from tools.bench.divided_tables.model import BATCH, ROWS, TABLES, WARM_UP, batches
from tools.bench.divided_tables.rank import DIVIDED, LOOP, PLAIN, SERVERS, WHOLE, WORKERS
from tools.bench.divided_tables.torchrec_rank import BY_ROWS, BY_TABLES
from tools.bench.harness import ROOT, check_choice, conditions, run_job, run_on_hosts, start

TORCHREC = {"TorchRec, by rows": BY_ROWS, "TorchRec, by tables": BY_TABLES}
CANDIDATES = (*DIVIDED, WHOLE, LOOP, *TORCHREC, *SERVERS)
FORMULAS: dict[str, Callable] = {
    **{name: partial(traffic.divided, row_codec=codec) for name, codec in DIVIDED.items()},
    WHOLE: traffic.whole,
    LOOP: traffic.loop,
    "TorchRec, by rows": traffic.torchrec_by_rows,
    "TorchRec, by tables": traffic.torchrec_by_tables,
}
COLUMNS = (
    "step, ms",
    "MB sent by a rank",
    "MB by formula",
    "peak of a rank, MiB",
    "1,000 ids/s",
    "alone",
    "memory",
)
TIMEOUT = 900.0
RANK, TORCHREC_RANK = (f"{__package__}.{name}" for name in ("rank", "torchrec_rank"))
TORCHREC_HOME = ROOT / ".venv-torchrec"
# In order of preference: the CPU build first, without the GPU libraries. FBGEMM's libraries load
# with the PyTorch alone for which they are built.
TORCH = ("torch==2.13.0+cpu", "torch==2.13.0")
# TorchRec depends on FBGEMM's build for GPUs, so all it needs is named.
PACKAGES = (
    "torchrec==1.8.0",
    "fbgemm-gpu-cpu==1.8.0",
    "tensordict==0.15.3",
    "pyre-extensions==0.0.32",
    "cloudpickle",
    "mypy-extensions",
    "pyvers",
    "typing-inspect",
)
# Sizes of the small model that TorchRec and plain Keras train. With many ids for each table, plain
# Keras's rounding would grow to more than the difference between right and wrong.
SMALL = ("--rows", "1000", "--ids-each", "4")
# Largest differences: of a loss, and of values in parts of their largest change. Plain Keras rounds
# a row once for each of its ids in a batch, FBGEMM once for all of them.
TOLERANCES = {"losses": 1e-6, "tables": 1e-2, "layers": 1e-4}


def torchrec_python() -> Path | None:
    """Returns the Python of an environment with TorchRec, made if necessary; None on failure."""
    python = TORCHREC_HOME / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(TORCHREC_HOME)], check=True)
    install = [python, "-m", "pip", "install", "-q"]
    for torch in ("", *TORCH):
        if torch:
            subprocess.run([*install, torch, "numpy"], timeout=1200)
            subprocess.run([*install, "--no-deps", *PACKAGES], timeout=1200)
        if subprocess.run([python, "-c", "import torchrec"], capture_output=True).returncode == 0:
            return python
    print("TorchRec cannot be installed here: its rows are left out.", file=sys.stderr)
    return None


def compare(name: str, python: Path, hosts: int) -> dict[str, float]:
    """Trains a small model by TorchRec and by plain Keras, from the same values.

    Args:
        name: TorchRec's candidate.
        python: Python with TorchRec.
        hosts: The number of hosts.

    Returns:
        The largest difference of a loss; of tables and of layers, in parts of their largest change.

    Raises:
        RuntimeError: If one of them is larger than what rounding explains.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/values.npz"
        run_job(RANK, PLAIN, *SMALL, "--values", file, processes=1, timeout=TIMEOUT)
        found = run_on_hosts(
            TORCHREC_RANK, TORCHREC[name], *SMALL, "--compare", file,
            hosts=hosts, rate="", python=python, timeout=TIMEOUT,
        )  # fmt: skip
    # A NaN is no small difference.
    if not all(found[kind] <= limit for kind, limit in TOLERANCES.items()):
        raise RuntimeError(
            f"{name!r} must train as plain Keras does, with differences of at most {TOLERANCES}. "
            f"Received: {found}."
        )
    return found


def measure(
    name: str, rows: int, ids_each: int, hosts: int, rate: str, python: Path | None
) -> dict[str, Any]:
    """Returns what rank 0 of a candidate's job reports.

    Args:
        name: The candidate.
        rows: The number of rows of each table.
        ids_each: The number of ids that a sample has for each table.
        hosts: The number of hosts, with a rank each.
        rate: Limit of a host's link.
        python: Python with TorchRec, for its candidates.
    """
    job = "none" if name in SERVERS else "multi-worker" if name == WORKERS else "horovod"
    module, what, how = RANK, name, {"job": job}
    if name in TORCHREC:
        module, what, how = TORCHREC_RANK, TORCHREC[name], {"python": python}
    sizes = ["--rows", str(rows), "--ids-each", str(ids_each)]
    return run_on_hosts(module, what, *sizes, hosts=hosts, rate=rate, timeout=TIMEOUT, **how)


def bytes_by_formula(name: str, rows: int, ids_each: int, hosts: int) -> float | None:
    """Returns the bytes that the first host has to send in a step, None without a formula.

    Args:
        name: The candidate.
        rows: The number of rows of each table.
        ids_each: The number of ids that a sample has for each table.
        hosts: The number of hosts, with a rank each.
    """
    if name not in FORMULAS:
        return None
    ids, _, _ = batches(rows, ids_each)
    steps = [ids[first : first + BATCH] for first in range(WARM_UP * BATCH, len(ids), BATCH)]
    return statistics.median(FORMULAS[name](step, rows, hosts) for step in steps)


def row(name: str, found: dict[str, Any], ids: float, formula: float | None) -> str:
    """Returns a candidate's row of the table.

    Args:
        name: The candidate.
        found: The figures that it has reported.
        ids: The number of ids of a rank in a step.
        formula: The bytes that the first host has to send in a step, None if unknown.
    """
    cells = [f"{1000 * found['step']:.1f}", f"{found['sent'] / 1e6:.2f}"]
    cells.append("–" if formula is None else f"{formula / 1e6:.2f}")
    cells.append(f"{found['peak']:.0f}")
    cells.append(f"{ids / found['step'] / 1000:.0f}")
    cells += [f"{found[each] / 1000:.0f}" if each in found else "" for each in ("alone", "memory")]
    return f"| {name} | {' | '.join(cells)} |"


def main(
    rate: Annotated[str, typer.Option(help="Limit of a host's link: 100mbit, 1gbit.")] = "1gbit",
    hosts: Annotated[int, typer.Option(min=2, help="Hosts, with a rank each.")] = 2,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each of the tables.")] = ROWS,
    ids_each: Annotated[int, typer.Option(min=1, help="Ids of a sample for each table.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Candidates, by name.")] = None,
) -> None:
    """Prints the table for the benchmarks' page."""
    if BATCH % hosts:
        raise typer.BadParameter(
            f"`--hosts` must divide the global batch, {BATCH}: each rank has as many samples. "
            f"Received: {hosts}."
        )
    check_choice("--only", only or (), CANDIDATES)
    names = only or list(CANDIDATES)
    python = torchrec_python() if set(names) & set(TORCHREC) else None
    if python is None:
        names = [name for name in names if name not in TORCHREC]
    for name in (name for name in names if name in TORCHREC):
        found = compare(name, python, hosts)
        differences = ", ".join(f"{kind} {difference:.1e}" for kind, difference in found.items())
        print(f"{name} trains as plain Keras does; largest differences: {differences}.")
    print(f"Measured with {conditions(load=True)}.\n")
    print(f"| {hosts} ranks, {rate}, ids {ids_each} | {' | '.join(COLUMNS)} |")
    print(f"|---|{'---:|' * len(COLUMNS)}", flush=True)
    for name in names:
        found = measure(name, rows, ids_each, hosts, rate, python)
        formula = bytes_by_formula(name, rows, ids_each, hosts)
        print(row(name, found, BATCH / hosts * TABLES * ids_each, formula), flush=True)


if __name__ == "__main__":
    start(__doc__, main)
