"""Checks the runner of Keras's own tests in a strategy's scope: selection and exclusions."""

import subprocess
from pathlib import Path

import pytest

from tools.keras_tests import exclusions
from tools.keras_tests.job import Job, Outcome

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED = Outcome("passed"), Outcome("failed", "AssertionError")


def suite(*arguments: str, timeout: float) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(ROOT / "tools" / "keras_suite"), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.slow
def test_the_selection_fails_where_the_exclusions_say():
    ended = suite(timeout=900)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert ", 0 failed" in ended.stdout


@pytest.mark.slow
def test_full_suite_fails_where_the_exclusions_say():
    ended = suite("--all", timeout=7200)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]


@pytest.mark.slow  # A minute and a half for the runner alone: the selection runs by default.
def test_diverging_test_is_recorded_and_the_others_run(tmp_path):
    """Real ranks: one test fails only on rank 1, one kills rank 1, one waits forever."""
    file = tmp_path / "apart_test.py"
    file.write_text(APART)
    found = Job(Path(_python()), "horovod", 2, silence=15.0).run([str(file)])
    ends = {test.rpartition("::")[2]: end for test, end in found.items()}
    assert {name: end.outcome for name, end in ends.items()} == {
        "test_alike": "passed",
        "test_apart": "failed",
        "test_killed": "failed",
        "test_waits": "failed",
        "test_last": "passed",
    }
    assert "The ranks parted" in ends["test_apart"].message
    assert "Nothing happened for 15 s" in ends["test_waits"].message


APART = """
import os, signal, threading
import tensorflow as tf

RANK = int(os.environ["HOROVOD_RANK"])

def test_alike():
    assert tf.distribute.get_strategy().size == 2
    assert isinstance(tf.Variable(1.0), tf.distribute.DistributedValues)

def test_pairs_of_different_jobs_raise():
    assert RANK == 0

def test_killed():
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()

def test_waits():
    threading.Event().wait()

def test_last():
    tf.keras.backend.clear_session()
    assert tf.distribute.has_strategy()
"""


def _python() -> str:
    from tools.keras_tests import environment

    return str(environment.python())


def listed(test: str, strategies: str = "mirrored") -> exclusions.Exclusion:
    return exclusions.Exclusion(test, tuple(strategies.split()), "refused", "reason", "link")


@pytest.mark.parametrize(
    ("outcomes", "plain", "exclusion", "problem"),
    [
        ({"a": PASSED}, {}, None, None),
        ({"a": FAILED}, {"a": PASSED}, None, "a fails, and is not listed"),
        ({"a": FAILED}, {"a": PASSED}, listed("a"), None),
        ({"a": FAILED}, {"a": PASSED}, listed("a", "horovod"), "a fails, and is not listed"),
        ({"a": FAILED}, {"a": PASSED}, listed("a", "mirrored/2"), None),
        ({"a": PASSED}, {}, listed("a", "mirrored/3"), None),
        ({"ab": FAILED}, {"ab": PASSED}, listed("a*"), None),
        ({"a": PASSED}, {}, listed("a"), "a is listed, and passes"),
        ({"a": FAILED}, {"a": FAILED}, None, None),
        ({"a": FAILED}, {"a": FAILED}, listed("a"), "a is listed, and fails without a strategy"),
        ({"b": PASSED}, {}, listed("a"), None),
    ],
)
def test_run_is_compared_with_the_list(outcomes, plain, exclusion, problem):
    listed_ones = [exclusion] if exclusion else []
    found = list(exclusions.problems(outcomes, plain, listed_ones, "mirrored", 2))
    assert len(found) == (problem is not None)
    assert problem is None or found[0].startswith(problem)


def test_a_line_that_cannot_be_read_is_an_error(tmp_path):
    file = tmp_path / "exclusions.txt"
    file.write_text("# comment\n\na_test.py::A::b | mirrored | no category | reason | link\n")
    with pytest.raises(ValueError, match="in line 3"):
        exclusions.read(file)


def test_each_reason_is_documented():
    """Each reason appears verbatim in the section that its link names."""
    for exclusion in exclusions.read():
        page, _, anchor = exclusion.link.partition("#")
        sections = (ROOT / page).read_text(encoding="utf-8").split("\n## ")
        title = anchor.replace("-", " ")
        section = next(s for s in sections if s.lower().startswith(title))
        assert exclusion.reason in " ".join(section.split()), exclusion.reason


def test_exclusions_are_few():
    assert len(exclusions.read()) <= 40
