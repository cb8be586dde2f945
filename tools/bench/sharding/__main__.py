"""Times sharded optimizer state against training without it, and against PyTorch's, in one run.

    python -m tools.bench.sharding --rate 100mbit --hosts 2
    python -m tools.bench.sharding --hosts 4               # a network without a limit

Each network is made by `tools/netlab` (root needed), with one rank on each host. Ours trains under
`fit` and HorovodStrategy with and without sharding; PyTorch's candidates are DDP, DDP with
`ZeroRedundancyOptimizer`, and FSDP2, on gloo, in an environment that this tool makes (.venv-torch
in the checkout). All train the same 25 million parameters with Adam, and take turns.
"""

from typing import Annotated

import typer

from tools.bench.compression.__main__ import torch_python
from tools.bench.compression.model import RATES
from tools.bench.harness import check_choice, conditions, run_on_hosts, start


def main(
    rate: Annotated[str, typer.Option(help="100mbit, 1gbit, 10gbit; unlimited if empty.")] = "",
    hosts: Annotated[int, typer.Option(min=2, help="Hosts.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each candidate.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps in each turn.")] = 3,
    peers: Annotated[bool, typer.Option(help="PyTorch's candidates, too.")] = True,
) -> None:
    """Measures one network, and prints its table."""
    check_choice("--rate", rate, RATES)
    network = {"hosts": hosts, "rate": rate, "progress": True}
    arguments = (str(rounds), str(steps))
    results = run_on_hosts("tools.bench.sharding.rank", *arguments, job="horovod", **network)
    if peers and (python := torch_python()):
        results |= run_on_hosts(
            "tools.bench.sharding.torch_rank", *arguments, python=python, **network
        )
    print(f"\n{conditions(load=True)}; {hosts} hosts, {rate or 'no limit'}\n")
    titles = ("ms a step, median", "MB sent a step", "of ours without", "slots, MB")
    print(f"| | {' | '.join(titles)} | step / ours without |")
    print("|---|---:|---:|---:|---:|---:|")
    first = results["without"]["median"]
    for name, row in results.items():
        ms, sent, slots = row["median"] * 1e3, row["bytes"] / 1e6, row["slots"] / 1e6
        of_bytes = row["bytes"] / results["without"]["bytes"]
        cells = [f"{ms:,.0f}", f"{sent:.1f}", f"{of_bytes:.2f}", f"{slots:.1f}"]
        print(f"| {name} | {' | '.join(cells)} | {row['median'] / first:.2f} |")


if __name__ == "__main__":
    start(__doc__, main)
