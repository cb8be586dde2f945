"""Times `ParameterServerStrategy` beside its peers; cases where tfdml is slower are printed too.

    python -m tools.bench.parameter_server peers --workers 2
    python -m tools.bench.parameter_server peers --workers 2 --rate 1gbit    # as root
    python -m tools.bench.parameter_server slow --workers 3
    python -m tools.bench.parameter_server compressed             # as root

`peers`: epochs of `fit` and of a hand-written `ClusterCoordinator` loop take turns in one process,
on the same cluster; the `fit` of tf_keras, which is frozen Keras 2, has a cluster of its own, in
turn with ours. `slow`: one worker is stopped four fifths of the time, and asynchronous training is
compared with synchronous, with and without a backup worker. `compressed`: what codecs save of the
bytes that workers push.

With `--rate` all tasks are hosts of a `tools/netlab` with such a network between them.
"""

import json
import statistics
from typing import Annotated, Any

import typer

from tools.bench.figures import in_words, ratios
from tools.bench.harness import conditions, run_on_hosts, run_with_servers, start
from tools.bench.parameter_server.chief import SLOWER, STEPS

LIMIT_SECONDS = 240.0


def run(kind: str, workers: int, rate: str, epochs: int, width: int, **options: Any) -> dict:
    """Runs one measurement in its own cluster, with one server; returns the chief's report."""
    arguments = ["measure", kind, str(epochs), str(width), json.dumps(options)]
    variables = {"TF_USE_LEGACY_KERAS": "1"} if kind == "fit_of_tf_keras" else {}
    if rate:
        return run_on_hosts(
            "tools.bench.parameter_server.host",
            *arguments,
            hosts=workers + 2,
            rate=rate,
            threads=1,
            timeout=LIMIT_SECONDS,
            **variables,
        )
    return run_with_servers(
        "tools.bench.parameter_server.chief",
        *arguments,
        workers=workers,
        timeout=LIMIT_SECONDS,
        **variables,
    )


def in_short(rates: list[float]) -> str:
    """Returns the median and the quartiles of rates."""
    low, middle, high = statistics.quantiles(rates, n=4)
    return f"{middle:,.0f} ({low:,.0f}–{high:,.0f})"


def peers(
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Clusters of each kind, in turn.")] = 2,
    epochs: Annotated[int, typer.Option(min=2, help=f"Epochs of {STEPS} steps.")] = 8,
    width: Annotated[int, typer.Option(min=1, help="Units of a layer.")] = 256,
    rate: Annotated[str, typer.Option(help="Of the network: 1gbit. Needs root.")] = "",
) -> None:
    """Compare `fit` with a hand-written loop and with tf_keras's `fit`."""
    seconds: dict[str, list[float]] = {"fit": [], "loop": [], "tf_keras": []}
    for _ in range(rounds):
        for kind in ("fit_and_loop", "fit_of_tf_keras"):
            for name, seen in run(kind, workers, rate, epochs, width).items():
                seconds[name] += seen
    print(conditions())
    by_loop, by_tf_keras = (ratios(seconds["fit"], seconds[n]) for n in ("loop", "tf_keras"))
    steps = {name: in_short([STEPS / s for s in seen]) for name, seen in seconds.items()}
    print("| workers | network | `fit`, steps/s | loop | time by the loop's | tf_keras | by its |")
    print(
        f"| {workers} | {rate or 'loopback'} | {steps['fit']} | {steps['loop']} | "
        f"{in_words(by_loop)} | {steps['tf_keras']} | {in_words(by_tf_keras)} |"
    )


def slow(
    workers: Annotated[int, typer.Option(min=2, help="Workers.")] = 3,
    epochs: Annotated[int, typer.Option(min=2, help=f"Epochs of {STEPS} steps.")] = 5,
    width: Annotated[int, typer.Option(min=1, help="Units of a layer.")] = 256,
) -> None:
    """Compare modes where one worker takes five times as long."""
    modes = {
        "asynchronous": {},
        "synchronous": {"synchronous": True},
        "synchronous, a backup worker": {"synchronous": True, "backup_workers": 1},
    }
    print(conditions())
    print(f"| {workers} workers | all equal, rows/s in updates | one {SLOWER} times as slow |")
    for name, options in modes.items():
        found = run("beside_a_slow_worker", workers, "", epochs, width, **options)
        print(f"| {name} | {in_short(found['even'])} | {in_short(found['slow'])} |")


def compressed(
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 2,
    epochs: Annotated[int, typer.Option(min=2, help=f"Epochs of {STEPS} steps.")] = 4,
    width: Annotated[int, typer.Option(min=1, help="Units of a layer.")] = 512,
    rate: Annotated[str, typer.Option(help="Of the network; needs root.")] = "100mbit",
) -> None:
    """Compare what workers push with and without codecs."""
    print(conditions())
    print(f"| {workers} workers | KB a step, all tasks, loopback | steps/s, {rate} |")
    for codec in (None, "float16", "natural", "terngrad"):
        options = {} if codec is None else {"compression": codec}
        sent = statistics.median(run("pushes", workers, "", epochs, width, **options)["bytes"])
        shaped = run("pushes", workers, rate, epochs, width, **options)["seconds"]
        rates = in_short([STEPS / s for s in shaped])
        print(f"| {codec or 'plain'} | {sent / 1e3:,.0f} | {rates} |")


if __name__ == "__main__":
    start(__doc__, peers, slow, compressed)
