"""Checks that a killed and restarted run is bit-identical to an uninterrupted one."""

import contextlib
import io
import os
import re
import signal
import socket
import threading
import time

import pytest

from tests.checkpointing import cases
from tests.harness.command import run_python
from tests.harness.metadata_server import MetadataServer, aws_notice, azure_event, give_notice
from tests.harness.pool import RankFailure
from tests.strategies.seam.test_each_part_is_needed import RESUMING, without
from tfdml.data import write_tfrecords
from tfdml.data.read.ledger import Account

SAME = ("weights", "slots", "histories", "numbers", "losses", "batches")


def run(ranks, size, *arguments, kind="horovod", **keywords):
    return ranks(size, kind).run(train, arguments, keywords)


def train(arguments: tuple, keywords: dict) -> dict:
    return cases.train(*arguments, **keywords)


def killed(ranks, size, *arguments, **keywords) -> None:
    with pytest.raises(RankFailure, match="died"):
        run(ranks, size, *arguments, **keywords)


def same(whole: list[dict], resumed: list[dict]) -> None:
    for one, other in zip(whole, resumed, strict=True):
        for name in SAME:
            assert one[name] == other[name], name


slow = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(ranks, tmp_path_factory) -> list[dict]:
    """Returns the outcome of an uninterrupted run on arrays."""
    return run(ranks, 1, str(tmp_path_factory.mktemp("plain")))


def test_killed_at_two_steps(ranks, tmp_path, plain):
    """Kills in mid-epoch, and after an epoch's last step."""
    for step in (8, 10):
        killed(ranks, 1, str(tmp_path), at=step)
    resumed = run(ranks, 1, str(tmp_path))
    same(plain, resumed)
    assert plain[0]["saved"] == resumed[0]["saved"]
    assert len(plain[0]["saved"]) == 3


@pytest.mark.parametrize("part", sorted(RESUMING))
def test_each_part_of_the_seam_is_needed(ranks, tmp_path, plain, part):
    """Without one of the seam's functions the resumed run differs or raises an error."""
    # In mid-epoch, and after the last step, when only the logs are left to compute.
    step = 8 if "iterator" in part else 10
    (ended,) = run(ranks, 1, str(tmp_path), at=step, number=signal.SIGTERM)
    assert ended["code"] == 75
    with pytest.raises((AssertionError, RankFailure)):
        same(plain, ranks(1).run(train_without, part, str(tmp_path)))


def train_without(part: str, directory: str) -> dict:
    return without(part, cases.train, directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "optimizer", "kills"),
    [
        ("arrays", "adam", (1, 5, 8, 13)),
        ("dataset", "scaled", (4, 11)),
        ("repeated", "accumulating", (6, 11)),
        ("generator", "schedule", (5, 9)),
        ("arrays", "accumulating", (7, 14)),
    ],
)
def test_killed_at_steps(ranks, tmp_path, kind, optimizer, kills):
    whole = run(ranks, 1, str(tmp_path / "whole"), kind, optimizer=optimizer)
    directory = str(tmp_path / "killed")
    for step in kills:
        killed(ranks, 1, directory, kind, at=step, optimizer=optimizer)
    resumed = run(ranks, 1, directory, kind, optimizer=optimizer)
    same(whole, resumed)
    assert whole[0]["saved"] == resumed[0]["saved"]
    assert len(whole[0]["saved"]) == 3


@pytest.mark.parametrize(
    "operation", [45, *(pytest.param(i, marks=slow) for i in (0, 3, 9, 10, 15, 40, 60))]
)
def test_killed_while_saving(ranks, tmp_path, plain, operation):
    killed(ranks, 1, str(tmp_path), operation=operation)
    same(plain, run(ranks, 1, str(tmp_path)))


@pytest.fixture(scope="module")
def records_of(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("records"))
    x, y = cases.numbers()
    rows = ({"x": a, "y": b} for a, b in zip(x, y, strict=True))
    write_tfrecords(rows, path, shards=1)
    return path


@pytest.mark.slow
def test_records_resume_at_their_position(ranks, tmp_path, records_of):
    """In mid-epoch, and after an epoch's last step, whose epoch has only its end left."""
    whole = run(ranks, 1, str(tmp_path / "whole"), records_of)
    directory = str(tmp_path / "killed")
    killed(ranks, 1, directory, records_of, at=8)
    (ended,) = run(ranks, 1, directory, records_of, at=10, number=signal.SIGTERM)
    assert ended["code"] == 75
    same(whole, run(ranks, 1, directory, records_of))


