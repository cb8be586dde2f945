"""Checks which hosts a job is restarted on, when some answer by ssh and others do not."""

import os

import pytest

from tests.runtime.launch.launched import launch
from tfdml.runtime.launch.host_pool import HostPool
from tfdml.runtime.launch.job_hosts import Host, parse_spares

HOSTS = [Host("a", 2), Host("b", 3)]


@pytest.fixture
def up(tmp_path, monkeypatch):
    """Returns a function that says which hosts `ssh` reaches from now on."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        "#!/bin/bash\n"
        'while [ "${1:0:1}" = - ]; do shift 2; done\n'
        f'exec grep -qx "$1" {tmp_path}/up\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    return lambda *names: (tmp_path / "up").write_text("\n".join(names) + "\n")


def test_a_spare_runs_the_ranks_of_the_host_that_it_replaces(up, capfd):
    pool = HostPool(HOSTS, ["c", "d"])
    up("a", "b", "c", "d")
    assert pool.wait(5, seconds=0.0) == HOSTS
    up("a", "d")
    assert pool.wait(5, seconds=0.0) == [Host("a", 2), Host("d", 3)]
    assert "d takes the place of b, which does not answer." in capfd.readouterr().err


def test_a_host_that_was_replaced_becomes_a_spare(up):
    pool = HostPool(HOSTS, ["c"])
    up("b", "c")
    assert pool.wait(5, seconds=0.0) == [Host("c", 2), Host("b", 3)]
    up("a", "c")
    assert pool.wait(5, seconds=0.0) == [Host("c", 2), Host("a", 3)]


def test_the_message_says_that_no_spare_is_left(up, capfd):
    pool = HostPool(HOSTS, ["c"])
    up("a")
    assert pool.wait(2, seconds=0.0) == [Host("a", 2)]
    assert "no answer from c; no spare is left for b." in capfd.readouterr().err
    with pytest.raises(ConnectionError, match="no answer from b, c; no spare is left for b"):
        pool.wait(5, seconds=0.0)
    with pytest.raises(ConnectionError, match="no answer from b. Bring"):
        HostPool(HOSTS).wait(5, seconds=0.0)


def test_names_of_spares():
    assert parse_spares("", HOSTS) == []
    assert parse_spares("c, d", HOSTS) == ["c", "d"]
    for wrong in ("c:2", "c,", "a", "c,c"):
        with pytest.raises(ValueError, match="`--spares` must be names of other machines"):
            parse_spares(wrong, HOSTS)


@pytest.mark.parametrize("options", [("--hosts", "a"), ("--max-restarts", "1")])
def test_spares_are_refused_where_they_cannot_be_used(tmp_path, options):
    done = launch("--spares", "c", *options, tmp_path=tmp_path)
    assert done.returncode == 2
    assert "`--spares` needs `--hosts` and `--max-restarts`" in done.stderr
