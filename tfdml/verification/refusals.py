"""Causes that tfdml itself names: a script that it refuses to run on several processes."""

import itertools
import re
from collections.abc import Sequence

from tfdml.verification.evidence import Cause

_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)\b:? ?(.*)")
# An assertion in a graph, with its parts in brackets.
_ASSERTION = re.compile(r".*assertion failed: (.*)", re.DOTALL)
_PART = re.compile(r"\[([^\[\]]*)\]")
# The report of the guard, which repeats the error.
_GUARD = "tfdml: "
# How messages of tfdml begin, and the cause's short name.
_NAMES = (
    ("`Dataset.shard` must", "Dataset.shard"),
    ("`Dataset.shuffle` must have a seed", "shuffle"),
    ("The `tf.data` pipeline must be the same", "data by rank"),
    ("The arrays given as data must be the same", "data by rank"),
    ("Batches must be the same", "data by rank"),
    ("Variables must be the same", "model by rank"),
)


def cause_of_failure(lines: Sequence[str]) -> Cause:
    """Returns why a script fails on several processes, though it runs on one.

    Args:
        lines: The last lines of output of the process that failed.
    """
    starts = [i for i, line in enumerate(lines) if _ERROR.fullmatch(line.strip())]
    if not starts:
        return Cause("failure", "The script fails on several processes.", "\n".join(lines))
    words = itertools.takewhile(lambda line: not line.startswith(_GUARD), lines[starts[-1] :])
    text = "\n".join(words).strip()
    message = _ERROR.fullmatch(lines[starts[-1]].strip())[1]
    if assertion := _ASSERTION.fullmatch(text):
        text = message = " ".join(_PART.findall(assertion[1]))
    name = next((name for start, name in _NAMES if message.startswith(start)), "failure")
    return Cause(name, "The script runs on one process and fails on several.", text)
