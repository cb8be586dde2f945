"""Checks `tfdml launch` with small programs: processes, environment, hosts and output."""

import contextlib
import json
import os
import pty
import subprocess

import pytest

from tests.runtime.launch.launched import TFDML, launch
from tfdml.runtime.launch.job_hosts import Host, parse_hosts


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


@pytest.mark.slow
def test_horovodrun_starts_the_ranks(tmp_path):
    script = "import os; print('rank', os.environ['HOROVOD_RANK'], os.environ['HOROVOD_SIZE'])"
    done = launch("--horovod", "-n", "2", script=script, tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0 2" in done.stdout
    assert "rank 1 2" in done.stdout
