"""Cases run by ranks: functions that rank 0 calls."""

import tensorflow as tf

from tests.harness import rank_job

ANSWERS = [None, {"rate": 0.1}, "x" * 100_000, b"", [1, (2, 3)]]


class _Uncopyable(Exception):
    """An error whose constructor takes more than its arguments."""

    def __init__(self, number: int, of: int):
        super().__init__(f"{number} of {of}")


def answers() -> dict:
    """Returns what this rank gets, and how often it calls the function."""
    strategy, calls = rank_job.strategy(), []

    def called(answer):
        return lambda: calls.append(1) or answer

    found = [strategy.call_on_chief(called(answer)) for answer in ANSWERS]
    return {"answers": found, "calls": len(calls)}


def _raising(kind: str):
    if kind == "known":
        raise KeyError("rate")
    if kind == "uncopyable":
        raise _Uncopyable(2, 3)
    return lambda: None


def error(kind: str) -> tuple[str, str, str]:
    """Returns the type and the text of this rank's error, and the answer of the next call."""
    strategy = rank_job.strategy()
    try:
        strategy.call_on_chief(lambda: _raising(kind))
    except Exception as raised:  # noqa: BLE001 (it is the answer)
        name, text = type(raised).__name__, str(raised)
    return name, text, strategy.call_on_chief(lambda: "next")


def in_a_graph() -> str:
    """Returns the message of a call in a step."""
    strategy = rank_job.strategy()
    step = tf.function(lambda: strategy.call_on_chief(lambda: 1))
    try:
        step()
    except RuntimeError as raised:
        return str(raised)
    return ""
