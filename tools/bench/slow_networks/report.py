"""Report of `tools.bench.slow_networks`: tables, their summary, and a plot."""

from collections.abc import Iterator
from pathlib import Path

from tools.bench.slow_networks.model import (
    AUTO,
    CANDIDATES,
    DILOCO,
    FRAMEWORKS,
    LOCAL_SGD,
    MODELS,
    NONE,
    RATES,
    TIMED_ALONE,
    Candidate,
)

COMMAND = "python -m tools.bench.slow_networks --rate 50mbit --hosts 2"
_COLUMNS = (
    "",
    "steps/s",
    "step, ms",
    "computing, %",
    "of local + exchange",
    "tfdml's step / this one",
    "MB sent a step",
    "processor s/step",
    "counted steps",
)
_NOTES = """\
Hosts are network namespaces of one machine (`tools/netlab`), with one rank each, and share its
cores; all frameworks have as many threads. The global batch has 32 rows. The time of a step is the
mean of whole rounds: local steps, and the exchange that ends them. A number in parentheses is that
of steps between two exchanges. Names in bold are tfdml's and run under `model.fit`. "Horovod
averaging" and "PyTorch averager" are hand-written loops, the latter with `PeriodicModelAverager`.
torchft has a lighthouse, a manager on each host and gloo; its quantization needs a GPU, so it is
not measured.

- "computing": the part of the time that the steps would take as the framework's local step alone.
  Above 100, the short runs of the local step alone were slower than the long ones with exchanges.
- "of local + exchange": the time of a step, relative to a local step alone and the exchange alone
  divided by the number of steps between exchanges, of the same job.
- "tfdml's step / this one": the time of tfdml's step with the same method, as many steps between
  exchanges and no codec, relative to this one; above 1, tfdml is slower.
"""


def counterpart(candidate: Candidate) -> str:
    """Returns the name of tfdml's candidate with a peer's method and steps between exchanges."""
    method = DILOCO if candidate.method == DILOCO else LOCAL_SGD
    return Candidate("tfdml", method, candidate.every).name


def computing(run: dict, name: str) -> float:
    """Returns the part of a candidate's time that its framework's local step takes alone."""
    base = run["bases"][CANDIDATES[name].framework]
    return base["alone"] / run["results"][name]["seconds"]


def of_parts(run: dict, name: str) -> float | None:
    """Returns a step's time, relative to that of its parts alone; None if they are not known."""
    candidate = CANDIDATES[name]
    base = run["bases"][candidate.framework]
    if candidate.codec == AUTO or candidate.codec not in base["exchanges"]:
        return None
    parts = base["alone"] + base["exchanges"][candidate.codec] / candidate.every
    return run["results"][name]["seconds"] / parts


def to_peer(run: dict, name: str) -> float | None:
    """Returns the time of tfdml's step, relative to a peer's; None if there are not both."""
    candidate, results = CANDIDATES[name], run["results"]
    if candidate.framework == "tfdml" or counterpart(candidate) not in results:
        return None
    return results[counterpart(candidate)]["seconds"] / results[name]["seconds"]


def rows(run: dict) -> list[list[str]]:
    """Returns a network's rows: by steps between exchanges, the fastest first."""
    made = []
    results = run["results"]
    for name in sorted(results, key=lambda n: (CANDIDATES[n].every, results[n]["seconds"])):
        result = results[name]
        ratios = [of_parts(run, name), to_peer(run, name)]
        made.append(
            [
                f"**{name}**" if CANDIDATES[name].framework == "tfdml" else name,
                f"{1 / result['seconds']:.3g}",
                f"{1e3 * result['seconds']:,.0f}",
                f"{100 * computing(run, name):.1f}",
                *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                f"{result['bytes'] / 1e6:.3f}",
                f"{result['cpu']:.3f}",
                f"{result['steps']}",
            ]
        )
    return made


def base_rows(run: dict) -> list[list[str]]:
    """Returns the rows of what each framework takes alone."""
    made = []
    for framework in (name for name in FRAMEWORKS if name in run["bases"]):
        base = run["bases"][framework]
        before, after = (f"{1e3 * seconds:.1f}" for seconds in base["alone each"])
        exchanges = (base["exchanges"].get(codec) for codec in TIMED_ALONE)
        cells = ["" if seconds is None else f"{1e3 * seconds:,.0f}" for seconds in exchanges]
        made.append([framework, f"{before}, {after}", *cells])
    return made


