"""Checks the project's text files: their form, and that paths, names and commands in them exist."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

import tfdml
from tfdml.cli.main import app
from tools.gpu_checks.__main__ import main as gpu_report
from tools.keras_tests.__main__ import main as keras_suite

ROOT = Path(__file__).resolve().parents[1]
GUIDES = ("CONTRIBUTING.md", "SECURITY.md")
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
# A path of the repository, in text or in a command.
PATH = re.compile(r"(?<![\w/.-])(?:tfdml|tests|tools|recipes|docs)/[\w/.-]*[\w/]|[A-Z]+\.md")
# Commands whose options are those of a function.
BY_TYPER = {"tools/gpu_report": gpu_report, "tools/keras_suite": keras_suite}


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# -- CHANGELOG.md ----------------------------------------------------------------------------------


def versions() -> dict[str, dict[str, list[str]]]:
    """Returns the changelog's entries by version and kind; rejects any other form."""
    found: dict[str, dict[str, list[str]]] = {}
    _, *parts = re.split(r"^## ", text_of("CHANGELOG.md"), flags=re.M)
    for part in parts:
        title, *rest = part.splitlines()
        kinds = found.setdefault(title, {})
        entries: list[str] | None = None
        for line in filter(None, rest):
            if line.startswith("### "):
                entries = kinds.setdefault(line[4:], [])
            elif line.startswith("- "):
                assert entries is not None, f"An entry must be under a kind of change: {line}"
                entries.append(line)
            else:
                assert entries, f"Only entries may be under a version: {line}"
                assert line.startswith("  "), f"A second line must be indented: {line}"
                entries[-1] += "\n" + line
    return found


def test_the_changelog_has_the_form_of_keep_a_changelog():
    assert "One line per change" in text_of("CHANGELOG.md")
    first, *released = versions()
    assert first == "[Unreleased]"
    for title in released:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d|unreleased)", title), title
    assert released[0].startswith(f"[{tfdml.__version__}]")
    for title, kinds in versions().items():
        assert set(kinds) <= KINDS, title
        assert all(kinds.values()), f"{title} has a heading without entries."


def test_changelog_entries_are_one_line():
    """Two lines if 100 columns are not enough."""
    for title, kinds in versions().items():
        for entry in (entry for entries in kinds.values() for entry in entries):
            assert entry.count("\n") < 2, f"{title}: {entry}"


def test_first_version_is_described_by_area():
    *_, (title, kinds) = versions().items()
    assert title.startswith("[0.1.0]")
    # Nobody had the bugs fixed before it.
    assert list(kinds) == ["Added"]
    assert len("\n".join(kinds["Added"]).splitlines()) <= 25
    assert all(re.match(r"- \*\*[A-Z][\w ]+\*\*: ", entry) for entry in kinds["Added"])


# -- CITATION.cff ----------------------------------------------------------------------------------


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == tfdml.__version__
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "The tfdml developers"}]
    for key in ("message", "title", "abstract"):
        assert isinstance(citation[key], str), key
    assert citation["keywords"]
    # None of these is known yet, and nothing is made up.
    assert not {"doi", "url", "repository", "repository-code", "date-released"} & set(citation)


# -- CONTRIBUTING.md and SECURITY.md ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CITATION.cff", *GUIDES])
def test_lines_fit_a_screen(name):
    assert not [line for line in text_of(name).splitlines() if len(line) > 100]


@pytest.mark.parametrize("name", GUIDES)
def test_paths_in_a_guide_exist(name):
    paths = set(PATH.findall(text_of(name)))
    assert paths
    assert not {path for path in paths if not (ROOT / path).exists()}


def test_names_in_a_guide_exist_in_their_files():
    """`NAME` of `path`."""
    for guide in GUIDES:
        for name, path in re.findall(r"`(\w+)` of\s+`([\w/.]+)`", text_of(guide)):
            assert re.search(rf"\b{name}\b", text_of(path)), f"{guide}: {name} of {path}"


