"""Times Horovod's exchanges as tfdml builds them against gloo's, by size and network.

    python -m tools.bench.exchanges --hosts 4 --rate 1gbit --latency 5ms
    python -m tools.bench.exchanges --operation all-to-all --latency 5ms

Jobs of both alternate; each reports the median of an exchange after a small all-reduce, by which
the ranks begin together. Needs root, for the network lab.
"""

import enum
import statistics
import time
from typing import Annotated

import typer

from tools.bench.harness import conditions, report, run_on_hosts, start

# Numbers of float32 that a rank has, and how often they are exchanged.
SIZES = {1: 30, 1 << 14: 30, 1 << 18: 30, 2_500_000: 8, 6_250_000: 8}


class Operation(enum.StrEnum):
    """An exchange of Horovod's."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"


def run(operation: Operation) -> None:
    """Times each size on this process's job; rank 0 reports milliseconds."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    exchanges = {
        Operation.ALL_REDUCE: lambda values, name: hvd.allreduce(values, op=hvd.Sum, name=name),
        Operation.ALL_GATHER: lambda values, name: hvd.allgather(values, name=name),
        Operation.ALL_TO_ALL: lambda values, name: hvd.alltoall(
            tf.reshape(values, [hvd.size(), -1]), [1] * hvd.size(), name=name
        ),
    }
    medians = []
    for size, repeats in SIZES.items():
        count = -(-size // hvd.size()) * hvd.size()
        exchange = exchanges[operation]
        total = tf.function(lambda v, n=f"timed.{count}", e=exchange: e(v, n))
        seconds = []
        for _ in range(repeats + 3):
            hvd.allreduce(tf.zeros([1]), name="begin")
            begin = time.perf_counter()
            total(tf.ones([count]))
            seconds.append(time.perf_counter() - begin)
        medians.append(1e3 * statistics.median(seconds[3:]))
    if hvd.rank() == 0:
        report(medians)


def main(
    hosts: Annotated[int, typer.Option(min=2, help="Hosts.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks on each host.")] = 1,
    rate: Annotated[str, typer.Option(help="Of what leaves a host: 1gbit.")] = "1gbit",
    latency: Annotated[str, typer.Option(help="Of what leaves a host: 5ms.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Jobs of each kind.")] = 2,
    operation: Annotated[Operation, typer.Option(help="Exchange.")] = Operation.ALL_REDUCE,
    run_rank: Annotated[bool, typer.Option("--run", hidden=True)] = False,
) -> None:
    """Prints a table of milliseconds."""
    if run_rank:
        return run(operation)
    network = ["--latency", latency] if latency else []
    kinds = {"gloo's": {"HOROVOD_GLOO_RING": "1"}, "direct": {}}
    found: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, variables in kinds.items():
            job = {"hosts": hosts, "ranks": ranks, "rate": rate, "job": "horovod", **variables}
            options = ["--run", "--operation", operation.value]
            found[kind].append(run_on_hosts(__spec__.name, *options, network=network, **job))
    print(f"{operation}, {hosts} hosts of {ranks}, {rate}, {latency or '0 ms'}; {conditions()}.\n")
    print(f"| | {' | '.join(f'{4 * count:,} B' for count in SIZES)} |")
    print("|---" * (len(SIZES) + 1) + "|")
    for kind, jobs in found.items():
        cells = [f"{statistics.median(times):.2f}" for times in zip(*jobs, strict=True)]
        print(f"| {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    start(__doc__, main)
