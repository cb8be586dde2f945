"""Checks that training with local updates is saved at synchronizations, and resumes from them."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.strategies.compare import assert_close, assert_same_bits
from tests.strategies.local_updates import cases
from tfdml.horovod_build import child
from tfdml.topology import child_environment

METHOD = ("LocalSGD", {"sync_every": 3})
OPTIONS = {"optimizer": "adam"}
FRAGMENTS = ("DiLoCo", {"sync_every": 4, "num_fragments": 2, "outer_optimizer": "nesterov"})
AVERAGED = ("DiLoCo", {"sync_every": 3, "average_slots": True})
CODEC = {"strategy_options": {"compression": "int4"}}


def _resumed(args: tuple, options: dict) -> dict:
    return cases.resumed(*args, **options)


def _checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("fit-"))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (METHOD, OPTIONS),
        pytest.param(FRAGMENTS, OPTIONS, marks=pytest.mark.slow),
        pytest.param(AVERAGED, OPTIONS | CODEC, marks=pytest.mark.slow),
        (FRAGMENTS, OPTIONS | CODEC),
    ],
    ids=["local_sgd", "fragments", "averaged", "compressed"],
)
def test_resumed_training_has_the_same_bits(ranks, tmp_path, method, options):
    whole = ranks(2).run(_resumed, (str(tmp_path / "whole"), method), options)
    # After step 5 of 7 of the second epoch.
    broken = str(tmp_path / "broken")
    stopped = options | {"stop_after": cases.STEPS + 5}
    ranks(2).run(_resumed, (broken, method), stopped)
    results = ranks(2).run(_resumed, (broken, method), options)
    for expected, result in zip(whole, results, strict=True):
        for key in ("weights", "slots"):
            pairs = zip(expected[key], result[key], strict=True)
            assert all(a.tobytes() == b.tobytes() for a, b in pairs), key
        assert_close(expected["history"], result["history"], rtol=1e-6, atol=1e-7)


def test_saved_at_synchronizations_only(ranks, tmp_path):
    ranks(2).run(_resumed, (str(tmp_path), METHOD), OPTIONS | {"epochs": 1, "stop_after": 5})
    # A step after which the ranks differ has no checkpoint, although each step asks for one.
    assert [name[-6:] for name in _checkpoints(tmp_path)] == ["000003"]


@pytest.mark.parametrize(
    "method",
    [METHOD, pytest.param(FRAGMENTS, marks=pytest.mark.slow)],
    ids=["local_sgd", "fragments"],
)
def test_other_number_of_ranks(ranks, tmp_path, method):
    """Slots become their mean; all ranks begin with the last common weights."""
    options = OPTIONS | {"epochs": 1}
    before = ranks(2).run(_resumed, (str(tmp_path), method), options)
    results = ranks(3).run(_resumed, (str(tmp_path), method), options)
    assert_same_bits([before[0], *results])
    for result in results:
        for i, slot in enumerate(result["slots"]):
            mean = np.mean([b["slots"][i] for b in before], 0)
            np.testing.assert_allclose(slot, mean, rtol=1e-12, atol=1e-15)
    results = ranks(3).run(_resumed, (str(tmp_path), method), OPTIONS)
    assert_same_bits(results)
    assert len(results[0]["history"]["loss"]) == cases.EPOCHS


@pytest.mark.parametrize(
    ("size", "method", "asked_after", "saved_after"),
    [
        (2, METHOD, 4, 6),
        # The last round of an epoch ends between two steps.
        (2, METHOD, 7, 7),
        # The other fragment's round goes on.
        (2, FRAGMENTS, 3, 4),
        (1, AVERAGED, 4, 6),
    ],
    ids=["round", "end", "fragments", "one_process"],
)
def test_preemption_saves_at_a_synchronization(
    ranks, tmp_path, size, method, asked_after, saved_after
):
    """SIGTERM on the last rank ends all at the next one; resumed, they have the same bits."""
    whole = ranks(size).run(_resumed, (str(tmp_path / "whole"), method), OPTIONS)
    directory = tmp_path / "preempted"
    ended = ranks(size).run(cases.preempted, str(directory), method, size - 1, asked_after)
    assert ended == [{"code": 75}] * size
    assert [int(name[-6:]) for name in _checkpoints(directory)] == [saved_after]
    results = ranks(size).run(_resumed, (str(directory), method), OPTIONS)
    for expected, result in zip(whole, results, strict=True):
        for key in ("weights", "slots"):
            pairs = zip(expected[key], result[key], strict=True)
            assert all(a.tobytes() == b.tobytes() for a, b in pairs), key


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [3, 5])
def test_killed_training_ends_with_the_same_bits(ranks, tmp_path, rank, step):
    whole = ranks(2).run(_resumed, (str(tmp_path / "whole"), METHOD), OPTIONS)[0]
    program = Path(__file__).with_name("killed_program.py")
    launch = [sys.executable, "-m", "tfdml.cli.main", "launch", "--workers", "2", "--horovod"]
    command = [*launch, "--max-restarts", "1", str(program), str(tmp_path), str(rank), str(step)]
    environment = child_environment(PYTHONPATH=str(program.parents[3]))
    ended = child.run(command, environment=environment, timeout=300)
    assert ended.returncode == 0, ended.output[-3000:]
    assert (tmp_path / "killed").exists()
    with np.load(tmp_path / "end.npz") as stored:
        end = [stored[name] for name in stored.files]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(whole["weights"], end, strict=True))