def commands(name: str) -> Iterator[list[str]]:
    """Yields the commands of a guide: those of its shell blocks, and `tfdml ...` in its text."""
    text = text_of(name)
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S):
        for line in block.splitlines():
            yield shlex.split(line, comments=True)
    for command in re.findall(r"`((?:tfdml|tools/\w+) [^`]+)`", text):
        yield shlex.split(command)


def check_options(parameters: list, words: list[str]) -> None:
    """Checks that a command has the given options."""
    known = {option for p in parameters for option in p.opts}
    for word in words:
        if word.endswith(".py"):
            return  # A script's own arguments follow.
        assert not word.startswith("-") or word in known, f"{word} is none of {sorted(known)}"


def check(words: list[str]) -> bool:
    """Checks that a command exists, with its options; returns whether it is one of ours."""
    program, *rest = words
    if program == "tfdml":
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            assert rest, "a command is missing"
            assert rest[0] in command.commands, words
            command = command.commands[rest.pop(0)]
        check_options(command.params, rest)
    elif program in BY_TYPER:
        suite = typer.Typer()
        suite.command()(BY_TYPER[program])
        check_options(typer.main.get_command(suite).params, rest)
    elif program.startswith("tools/"):
        assert os.access(ROOT / program, os.X_OK), program
        for option in (word for word in rest if word.startswith("-")):
            assert option in text_of(program), words
    elif words[:3] == ["python", "-m", "pytest"]:
        marks = rest[rest.index("-m", 2) + 1] if rest.count("-m") > 1 else "slow"
        assert marks in ("slow", "not slow"), words
        paths = [word for word in rest if word.startswith("tests")]
        assert paths, words
        assert all((ROOT / path).exists() for path in paths), words
    elif words[:2] == ["python", "-m"] and rest[1].startswith("tools."):
        # tests/tools/test_bench.py checks the options.
        assert importlib.util.find_spec(rest[1]) is not None, words
    elif program == "python" and rest[0].startswith("tools/"):
        assert (ROOT / rest[0]).exists(), words
    elif program == "ruff":
        assert rest in (["check", "."], ["format", "."]), words
    else:
        return False
    return True


def test_commands_for_contributors_exist():
    found = list(commands("CONTRIBUTING.md"))
    assert len(found) > 20
    others = [words for words in found if not check(words)]
    assert all(words[:3] == ["git", "grep", "-n"] for words in others), others


def test_commands_for_a_secure_job_exist():
    """tests/runtime/launch/test_tunnels.py runs the other commands verbatim."""
    ours = [words for words in commands("SECURITY.md") if words and check(words)]
    assert ["tfdml", "launch", "--hosts", "node1:1,node2:1", "train.py"] in ours


@pytest.mark.parametrize(
    "wrong",
    [
        ["tfdml", "lunch", "train.py"],
        ["tfdml", "launch", "--host", "node1:1", "train.py"],
        ["tools/keras_suite", "--everything"],
        ["tools/gpu_report", "--everything"],
        ["tools/test", "--everything"],
        ["python", "-m", "pytest", "tests/nowhere"],
        ["python", "-m", "tools.bench.nowhere"],
    ],
    ids=" ".join,
)
def test_missing_command_is_detected(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


# -- What SECURITY.md promises ---------------------------------------------------------------------

TRAP = """
import sys
from pathlib import Path
import keras, numpy as np, tfdml
from tfdml.cli.main import main
ran = Path(sys.argv[1], "ran")
trap = keras.layers.Lambda(lambda x: (ran.touch(), x)[1], output_shape=(4,))
model = keras.Sequential([keras.Input((4,)), trap, keras.layers.Dense(1)])
model.compile("sgd", "mse")
directory = sys.argv[1] + "/run"
checkpoint = tfdml.callbacks.FaultTolerantCheckpoint(directory)
model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0, callbacks=[checkpoint])
ran.unlink()
sys.argv = ["tfdml", "checkpoints", "export", directory, directory + ".keras"]
main()
"""


def test_export_runs_no_code_of_a_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TRAP, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "unsafe" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_setup_names_each_list_of_packages_once():
    """Else the later one counts, and what the first one lists is not installed."""
    names = re.findall(r"^([A-Z_]+) = ", (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert names
    assert len(names) == len(set(names))
