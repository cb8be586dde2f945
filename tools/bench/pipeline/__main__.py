"""Measures pipelines of two stages on two cores against one core, and against their peers.

    python -m tools.bench.pipeline
    python -m tools.bench.pipeline --only transformer --rounds 5
    python -m tools.bench.pipeline --only "first step"

Each core has one thread: a pipeline of two stages has two cores, and what it is compared with has
one, with the same microbatches, Adam and, up to its library's layers, the same model. Candidates
take turns in two processes, which move from core to core. tfdml has both stages in one process; so
have hand-written loops of TensorFlow, whose halves are under `tf.device`. PyTorch's
`torch.distributed.pipelining` has a stage in each process, on gloo, in an environment that this
tool makes (.venv-torch in the checkout). "Two jobs at once" trains the one-core job twice, which
shows what two cores of this machine do more than one.

Memory is measured in a run of its own, in which it is given back at once, which makes steps slower.
"activations" compares the memory of schedules, with activations far larger than the weights.
"first step" traces a transformer of 8 blocks in 8 stages, with 8, 16 and 32 microbatches.
"""

from typing import Annotated

import typer

from tools.bench.compression.__main__ import torch_python
from tools.bench.harness import check_choice, conditions, environment, module_command, start
from tools.bench.harness import result_of as run
from tools.bench.pipeline import report
from tools.bench.pipeline.sizes import MODELS, sizes_of

TENSORFLOW, TORCH, FIRST_STEP = (
    f"{__package__}.{name}" for name in ("tensorflow_job", "torch_job", "first_step_job")
)
FIRST = "first step"
PARTS = (*MODELS, FIRST)
# By which memory is given back when it is freed, so that the peak is that of what is in use. The
# allocator of oneDNN would keep it.
AT_ONCE = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 16),
    "MALLOC_MMAP_MAX_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}
TIMEOUT = 900.0


def measure(
    model: str, steps: int, rounds: int, tiny: bool, peers: bool
) -> tuple[dict, dict[str, report.Results]]:
    """Measures the candidates of a model.

    Args:
        model: Name of the model.
        steps: Steps of a turn.
        rounds: Turns of each candidate.
        tiny: Whether sizes are tiny.
        peers: Whether PyTorch's candidates are measured, too.

    Returns:
        The plan of two stages, and the results by library.
    """
    small = ["--tiny"] if tiny else []
    plan = run(module_command(TENSORFLOW, "plan", model, *small), environment(1), TIMEOUT)
    layers = ";".join(",".join(stage) for stage in plan["layers"])
    jobs = {"TensorFlow": module_command(TENSORFLOW, "turns", model, "--layers", layers, *small)}
    if peers and (python := torch_python()):
        jobs["PyTorch"] = module_command(TORCH, model, *small, python=python)
    found = {}
    for library, job in jobs.items():
        once = [*job, "--steps", "2", "--rounds", "1"]
        memory = run(once, environment(1, **AT_ONCE), TIMEOUT, progress=True)
        if model == "activations":
            found[library] = memory
            continue
        turns = [*job, "--steps", str(steps), "--rounds", str(rounds)]
        found[library] = run(turns, environment(1), TIMEOUT, progress=True)
        for name, parts in found[library].items():
            for part, measured in zip(parts, memory[name], strict=True):
                part["mib"] = measured["mib"]
    return plan, found


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Parts: {', '.join(PARTS)}.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each candidate.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 3,
    peers: Annotated[bool, typer.Option(help="PyTorch's candidates, too.")] = True,
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny models, which only must run.")] = False,
) -> None:
    """Prints a table for each part."""
    check_choice("--only", only or (), PARTS)
    for part in only or PARTS:
        if part == FIRST:
            small = ["--stages", "2", "--blocks", "2", "--width", "16"] if tiny else []
            counts = (2, 4) if tiny else (8, 16, 32)
            jobs = [module_command(FIRST_STEP, str(count), *small) for count in counts]
            found = [run(job, environment(1), TIMEOUT) for job in jobs]
            print(f"\n## {part}\n\nMeasured with {conditions(load=True)}.\n")
            table = report.first_step_table(list(zip(counts, found, strict=True)))
            print(table, flush=True)
            continue
        plan, results = measure(part, steps, rounds, tiny, peers)
        print(f"\n## {report.title(part, sizes_of(part, tiny))}\n")
        print(f"Measured with {conditions(load=True)}.\n")
        if part == "activations":
            print(report.memory_table(results), flush=True)
            continue
        print(f"{report.verdict(plan, results['TensorFlow'])}\n")
        print(report.speed_table(results), flush=True)


if __name__ == "__main__":
    start(__doc__, main)
