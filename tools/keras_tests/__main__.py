"""Command line of `tools/keras_suite`."""

import dataclasses
import json
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from tools.keras_tests import environment, exclusions
from tools.keras_tests.job import Job, Outcome

# Folders of `keras/src` whose tests train, save or compute with variables.
FOLDERS = (
    "layers",
    "losses",
    "metrics",
    "trainers",
    "callbacks",
    "models",
    "optimizers",
    "saving",
    "utils",
    "wrappers",
    "distillation",
    "export",
)
TRAINING = ("trainers", "callbacks")
# Tests closest to a training step: two minutes on two slow cores.
SELECTION = (
    "losses",
    "metrics/iou_metrics_test.py",
    "metrics/reduction_metrics_test.py",
    "optimizers/adam_test.py",
    "optimizers/optimizer_test.py",
    "optimizers/loss_scale_optimizer_test.py",
    "callbacks/swap_ema_weights_test.py",
    "callbacks/reduce_lr_on_plateau_test.py",
    "layers/core/embedding_test.py",
    "layers/preprocessing/stft_spectrogram_test.py",
    "trainers/compile_utils_test.py",
    *(
        f"trainers/trainer_test.py::TestTrainer::{name}"
        for name in (
            "test_compute_loss_no_training_backwards_compatibility",
            "test_evaluate_with_custom_test_step_dict",
            "test_fit_sparse_tf_graph",
            "test_fit_with_custom_train_step",
            "test_metric_update_in_compute_loss",
            "test_on_batch_methods_eager",
            "test_predict_flow_jit",
            "test_trainer_with_raggeds_functional",
        )
    ),
)


class Strategy(str, Enum):
    """The strategies that Keras's tests run under."""

    mirrored = "mirrored"
    horovod = "horovod"
    multi_worker = "multi_worker"


def main(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders, files or tests in keras/src, as `trainers`, or "
            "`losses/loss_test.py::LossTest::test_mask`. By default a selection."
        ),
    ] = None,
    strategy: Annotated[Strategy, typer.Option(help="Whose scope the tests run in.")] = (
        Strategy.mirrored
    ),
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of the job.")] = 2,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="All folders under mirrored on 2 and 3 replicas; trainers and callbacks under "
            "horovod on 2.",
        ),
    ] = False,
    report: Annotated[Path | None, typer.Option(help="A JSON file for every outcome.")] = None,
) -> None:
    """Run Keras's own tests in the scope of a strategy, and compare with a plain run.

    The tests are those that Keras's wheel ships. What fails in the scope runs again without one. A
    test that fails in the scope alone must be listed in tools/keras_tests/exclusions.txt, and one
    that is listed must fail: anything else is an error.

    `tools/keras_suite`

    `tools/keras_suite --strategy horovod --replicas 2 trainers callbacks`

    `tools/keras_suite --all`
    """
    runs = [(strategy.value, replicas, tuple(paths or SELECTION))]
    if everything:
        runs = [("mirrored", 2, FOLDERS), ("mirrored", 3, FOLDERS), ("horovod", 2, TRAINING)]
    python = environment.python(everything)
    found: list[str] = []
    outcomes = {}
    for name, size, tests in runs:
        ends, problems = _run(python, name, size, tests)
        outcomes[f"{name} {size}"] = {test: dataclasses.asdict(end) for test, end in ends.items()}
        found += problems
    if report is not None:
        report.write_text(json.dumps(outcomes, indent=1))
    for problem in found:
        typer.echo(f"\n{problem}")
    passed = sum(end["outcome"] == "passed" for ends in outcomes.values() for end in ends.values())
    typer.echo(f"\n{passed} passed, {len(found)} failed")
    raise typer.Exit(code=1 if found else 0)


def _run(
    python: Path, strategy: str, replicas: int, tests: tuple[str, ...]
) -> tuple[dict[str, Outcome], list[str]]:
    began = time.monotonic()
    typer.echo(f"{', '.join(tests)} under {strategy}, {replicas} replicas")
    outcomes = _side_by_side(Job(python, strategy, replicas), tests)
    failed = [test for test, end in outcomes.items() if end.outcome == "failed"]
    plain = Job(python, "plain", 1).run(failed) if failed else {}
    listed = exclusions.read()
    problems = list(exclusions.problems(outcomes, plain, listed, strategy, replicas))
    counts = Counter(end.outcome for end in outcomes.values())
    alone = [test for test in failed if plain.get(test, Outcome("failed")).outcome == "passed"]
    typer.echo(
        f"  {dict(counts)}; {len(alone)} of the failed pass without a strategy; "
        f"{time.monotonic() - began:.0f} s"
    )
    return outcomes, [f"{strategy}, {replicas} replicas: {problem}" for problem in problems]


def _side_by_side(job: Job, tests: tuple[str, ...]) -> dict[str, Outcome]:
    """Runs tests in as many parallel jobs as the cores allow."""
    jobs = max(1, len(os.sched_getaffinity(0)) // job.processes)
    parts = [tests[i::jobs] for i in range(jobs) if tests[i::jobs]]
    outcomes: dict[str, Outcome] = {}
    with ThreadPoolExecutor(len(parts)) as threads:
        for ends in threads.map(job.run, parts):
            outcomes |= ends
    return outcomes


if __name__ == "__main__":
    typer.run(main)
