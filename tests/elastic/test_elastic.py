"""Checks lost and added ranks under a real `horovodrun` with a host discovery script."""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdml
from tests.harness.ssh_lab import run_on_hosts
from tfdml.data.read.ledger import Account
from tfdml.elastic.lost_ranks import is_of_lost_rank
from tfdml.horovod_build import child
from tfdml.topology import child_environment

PROGRAM = Path(__file__).with_name("program.py")
STEPS, EPOCHS, BATCH = 6, 4, 8
# Seconds after which a lost host may be used again.
COOLDOWN = ("--blacklist-cooldown-range", "1", "2")

# Names of this machine: when a rank is lost, Horovod considers its whole host lost.
A, B, C, D = (f"{name}:1" for name in ("localhost", "127.0.0.1", "127.1", "127.0.1"))


def horovodrun(
    tmp_path: Path, first: list[str], plans: tuple, options: tuple = (), interface: str = "lo"
) -> list[str]:
    """Returns the command that runs the program on hosts."""
    hosts, script = tmp_path / "hosts", tmp_path / "hosts.sh"
    hosts.write_text("\n".join(first) + "\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    return [
        sys.executable, str(Path(sys.executable).with_name("horovodrun")),
        "-np", str(len(first)), "--min-np", "1", "--max-np", "4",
        "--host-discovery-script", str(script), "--network-interface", interface,
        "--gloo-timeout-seconds", "90", *options, *alone(tmp_path, plans),
    ]  # fmt: skip


def alone(tmp_path: Path, plans: tuple) -> list[str]:
    """Returns the command that runs the program as one process."""
    return [sys.executable, str(PROGRAM), str(tmp_path), str(tmp_path / "hosts"), *plans]


