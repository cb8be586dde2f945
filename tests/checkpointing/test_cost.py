"""Checks the advice on how often to save, derived from the cost of past saves."""

import re

import pytest

from tests.checkpointing import cases
from tfdml.callbacks.checkpoint.cost import LIMIT, SaveCost


class Training:
    """Training with a simulated clock: steps of 0.1 s, saves of a given cost."""

    def __init__(self, every: int, still: float, slower: float, write: float):
        self.now = 0.0
        self._cost = SaveCost(lambda: self.now)
        self._every, self._still, self._slower, self._write = every, still, slower, write
        self.writing = 0.0

    def run(self, steps: int) -> str | None:
        for step in range(1, steps + 1):
            seconds = 0.1 + self._slower * (self.writing > 1e-9)
            self.now, self.writing = self.now + seconds, max(0.0, self.writing - seconds)
            self._cost.step(1, self.writing > 1e-9)
            if step % self._every == 0:
                began = self.now
                self.now, self.writing = self.now + self._still + self.writing, self._write
                self._cost.saved(began, self._write)
                if advice := self._cost.advice():
                    return advice
        return None


@pytest.mark.parametrize("every", [10, 50])
@pytest.mark.parametrize(
    ("still", "slower", "write"), [(0.2, 0.0, 0.1), (0.05, 0.05, 0.5), (0.01, 0.0, 0.9)]
)
def test_advised_interval_keeps_the_cost_below_the_limit(every, still, slower, write):
    advice = Training(every, still, slower, write).run(1000)
    steps = int(re.search(r"or (\d+) steps takes", advice)[1])
    cost = still + slower * write / (0.1 + slower)
    assert cost / (0.1 * steps) <= LIMIT * 1.1
    # Not longer than needed: a save must not begin before the previous one is written, either.
    assert steps == pytest.approx(max(cost / LIMIT, write) / 0.1, rel=0.15, abs=1)


def test_advice_is_given_once_after_enough_saves():
    training = Training(10, 0.1, 0.0, 0.1)
    assert training.run(30) is None
    assert training.run(20) is not None
    assert training.run(100) is None


def test_callback_logs_the_advice(ranks, tmp_path):
    messages = ranks(1).run(messages_of_training, str(tmp_path))[0]
    (line,) = [line for line in messages if "One save every" in line]
    assert re.search(r"One save every [\d.e-]+ s or \d+ steps takes less than 3.5 %", line)


def messages_of_training(directory: str) -> list[str]:
    from tfdml.callbacks.checkpoint import checkpoint_run as module

    messages: list[str] = []
    module.say, say = messages.append, module.say
    try:
        cases.train(directory, epochs=6, save_freq=4)
    finally:
        module.say = say
    return messages
