"""Candidates of `tools.bench.slow_networks`, and how a rank of any framework times them.

Neither TensorFlow nor PyTorch is imported here: a rank has one of them.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tools.bench.compression.model import Clock

RATES = ("50mbit", "100mbit", "1gbit", "5gbit")
MODELS = {
    "mlp": "dense layers of 25 million parameters",
    "text": "a byte-level transformer of 120,704 parameters",
}
# Steps between two exchanges.
EVERY = (8, 32, 128)
# What is trained to a given loss.
METHODS = (
    "every step",
    "every step, PowerSGD",
    "LocalSGD(16)",
    "DiLoCo(50)",
    "post-local SGD(16)",
)
FRAMEWORKS = ("tfdml", "Horovod", "PyTorch", "torchft")
EVERY_STEP, LOCAL_SGD, DILOCO = "every step", "LocalSGD", "DiLoCo"
NONE, POWER_SGD, FOUR_BITS, AUTO = "none", "PowerSGD", "4 bit", "auto"
# Codecs whose exchange is also timed alone; that of AUTO is chosen in its steps.
TIMED_ALONE = (NONE, POWER_SGD, FOUR_BITS)
# Time budget in seconds of a candidate's counted rounds, and the most counted steps of several
# rounds. There is always one round.
BUDGET, MOST_STEPS = 15.0, 128
# The same of what is timed alone: a local step, or an exchange.
BUDGET_ALONE, MOST_ALONE = 6.0, 30
# Fewest steps before the counted ones, of which a candidate also takes whole rounds.
WARM_UP = 2
# By then "auto" has chosen its codec.
WARM_UP_OF_AUTO = 35


class Candidate(NamedTuple):
    """One way to train on several hosts.

    Attributes:
        framework: One of FRAMEWORKS.
        method: EVERY_STEP, LOCAL_SGD, DILOCO, or what the framework calls its averaging.
        every: Number of steps between two exchanges.
        codec: Codec of what is exchanged.
    """

    framework: str
    method: str
    every: int = 1
    codec: str = NONE

    @property
    def name(self) -> str:
        """Name in tables and on the command line."""
        every = "" if self.method == EVERY_STEP else f"({self.every})"
        codec = "" if self.codec == NONE else f", {self.codec}"
        return f"{self.framework} {self.method}{every}{codec}"

    @property
    def warm_up(self) -> int:
        """Steps before the counted ones, in whole rounds."""
        fewest = WARM_UP_OF_AUTO if self.codec == AUTO else WARM_UP
        return self.every * -(-fewest // self.every)


def _candidates() -> list[Candidate]:
    found = [Candidate("tfdml", EVERY_STEP, 1, codec) for codec in (NONE, POWER_SGD, AUTO)]
    for method in (LOCAL_SGD, DILOCO):
        for codec in (NONE, FOUR_BITS):
            found += [Candidate("tfdml", method, every, codec) for every in EVERY]
    peers = ("Horovod", "averaging"), ("PyTorch", "averager")
    for framework, method in (*peers, ("torchft", LOCAL_SGD), ("torchft", DILOCO)):
        found += [Candidate(framework, method, every) for every in EVERY]
    return found


CANDIDATES = {candidate.name: candidate for candidate in _candidates()}


def rounds_of(every: int, alone: float, exchange: float) -> int:
    """Returns the number of counted rounds of local steps and an exchange.

    Args:
        every: Number of steps of a round.
        alone: Seconds of a local step.
        exchange: Seconds of an exchange.
    """
    within = int(BUDGET / (every * alone + exchange))
    return max(1, min(within, MOST_STEPS // every))


def seconds_of(call: Callable[[], object], agree: Callable[[float], float]) -> float:
    """Returns the mean seconds of a call that all ranks make, as often as the budget allows.

    Args:
        call: The call; once before it is timed.
        agree: Returns the mean of all ranks' numbers, when all have called it.
    """

    def timed(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            call()
        return agree(time.perf_counter() - begin)

    call()
    agree(0.0)  # So that no rank is timed while another one still warms up.
    first = timed(1)
    more = max(0, min(MOST_ALONE, int(BUDGET_ALONE / first)) - 1)
    return (first + timed(more)) / (1 + more)


def timed_rounds(step: Callable[[], object], candidate: Candidate, rounds: int) -> dict:
    """Returns `mean_of` some rounds of local steps, each of which ends with an exchange.

    Args:
        step: A step, which exchanges when it is due.
        candidate: The candidate, which is at the beginning of a round.
        rounds: Number of counted rounds.
    """
    for _ in range(candidate.warm_up):
        step()
    clock = Clock()
    clock.start()
    for _ in range(rounds * candidate.every):
        step()
        clock.tick()
    return mean_of(clock.rows, len(clock.rows))


def mean_of(rows: Sequence[tuple[float, float, float]], steps: int) -> dict[str, float]:
    """Returns the means of counted steps: "seconds", "cpu" and "bytes" a step, and "steps".

    Args:
        rows: Rows of a clock: wall seconds, processor seconds, sent bytes.
        steps: Number of steps in all these rows.
    """
    seconds, processor, sent = (sum(column) / steps for column in zip(*rows, strict=True))
    return {"steps": steps, "seconds": seconds, "cpu": processor, "bytes": sent}