def table(head: tuple[str, ...], lines: list[list[str]]) -> str:
    """Returns a Markdown table."""
    every = [list(head), ["---", *["---:"] * (len(head) - 1)], *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in every)


def loss_table(found: list[dict]) -> str:
    """Returns the Markdown table of `--loss`."""
    lines = []
    first = found[0]["seconds"]
    for each in found:
        steps = f"{each['steps']}" if each["reached"] else f"not in {each['steps']}"
        faster = f"{first / each['seconds']:.2f}" if each["reached"] else ""
        sent = f"{each['sent'] / 1e6:.2f}"
        seconds, bits = f"{each['seconds']:.1f}", f"{each['bits']:.3f}"
        lines.append([each["method"], faster, steps, seconds, sent, bits])
    return table(("", "times as fast", "steps", "seconds", "MB sent", "bits per character"), lines)


def loss_parts(losses: dict) -> list[str]:
    """Returns the report's parts about the time to a given loss, a network after the other."""
    parts = []
    for network, run in losses.items():
        links, _, hosts = network.partition(" x ")
        rate, *latency = links.split()
        options = [f"--rate {rate}", *(f"--latency {each}" for each in latency)]
        options += [f"--hosts {hosts}", f"--loss {run['loss']}"]
        parts += [
            f"## {network}: time to {run['loss']} bits per character",
            f"The same transformer, to a given loss on text not seen, which is measured every 50 "
            f"steps or fewer. Times as fast as the first row. Measured with {run['conditions']}.",
            f"    python -m tools.bench.slow_networks {' '.join(options)}",
            loss_table(run["results"]),
        ]
    return parts


# -- The summary -----------------------------------------------------------------------------------


def meaning(runs: dict) -> str:
    """Returns the best of tfdml and of its peers on each network."""
    said = []
    for network, run in runs.items():
        parts = []
        for of_tfdml in (True, False):
            names = [n for n in run["results"] if (CANDIDATES[n].framework == "tfdml") == of_tfdml]
            if names:
                best = min(names, key=lambda n: run["results"][n]["seconds"])
                parts.append(f"{best} computes {100 * computing(run, best):.1f} % of the time")
        said.append(f"{network}: {', '.join(parts)}")
    return "; ".join(said)


def slower(runs: dict) -> str:
    """Returns where a peer is faster with the same method and steps between exchanges.

    Of each peer's method the worst case on each network is told.
    """
    said, compared = [], False
    for network, run in runs.items():
        worst: dict[tuple[str, str], tuple[float, str]] = {}
        for name in run["results"]:
            ratio = to_peer(run, name)
            compared = compared or ratio is not None
            if ratio is not None and ratio > 1.0:
                kind = CANDIDATES[name].framework, CANDIDATES[name].method
                worst[kind] = max(worst.get(kind, (0.0, "")), (ratio, name))
        if worst:
            cases = ", ".join(f"{ratio:.2f} as {name}" for ratio, name in worst.values())
            said.append(f"{network}: at most (times as long) {cases}")
    return "; ".join(said) or ("than none of these peers" if compared else "not compared yet")


def header(runs: dict) -> str:
    """Returns the table at the beginning of the page."""
    conditions = [run["conditions"].split("; ") for run in runs.values()]
    versions, machines, dates = (
        list(dict.fromkeys(part)) for part in zip(*conditions, strict=True)
    )
    for run in runs.values():
        for base in run["bases"].values():
            versions += [f"{p} {v}" for p, v in base.get("versions", {}).items()]
    lines = {
        "Question": "What part of the time do workers compute that exchange seldom, on slow links?",
        "Hardware": f"{', '.join(machines)}; hosts are network namespaces; {', '.join(dates)}",
        "Versions": ", ".join(dict.fromkeys(versions)),
        "Command": f"`{COMMAND}`",
        "Meaning": meaning(runs),
        "tfdml is slower": slower(runs),
    }
    body = "\n".join(f"| **{name}** | {text} |" for name, text in lines.items())
    return f"| | |\n|---|---|\n{body}"


# -- Page and plot ---------------------------------------------------------------------------------


def _order(network: str) -> tuple:
    """Returns the sort key of a network: the model, then the slowest first."""
    links, hosts, model = network.split(" x ")
    rate, *latency = links.split()
    return list(MODELS).index(model), latency, RATES.index(rate), int(hosts)


