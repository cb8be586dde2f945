"""Report of `tools.bench.compression`: tables and a plot of its results."""

from pathlib import Path

from tools.bench.compression.model import GLOBAL_BATCH, PARAMETERS, PEERS, formula
from tools.bench.harness import BENCHMARKS

# Text of the report, kept separately from its numbers.
_NOTES = BENCHMARKS / "compression_notes.md"
MODELS = {
    "mlp": f"dense layers of {PARAMETERS:,} parameters",
    "resnet20": "ResNet-20",
    "transformer": "a small transformer with an embedding of 8,192 rows",
    "text": "a smaller transformer with an embedding of 128 rows",
}
_RATES = ("100mbit", "1gbit", "10gbit", "25gbit", "unshaped")
_COLUMNS = (
    "",
    "MB sent",
    "of formula",
    "step, ms (p90)",
    "of raw Horovod",
    "samples/s",
    "step - local, ms",
    "exchange alone, ms",
    "codec (encoding) + wire, together, ms",
    "processor s/step",
)


def hosts_and_ranks(text: str) -> tuple[int, int]:
    """Returns the number of hosts, and of ranks on each, from a network's name: "2" or "2*2"."""
    hosts, _, ranks = text.partition("*")
    return int(hosts), int(ranks or 1)


def rows(results: dict, hosts: str, model: str) -> list[list[str]]:
    """Returns a network's rows, the fastest first."""
    count, ranks = hosts_and_ranks(hosts)
    local = results.get("local", {}).get("median")
    torch_local = results.get("PyTorch local", {}).get("median")
    raw = results.get("raw Horovod", {}).get("median")
    made = []
    measured = {n: r for n, r in results.items() if "median" in r}
    for name, r in sorted(measured.items(), key=lambda item: item[1]["median"]):
        sends = model == "mlp" and "local" not in name and not name.startswith("auto")
        alone = torch_local if name.startswith("PyTorch") else local
        exchange = r.get("exchange")
        made.append(
            [
                name if name in PEERS or "local" in name else _bold(name, r),
                f"{r['bytes'] / 1e6:.2f}",
                f"{r['bytes'] / formula(name, count, ranks, r.get('by_hosts', False)):.3f}"
                if sends
                else "",
                _step(r),
                f"{raw / r['median']:.2f} x" if raw else "",
                f"{GLOBAL_BATCH / r['median']:.1f}",
                f"{1e3 * (r['median'] - alone):.0f}" if alone else "",
                f"{1e3 * exchange:.0f}" if exchange else "",
                _parts(r),
                f"{r['cpu']:.2f}",
            ]
        )
    return made


def _step(result: dict) -> str:
    """Returns the milliseconds of a step as text, with their 90th percentile or range of turns."""
    if "turns" not in result:
        return f"{1e3 * result['median']:.0f} ({1e3 * result['p90']:.0f})"
    low, high = (1e3 * end(result["turns"]) for end in (min, max))
    return f"{1e3 * result['median']:.0f} ({len(result['turns'])} turns, {low:.0f}–{high:.0f})"


def _bold(name: str, result: dict) -> str:
    return f"**{name}, by hosts**" if result.get("by_hosts") else f"**{name}**"


def _parts(result: dict) -> str:
    """Returns the separate times of the parts of an exchange, as text."""
    if "codec" not in result:
        return ""
    codec, wire, together = (1e3 * result[part] for part in ("codec", "wire", "together"))
    encoding = f" ({1e3 * result['encode']:.0f})" if "encode" in result else ""
    return f"{codec:.0f}{encoding} + {wire:.0f}, {together:.0f}"


def table(lines: list[list[str]]) -> str:
    """Returns a Markdown table."""
    head = [list(_COLUMNS), ["---", *["---:"] * (len(_COLUMNS) - 1)]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [*head, *lines])


def plot(runs: dict, path: Path) -> None:
    """Plots speeds relative to raw Horovod on each network, for the dense layers without XLA."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    networks = [n for n in runs if n.endswith(" x mlp") and len(runs[n]["results"]) > 20]
    wide = min(2, len(networks))
    high = -(-len(networks) // wide)
    figure, axes = plt.subplots(high, wide, figsize=(6.5 * wide, 5 * high), squeeze=False)
    for axis in axes.flat[len(networks) :]:
        axis.set_axis_off()
    for axis, network in zip(axes.flat, networks, strict=False):
        results = {n: r for n, r in runs[network]["results"].items() if "median" in r}
        names = sorted(results, key=lambda n: -results[n]["median"])
        names = [n for n in names if "local" not in n]
        base = results["raw Horovod"]["median"]
        speeds = [base / results[n]["median"] for n in names]
        colors = ["#999999" if n in PEERS else "#1f77b4" for n in names]
        axis.barh(names, speeds, color=colors)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log")
        ticks = [t for t in (0.5, 1, 2, 5, 10, 20, 50) if t < 1.1 * max(speeds)]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        rate, hosts, _ = network.split(" x ")
        axis.set_title(f"{rate}, {_in_words(hosts)}")
        axis.set_xlabel("steps, times as fast as raw Horovod")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def _order(item: tuple[str, dict]) -> tuple:
    """Returns the sort key of a network: the model, then the slowest first."""
    links, hosts, model, *compiled = item[0].split(" x ")
    rate, *far = links.split()
    return list(MODELS).index(model), compiled, _RATES.index(rate), far, hosts_and_ranks(hosts)


def _in_words(hosts: str) -> str:
    """Returns how many ranks a network has, as text."""
    count, ranks = hosts_and_ranks(hosts)
    return f"{count} ranks" if ranks == 1 else f"{count} hosts of {ranks} ranks"


def write_report(runs: dict, path: Path) -> None:
    """Writes the tables of all networks, and the plot beside them."""
    parts = [_NOTES.read_text().strip()] if _NOTES.exists() else []
    runs = dict(sorted(runs.items(), key=_order))
    parts.append(f"![steps against raw Horovod's]({path.with_suffix('.png').name})")
    for network, run in runs.items():
        rate, hosts, model, *compiled = network.split(" x ")
        by_xla = ", TensorFlow's compiled by XLA" if compiled else ""
        torch = run["results"].get("versions", {}).get("torch")
        with_torch = f", torch {torch}" if torch else ""
        idle = run["results"].get("idle")
        alone = ""
        if idle:
            heartbeat = idle["bytes_per_second"] / 1e3
            alone = f" Horovod sends {heartbeat:.0f} KB a second while nothing is exchanged."
        parts.append(
            f"## {rate}, {_in_words(hosts)}, {MODELS[model]}{by_xla}\n\n"
            f"Measured with {run['conditions']}{with_torch}.{alone}\n\n"
            f"{table(rows(run['results'], hosts, model))}"
        )
    path.write_text("\n\n".join(parts) + "\n")
    plot(runs, path.with_suffix(".png"))