@pytest.mark.parametrize(
    ("kind", "compression", "optimizer"),
    [
        pytest.param("horovod", "onebit", "adam", marks=pytest.mark.slow),
        pytest.param("horovod", "powersgd", "accumulating", marks=pytest.mark.slow),
        pytest.param("horovod", None, "scaled", marks=pytest.mark.slow),
        pytest.param("multi_worker", "powersgd", "adam", marks=pytest.mark.slow),
        pytest.param("mirrored", None, "adam", marks=pytest.mark.slow),
        pytest.param("mirrored", "onebit", "adam", marks=pytest.mark.slow),
    ],
)
def test_two_replicas_killed_at_steps(ranks, tmp_path, kind, compression, optimizer):
    # Matrices of 1,024 values or more are compressed.
    options = {
        "strategy": True, "compression": compression, "optimizer": optimizer, "width": 400,
    }  # fmt: skip
    whole = run(ranks, 2, str(tmp_path / "whole"), kind=kind, **options)
    directory = str(tmp_path / "killed")
    for step, rank in ((4, 0 if kind == "mirrored" else 1), (11, 0)):
        killed(ranks, 2, directory, at=step, rank=rank, kind=kind, **options)
    same(whole, run(ranks, 2, directory, kind=kind, **options))


def test_more_or_fewer_ranks_lose_no_sample(ranks, tmp_path, records_of):
    """Killed on two ranks twice, resumed on one, then on two: each sample once per epoch."""
    options = {"strategy": True, "compression": "onebit", "width": 400}
    options["ledger"] = str(tmp_path / "ledger")
    directory = str(tmp_path / "killed")
    killed(ranks, 2, directory, records_of, at=4, rank=1, **options)
    # Two ranks restore the state, in the function that trains.
    killed(ranks, 2, directory, records_of, at=7, rank=0, **options)
    killed(ranks, 1, directory, records_of, at=9, **options)
    resumed = run(ranks, 2, directory, records_of, **options)
    for result in resumed:
        assert result["batches"] == [*range(cases.STEPS)] * 3
        assert result["trained"] == 3 * cases.STEPS
        assert result["weights"] == resumed[0]["weights"]
    account = Account(options["ledger"])
    assert (account.problems, account.unfinished) == ([], [])
    assert account.epochs == dict.fromkeys(range(3), cases.SAMPLES)


def test_a_finished_run_is_not_trained_again(ranks, tmp_path):
    directory = str(tmp_path / "a")
    first = run(ranks, 1, directory, save_freq="epoch")
    same(first, run(ranks, 1, directory, save_freq="epoch"))
    assert len(first[0]["saved"]) == 3


@pytest.mark.slow
def test_more_epochs_than_before(ranks, tmp_path):
    whole = run(ranks, 1, str(tmp_path / "whole"), epochs=4)
    run(ranks, 1, str(tmp_path / "parts"), epochs=2)
    parts = run(ranks, 1, str(tmp_path / "parts"), epochs=4)
    for name in ("weights", "slots", "histories", "losses"):
        assert whole[0][name] == parts[0][name]


@pytest.mark.slow
def test_a_second_fit_of_the_program(ranks, tmp_path):
    whole = run(ranks, 1, str(tmp_path / "whole"), fits=2)
    assert len(whole[0]["losses"]) == 6 * cases.STEPS
    for step in (4, 3 * cases.STEPS + 6):
        killed(ranks, 1, str(tmp_path / "killed"), fits=2, at=step)
    same(whole, run(ranks, 1, str(tmp_path / "killed"), fits=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 9}, r"Received: .*dense\w*/kernel of shape \(6, 9\).*, before .*\(6, 8\)"),
        pytest.param(
            {"optimizer": "slow adam"}, "Received: optimizer with learning_rate=0.001", marks=slow
        ),
        pytest.param({"optimizer": "scaled"}, "must be those that .* was saved with", marks=slow),
    ],
)
def test_a_changed_model_or_optimizer_is_refused(ranks, tmp_path, change, message):
    killed(ranks, 1, str(tmp_path), at=4)
    with pytest.raises(RankFailure, match=message):
        run(ranks, 1, str(tmp_path), **change)
    assert run(ranks, 1, str(tmp_path))[0]["trained"] == 3 * cases.STEPS


