"""Tables of `tools.bench.pipeline`."""

import statistics
from collections.abc import Sequence

from tfdml.pipeline.schedule import max_in_flight
from tools.bench.pipeline import tensorflow_job, torch_job
from tools.bench.pipeline.sizes import MICROBATCHES, Sizes

BAR = 1.6
# What a job reports: by a candidate's name, what each process has measured.
Results = dict[str, list[dict]]
BASES = {"TensorFlow": tensorflow_job.BASES, "PyTorch": torch_job.BASES}


def title(model: str, sizes: Sizes) -> str:
    """Returns the heading of a model's table."""
    kind = f"{sizes.blocks} dense layers of {sizes.width}, {sizes.rows:,} rows"
    if sizes.length:
        kind = f"{sizes.blocks} blocks of {sizes.width}, {sizes.rows} rows of {sizes.length} tokens"
    return f"{model}: {kind}, {MICROBATCHES} microbatches, {sizes.parameters:,} parameters"


def speed_table(found: dict[str, Results]) -> str:
    """Returns a table of times, ratios to one core, and memory.

    Args:
        found: Results by library.
    """
    lines = [
        "| | candidate | times as fast as one core | ms a step | MiB at the peak | first step, s |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for library, results in found.items():
        for name, parts in results.items():
            ratios = speedups(library, results, name)
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            ms = f"{1e3 * statistics.median(_seconds(parts)):.0f}"
            first = f"{max(part['first'] for part in parts):.1f}"
            lines.append(f"| {library} | {name} | {spread} | {ms} | {_peaks(parts)} | {first} |")
    return "\n".join(lines)


def speedups(library: str, results: Results, name: str) -> list[float]:
    """Returns how many times as fast as its one-core run a candidate was, in each round.

    Two jobs at once make two steps in the time of one.
    """
    base = results[BASES[library][name]][0]["seconds"]
    if name == tensorflow_job.BOTH:
        both = zip(*(part["seconds"] for part in results[name]), strict=True)
        return [one * sum(1 / s for s in own) for one, own in zip(base, both, strict=True)]
    return [one / own for one, own in zip(base, _seconds(results[name]), strict=True)]


def memory_table(found: dict[str, Results]) -> str:
    """Returns a table of the peaks of memory by schedule.

    Args:
        found: Results by library.
    """
    lines = [
        "| | candidate | microbatches in flight, by stage | kept, of a microbatch's activations "
        "| MiB at the peak | of gpipe |",
        "|---|---|---|---:|---:|---:|",
    ]
    for library, results in found.items():
        for name, parts in results.items():
            stages, schedule = _schedule(name)
            flights = [
                max_in_flight(stage, stages, MICROBATCHES, schedule) for stage in range(stages)
            ]
            kept = f"{sum(flights) / stages:.2f}"
            peers = [other for other in results if _schedule(other) == (stages, "gpipe")]
            total = _total_peak(parts)
            ratio = f"{total / _total_peak(results[peers[0]]):.2f}" if peers else ""
            numbers = ", ".join(map(str, flights))
            cells = [library, name, numbers, kept, _peaks(parts), ratio]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(plan: dict, results: Results) -> str:
    """Returns what was planned, what was measured, and what the machine allows.

    Args:
        plan: What the job has planned.
        results: Results of TensorFlow.
    """
    (fastest,) = [
        statistics.median(speedups("TensorFlow", results, name)) for name in ["two stages, 1f1b"]
    ]
    both = statistics.median(speedups("TensorFlow", results, tensorflow_job.BOTH))
    limit = 2 * MICROBATCHES / (MICROBATCHES + 1)
    return (
        f"Two stages by 1f1b: {fastest:.2f} times one core; bar {BAR}: "
        f"{'reached' if fastest >= BAR else 'missed'}. Limit of equal stages: {limit:.2f}. Planned "
        f"on one core: {plan['speedup']:.2f}, {100 * plan['bubble']:.1f} % idle, "
        f"{1e3 * plan['seconds']:.0f} ms. Two independent jobs at once: {both:.2f} times the steps "
        f"of one, so that this machine's limit is {limit * both / 2:.2f}."
    )


def first_step_table(found: Sequence[tuple[int, dict]]) -> str:
    """Returns a table of times until the first step, and sizes of graphs.

    Args:
        found: Numbers of microbatches, with what the job has measured.
    """
    lines = [
        "| microbatches | s until the first step has run | operations | more for a microbatch |",
        "|---:|---:|---:|---:|",
    ]
    before: tuple[int, int] | None = None
    for number, one in sorted(found):
        more = (one["operations"] - before[1]) / (number - before[0]) if before else None
        before = number, one["operations"]
        cells = [f"{number}", f"{one['seconds']:.1f}", f"{one['operations']:,}"]
        lines.append(f"| {' | '.join(cells)} | {'' if more is None else f'{more:.1f}'} |")
    return "\n".join(lines)


def _seconds(parts: list[dict]) -> list[float]:
    """Returns the seconds of a step in each round: those of the slowest process."""
    return [max(own) for own in zip(*(part["seconds"] for part in parts), strict=True)]


def _peaks(parts: list[dict]) -> str:
    return " + ".join(f"{statistics.median(part['mib']):.0f}" for part in parts)


def _total_peak(parts: list[dict]) -> float:
    return sum(statistics.median(part["mib"]) for part in parts)


def _schedule(name: str) -> tuple[int, str]:
    """Returns the number of stages of a candidate, and its schedule."""
    if name in tensorflow_job.STAGES:
        return tensorflow_job.STAGES[name]
    if name in torch_job.SCHEDULES:
        return 2, name.removeprefix("Schedule").lower()
    return 1, "1f1b"
