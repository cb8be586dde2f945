"""Checks `tfdml launch` with small programs: processes, environment, output and leftovers."""

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.runtime.faults.jobs import left_of
from tfdml.runtime.launch.job_hosts import Host, parse_hosts
from tfdml.runtime.launch.launcher import run
from tfdml.runtime.launch.rank_process import HorovodRun, explain

TFDML = [sys.executable, "-m", "tfdml.cli.main"]
_STOPPED = "rank 0: did not end by itself, and was stopped (exit code 143)"


def launch(
    *options: str,
    script: str = "",
    tmp_path: Path,
    timeout: float = 180,
    arguments: Sequence[str] = (),
    **environment,
):
    """Runs `tfdml launch` with a script of this text; returns the finished process."""
    program = tmp_path / "program.py"
    program.write_text(script)
    return subprocess.run(
        [*TFDML, "launch", *options, str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )


def test_every_worker_gets_a_task_of_one_cluster(tmp_path):
    script = "import os; print(os.environ['TF_CONFIG'])"
    done = launch("--workers", "3", script=script, tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line[:4] for line in lines] == ["[0] ", "[1] ", "[2] "]
    configs = [json.loads(line[4:]) for line in lines]
    assert [c["task"] for c in configs] == [{"type": "worker", "index": i} for i in range(3)]
    (cluster,) = {json.dumps(c["cluster"]) for c in configs}
    workers = json.loads(cluster)["worker"]
    assert len(set(workers)) == 3
    assert all(w.startswith("127.0.0.1:") for w in workers)


def test_workers_know_their_local_rank(tmp_path):
    script = "from tfdml.topology import on_this_host as p; print(p().local_rank, p().local_size)"
    done = launch("--hosts", "localhost:2,127.0.0.1:1", script=script, tmp_path=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[0] 0 2", "[1] 1 2", "[2] 0 1"]


def test_the_script_gets_its_arguments(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys; print(sys.argv[1:])")
    command = [*TFDML, "launch", "-n", "1", str(program), "--epochs", "3", "--workers", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "['--epochs', '3', '--workers', '7']" in done.stdout


FAILING = """
import json, os, sys, time
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
print("begins", flush=True)
if rank == 1:
    print("something is wrong", file=sys.stderr, flush=True)
    {end}
time.sleep({others})
"""


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        pytest.param("sys.exit(3)", 3, "exit code 3", marks=pytest.mark.slow),
        ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL (exit code 137)"),
    ],
)
def test_the_rank_that_failed_is_shown_first(tmp_path, end, code, words):
    began = time.monotonic()
    script = FAILING.format(end=end, others=120)
    done = launch("--workers", "3", script=script, tmp_path=tmp_path)
    assert done.returncode == code
    assert time.monotonic() - began < 45
    lines = done.stderr.split("tfdml launch: ")[1].splitlines()
    assert lines[0] == f"rank 1 failed: {words}. Its last lines:"
    assert "    something is wrong" in lines
    assert any(line.startswith("rank 0: did not end by itself") for line in lines)
    assert not left_of(tmp_path)


def test_an_error_ends_the_job_while_another_rank_sleeps(tmp_path):
    script = FAILING.format(
        end=f"open({str(tmp_path / 'raised')!r}, 'w'); raise OSError", others=600
    )
    done = launch("--workers", "2", script=script, tmp_path=tmp_path)
    # Without an error of its script, the others get `GRACE_SECONDS`, which are 10.
    assert time.time() - (tmp_path / "raised").stat().st_mtime < 8
    assert done.returncode == 1
    assert "[1] Traceback (most recent call last):" in done.stderr
    assert "rank 1 failed: exit code 1" in done.stderr
    assert "rank 0: did not end by itself" in done.stderr


LOST = """\
E0000 00:00:1.2 34 context.cc:873] Failed: lost
Additional GRPC error information from remote target
[2026-01-01 00:00:00. 75513: E a/operations.cc:697] [0]: lost
Exception ignored in: <function Executor.__del__ at 0x7f>
Traceback (most recent call last):
  File "executor.py", line 46, in __del__
    self.wait()
tensorflow.python.framework.errors_impl.UnavailableError: recvmsg:Connection reset by peer
Additional GRPC error information from remote target
ERROR:tensorflow:Worker /job:worker/replica:0/task:1 failed with UnavailableError()
:UNKNOWN:Error received from peer
Exception ignored in: <function Executor.__del__ at 0x7f>
tensorflow.python.framework.errors_impl.UnavailableError: recvmsg:Connection reset by peer
""".splitlines()
OWN = ["tfdml: the job ends", "Traceback (most recent call last):", "  File x", "ValueError: mine"]


def test_the_cause_comes_before_errors_of_tensorflow(tmp_path):
    script = f"import sys\nprint(*{[*LOST, *OWN]!r}, sep='\\n', file=sys.stderr)"
    shown = launch("-n", "1", script=script, tmp_path=tmp_path).stderr.splitlines()
    assert [line.removeprefix("[0] ") for line in shown] == [*OWN, *LOST]


def test_rank_ended_by_the_guard_is_not_blamed(tmp_path):
    script = FAILING.format(end="time.sleep(1); sys.exit(1)", others=0.1).replace(
        "time.sleep(0.1)", "sys.exit(70)"
    )
    done = launch("--workers", "2", script=script, tmp_path=tmp_path)
    assert done.returncode == 1
    assert "rank 1 failed: exit code 1" in done.stderr
    assert "rank 0: ended because another rank could not continue" in done.stderr


def test_only_rank_0_draws_on_a_terminal(tmp_path):
    program = tmp_path / "program.py"
    # One write each: partial writes of the ranks may be interleaved.
    program.write_text(
        "import os, sys\n"
        "sys.stdout.write(f\"{sys.stdout.isatty()} {'TF_CONFIG' in os.environ}\\n\")\n"
    )
    master, slave = pty.openpty()
    command = [*TFDML, "launch", "-n", "2", str(program)]
    done = subprocess.run(command, stdout=slave, stderr=subprocess.PIPE, timeout=60)
    os.close(slave)
    output = b""
    with contextlib.suppress(OSError):  # The other end is closed.
        while data := os.read(master, 4096):
            output += data
    os.close(master)
    # Both terminals, the rank's and the launcher's, add a \r.
    output = output.decode().replace("\r", "").split("\n")
    assert done.returncode == 0
    assert sorted(line for line in output if line) == ["True True", "[1] False True"]


@pytest.mark.parametrize("how", ["killed", "progress"])
def test_restarts(tmp_path, how):
    script = f"""
import json, os, sys
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
path = {str(tmp_path)!r} + f"/tries{{rank}}"
open(path, "a").write("x")
tries = len(open(path).read())
if tries < 3 and "killed" in sys.argv:
    os.kill(os.getpid(), 9)
if rank == 0 and tries > 1 and "progress" in sys.argv:
    print(f"tfdml: epoch 0 continues at step {{tries}}, from {{path}}", file=sys.stderr)
if tries < 3:
    raise ValueError("in the script")
"""
    options = ("-n", "2", "--max-restarts", "2")
    done = launch(*options, script=script, tmp_path=tmp_path, arguments=[how])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tries0").read_text() == "xxx"
    assert "restart 2 of 2" in done.stderr


@pytest.mark.parametrize("error", ["raise SystemExit(5)", "raise ValueError('in the script')"])
def test_an_error_at_the_start_is_restarted_once(tmp_path, error):
    done = launch("-n", "1", "--max-restarts", "5", script=error, tmp_path=tmp_path)
    assert done.returncode == (5 if "5" in error else 1)
    assert "restart 1 of 5" in done.stderr
    assert "restart 2 of 5" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "tfdml launch: rank 0 failed in the same way twice at the start: an error of the script, "
        "not restarted; its traceback is above."
    )


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_no_process_is_left_whatever_ends_the_launcher(tmp_path, number):
    program = tmp_path / "program.py"
    # A rank with a child, both of which ignore SIGTERM.
    program.write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.fork()\n"
        "os.write(1, b'begins\\n')\n"
        "time.sleep(300)\n"
    )
    launcher = subprocess.Popen(
        [*TFDML, "launch", "-n", "2", str(program)], stdout=subprocess.PIPE, text=True
    )
    for _ in range(4):
        assert "begins" in launcher.stdout.readline()
    assert len(left_of(tmp_path)) >= 4
    launcher.send_signal(number)
    launcher.wait(30)
    deadline = time.monotonic() + 15
    while left_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_of(tmp_path)


