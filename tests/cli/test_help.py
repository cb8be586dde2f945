"""Checks every help page: a sentence, examples that run as printed, and options with sentences."""

import gzip
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tests.harness.command import ROOT
from tests.timeline.synthetic import write as write_timeline
from tfdml.cli.main import app

ROOT_COMMAND = get_command(app)
_EXAMPLE = re.compile(r"^ *`(tfdml[^`]*)`$", re.MULTILINE)

TRAIN = """
import json, os
import keras, numpy as np, tfdml

keras.utils.set_random_seed(3)
callbacks = [tfdml.callbacks.FaultTolerantCheckpoint("run1")]
if "ps" in json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {}):
    strategy, callbacks = tfdml.ParameterServerStrategy(synchronous=True), []
elif "HOROVOD_RANK" in os.environ:
    strategy = tfdml.HorovodStrategy()
else:
    strategy = tfdml.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
x = np.arange(80, dtype="float32").reshape(20, 4) / 80
model.fit(x, x[:, :3], batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
print("trained", flush=True)
"""

# Files that an example finds in its directory.
QUICKLY = {
    "tfdml records convert photos -o data/photos --split train=0.9,test=0.1 --shuffle 1": "photos",
    "tfdml records convert image=images.gz label=labels.gz --kind idx -o data/digits": "idx",
    "tfdml records convert people.csv -o data/people --on-missing age=nan --drop name": "people",
    "tfdml records verify data/photos": "data",
    "tfdml records inspect data/photos --examples 1": "data",
}
SLOWLY = {
    "tfdml records convert photos -o data/photos": "photos",
    "tfdml records verify data/photos --repair": "data",
    "tfdml records inspect data/photos --split train --sheet photos.png": "data",
    "tfdml launch --workers 2 train.py": "train",
    "tfdml launch --horovod --workers 2 train.py": "train",
    "tfdml launch --workers 2 --ps 1 train.py": "train",
    "tfdml checkpoints inspect run1": "run",
    "tfdml checkpoints inspect run1/fit-000-epoch-0002-step-0000000010": "run",
    "tfdml checkpoints export run1 model.keras": "run",
    "tfdml checkpoints export run1/fit-000-epoch-0001-step-0000000005 early.keras": "run",
    "tfdml chaos --faults 5 python train.py": "train",
    "tfdml doctor --data data/photos --split train": "data",
    "tfdml timeline run1/timeline": "timeline",
    "tfdml timeline run1/timeline --output trace.json --picture step.png": "timeline",
    "tfdml estimate-memory train.py": "train",
    "tfdml verify train.py": "train",
    "tfdml estimate-memory --memory 16GB --plot memory.png train.py --batch 512": "train",
}
NOT_RUN = {
    "tfdml build-codecs": "needs a compiler; tests/native/test_build.py",
    "tfdml build-codecs --rebuild": "needs a compiler; tests/native/test_build.py",
    "tfdml build-horovod": "needs a compiler and minutes; tools/bootstrap runs it",
    "tfdml build-horovod --only-wheel --wheel-dir wheels": "needs a compiler and minutes",
    "tfdml build-horovod --nccl": "needs CUDA's compiler; tests/horovod_build/test_nccl.py",
    "tfdml hang-report --pid 12474": "needs a job; tests/runtime/hang_report",
    "tfdml hang-report --job run1/job": "needs a job; tests/runtime/hang_report",
    "tfdml launch --hosts node1:4,node2:4 train.py --epochs 10": "hosts: runtime/launch",
    "tfdml bench --hosts node1:1,node2:1 --horovod --model model.keras": "needs other hosts",
    "tfdml bench --workers 2": "tests/cli/test_bench.py runs it",
    "tfdml chaos --seed 1 -- tfdml launch --workers 2 train.py": "needs minutes",
    "tfdml doctor": "tests/cli/test_doctor.py runs it",
    "tfdml test": "tests/cli/test_selftest.py runs it",
    "tfdml test --hosts node1:2,node2:2": "needs other hosts; tests/cli/test_selftest.py",
    "tfdml test --only multi_worker_mirrored --json results.json": "test_selftest.py runs it",
    "tfdml verify -n 4 --steps 10 --json answer.json train.py --batch 256": "needs minutes",
    "tfdml verify --against none train.py": "tests/verification/test_verify.py runs it",
    "tfdml serve": "needs a chief; `tfdml launch --ps` runs it",
    "tfdml serve --start-limit 3600": "needs a chief; `tfdml launch --ps` runs it",
}


