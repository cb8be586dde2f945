"""Checks the recipe of a search with Optuna, with the real package."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.harness import side_environment


def _search(directory: Path, trials: int) -> list[str]:
    """Returns the lines that each of two ranks prints, without its name."""
    launch = [side_environment.tuners_python(), "-m", "tfdml.cli.main", "launch", "--workers", "2"]
    recipe = side_environment.ROOT / "recipes" / "optuna_search.py"
    options = ["--trials", str(trials), "--epochs", "3", "--data", "digits", "--limit", "600"]
    storage = ["--storage", f"sqlite:///{directory}/search.db"]
    done = subprocess.run(
        [*launch, recipe, *options, *storage],
        cwd=side_environment.ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [re.findall(rf"rank {rank}: (.*)", done.stdout) for rank in range(2)]


@pytest.mark.slow
def test_all_ranks_train_and_prune_the_same_trials(tmp_path):
    chief, other = _search(tmp_path, 6)
    assert chief == other
    assert [line.split(",")[0] for line in chief[:-1]] == [f"trial {i}" for i in range(6)]
    assert any("pruned after epoch" in line for line in chief)
    assert any("complete" in line for line in chief)
    # The study goes on in rank 0's database.
    chief, other = _search(tmp_path, 1)
    assert chief == other
    assert chief[0].startswith("trial 6,")
