"""Checks the workflows: valid, and each step is a command of tools/ that developers can run."""

import itertools
import os
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml

from tests.tools.checkouts import ROOT
from tfdml.known_versions import known_releases

WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
ACTIONS = {"actions/checkout", "actions/setup-python"}
# All checks that a change must pass.
COMMANDS = {
    "tools/docs",
    "tools/test",
    "tools/test --all",
    "tools/test --docs",
    "tools/test --lint",
    *(f"tools/test --versions {k} {t}" for k in ("3.14", "3.15") for t in ("2.20", "2.21")),
    "tools/wheel",
}


def jobs(file: Path) -> list[dict]:
    return list(yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].values())


def commands() -> list[str]:
    """Returns the commands of all steps, for each combination of a matrix."""
    found = []
    for job in (job for file in WORKFLOWS for job in jobs(file)):
        for values in combinations(job):
            steps = [step["run"] for step in job["steps"] if "run" in step]
            for name, value in values.items():
                steps = [step.replace(f"${{{{ matrix.{name} }}}}", value) for step in steps]
            found += steps
    return found


def combinations(job: dict) -> list[dict[str, str]]:
    """Returns the values of a job's matrix; one empty combination if it has none."""
    matrix = job.get("strategy", {}).get("matrix", {})
    return [
        dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values())
    ]


def lint(*files: Path) -> subprocess.CompletedProcess:
    """Validates workflows against GitHub's schema, which comes with the linter."""
    linter = Path(sysconfig.get_path("scripts")) / "check-jsonschema"
    return subprocess.run(
        [linter, "--builtin-schema", "vendor.github-workflows", *files],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_workflows_match_the_schema():
    done = lint(*WORKFLOWS)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("right", "wrong"), [("runs-on:", "runs_on:"), ("jobs:", "job:"), ("- run:", "- runs:")]
)
def test_linter_detects_invalid_workflows(right, wrong, tmp_path):
    text = (ROOT / ".github" / "workflows" / "lint.yml").read_text(encoding="utf-8")
    (tmp_path / "lint.yml").write_text(text.replace(right, wrong))
    done = lint(tmp_path / "lint.yml")
    assert done.returncode == 1
    assert "Schema validation errors" in done.stdout


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_step_is_an_action_or_one_command_of_tools(file):
    for job in jobs(file):
        actions = [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step]
        assert set(actions) == ACTIONS
        for step in job["steps"]:
            assert set(step) <= {"uses", "with"} or set(step) == {"run"}, step


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_the_commands_exist_with_their_options(command):
    assert not re.search(r"[\n;&|<>$`]", command), "One command, and no shell."
    tool, *arguments = shlex.split(command)
    assert tool.startswith("tools/")
    assert os.access(ROOT / tool, os.X_OK)
    for argument in arguments:
        if argument.startswith("-"):
            helped = subprocess.run([ROOT / tool, "--help"], capture_output=True, text=True)
            assert re.search(rf"^  {argument} ", helped.stdout, re.MULTILINE)
        elif not re.fullmatch(r"\d+\.\d+", argument):
            assert (ROOT / argument).exists()


def test_workflows_run_all_checks():
    assert set(commands()) >= COMMANDS


def test_all_supported_versions_are_tried():
    (job,) = jobs(ROOT / ".github" / "workflows" / "versions.yml")
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    known = {
        library: sorted({f"{r.major}.{r.minor}" for r in known_releases(library)})
        for library in ("keras", "tensorflow")
    }
    pythons = re.findall(r'Python :: (3\.\d+)"', setup)
    assert job["strategy"]["matrix"] == {**known, "python": pythons}
    assert pythons
