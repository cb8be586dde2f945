"""Runs the programs of `keras_remat.md`, without tfdml. A failure here is good news."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).with_name("keras_remat.md")
_FAULT = re.compile(
    r"^## (?P<title>.+?)\n.*?```python\n(?P<program>.*?)```\n\n```text\n(?P<printed>.*?)```",
    re.MULTILINE | re.DOTALL,
)
FAULTS = {f["title"]: (f["program"], f["printed"]) for f in _FAULT.finditer(PAGE.read_text())}
# Runs programs in one process, because TensorFlow's import takes seconds.
RUN = """
import contextlib, io, json, sys
printed = []
for program in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(program, {})
    printed.append(output.getvalue())
print(json.dumps(printed))
"""


def test_every_fault_has_a_program():
    assert list(FAULTS) == re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """Returns what each program prints."""
    programs = json.dumps([program for program, _ in FAULTS.values()])
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(command, input=programs, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(FAULTS, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow  # No change of tfdml can make these fail: only a new Keras or TensorFlow.
@pytest.mark.parametrize("fault", FAULTS)
def test_keras_still_does_it(printed, fault):
    assert printed[fault] == FAULTS[fault][1]
