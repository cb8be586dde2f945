"""Checks the benchmark of local updates on slow networks: what it times, keeps and reports."""

import re
import time

import pytest

from tools.bench.slow_networks import __main__ as program
from tools.bench.slow_networks import loss_rank, model, report
from tools.bench.slow_networks.model import CANDIDATES, Candidate

NETWORK = "50mbit 50ms x 2 x mlp"


SENT = {"sent": 1e6, "bits": 3.3}


def result(seconds: float, steps: int = 8) -> dict[str, float]:
    return {"steps": steps, "seconds": seconds, "cpu": 0.1, "bytes": 1e6}


def base(alone: float, **exchanges: float) -> dict:
    return {
        "alone": alone,
        "alone each": [0.9 * alone, 1.1 * alone],
        "exchanges": exchanges,
        "parameters": 25,
    }


def measured() -> dict:
    """Returns results in which tfdml is faster than Horovod's loop, and slower than torchft."""
    return {
        "conditions": "keras 3.15.1, Python 3.11.7; 2 cores, x86_64, Linux; 2026-11-28",
        "bases": {
            "tfdml": base(0.1, **{"none": 8.0, "4 bit": 1.0}),
            "Horovod": base(0.08, none=9.0),
            "torchft": {**base(0.05, none=10.0), "versions": {"torchft": "0.2.0"}},
        },
        "results": {
            "tfdml every step": result(8.5),
            "tfdml every step, auto": result(2.0),
            "tfdml LocalSGD(8)": result(1.21),
            "tfdml LocalSGD(8), 4 bit": result(0.25),
            "tfdml DiLoCo(8)": result(1.5),
            "Horovod averaging(8)": result(1.25),
            "torchft DiLoCo(8)": result(1.2),
        },
    }


# -- What is timed ---------------------------------------------------------------------------------


def test_names_tell_candidates_apart():
    assert len(CANDIDATES) == 3 + 2 * 2 * 3 + 4 * 3
    assert {c.framework for c in CANDIDATES.values()} == set(model.FRAMEWORKS)
    assert CANDIDATES["tfdml DiLoCo(32), 4 bit"] == Candidate("tfdml", "DiLoCo", 32, "4 bit")


def test_methods_are_those_that_ranks_know():
    assert tuple(loss_rank.methods(steps=100)) == model.METHODS


@pytest.mark.parametrize("every", [1, *model.EVERY])
@pytest.mark.parametrize("exchange", [0.001, 0.2, 16.0])
def test_rounds_fit_into_the_budget(every, exchange):
    rounds = model.rounds_of(every, 0.06, exchange)
    seconds = rounds * (every * 0.06 + exchange)
    assert rounds == 1 or (seconds <= model.BUDGET and rounds * every <= model.MOST_STEPS)
    # One more would be too many.
    longer = seconds + every * 0.06 + exchange
    assert longer > model.BUDGET or (rounds + 1) * every > model.MOST_STEPS


@pytest.mark.parametrize("candidate", CANDIDATES.values(), ids=lambda c: c.name)
def test_a_warm_up_is_of_whole_rounds(candidate):
    assert candidate.warm_up % candidate.every == 0
    assert candidate.warm_up >= (35 if candidate.codec == "auto" else 2)


def test_times_are_of_whole_rounds_with_their_exchanges():
    candidate, done, exchanges = Candidate("Horovod", "averaging", 4), [], []

    def step() -> None:
        done.append(time.perf_counter())
        if len(done) % candidate.every == 0:
            time.sleep(0.04)
            exchanges.append(len(done))

    found = model.timed_rounds(step, candidate, rounds=3)
    assert (len(done), exchanges) == (16, [4, 8, 12, 16])
    # The mean step has a quarter of an exchange.
    assert found["steps"] == 12
    assert 0.01 <= found["seconds"] < 0.04


def test_a_mean_counts_what_comes_after_the_last_step():
    found = model.mean_of([(1.0, 0.5, 10), (2.0, 0.5, 30), (0.5, 0.0, 0)], steps=2)
    assert found == {"steps": 2, "seconds": 1.75, "cpu": 0.5, "bytes": 20}


def test_ranks_make_the_same_number_of_calls(monkeypatch):
    """Although a call takes a rank no time, the ranks' mean decides."""
    monkeypatch.setattr(model, "BUDGET_ALONE", 10.0)
    calls = []
    assert model.seconds_of(lambda: calls.append(1), lambda own: 4.0) == 4.0
    assert len(calls) == 1 + 2


# -- What is reported ------------------------------------------------------------------------------


def test_ratios_are_those_of_the_framework_itself():
    run = measured()
    assert report.computing(run, "tfdml LocalSGD(8)") == pytest.approx(0.1 / 1.21)
    assert report.computing(run, "torchft DiLoCo(8)") == pytest.approx(0.05 / 1.2)
    assert report.of_parts(run, "tfdml LocalSGD(8)") == pytest.approx(1.21 / (0.1 + 8.0 / 8))
    assert report.of_parts(run, "tfdml LocalSGD(8), 4 bit") == pytest.approx(0.25 / (0.1 + 1 / 8))
    assert report.of_parts(run, "tfdml every step, auto") is None


