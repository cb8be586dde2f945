"""Candidates of `tools.bench.pipeline.turns` for its tests, without a framework."""

import os
import signal

from tools.bench.pipeline.turns import Candidate, Made


def make(rank: int, fault: str = "") -> Made:
    """Returns candidates whose steps take as many seconds as the process has cores.

    Args:
        rank: Number of the process; process 1 takes no part in "alone".
        fault: Fault of process 1: "raises", "dies" or none.
    """
    if rank and fault == "raises":
        raise ValueError("no model")
    if rank and fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    both = Candidate(_steps, (rank,))
    return {"both": both} if rank else {"alone": Candidate(_steps, (0, 1)), "both": both}


def _steps(number: int) -> list[float]:
    block = bytearray(64 << 20)  # Its pages are touched: zeroes would take no memory.
    block[::4096] = b"1" * len(block[::4096])
    return [float(len(os.sched_getaffinity(0)))] * number