def _lines(run: dict) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """Yields each line of the plot: its label, and steps between exchanges with percent."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name in run["results"]:
        candidate = CANDIDATES[name]
        codec = "" if candidate.codec == NONE else f", {candidate.codec}"
        label = f"{candidate.framework} {candidate.method}{codec}"
        found.setdefault(label, []).append((candidate.every, 100 * computing(run, name)))
    for label, points in found.items():
        yield label, sorted(points)


def plot(runs: dict, path: Path) -> None:
    """Plots the part of the time spent computing by the steps between exchanges."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    wide = min(2, len(runs))
    high = -(-len(runs) // wide)
    figure, axes = plt.subplots(high, wide, figsize=(6 * wide, 4 * high), squeeze=False)
    for axis in axes.flat[len(runs) :]:
        axis.set_axis_off()
    colors: dict[str, str] = {}
    for axis, (network, run) in zip(axes.flat, runs.items(), strict=False):
        for label, points in _lines(run):
            color = colors.setdefault(label, f"C{len(colors) % 10}")
            marker = "o-" if label.startswith("tfdml") else "x--"
            axis.plot(*zip(*points, strict=True), marker, color=color, label=label)
        axis.set_xscale("log", base=2)
        ticks = sorted({CANDIDATES[name].every for name in run["results"]})
        axis.set_xticks(ticks, [f"{tick}" for tick in ticks])
        axis.set_title(network)
        axis.set_ylim(0, None)
        axis.set_xlabel("steps between exchanges")
        axis.set_ylabel("computing, % of the time")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def plot_choice(runs: dict, path: Path) -> None:
    """Plots, for each network and each way of tfdml, the part of the time spent computing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [n for n, c in CANDIDATES.items() if c.framework == "tfdml" and c.method != DILOCO]
    names.sort(key=lambda name: (CANDIDATES[name].every, name))
    parts = [[_percent(run, name) for name in names] for run in runs.values()]
    figure, axis = plt.subplots(figsize=(1 + 0.9 * len(names), 1.6 + 0.5 * len(runs)))
    axis.imshow(parts, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
    for y, row in enumerate(parts):
        for x, percent in enumerate(row):
            if percent == percent:
                axis.text(x, y, f"{percent:.0f}", ha="center", va="center")
    axis.set_yticks(range(len(runs)), [_in_words(network) for network in runs])
    labels = [name.removeprefix("tfdml ").replace(", ", ",\n") for name in names]
    axis.set_xticks(range(len(names)), labels, rotation=35, ha="right", fontsize=8)
    axis.set_title("Part of the time spent computing, %")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def _percent(run: dict, name: str) -> float:
    """Returns the part of the time spent computing in percent; NaN if it was not measured."""
    return 100 * computing(run, name) if name in run["results"] else float("nan")


def _in_words(network: str) -> str:
    """Returns text such as "25 M parameters, 1 Gbit/s, 50 ms"."""
    links, _, model = network.split(" x ")
    rate, *latency = links.split()
    size = {"mlp": "25 M parameters", "text": "120,000 parameters"}[model]
    rate = rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")
    return ", ".join([size, rate, *(each.replace("ms", " ms") for each in latency)])


def write_report(runs: dict, losses: dict, path: Path) -> None:
    """Writes the page with the tables of all networks, and the plots beside it.

    Args:
        runs: Results by network.
        losses: Results of `--loss` by network.
        path: Path of the page.
    """
    runs = {network: runs[network] for network in sorted(runs, key=_order)}
    picture = path.with_suffix(".png")
    commands = f"    {COMMAND}\n    python -m tools.bench.slow_networks --report"
    parts = ["# Local updates on slow networks", header(runs), commands, _NOTES.strip()]
    parts.append(f"![part of the time spent computing]({picture.name})")
    alone = (
        "alone",
        "local step, ms, before and after",
        *(f"exchange, {c}, ms" for c in TIMED_ALONE),
    )
    for network, run in runs.items():
        model = network.rpartition(" x ")[2]
        parts += [
            f"## {network}",
            f"{MODELS[model].capitalize()}. Measured with {run['conditions']}.",
        ]
        parts += [table(_COLUMNS, rows(run)), table(alone, base_rows(run))]
    parts += loss_parts(losses)
    path.write_text("\n\n".join(parts) + "\n")
    plot(runs, picture)
    plot_choice(runs, path.with_name(f"{path.stem}_choice.png"))