def pages(command=ROOT_COMMAND, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    """Returns all commands and groups by name."""
    found = {path: command}
    for name, below in getattr(command, "commands", {}).items():
        found |= pages(below, (*path, name))
    return found


PAGES = pages()
EVERY_PAGE = pytest.mark.parametrize("path", PAGES, ids=lambda path: " ".join(path) or "tfdml")


def examples(path: tuple[str, ...]) -> list[str]:
    """Returns the examples of a help page."""
    return _EXAMPLE.findall(PAGES[path].help)


def test_all_commands_exist():
    assert {path[0] for path in PAGES if path} == {
        "launch",
        "serve",
        "doctor",
        "test",
        "bench",
        "chaos",
        "estimate-memory",
        "hang-report",
        "verify",
        "timeline",
        "records",
        "checkpoints",
        "build-horovod",
        "build-codecs",
    }


def test_the_start_without_a_compiler_comes_first():
    first, *others = examples(())
    assert first == "tfdml launch --workers 2 train.py"
    assert [example for example in others if "horovod" in example] == others


@EVERY_PAGE
def test_a_page_has_a_sentence_and_two_examples(path):
    sentence, *_ = PAGES[path].help.split("\n\n")
    assert re.fullmatch(r"[A-Z][^\n]*\.", sentence.strip())
    own = " ".join(("tfdml", *path))
    assert len(examples(path)) >= 2
    assert all(example.startswith(own) for example in examples(path))


@EVERY_PAGE
def test_a_page_fits_100_columns_with_its_examples_in_one_line(path):
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "100"})
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert max(map(len, lines)) <= 100
    assert set(examples(path)) <= {line.strip() for line in lines}


@EVERY_PAGE
def test_an_option_is_explained_by_a_sentence(path):
    for parameter in PAGES[path].params:
        if parameter.name in ("help", "install_completion", "show_completion"):
            continue
        text = (parameter.help or "").removesuffix(" **Untested.**")
        assert re.fullmatch(r"[A-Z].*\.", text), f"{parameter.name}: {text!r}"
        assert ". " not in text, f"{parameter.name}: {text!r}"


@pytest.mark.parametrize("example", sorted({e for path in PAGES for e in examples(path)}))
def test_examples_are_parsed(example):
    """The real parser accepts it: the command and its options exist."""
    _, *words = example.split()
    command, names = ROOT_COMMAND, []
    while hasattr(command, "commands"):
        names.append(words.pop(0))
        command = command.commands[names[-1]]
    command.make_context(" ".join(names), words)


def test_every_example_is_run_or_has_a_reason_not_to_be():
    listed = [*QUICKLY, *SLOWLY, *NOT_RUN]
    assert len(set(listed)) == len(listed)
    assert {e for path in PAGES for e in examples(path)} == set(listed)
    assert all(NOT_RUN.values())


def run(example: str, directory: Path) -> str:
    """Runs an example as printed, in a shell; returns its output."""
    scripts = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    done = subprocess.run(
        example,
        shell=True,
        cwd=directory,
        env={**os.environ, "PATH": scripts, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Returns a directory with `photos`, images of two classes."""
    from PIL import Image

    root = tmp_path_factory.mktemp("photos")
    for name, grey in (("cats", 10), ("dogs", 200)):
        directory = root / "photos" / name
        directory.mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (8, 8), (grey, number, 0)).save(directory / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def data(photos, tmp_path_factory) -> Path:
    """Returns a directory with `data/photos`, created by the first example of `records convert`."""
    root = tmp_path_factory.mktemp("data")
    shutil.copytree(photos, root, dirs_exist_ok=True)
    run(next(iter(QUICKLY)), root)
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Returns a directory with `run1`, checkpoints of `train.py`."""
    root = tmp_path_factory.mktemp("trained")
    (root / "train.py").write_text(TRAIN)
    run(f"{sys.executable} train.py", root)
    return root


@pytest.fixture
def filled(request, tmp_path):
    """Returns a function that fills this test's directory and returns it."""

    def fill(content: str) -> Path:
        if content == "train":
            (tmp_path / "train.py").write_text(TRAIN)
        elif content == "timeline":
            write_timeline(tmp_path / "run1" / "timeline")
        elif content == "people":
            (tmp_path / "people.csv").write_text("name,age\nA,31\nB,\n")
        elif content == "idx":
            for name, shape in (("images", (6, 4, 4)), ("labels", (6,))):
                header = bytes([0, 0, 8, len(shape)]) + np.asarray(shape, ">u4").tobytes()
                body = (np.arange(np.prod(shape)) % 6).astype("uint8").tobytes()
                (tmp_path / f"{name}.gz").write_bytes(gzip.compress(header + body))
        else:
            source = {"photos": "photos", "data": "data", "run": "trained"}[content]
            shutil.copytree(request.getfixturevalue(source), tmp_path, dirs_exist_ok=True)
        return tmp_path

    return fill


@pytest.mark.parametrize(
    ("example", "content"),
    [*QUICKLY.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in SLOWLY.items())],
)
def test_an_example_runs_as_printed(filled, example, content):
    directory = filled(content)
    before = set(directory.rglob("*"))
    printed = run(example, directory)
    assert printed.strip() or set(directory.rglob("*")) > before, "Nothing was printed or written."