@pytest.mark.slow
def test_changed_data_are_refused(ranks, tmp_path):
    killed(ranks, 1, str(tmp_path), "dataset", at=4)
    with pytest.raises(RankFailure, match="steps_per_epoch 4, before None|batches"):
        run(ranks, 1, str(tmp_path), "repeated")


@pytest.mark.slow
def test_a_fresh_start_on_purpose(ranks, tmp_path):
    killed(ranks, 1, str(tmp_path), at=12)
    result = run(ranks, 1, str(tmp_path), resume=False, epochs=1)[0]
    assert len(result["losses"]) == cases.STEPS
    assert len(result["saved"]) == 3


def test_damaged_checkpoint_is_skipped_and_no_sound_one_is_refused(ranks, tmp_path, plain):
    directory = tmp_path / "killed"
    killed(ranks, 1, str(directory), at=12)
    newest = sorted(directory.glob("fit-*"))[-1]
    member = newest / "rank-00000-of-00001.safetensors"
    content = bytearray(member.read_bytes())
    content[-5] ^= 4
    member.write_bytes(content)
    resumed = run(ranks, 1, str(directory))
    assert f"damaged-{newest.name}" in resumed[0].pop("saved")
    same(plain, resumed)
    for path in directory.glob("fit-*/checkpoint.json"):
        path.unlink()
    with pytest.raises(RankFailure, match="allow_fresh_start=True"):
        run(ranks, 1, str(directory))


@pytest.mark.slow
def test_best_checkpoint_is_kept_too(ranks, tmp_path):
    result = run(ranks, 1, str(tmp_path), max_to_keep=1, keep_best="val_loss", save_freq="epoch")[0]
    losses = result["histories"][0][0]["val_loss"]
    best = losses.index(min(losses)) + 1
    saved_epochs = {int(name.split("-")[3]) for name in result["saved"]}
    assert saved_epochs == {best, 3}


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=slow)])
def test_a_full_disk(ranks, tmp_path, asynchronous):
    with pytest.raises(RankFailure, match="A checkpoint could not be written.* rank 0.*No space"):
        ranks(1).run(train_on_a_full_disk, str(tmp_path), asynchronous, "raise")
    (result,) = ranks(1).run(train_on_a_full_disk, str(tmp_path), asynchronous, "warn")
    assert result["trained"] == 3 * cases.STEPS
    assert len(result["saved"]) == 1


