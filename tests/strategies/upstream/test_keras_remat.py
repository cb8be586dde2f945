"""Runs the programs of `keras_remat.md`, without tfdml. A failure here is good news."""

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


def test_every_fault_has_a_program():
    assert list(FAULTS) == re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.slow  # No change of tfdml can make these fail: only a new Keras or TensorFlow.
@pytest.mark.parametrize("fault", FAULTS)
def test_keras_still_does_it(fault):
    program, printed = FAULTS[fault]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed
