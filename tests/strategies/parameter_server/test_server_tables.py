"""Checks checkpoints whose tables are saved and loaded by the servers that have them."""

import contextlib
import resource
import signal
import time
from pathlib import Path

import pytest

from tests.harness.pool import RankFailure
from tests.harness.server_cluster import ServerCluster
from tests.strategies.compare import assert_close
from tests.strategies.parameter_server import table_cases as cases
from tests.strategies.parameter_server.test_faults import appears, at_step
from tfdml.checkpointing import Checkpoint, Files, verify
from tfdml.cli import checkpoint_report

# Name of a checkpoint after 20 steps.
FIRST = "fit-000-epoch-0000-step-0000000020"
MEMBERS = ["server-00000-of-00002.safetensors", "server-00001-of-00002.safetensors"]


def checkpoints(directory: Path) -> list[Checkpoint]:
    """Returns the checkpoints of a directory, all of them whole."""
    files = Files()
    return [
        Checkpoint(files, str(path), verify(files, str(path)))
        for path in sorted(directory.glob("fit-*"))
    ]


def test_each_server_saves_its_rows_and_loads_them(cluster, ranks, tmp_path):
    trained = cluster.run(cases.trained, str(tmp_path / "run"), True)
    (saved,) = checkpoints(tmp_path / "run")
    assert [Path(m.name).name for m in saved.manifest.server_members] == MEMBERS
    tables = saved.tables()
    # The table and Adam's two slots.
    assert {name: (t.shape, list(t.parts)) for name, t in tables.items()} == {
        "model/0": ((40, 4), [0, 20]),
        "optimizer/2": ((40, 4), [0, 20]),
        "optimizer/3": ((40, 4), [0, 20]),
    }
    ((chiefs, _),) = saved.read()
    assert not set(tables) & set(chiefs)
    # The same epoch again: the new model has what the old one had.
    again = cluster.run(cases.trained, str(tmp_path / "run"), True)
    assert_close(trained, again, rtol=0, atol=0)
    assert not list((tmp_path / "run").glob("partial-*"))
    # Without parts, servers or a strategy of theirs.
    (alone,) = ranks(1).run(cases.trained, str(tmp_path / "run"), False)
    assert_close(trained["weights"], alone["weights"], rtol=0, atol=0)
    assert_close(trained["slots"], alone["slots"], rtol=0, atol=0)


def test_servers_take_over_what_one_process_has_saved(cluster, ranks, tmp_path):
    (alone,) = ranks(1).run(cases.trained, str(tmp_path), False)
    taken = cluster.run(cases.trained, str(tmp_path), True)
    assert_close(alone["weights"], taken["weights"], rtol=0, atol=0)
    assert_close(alone["slots"], taken["slots"], rtol=0, atol=0)


def test_a_store_is_written_and_read_by_servers(cluster, tmp_path):
    url = f"local://{tmp_path}/run"
    trained = cluster.run(cases.trained, url, True)
    (members,) = [
        [m.name for m in c.manifest.server_members] for c in checkpoints(tmp_path / "run")
    ]
    assert [Path(name).name for name in members] == MEMBERS
    assert_close(trained, cluster.run(cases.trained, url, True), rtol=0, atol=0)


def test_chief_saves_tables_where_servers_do_not_see_its_directory(cluster):
    trained = cluster.run(cases.trained, "memory://run", True)
    said = cluster.output("chief", 0)
    assert "parameter server 0, parameter server 1 cannot write to memory://run" in said
    assert "run `tfdml serve` there: then each server saves the rows that it has" in said
    assert_close(trained, cluster.run(cases.trained, "memory://run", True), rtol=0, atol=0)


def test_later_steps_do_not_change_what_servers_write(cluster, tmp_path):
    assert not cluster.run(cases.changed_while_saved, str(tmp_path))
    assert len(checkpoints(tmp_path)) >= 25


def test_command_line_shows_and_exports_tables(cluster, tmp_path, capsys):
    import keras

    trained = cluster.run(cases.trained, str(tmp_path / "run"), True)
    assert checkpoint_report.show(str(tmp_path / "run"))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # The table, the kernel and the bias.
    assert ["model", "3", "0.00"] in lines
    checkpoint_report.export(str(tmp_path / "run"), tmp_path / "m.keras")
    weights = [w.numpy() for w in keras.saving.load_model(tmp_path / "m.keras").weights]
    assert_close(trained["weights"], weights, rtol=0, atol=0)


def test_a_table_larger_than_the_chief_is_saved_and_loaded(cluster, tmp_path):
    """A table of 256 MB, with two slots of its size, while the chief has 64 MB for it."""
    result = cluster.run(cases.memory_of_checkpoints, str(tmp_path), 256)
    assert result["peak"] < 64
    assert result["differ"] == 0