def train_on_a_full_disk(directory: str, asynchronous: bool, on_write_error: str) -> dict:
    import errno

    from tfdml.callbacks.checkpoint.directory_use import use_directory
    from tfdml.checkpointing import Files

    class Full(Files):
        """Pretends that the disk has room for one checkpoint."""

        def create(self, path):
            if any(name.startswith("fit-") for name in os.listdir(directory)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().create(path)

    use_directory(directory).files = Full()
    return cases.train(directory, asynchronous=asynchronous, on_write_error=on_write_error)


@pytest.mark.slow
def test_a_time_between_saves(ranks, tmp_path):
    import datetime

    result = run(ranks, 2, str(tmp_path), strategy=True, max_to_keep=0, epochs=6,
                 save_freq=datetime.timedelta(milliseconds=1))  # fmt: skip
    assert len(result[0]["saved"]) > 2


@pytest.mark.parametrize(
    ("size", "rank"),
    [pytest.param(1, None, marks=slow), pytest.param(2, None, marks=slow), (2, 1)],
)
def test_termination_request_saves_and_exits(ranks, tmp_path, size, rank):
    """After SIGTERM on all ranks or one, all save after the same step and exit with one code."""
    options = {"strategy": size > 1}
    whole = run(ranks, size, str(tmp_path / "whole"), **options)
    directory = str(tmp_path / "asked")
    for step in (3, 8):
        ended = run(
            ranks, size, directory, at=step, number=signal.SIGTERM, rank=rank, save_freq="epoch",
            **options,
        )  # fmt: skip
        assert [r["code"] for r in ended] == [75] * size
        trained = {r["trained"] for r in ended}
        assert len(trained) == 1
        assert trained.pop() in (step, step + 1)
    resumed = run(ranks, size, directory, save_freq="epoch", **options)
    for one, other in zip(whole, resumed, strict=True):
        for name in SAME:
            assert one[name] == other[name], name


@pytest.mark.parametrize(
    ("when", "steps"),
    [
        ({"at": 0}, {1}),  # Before the first step.
        ({"operation": 9}, range(2, 5)),  # During a save, and again at each operation that follows.
        pytest.param({"operation": 0}, {1}, marks=slow),  # While a checkpoint is selected.
    ],
)
def test_termination_request_outside_of_steps(ranks, tmp_path, plain, when, steps):
    (ended,) = run(ranks, 1, str(tmp_path), number=signal.SIGTERM, **when)
    assert ended["code"] == 75
    assert ended["trained"] in steps
    assert ended["saved"][-1].endswith(f"-step-{ended['trained']:010d}")
    same(plain, run(ranks, 1, str(tmp_path)))


def test_termination_request_after_the_last_step(ranks, tmp_path, plain):
    (ended,) = run(ranks, 1, str(tmp_path), at=3 * cases.STEPS, number=signal.SIGTERM)
    assert ended["code"] == 75
    same(plain, run(ranks, 1, str(tmp_path)))


# Asks itself to end in the first epoch, and again while it exits.
ASKED_TWICE = """
import atexit, os, signal
import numpy as np, keras, tfdml
ask = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
atexit.register(ask)
with tfdml.MirroredStrategy().scope():
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
asks = keras.callbacks.LambdaCallback(on_epoch_begin=ask)
x = np.ones((8, 1))
model.fit(x, x, epochs=9, callbacks=[asks, tfdml.callbacks.FaultTolerantCheckpoint(DIRECTORY)])
"""


@slow
def test_second_termination_request_does_not_change_the_exit_code(tmp_path):
    done = run_python("-c", ASKED_TWICE.replace("DIRECTORY", repr(str(tmp_path))))
    assert done.returncode == 75, done.stderr


def test_preemption_notice_from_a_watcher(ranks, tmp_path, plain):
    (ended,) = ranks(1).run(train_with_notice, str(tmp_path))
    assert ended["code"] == 75
    assert ended["trained"] < 3 * cases.STEPS
    same(plain, run(ranks, 1, str(tmp_path)))


def train_with_notice(directory: str) -> dict:
    from tfdml.callbacks.checkpoint import preemption

    # Immediately: a fast machine may finish training before any delay that a test could choose.
    preemption.SECONDS = 0.01
    return cases.train(directory, on_preemption=lambda: True)


def test_ranks_that_stay_after_a_notice_save_once_and_train_on(ranks, tmp_path):
    """As under Ray, which ends them itself."""
    job = ranks(2)
    whole = job.run(train, (str(tmp_path / "whole"),), {"strategy": True})
    stayed = job.run(train_and_stay, str(tmp_path / "stayed"))
    assert [r["code"] for r in stayed] == [0, 0]
    same(whole, stayed)
    notice, end = stayed[0]["saved"]
    assert int(notice[-10:]) in (3, 4)
    assert int(end[-10:]) == 3 * cases.STEPS


def train_and_stay(directory: str) -> dict:
    """Trains with a notice on rank 1 after step 3; nothing else saves, but the end."""
    from tfdml.callbacks import FaultTolerantCheckpoint
    from tfdml.callbacks.checkpoint import preemption

    notice, seen = threading.Event(), threading.Event()

    def watcher() -> bool:
        if notice.is_set():
            seen.set()
        return notice.is_set()

    def notify() -> None:
        notice.set()
        seen.wait(10.0)
        time.sleep(0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preemption, "SECONDS", 0.02)
        stay = FaultTolerantCheckpoint.forget_preemption
        patch.setattr(FaultTolerantCheckpoint, "leave", stay)
        return cases.train(
            directory, at=3, number=notify, rank=1, strategy=True, save_freq=10**6,
            on_preemption=watcher,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("cloud", "hosts", "rank"),
    [
        ("aws", 1, 0),
        pytest.param("azure", 2, 1, marks=slow),
        pytest.param("google", 2, 1, marks=slow),
    ],
)
def test_preemption_notice_of_a_cloud(ranks, tmp_path, cloud, hosts, rank):
    """One for a rank's host, in mid-epoch, does what SIGTERM does; one process of a host asks."""
    job = ranks(2, hosts=hosts)
    options = {"strategy": True, "save_freq": "epoch"}
    whole = job.run(train, (str(tmp_path / "whole"),), options)
    directory = str(tmp_path / "asked")
    notice = {"aws": aws_notice(120), "azure": [azure_event(120)], "google": True}[cloud]
    with MetadataServer(cloud) as first, MetadataServer(cloud) as second:
        addresses = first.address, second.address
        ended = job.run(train_with_cloud, directory, cloud, addresses, rank, notice)
        assert bool(second.asked) == (hosts == 2)
    assert [r["code"] for r in ended] == [75, 75]
    assert [r["said"].count("preemption notice on rank") for r in ended] == [rank == 0, rank == 1]
    left = {
        "aws": r"terminate in \d+ s",
        "azure": r"Preempt in \d+ s",
        "google": "preempted, usually",
    }
    assert re.search(rf"on rank {rank}, of '{cloud}': {left[cloud]}", ended[rank]["said"])
    step = ended[0]["trained"]
    assert ended[1]["trained"] == step
    assert 3 <= step < 3 * cases.STEPS
    assert ended[0]["saved"][-1].endswith(f"-step-{step:010d}")
    same(whole, job.run(train, (directory,), options))


def train_with_cloud(
    directory: str, cloud: str, addresses: tuple[str, str], rank: int, notice: object
) -> dict:
    """Trains with one metadata server for each rank; after step 3 a rank's gives a notice."""
    from tests.harness import rank_job
    from tfdml.callbacks.checkpoint import preemption
    from tfdml.runtime import preemption_notices

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(preemption, "SECONDS", 0.05)
        patch.setitem(preemption_notices.ADDRESSES, cloud, addresses[rank_job.rank()])
        result = cases.train(
            directory, at=3, number=lambda: give_notice(addresses[rank], notice), rank=rank,
            strategy=True, on_preemption=cloud, save_freq="epoch",
        )  # fmt: skip
    return {**result, "said": said.getvalue()}


def test_a_missing_metadata_server_is_warned_of_once(ranks, tmp_path, plain):
    (result,) = ranks(1).run(train_without_server, str(tmp_path))
    said = result.pop("said")
    assert said.count("WARNING: no preemption notices on rank 0: the metadata server of ") == 1
    assert re.search(r"on_preemption='google' at 127.0.0.1:\d+ .*refused", said)
    same(plain, [result])


def train_without_server(directory: str) -> dict:
    """Trains where a metadata server refuses connections, and has been asked several times."""
    from tfdml.callbacks.checkpoint import preemption
    from tfdml.runtime import preemption_notices

    asked, ask = [], preemption.preemption_notice

    def counted(cloud: str) -> str | None:
        asked.append(cloud)
        return ask(cloud)

    def wait_for_three() -> None:
        deadline = time.monotonic() + 60
        while len(asked) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(asked) >= 3

    said = io.StringIO()
    with (
        socket.socket() as bound,  # Nobody else can listen there meanwhile.
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(said),
    ):
        bound.bind(("127.0.0.1", 0))
        patch.setattr(preemption, "SECONDS", 0.01)
        patch.setattr(preemption, "preemption_notice", counted)
        patch.setitem(preemption_notices.ADDRESSES, "google", f"127.0.0.1:{bound.getsockname()[1]}")
        result = cases.train(directory, at=3, number=wait_for_three, on_preemption="google")
    return {**result, "said": said.getvalue()}


def test_resume_from_an_object_store(ranks, tmp_path, plain):
    """In an object store only objects appear whole."""
    url = f"bucket://{tmp_path}/run"
    killed(ranks, 1, url, at=8)
    resumed = run(ranks, 1, url)
    same(plain, resumed)
    assert plain[0]["saved"] == resumed[0]["saved"]


def test_arguments():
    import tfdml

    make = tfdml.callbacks.FaultTolerantCheckpoint
    for bad in (0, "step", 1.5, None):
        with pytest.raises(ValueError, match="`save_freq` must be"):
            make("x", save_freq=bad)
    for bad in ("AWS", "gcp", None, 3):
        with pytest.raises(ValueError, match="`on_preemption` must be True, False, a function, or"):
            make("x", on_preemption=bad)
    with pytest.raises(ValueError, match="`max_to_keep` must be"):
        make("x", max_to_keep=-1)
    with pytest.raises(ValueError, match="`on_write_error` must be"):
        make("x", on_write_error="ignore")
    with pytest.raises(ValueError, match="`directory` must be local, or in a store whose plug-in"):
        make("nosuchstore://bucket/run")
    assert not os.path.exists("x")
