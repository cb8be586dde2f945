"""Checks TensorFlow's own tutorials with `tf.distribute.` replaced by `tfdml.`.

A program here makes a tutorial's calls, in its order, by TensorFlow's names. The command that the
page on tf.distribute gives replaces them; nothing else is changed.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.harness.pool import RankPool, RankPools
from tests.strategies.compare import assert_close, assert_same_bits
from tests.strategies.upstream.tutorials import cases
from tfdml.runtime.launch.supervisor import free_ports
from tfdml.topology import child_environment

HERE = Path(__file__).parent
MIGRATING = HERE.parents[3] / "docs" / "from_tf_distribute.md"


def replaced(program: str, directory: Path) -> str:
    """Applies the page's command to a copy of a program; returns its path."""
    copy = directory / program
    shutil.copy(HERE / program, copy)
    (command,) = re.findall(r"^(sed -i .*) train\.py$", MIGRATING.read_text(), re.M)
    subprocess.run([*shlex.split(command), str(copy)], check=True)
    assert "tf.distribute" not in copy.read_text().replace("tf.distribute.Strategy", "")
    return str(copy)


@pytest.fixture
def run(ranks: RankPools, tmp_path: Path) -> Callable:
    """Runs a program under tfdml's names: `run(program, kind, size, *arguments)`."""

    def run_it(program: str, kind: str, size: int, *arguments: str) -> list[dict]:
        # The program itself is not one of its output files.
        directory = tmp_path / f"of_{size}"
        directory.mkdir(exist_ok=True)
        path = replaced(program, tmp_path)
        return ranks(size, kind).run(cases.run, path, str(directory), *arguments)

    return run_it


@pytest.fixture
def stock() -> Iterator[RankPool]:
    """Returns a process with two devices and no strategy yet."""
    pool = RankPool(2, "mirrored")
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "tutorial",
    [
        pytest.param("keras_fit", marks=pytest.mark.slow),
        "distributed_input",
        pytest.param("save_and_load", marks=pytest.mark.slow),
    ],
)
def test_on_two_devices(run, stock, tmp_path, tutorial):
    """TensorFlow's own strategy gives correct results here too: every batch divides evenly."""
    (one,) = run(f"{tutorial}.py", "mirrored", 1)
    (two,) = run(f"{tutorial}.py", "mirrored", 2)
    assert_close(one, two)
    (directory := tmp_path / "stock").mkdir()
    (theirs,) = stock.run(cases.run, str(HERE / f"{tutorial}.py"), str(directory))
    assert_close(theirs, two)


@pytest.mark.slow  # `test_replica_invariance` has a loop by default.
def test_custom_loop_on_two_devices(run):
    """TensorFlow's own strategy crashes when the optimizer creates its variables."""
    (one,) = run("own_loop.py", "mirrored", 1)
    (two,) = run("own_loop.py", "mirrored", 2)
    assert_close(one, two)
    # 2 epochs and one in a function, of 10 batches each, and 5 by an iterator.
    assert two["steps"] == 35


def files(directory: Path) -> set[str]:
    """Returns the names in a directory."""
    return {path.name for path in directory.iterdir()}


def test_several_workers(run, tmp_path):
    (one,) = run("several_workers.py", "horovod", 1)
    both = run("several_workers.py", "multi_worker", 2)
    assert_same_bits(both)
    # Each worker reads its own shard, unlike one process.
    one.pop("not_sharded")
    sharded_input, others = (result.pop("not_sharded") for result in both)
    assert sharded_input == others
    assert np.isfinite(sharded_input["loss"]).all()
    for result in both:
        assert_close(one, result)
        # Restoring goes back by 3 steps.
        assert result["steps"] == 2 * 10 + 3
    saved = {"epoch1.keras", "epoch2.keras", "model.keras", "ckpt"}
    # The tutorial leaves the folder of a worker's own checkpoint.
    assert files(tmp_path / "of_2") - {"workertemp_1"} == saved
    assert {name for name in files(tmp_path / "of_2" / "ckpt")} >= {"checkpoint"}


@pytest.mark.slow
def test_a_loop_on_several_workers(run, tmp_path):
    (one,) = run("several_workers_loop.py", "horovod", 1, "2")
    both = run("several_workers_loop.py", "multi_worker", 2, "2")
    assert_same_bits(both)
    for result in both:
        assert_close(one, result)
        assert (result["begins_at"], result["steps"]) == ((0, 0), 16)
    assert files(tmp_path / "of_2") >= {"ckpt"}
    # Resumes from the checkpoint, in whose last epoch no step is left.
    (one,) = run("several_workers_loop.py", "horovod", 1, "3")
    both = run("several_workers_loop.py", "multi_worker", 2, "3")
    assert_same_bits(both)
    for result in both:
        assert_close(one, result)
        assert (result["begins_at"], result["steps"]) == ((1, 8), 8)


@pytest.fixture
def process() -> Iterator[RankPool]:
    """Returns a process that becomes the chief of parameter servers permanently."""
    pool = RankPool(1)
    yield pool
    pool.close()


def check_parameter_servers(found: dict) -> None:
    """Checks the promise of asynchronous training: each step counts once."""
    assert found["fit_steps"] == 3 * 20
    assert found["loss"][-1] < found["loss"][0]
    assert found["steps"] == 4 * 5 + 1
    # Keras's metrics read and assign: in a custom loop a worker may overwrite another's update.
    assert 32 <= found["counted"] <= 5 * 32
    assert found["accuracies"][-1] > 0.9
    assert [tuple(shard) for shard in found["shards"]] == [(4, 64), (4, 64)]
    assert found["evaluated"] == [1.0, 1.0]


def test_parameter_servers_in_this_process(process, tmp_path):
    path = replaced("parameter_servers.py", tmp_path)
    (found,) = process.run(cases.run, path, str(tmp_path))
    check_parameter_servers(found)
    assert files(tmp_path) >= {"ckpt.keras", "log"}


@pytest.mark.slow
def test_parameter_servers_in_separate_processes(tmp_path):
    """The script runs on all tasks, set by `TF_CONFIG`; workers and servers end with the chief."""
    path = replaced("parameter_servers.py", tmp_path)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(5)]
    cluster = {"chief": addresses[:1], "worker": addresses[1:3], "ps": addresses[3:]}
    tasks = {}
    for role, index in [("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1), ("chief", 0)]:
        config = {"cluster": cluster, "task": {"type": role, "index": index}}
        tasks[role, index] = subprocess.Popen(
            ["timeout", "-k", "5", "300", sys.executable, path],
            cwd=tmp_path,
            env=child_environment(TF_CONFIG=json.dumps(config), PYTHONPATH=str(HERE.parents[3])),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    outputs = {name: task.communicate()[0] for name, task in tasks.items()}
    assert {task.returncode for task in tasks.values()} == {0}, outputs
    (line,) = re.findall(r'^\{"loss".*\}$', outputs["chief", 0], re.M)
    check_parameter_servers(json.loads(line))
    assert "tfdml: worker 1 ends, because the chief is done." in outputs["worker", 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["launched", "alone"])
def test_a_script_for_several_workers_as_a_user_starts_it(tmp_path, kind):
    path = replaced("several_workers.py", tmp_path)
    command = [sys.executable, path]
    if kind == "launched":
        command[1:1] = ["-m", "tfdml.cli.main", "launch", "--workers", "2"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=child_environment(PYTHONPATH=str(HERE.parents[3])),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) >= {"model.keras", "ckpt"}
