"""Checks that TensorFlow's start-up lines are hidden, but never warnings and errors."""

import subprocess
import sys

import pytest

from tfdml.runtime.startup_noise import is_noise

NOISE = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795583109.067053   22932 port.cc:153] oneDNN custom operations are on. You may",
    "I0000 00:00:1795583109.1 7 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to",
    "I0000 00:00:1795583109.1 7 cudart_stub.cc:31] Could not find cuda drivers on your machine",
    "2026-11-25 04:31:00.123: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.",
    "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with "
    "the appropriate compiler flags.",
    "[1]<stderr>:I0000 00:00:1795583122.311128   23295 port.cc:153] oneDNN custom operations",
]
SAID = [
    "E0000 00:00:1795583109.067053   22932 cuda_dnn.cc:8310] Unable to register cuDNN factory",
    "E0000 00:00:1795583109.067053   22932 port.cc:153] an error in the same file",
    "W0000 00:00:1795583109.067053   22932 cpu_feature_guard.cc:1] a warning in the same file",
    "F0000 00:00:1795583109.067053   22932 cpu_feature_guard.cc:164] The TensorFlow library was",
    "I0000 00:00:1795583109.067053   22932 gpu_device.cc:2020] Created device",
    "train.py: port.cc:153] of a user",
    "Traceback (most recent call last):",
    "",
]


@pytest.mark.parametrize("line", NOISE)
def test_startup_noise_is_recognised(line):
    assert is_noise(line)


@pytest.mark.parametrize("line", SAID)
def test_other_output_is_kept(line):
    assert not is_noise(line)


IMPORTS = """
import os, sys
from tfdml.runtime.startup_noise import filter_import_of_tensorflow, filtered_stderr
filter_import_of_tensorflow()
import tensorflow
print("after", file=sys.stderr)
with filtered_stderr():
    os.write(2, b"I0000 00:00:1 7 port.cc:153] oneDNN\\nE0000 00:00:1 7 port.cc:1] bad\\n")
    os.kill(os.getpid(), 9)
"""


def test_standard_error_may_be_closed():
    code = "import os; from tfdml.runtime.startup_noise import filtered_stderr\n"
    code += "with filtered_stderr(): print('works')"
    command = ["bash", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "works\n")


def test_import_is_quiet_and_output_of_a_killed_process_arrives():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -9
    assert done.stderr.splitlines() == ["after", "E0000 00:00:1 7 port.cc:1] bad"]