def test_servers_write_an_exported_model(cluster, tmp_path):
    result = cluster.run(cases.exported, str(tmp_path), 256)
    assert result["peak"] < 64
    assert result["differ"] < 1e-5


@pytest.mark.parametrize("way", ["checkpoint", "restore", "saved model"])
def test_files_of_tensorflow_are_refused_for_parts(cluster, tmp_path, way):
    message = cluster.run(cases.refused, str(tmp_path), way)
    assert "`tf.saved_model.save` need whole variables" in message
    assert "table/embeddings, whose parts are on servers." in message
    assert "`tfdml.callbacks.FaultTolerantCheckpoint`, `model.save` or `model.export`" in message


@contextlib.contextmanager
def started():
    """Returns a new cluster of two workers and two servers."""
    running = ServerCluster()
    try:
        yield running
    finally:
        running.close()


@pytest.mark.slow  # `test_stored_tables` has the message without servers.
def test_a_server_whose_disk_is_full_is_named(tmp_path):
    with started() as cluster:
        pid = cluster.pid("ps", 1)
        at_step(
            tmp_path, 30, lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
        )
        steps = cluster.run(cases.saved_in_large_parts, str(tmp_path), 16, "warn")["steps"]
        said, of_server = cluster.output("chief", 0), cluster.output("ps", 1)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, 4 << 20))
        message = cluster.run(cases.refused, str(tmp_path), "export")
    assert len(steps) == 60
    assert "parameter server 1 could not write its part; see its output." in said
    assert "File too large" in of_server
    # The last save failed, and the ones before it are whole.
    assert [c.manifest.step for c in checkpoints(tmp_path / "run")] == [20]
    assert not list((tmp_path / "run").glob("partial-*"))
    assert f"Received: {tmp_path}, to which parameter server 1 cannot." in message


@pytest.mark.slow
def test_a_table_larger_than_the_chief_survives_a_server(tmp_path):
    """A table of 256 MB, with two slots of its size, while the chief has 64 MB for it."""
    with started() as cluster:

        def kill_and_start_again() -> None:
            assert appears(tmp_path / "large" / FIRST)
            cluster.send("ps", 1, signal.SIGKILL)
            time.sleep(1)
            cluster.start("ps", 1)

        at_step(tmp_path, 30, kill_and_start_again)
        result = cluster.run(cases.through_a_loss, str(tmp_path), 256)
    assert result["peak"] < 64
    assert result["iterations"] == 60
    assert result["steps"] > 60, "steps since the checkpoint were taken again"
    assert result["differ"] < 1e-5


def await_part_of_server_1(run: Path) -> None:
    """Waits until server 1 writes its part of the second checkpoint."""
    assert appears(run / FIRST)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(run.glob(f"partial-fit*/{MEMBERS[1]}")):
        time.sleep(0.001)


@pytest.mark.slow
def test_a_server_killed_while_it_writes_ends_the_job(tmp_path):
    def kill_writer() -> None:
        await_part_of_server_1(tmp_path / "run")
        cluster.send("ps", 1, signal.SIGKILL)

    with started() as cluster:
        at_step(tmp_path, 30, kill_writer)
        began = time.monotonic()
        with pytest.raises(RankFailure) as failure:
            cluster.run(cases.saved_in_large_parts, str(tmp_path), 400, "raise")
        assert time.monotonic() - began < 120
        # Otherwise the chief's process would not end.
        assert "a lost server is still waited for" not in cluster.output("chief", 0)
    assert "ServerLostError: `fit` cannot continue, because parameter server 1" in str(
        failure.value
    )
    assert [c.manifest.step for c in checkpoints(tmp_path / "run")] == [20]
    assert not list((tmp_path / "run").glob("partial-*"))
    with started() as cluster:
        again = cluster.run(cases.saved_in_large_parts, str(tmp_path), 400, "raise")
    assert again["steps"][0] == 20


@pytest.mark.slow
def test_a_server_killed_while_it_writes_leaves_no_part_of_the_checkpoint(tmp_path):
    with started() as cluster:

        def kill_writer_and_start_it_again() -> None:
            await_part_of_server_1(tmp_path / "run")
            cluster.send("ps", 1, signal.SIGKILL)
            time.sleep(1)
            cluster.start("ps", 1)

        at_step(tmp_path, 30, kill_writer_and_start_it_again)
        found = cluster.run(cases.saved_in_large_parts, str(tmp_path), 400, "raise", 60.0)
        said = cluster.output("chief", 0)
    assert "all variables are restored from the newest checkpoint" in said
    assert 20 in found["steps"][40:], "the steps since the checkpoint were taken again"
    assert found["unfinished"] == []
    assert [c.manifest.step for c in checkpoints(tmp_path / "run")] == [40, 60, 60]
    assert not list((tmp_path / "run").glob("partial-*"))