def test_other_hosts_are_reached_by_ssh(tmp_path):
    """This `ssh` runs the command on this machine, and records the host that it was for."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        "#!/bin/bash\n"
        'while [ "${1:0:1}" = - ]; do shift 2; done\n'
        f'echo "$1" >> {tmp_path}/hosts\n'
        'exec bash -c "$2"\n'
    )
    ssh.chmod(0o755)
    done = launch(
        "--hosts", "one:1,two:2",
        script="import os; print(os.environ['TF_CONFIG'], os.getcwd())",
        tmp_path=tmp_path,
        PATH=f"{ssh.parent}:{os.environ['PATH']}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    config = json.loads(lines[0][4:].rsplit(" ", 1)[0])
    assert [w.split(":")[0] for w in config["cluster"]["worker"]] == ["one", "two", "two"]
    assert lines[2].endswith(os.getcwd())
    # Free ports are requested once per host, before the ranks are started.
    assert sorted((tmp_path / "hosts").read_text().split()) == ["one"] * 2 + ["two"] * 3


def test_unreachable_host_is_reported(tmp_path):
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text("#!/bin/bash\necho 'no route to host' >&2; exit 255\n")
    ssh.chmod(0o755)
    done = launch(
        "--hosts", "far:2", script="", tmp_path=tmp_path,
        PATH=f"{ssh.parent}:{os.environ['PATH']}",
    )  # fmt: skip
    assert done.returncode == 2
    assert "`hosts` must be reachable by ssh" in done.stderr
    assert "no route to host" in done.stderr


def test_hosts():
    assert parse_hosts("a:4, b") == [Host("a", 4), Host("b", 1)]
    for wrong in ("a:", ":4", "a:x", "a:0", ""):
        if wrong == "a:":
            continue
        with pytest.raises(ValueError, match="`hosts` must be names"):
            parse_hosts(wrong)
    assert Host("8.8.8.8", 1).is_public
    assert not Host("127.0.0.1", 1).is_public
    assert not Host("10.1.2.3", 1).is_public


@pytest.mark.parametrize("command", [("launch", "x.py"), ("bench",)])
def test_workers_and_hosts_that_contradict(tfdml_command, command):
    name, *program = command
    done = tfdml_command(name, "--hosts", "a:1", "--workers", "2", *program)
    assert done.returncode == 2
    assert "Received: --workers 2, --hosts a:1. " in done.stderr
    assert "as in --hosts a:2." in done.stderr


def test_workers_may_repeat_what_hosts_says(tmp_path):
    done = launch("--hosts", "localhost:2", "-n", "2", script="print(1)", tmp_path=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[0] 1", "[1] 1"]


def test_the_rank_that_failed_under_horovodrun_is_shown_first(tmp_path):
    script = "import os, time; os.environ['HOROVOD_RANK'] == '1' and exit(3); time.sleep(600)"
    done = launch("--horovod", "-n", "2", script=script, tmp_path=tmp_path)
    assert done.returncode == 3
    report = done.stderr[done.stderr.index("tfdml launch:") :].splitlines()
    assert report[0] == "tfdml launch: rank 1 failed: exit code 3. Its last lines:"
    # `horovodrun` itself sometimes takes the rank that it ended for one that exited with code 0.
    assert [line for line in report if line.startswith("rank ")] in ([], [_STOPPED])
    assert "gloo_run" not in done.stderr


def test_ranks_that_horovodrun_ended_are_not_to_blame():
    lines = [f"Process {rank} exit with status code {code}." for rank, code in ((1, 3), (0, 143))]
    horovodrun = HorovodRun([sys.executable, "-c", f"print(*{lines}, sep='\\n'); exit(1)"])
    report = explain(run([horovodrun])).splitlines()
    assert report == ["tfdml launch: rank 1 failed: exit code 3. Its last lines:", _STOPPED]


@pytest.mark.slow
def test_horovodrun_starts_the_ranks(tmp_path):
    script = "import os; print('rank', os.environ['HOROVOD_RANK'], os.environ['HOROVOD_SIZE'])"
    done = launch("--horovod", "-n", "2", script=script, tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0 2" in done.stdout
    assert "rank 1 2" in done.stdout


def yaml_documents(text: str) -> list:
    """Parses a manifest."""
    import yaml

    return list(yaml.safe_load_all(text))


def test_a_train_job_makes_the_same_cluster(tmp_path):
    done = launch("-n", "2", "--print-kubernetes", script="", tmp_path=tmp_path)
    runtime, job = yaml_documents(done.stdout)
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"]["numNodes"] == 2
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "$TF_CONFIG"; echo "$@"\n')
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
    lines = subprocess.run(
        container["command"], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    config = json.loads(lines[0])
    assert config["task"] == {"type": "worker", "index": 1}
    assert [w.split(".")[0] for w in config["cluster"]["worker"]] == [
        "tfdml-node-0-0",
        "tfdml-node-0-1",
    ]
    assert lines[1] == str(tmp_path / "program.py")


def test_an_mpi_job_runs_horovodrun(tmp_path):
    done = launch(
        "--horovod", "--hosts", "a:2,b:2", "--print-kubernetes", script="", tmp_path=tmp_path
    )
    (job,) = yaml_documents(done.stdout)
    assert job["kind"] == "MPIJob"
    assert job["spec"]["slotsPerWorker"] == 2
    assert job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["command"][:3] == ["horovodrun", "-np", "4"]


def slurm_bin(tmp_path: Path) -> Path:
    """Creates a directory with `scontrol`, `srun` of four tasks, and a `python` that reports."""
    directory = tmp_path / "bin"
    directory.mkdir()
    programs = {
        "scontrol": 'echo node1; echo node2',
        "srun": 'while [ "${1:0:2}" = -- ]; do shift; done\n'
        'for i in 0 1 2 3; do SLURM_PROCID=$i "$@"; done',
        "python": 'echo "$TF_CONFIG"',
        "horovodrun": 'echo "$@"',
    }  # fmt: skip
    for name, text in programs.items():
        path = directory / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    return directory


def run_sbatch(text: str, directory: Path) -> str:
    """Runs an sbatch script as the first node would."""
    environment = {"PATH": f"{directory}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[1-2]"}
    return subprocess.run(
        [shutil.which("bash"), "-c", text],
        env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


def test_an_sbatch_script_makes_the_same_cluster(tmp_path):
    done = launch("--hosts", "a:2,b:2", "--print-slurm", script="", tmp_path=tmp_path)
    assert "#SBATCH --nodes=2" in done.stdout
    lines = run_sbatch(done.stdout, slurm_bin(tmp_path)).splitlines()
    configs = [json.loads(line) for line in lines]
    assert [c["task"]["index"] for c in configs] == [0, 1, 2, 3]
    assert configs[3]["cluster"]["worker"] == [
        "node1:29400",
        "node1:29401",
        "node2:29400",
        "node2:29401",
    ]


def test_an_sbatch_script_for_horovod(tmp_path):
    done = launch("--horovod", "--hosts", "a:2,b:2", "--print-slurm", script="", tmp_path=tmp_path)
    output = run_sbatch(done.stdout, slurm_bin(tmp_path))
    assert output.startswith("-np 4 -H node1:2,node2:2 python")


def test_leftover_processes_are_found():
    """Checks the helper: it finds a process by its command line."""
    marker = "tfdml-left-of-test"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", marker])
    try:
        assert [p for p in left_of(Path(marker))] == [child.pid]
    finally:
        child.kill()
        child.wait()
    assert psutil.pid_exists(os.getpid())
