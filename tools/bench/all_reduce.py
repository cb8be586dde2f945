"""Times Horovod's all-reduce as tfdml builds it against gloo's ring, by size and network.

    python -m tools.bench.all_reduce --hosts 4 --rate 1gbit --latency 5ms

Jobs of both alternate; each reports the median of an all-reduce after a small one, by which the
ranks begin together. Needs root, for the network lab.
"""

import statistics
import time
from typing import Annotated

import typer

from tools.bench.harness import conditions, report, run_on_hosts, start

# Numbers of float32, and how often each is summed.
SIZES = {1: 60, 1 << 14: 60, 1 << 18: 60, 2_500_000: 8, 6_250_000: 8}


def run() -> None:
    """Times each size on this process's job; rank 0 reports milliseconds."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    medians = []
    for count, repeats in SIZES.items():
        total = tf.function(lambda v, n=f"sum.{count}": hvd.allreduce(v, op=hvd.Sum, name=n))
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
    run_rank: Annotated[bool, typer.Option("--run", hidden=True)] = False,
) -> None:
    """Prints a table of milliseconds."""
    if run_rank:
        return run()
    network = ["--latency", latency] if latency else []
    kinds = {"gloo's ring": {"HOROVOD_GLOO_RING": "1"}, "direct": {}}
    found: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, variables in kinds.items():
            job = {"hosts": hosts, "ranks": ranks, "rate": rate, "job": "horovod", **variables}
            found[kind].append(run_on_hosts(__spec__.name, "--run", network=network, **job))
    print(f"{hosts} hosts of {ranks}, {rate}, {latency or '0 ms'}; {conditions()}.\n")
    print(f"| | {' | '.join(f'{4 * count:,} B' for count in SIZES)} |")
    print("|---" * (len(SIZES) + 1) + "|")
    for kind, jobs in found.items():
        cells = [f"{statistics.median(times):.2f}" for times in zip(*jobs, strict=True)]
        print(f"| {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    start(__doc__, main)