def test_tfdml_is_compared_with_its_own_method():
    run = measured()
    assert report.to_peer(run, "Horovod averaging(8)") == pytest.approx(1.21 / 1.25)
    assert report.to_peer(run, "torchft DiLoCo(8)") == pytest.approx(1.5 / 1.2)
    assert report.to_peer(run, "tfdml LocalSGD(8)") is None
    # The worst case of a peer's method.
    run["results"] |= {"tfdml DiLoCo(32)": result(0.6), "torchft DiLoCo(32)": result(0.5)}
    expected = f"{NETWORK}: at most (times as long) 1.25 as torchft DiLoCo(8)"
    assert report.slower({NETWORK: run}) == expected
    run["results"]["tfdml DiLoCo(32)"]["seconds"] = 0.4
    run["results"]["tfdml DiLoCo(8)"]["seconds"] = 1.1
    assert report.slower({NETWORK: run}) == "than none of these peers"


def test_a_report_has_the_skeleton_and_all_rows(tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "slow_networks.md"
    reached = {"method": "every step", "reached": True, "steps": 96, "seconds": 2.0}
    losses = {"loss": 3.6, "conditions": "a machine", "results": [{**reached, **SENT}]}
    runs = {"1gbit x 2 x mlp": measured(), NETWORK: measured()}
    report.write_report(runs, {"50mbit 50ms x 2": losses}, page)
    text = page.read_text()
    heads = ["Question", "Hardware", "Versions", "Command", "Meaning", "tfdml is slower"]
    assert re.findall(r"^\| \*\*([A-Z].+?|tfdml is slower)\*\* \|", text, re.MULTILINE)[:6] == heads
    # Without a latency first.
    titles = ["1gbit x 2 x mlp", NETWORK, "50mbit 50ms x 2: time to 3.6 bits per character"]
    assert re.findall("^## (.+)$", text, re.MULTILINE) == titles
    assert "--rate 50mbit --latency 50ms --hosts 2 --loss 3.6" in text
    row = "| **tfdml LocalSGD(8)** | 0.826 | 1,210 | 8.3 | 1.10 |  | 1.000 | 0.100 | 8 |"
    assert text.count(row) == 2
    assert "| torchft | 45.0, 55.0 | 10,000 |  |  |" in text
    assert "torchft 0.2.0" in text
    assert page.with_suffix(".png").stat().st_size > 10_000


def test_a_training_that_ends_too_early_is_told():
    rows = [
        {"method": "a", "reached": True, "steps": 96, "seconds": 2.0, **SENT},
        {"method": "b", "reached": True, "steps": 100, "seconds": 1.0, **SENT},
        {"method": "c", "reached": False, "steps": 464, "seconds": 9.0, "sent": 1e5, "bits": 3.6},
    ]
    assert report.loss_table(rows).splitlines()[2:] == [
        "| a | 1.00 | 96 | 2.0 | 1.00 | 3.300 |",
        "| b | 2.00 | 100 | 1.0 | 1.00 | 3.300 |",
        "| c |  | not in 464 | 9.0 | 0.10 | 3.600 |",
    ]


# -- What is kept ----------------------------------------------------------------------------------


def test_results_of_one_day_are_kept_together(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "RESULTS", tmp_path / "kept.json")
    run = measured()
    first = {"bases": {"tfdml": run["bases"]["tfdml"]}, "results": {"tfdml every step": result(8)}}
    second = {"bases": {"Horovod": run["bases"]["Horovod"]}, "results": {"tfdml LocalSGD(8)": {}}}
    program.keep(first, NETWORK)
    program.keep(second, NETWORK)
    stored = program.json.loads(program.RESULTS.read_text())[NETWORK]
    assert set(stored["bases"]) == {"tfdml", "Horovod"}
    assert set(stored["results"]) == {"tfdml every step", "tfdml LocalSGD(8)"}
    monkeypatch.setattr(program, "conditions", lambda: "another day")
    program.keep(second, NETWORK)
    stored = program.json.loads(program.RESULTS.read_text())[NETWORK]
    assert set(stored["bases"]) == {"Horovod"}


def test_losses_of_networks_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "LOSSES", tmp_path / "kept.json")
    program.keep_loss([{"method": "a"}], "50mbit x 2", 3.6)
    program.keep_loss([{"method": "b"}], "1gbit x 2", 3.4)
    kept = program.stored(program.LOSSES)
    assert {name: run["loss"] for name, run in kept.items()} == {
        "50mbit x 2": 3.6,
        "1gbit x 2": 3.4,
    }


def test_frameworks_must_train_the_same_model():
    run = measured()
    other = {"bases": {"PyTorch": {**base(0.1, none=1.0), "parameters": 24}}, "results": {}}
    with pytest.raises(RuntimeError, match=r"as many parameters. Received: .*'PyTorch': 24"):
        program.merged(run, other)