ENVIRONMENT = {
    "PYTHONPATH": str(PROGRAM.parents[2]),
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def start(tmp_path: Path, first: list[str], *plans: str, options: tuple = ()) -> child.ChildResult:
    """Runs the program on hosts; with an empty list as one process."""
    command = horovodrun(tmp_path, first, plans, options) if first else alone(tmp_path, plans)
    return child.run(command, environment=child_environment(**ENVIRONMENT), timeout=300)


def results_of(tmp_path: Path, ended: child.ChildResult) -> list[dict]:
    """Returns the records of a job's ranks."""
    assert ended.ok, ended.output[-6000:]
    return [json.loads(p.read_text()) for p in sorted(tmp_path.glob("result*.json"))]


def run(tmp_path: Path, first: list[str], *plans: str, **how) -> list[dict]:
    """Runs the program on hosts; returns the records of its ranks."""
    return results_of(tmp_path, start(tmp_path, first, *plans, **how))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    (result,) = run(tmp_path_factory.mktemp("whole"), [])
    assert result["iterations"] == STEPS * EPOCHS
    return result


def same(result: dict, whole: dict) -> None:
    """Checks that each step was trained once, with the same global batches."""
    assert result["iterations"] == STEPS * EPOCHS
    np.testing.assert_allclose(result["losses"], whole["losses"], rtol=1e-4)
    for one, other in zip(result["weights"], whole["weights"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    for name, values in whole["history"].items():
        np.testing.assert_allclose(result["history"][name], values, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_a_rank_is_lost(tmp_path, whole, lost):
    """The other rank continues alone, in the same process."""
    (result,) = run(tmp_path, [A, B], f"{lost}:9:kill")
    same(result, whole)
    # From step 9 it rolls back to the commit after step 8.
    assert result["sizes"] == [2] * 8 + [1] * 16


@pytest.mark.slow
def test_numbers_of_a_watched_job(tmp_path, whole):
    """Every epoch has the same names, on one rank and on two; a timeline is refused."""
    both = f"hosts={A}+{B}"
    results = run(tmp_path, [A], f"0:5:{both}", "0:7:notified", "watched")
    assert len(results) == 2
    for rank, result in enumerate(results):
        same(result, whole)
        assert result["sizes"] == [1] * 8 + [2] * 16
        (refusal,) = result["refusals"]
        assert "`Timeline` must not be used in an elastic job, whose ranks change." in refusal
        assert f"Received: rank {rank} of 2 in `tfdml.elastic.run`" in refusal
    numbers = {k: v for k, v in results[0]["history"].items() if k.startswith("perf/")}
    assert {"perf/step_ms", "perf/wait_ms", "perf/slowest_rank", "perf/grad_norm"} <= set(numbers)
    assert all(np.isfinite(values).all() for values in numbers.values())
    assert {len(values) for values in numbers.values()} == {EPOCHS}
    assert (np.array(numbers["perf/bytes_sent"]) > 0).tolist() == [False, True, True, True]
    lines = (tmp_path / "ranks" / "rank_0.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_a_rank_is_lost_between_two_synchronizations(tmp_path, lost):
    """The other rank loses the round, and goes on alone from the commit of step 9."""
    (result,) = run(tmp_path, [A, B], f"{lost}:11:kill", "local")
    assert result["sizes"] == [2] * 9 + [1] * 15
    assert result["iterations"] == STEPS * EPOCHS
    assert result["history"]["loss"][-1] < result["history"]["loss"][0]


@pytest.mark.slow
def test_a_lost_rank_comes_back(tmp_path, whole):
    """2, 1, 2 ranks: the host counts as lost for a while, and then gets a new process."""
    results = run(tmp_path, [A, B], "1:9:kill", "0:13:notified", options=COOLDOWN)
    assert len(results) == 2
    for result in results:
        same(result, whole)
    assert results[0]["sizes"] == [2] * 8 + [1] * 6 + [2] * 10


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_rank_leaves_its_part_of_the_slots_to_the_next(tmp_path, whole, lost):
    (result,) = run(tmp_path, [A, B], f"{lost}:9:kill", "replicated")
    same(result, whole)
    assert result["sizes"] == [2] * 8 + [1] * 16


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_a_commit_that_a_rank_did_not_complete_is_not_used(tmp_path, whole, lost):
    """The fourth commit is that after step 6: of the lost rank only that of step 4 has its part."""
    (result,) = run(tmp_path, [A, B], f"{lost}:commit4:kill", "replicated")
    same(result, whole)
    assert result["sizes"] == [2] * 4 + [1] * 20


@pytest.mark.slow
def test_divided_slots_follow_the_ranks(tmp_path, whole):
    """1, 3, 2 ranks: slots are divided again, from all former ranks' parts."""
    three = f"hosts={A}+{B}+{C}"
    results = run(tmp_path, [A], f"0:5:{three}", "0:7:notified", "2:15:kill", "replicated")
    assert len(results) == 2
    for result in results:
        same(result, whole)
    assert results[0]["sizes"] == [1] * 8 + [3] * 6 + [2] * 10
    # Two moments of each: half of 96 numbers, 16 and 32 of 48, whole biases of 16 and 3.
    own = [16, 32]
    for result, part in zip(results, own, strict=True):
        assert sorted(result["slots"]) == sorted([1, 1, 48, 48, part, part, 16, 16, 3, 3])


@pytest.mark.slow
def test_two_neighbours_are_lost_with_their_parts(tmp_path):
    """No rank has the part of the first one: with a checkpoint it resumes there, else it ends."""
    plans = ("1:9:kill", "2:9:kill", "replicated")
    ended = start(tmp_path, [A, B, C], *plans)
    assert not ended.ok
    assert "lost ranks must leave their parts of the optimizer's state" in ended.output
    assert "Use `tfdml.Sharding(replicated=True)`" in ended.output


@pytest.mark.slow
def test_a_lost_part_comes_from_the_disk(tmp_path, whole):
    (result,) = run(tmp_path, [A, B], "1:9:kill", "sharded", "disk often")
    assert result["iterations"] == STEPS * EPOCHS
    for one, other in zip(result["weights"], whole["weights"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_hosts_come_and_go(tmp_path, whole):
    """1, 2, 1 ranks, following the output of the discovery script."""
    both = f"hosts={A}+{B}"
    (result,) = run(
        tmp_path, [A], f"0:5:{both}", "0:7:notified", f"0:13:hosts={A}", "0:15:notified"
    )
    same(result, whole)
    assert result["sizes"] == [1] * 8 + [2] * 8 + [1] * 8


@pytest.mark.slow
def test_two_ranks_come_at_once(tmp_path, whole):
    """1, 3 ranks."""
    results = run(tmp_path, [A], f"0:5:hosts={A}+{B}+{C}", "0:7:notified")
    assert len(results) == 3
    for result in results:
        same(result, whole)
    assert results[0]["sizes"] == [1] * 8 + [3] * 16


@pytest.mark.slow
def test_two_ranks_are_lost_at_once(tmp_path, whole):
    """4, 2 ranks."""
    results = run(tmp_path, [A, B, C, D], "3:9:kill", "2:9:kill")
    assert len(results) == 2
    for result in results:
        same(result, whole)
        assert result["sizes"] == [4] * 8 + [2] * 16


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["6", "begin1"])
def test_a_rank_is_lost_between_two_epochs(tmp_path, whole, moment):
    """Loses a rank after the last step, before and after its commit."""
    (result,) = run(tmp_path, [A, B], f"1:{moment}:kill")
    same(result, whole)
    # Rank 0 has committed step 6, and waits for rank 1 there.
    assert result["sizes"] == [2] * 6 + [1] * 18


@pytest.mark.slow
def test_each_sample_once_an_epoch(tmp_path):
    """With records: a rank is lost within an epoch, and returns within another."""
    data = str(tmp_path / "data")
    numbers = np.random.default_rng(0)
    columns = [numbers.normal(size=(STEPS * BATCH, n)).astype("float32") for n in (6, 3)]
    tfdml.data.write_tfrecords(({"x": a, "y": b} for a, b in zip(*columns, strict=True)), data)
    directories = [tmp_path / name for name in ("whole", "elastic")]
    for directory in directories:
        directory.mkdir()
    (whole,) = run(directories[0], [], f"records={data}")
    plans = (f"records={data}", "1:9:kill", "0:15:notified")
    results = run(directories[1], [A, B], *plans, options=COOLDOWN)
    assert len(results) == 2
    for result in results:
        same(result, whole)
    account = Account(str(directories[1] / "ledger"))
    assert (account.problems, account.unfinished) == ([], [])
    assert account.epochs == dict.fromkeys(range(EPOCHS), STEPS * BATCH)


@pytest.mark.slow
def test_a_host_on_standby_takes_over(tmp_path, whole):
    """Two of three hosts are used; the third one's rank replaces the lost one."""
    results = run(
        tmp_path, [A, B, C], "1:9:kill", options=("-np", "2", "--min-np", "2", "--max-np", "2")
    )
    assert len(results) == 2
    for result in results:
        same(result, whole)
        assert result["sizes"] == [2] * 24


@pytest.mark.slow
def test_too_many_losses_end_the_job(tmp_path):
    ended = start(tmp_path, [A, B, C], "2:5:kill", "1:9:kill", options=("--reset-limit", "1"))
    assert not ended.ok
    assert not ended.timed_out
    assert "number of resets" in ended.output


def check_directory(tmp_path: Path) -> None:
    """The training's last checkpoint exists, and no unfinished one."""
    names = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert f"fit-000-epoch-{EPOCHS:04d}-step-{STEPS * EPOCHS:010d}" in names
    assert not [name for name in names if name.startswith("partial-")]


@pytest.mark.slow
def test_all_ranks_are_lost(tmp_path, whole):
    """The same command resumes from the disk, and ranks may be lost again."""
    plans = ("disk", "0:9:kill", "1:9:kill", "1:15:kill")
    ended = start(tmp_path, [A, B], *plans)
    assert not ended.ok
    assert not ended.timed_out
    (result,) = run(tmp_path, [A, B], *plans)
    same(result, whole)
    assert result["sizes"] == [2] * 14 + [1] * 10
    check_directory(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_a_rank_is_lost_during_a_save(tmp_path, whole, lost):
    """An incomplete checkpoint is abandoned, and the next ones are complete."""
    (result,) = run(tmp_path, [A, B], "slow disk", f"{lost}:10:kill")
    assert list(tmp_path.glob("saving*")), "No save was under way."
    same(result, whole)
    assert result["sizes"] == [2] * 10 + [1] * 14
    check_directory(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_a_rank_is_lost_during_the_last_save(tmp_path, whole, lost):
    """Rank 0 waits for rank 1's part after the last step: the remaining rank saves it alone."""
    (result,) = run(tmp_path, [A, B], "slow disk", f"{lost}:end:kill")
    assert list(tmp_path.glob("saving*")), "No save was under way."
    same(result, whole)
    check_directory(tmp_path)
    # The same command trains no further step.
    again = start(tmp_path, [A], "slow disk")
    assert f"epoch {EPOCHS} has finished" in again.output
    assert results_of(tmp_path, again)[0]["weights"] == result["weights"]


@pytest.mark.slow
def test_checkpoint_newer_than_the_last_commit(tmp_path, whole):
    """Steps up to 9 are on the disk, the last commit is step 6: three steps are not saved again."""
    (result,) = run(tmp_path, [A, B], "disk often", "1:before10:kill")
    same(result, whole)
    assert result["sizes"] == [2] * 6 + [1] * 18
    check_directory(tmp_path)


@pytest.mark.slow
def test_a_rank_joins_during_a_save(tmp_path, whole):
    """The save begins after step 9; the ranks synchronise after step 10."""
    results = run(tmp_path, [A], "slow disk", f"0:7:hosts={A}+{B}", "0:9:notified")
    assert len(results) == 2
    for result in results:
        same(result, whole)
    assert results[0]["sizes"] == [1] * 10 + [2] * 14
    check_directory(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_several_machines(tmp_path, whole, lost):
    """One of two ranks is lost and a third one joins, by ssh."""
    # Horovod assigns ranks to the hosts in any order.
    plans = (f"{lost}:9:kill", "0:13:hosts=@:1+host2:1", "0:15:notified")
    command = horovodrun(tmp_path, ["host0:1", "host1:1"], plans, interface="eth0")
    ended = run_on_hosts(tmp_path, 3, command, child_environment(**ENVIRONMENT))
    results = results_of(tmp_path, ended)
    assert len(results) == 2
    for result in results:
        same(result, whole)
    assert results[0]["sizes"] == [2] * 8 + [1] * 8 + [2] * 8


@pytest.mark.slow
def test_batch_and_rate_follow_the_ranks(tmp_path):
    """Rank 1 is lost in the second epoch, which restarts with half the batch and rate."""
    (result,) = run(tmp_path, [A, B], "scale", "1:5:kill")
    assert result["sizes"] == [2] * 3 + [1] * 18
    assert result["rate"] == pytest.approx(0.01)
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
    )
    model.compile(keras.optimizers.Adam(0.02), "mse")
    numbers = np.random.default_rng(0)
    x, y = (numbers.normal(size=(48, n)).astype("float32") for n in (6, 3))
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    model.optimizer.learning_rate = 0.01
    model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    for one, other in zip(result["weights"], model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "`steps` must be a positive integer"),
        ({"rule": "square"}, "`rule` must be one of"),
        ({"steps": 5, "rule": "linear"}, "`steps` must be None with rule='linear'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with tfdml.HorovodStrategy(["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("adam", "mse")
    with pytest.raises(ValueError, match=message):
        tfdml.elastic.KerasState(model).committer(**arguments)
    with pytest.raises(TypeError, match="`checkpoint` must be a `tfdml.callbacks.FaultTol"):
        tfdml.elastic.KerasState(model).committer(checkpoint="run")


def test_wrong_models():
    with pytest.raises(ValueError, match="`model` must be built"):
        tfdml.elastic.KerasState(keras.Sequential([keras.layers.Dense(3)]))
    with pytest.raises(ValueError, match="`model` must be compiled"):
        tfdml.elastic.KerasState(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]))


def test_errors_of_the_program_are_not_caught():
    lost = tf.errors.UnknownError(None, None, "Horovod has been shut down.")
    assert is_of_lost_rank(lost)
    assert not is_of_lost_rank(tf.errors.UnknownError(None, None, "ValueError: mine"))
    assert not is_of_lost_rank(tf.errors.InvalidArgumentError(None, None, "Horovod"))
