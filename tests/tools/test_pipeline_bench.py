"""Checks `tools.bench.pipeline`: turns in two processes, ratios, and a run of tiny models."""

import os

import pytest

from tests.tools import turn_takers
from tools.bench.pipeline import __main__ as program
from tools.bench.pipeline import report, tensorflow_job, turns

NAMES = ["alone", "both"]


def test_candidates_take_turns_on_their_cores():
    found = turns.measure(turn_takers.make, NAMES, 2, 3)
    cores = float(min(2, os.cpu_count()))
    assert [part["seconds"] for part in found["alone"]] == [[cores] * 3]
    assert [part["seconds"] for part in found["both"]] == [[1.0] * 3] * 2
    assert found["alone"][0]["first"] == cores
    assert all(60 < mib < 80 for part in found["both"] for mib in part["mib"])


@pytest.mark.parametrize("fault", ["raises", "dies"])
def test_a_process_that_fails_ends_the_turns(fault):
    with pytest.raises(RuntimeError, match="process 1 has ended before"):
        turns.measure(turn_takers.make, NAMES, 1, 1, fault)


def _results(**seconds: list[list[float]]) -> report.Results:
    """Returns results with the seconds of each process in each round."""
    return {
        name.replace("_", " "): [{"seconds": own, "mib": [8.0], "first": 1.0} for own in parts]
        for name, parts in seconds.items()
    }


def test_ratios_are_of_the_same_round():
    results = _results(one_stage=[[2.0, 4.0]]) | {
        "two stages, 1f1b": _results(x=[[1.0, 4.0]])["x"],
        "two jobs at once": _results(x=[[2.0, 8.0], [4.0, 8.0]])["x"],
    }
    assert report.speedups("TensorFlow", results, "two stages, 1f1b") == [2.0, 1.0]
    # Each makes a step in its own time.
    assert report.speedups("TensorFlow", results, "two jobs at once") == [1.5, 1.0]
    table = report.speed_table({"TensorFlow": results})
    assert "| TensorFlow | two stages, 1f1b | 1.50 (1.00 to 2.00) | 2500 | 8 | 1.0 |" in table


def test_a_pipeline_is_as_slow_as_its_slower_process():
    results = _results(one_core=[[6.0]], Schedule1F1B=[[2.0], [3.0]])
    assert report.speedups("PyTorch", results, "Schedule1F1B") == [2.0]


def test_memory_is_compared_with_gpipe_of_as_many_stages():
    results = {
        name: [{"seconds": [1.0], "mib": [mib], "first": 1.0}]
        for name, mib in {
            "one stage": 20.0,
            "two stages, 1f1b": 40.0,
            "two stages, gpipe": 160.0,
            "four stages, 1f1b": 60.0,
            "four stages, gpipe": 120.0,
        }.items()
    }
    table = report.memory_table({"TensorFlow": results}).splitlines()
    assert "| TensorFlow | one stage | 1 | 1.00 | 20 |  |" in table
    assert "| TensorFlow | two stages, 1f1b | 2, 1 | 1.50 | 40 | 0.25 |" in table
    assert "| TensorFlow | four stages, 1f1b | 4, 3, 2, 1 | 2.50 | 60 | 0.50 |" in table
    assert "| TensorFlow | four stages, gpipe | 16, 16, 16, 16 | 16.00 | 120 | 1.00 |" in table


def test_operations_of_a_microbatch():
    found = [(8, {"seconds": 1.0, "operations": 100}), (16, {"seconds": 2.0, "operations": 180})]
    assert "| 16 | 2.0 | 180 | 10.0 |" in report.first_step_table(found)


def test_each_candidate_has_a_one_core_run_to_compare_with():
    for model in ("mlp", "activations"):
        names = tensorflow_job.names(model)
        assert {tensorflow_job.BASES[name] for name in names} <= set(names)


@pytest.mark.slow  # Traces eight steps.
@pytest.mark.parametrize("part", ["mlp", "first step"])
def test_tiny_models(capsys, part):
    program.main([part], rounds=1, steps=1, peers=False, tiny=True)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    count = {"mlp": len(tensorflow_job.names("mlp")), "first step": 2}[part]
    assert len(rows) == count + 1
