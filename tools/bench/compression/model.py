"""Model sizes, candidates and expected traffic of `tools.bench.compression`."""

import statistics
import time
from collections.abc import Callable

# 25 million parameters: 6 layers of 2,048 x 2,048 weights, and the classes.
WIDTH, LAYERS, CLASSES = 2048, 6, 10
GLOBAL_BATCH = 32
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH) + WIDTH * CLASSES + CLASSES
# Bandwidths in bits per second, by name; "" for a network without a limit.
RATES = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10, "25gbit": 2.5e10, "": float("inf")}
# Time budget of a candidate's steps in seconds, and the fewest and most steps.
BUDGET, FEWEST, MOST = 20.0, 3, 20
# Untimed steps before those.
WARM_UP = 2
# Bits of a matrix's number on the wire, scales included, by the name of what compresses it. What
# is smaller than 1,024 numbers or one-dimensional goes as it is.
BITS = {
    "none": 32,
    "fp16": 16 + 32 / 4096,
    "bf16": 16,
    "int8": 8 + 32 / 512,
    "int8 stochastic": 8 + 32 / 512,
    "int4": 4 + 32 / 512,
    "int2": 2 + 32 / 512,
    "natural": 8 + 32 / 512,
    "terngrad": 2 + 32 / 4096,
    "onebit": 1 + 8 / 64 + 32 / 2048,
    "topk 1 %": 0.01 * 64,
    "dgc 1 %": 0.01 * 64,
    "dgc 0.1 %": 0.001 * 64,
    "randomk 1 %": 0.01 * 32,
}
# Numbers of columns that are sent of both matrices; in turns, of one.
RANKS = {"powersgd 2": 2, "powersgd 4": 4, "powersgd 4 in turns": 2}
# Its codec is chosen at run time.
AUTO = "auto"
# End of the names of candidates whose gradients are summed over all ranks at once, although hosts
# have several ranks.
AT_ONCE = ", at once"
# Candidates that a ring sums as they are, in addition to those of RANKS.
SUMMED = ("none", "randomk 1 %")
# Our MultiWorkerMirroredStrategy, without compression.
OF_WORKERS = "MultiWorkerMirrored"
# Names of the peers, and the codec of what each sends. "RING" is TensorFlow's own strategy in a
# hand-written loop, "tf_keras" the same under the frozen Keras 2's `fit`.
PEERS = {
    "raw Horovod": "none",
    "raw Horovod fp16": "fp16",
    "MultiWorkerMirrored RING": "none",
    "MultiWorkerMirrored tf_keras": "none",
    "PyTorch DDP": "none",
    "PyTorch DDP fp16 hook": "fp16",
    "PyTorch DDP PowerSGD hook": "powersgd 4",
}


def formula(name: str, hosts: int, ranks: int = 1, by_hosts: bool = False) -> float:
    """Returns the bytes that should leave a host in a step.

    The peers' rings carry 2(N-1)/N of the payload, our all-reduce 2(H-1)/H: it sums within hosts
    first. Encoded gradients that cannot be summed on the wire are summed by hosts, 2(H-1)/H, or at
    once, (L(N-L) + N-1)/N; all are the same for L = 1.

    Args:
        name: Name of one of our candidates or of the peers.
        hosts: Number of hosts, H.
        ranks: Number of ranks on each host, L.
        by_hosts: Whether the gradients are summed by hosts.
    """
    name = name.removesuffix(AT_ONCE)
    is_peer = name in PEERS
    is_ring = is_peer or name in (*SUMMED, *RANKS, OF_WORKERS)
    size = hosts * ranks
    name = {**PEERS, OF_WORKERS: "none"}.get(name, name)
    shapes = [(WIDTH, WIDTH)] * LAYERS + [(WIDTH, CLASSES)]
    matrices = sum(n * m for n, m in shapes)
    if name in RANKS:
        payload = sum(4 * RANKS[name] * (n + m) for n, m in shapes)
    else:
        payload = matrices * BITS[name] / 8
    between_hosts = 2 * (hosts - 1) / hosts
    ring = 2 * (size - 1) / size if is_peer else between_hosts
    rest = 4 * (PARAMETERS - matrices)
    chunks = between_hosts if by_hosts else (ranks * (size - ranks) + size - 1) / size
    return (ring if is_ring else chunks) * payload + ring * rest


def steps_of(name: str, hosts: int, rate: float, ranks: int = 1) -> int:
    """Returns the number of timed steps: fewer if they are expected to be slow.

    Args:
        name: Name of one of our candidates or of the peers.
        hosts: Number of hosts.
        rate: Bandwidth in bits per second; infinite for no limit.
        ranks: Number of ranks on each host.
    """
    if name == AUTO:
        return MOST
    seconds = 0.5 + 8 * formula(name, hosts, ranks) / rate
    return max(FEWEST, min(MOST, int(BUDGET / seconds)))


def sent_bytes() -> int:
    """Returns the bytes sent by this host's interface; 0 outside of the network lab."""
    try:
        with open("/sys/class/net/eth0/statistics/tx_bytes") as counter:
            return int(counter.read())
    except OSError:
        return 0


class Clock:
    """Recorder of every step's wall seconds, CPU seconds and sent bytes."""

    def __init__(self) -> None:
        self._last = self._now()
        self.rows: list[tuple[float, float, float]] = []

    @staticmethod
    def _now() -> tuple[float, float, int]:
        return time.perf_counter(), time.process_time(), sent_bytes()

    def start(self) -> None:
        """Begins the first step."""
        self._last = self._now()

    def tick(self) -> None:
        """Ends a step, and begins the next one."""
        now = self._now()
        self.rows.append(tuple(b - a for a, b in zip(self._last, now, strict=True)))
        self._last = now

    def summary(self) -> dict[str, float]:
        """Returns medians, and the 90th percentile of the seconds."""
        seconds, processor, sent = zip(*self.rows, strict=True)
        return {
            "steps": len(seconds),
            "median": statistics.median(seconds),
            "p90": sorted(seconds)[min(len(seconds) - 1, int(0.9 * len(seconds)))],
            "cpu": statistics.median(processor),
            "bytes": statistics.median(sent),
        }


def timed(step: Callable[[], object], steps: int, warm_up: int) -> dict[str, float]:
    """Returns the summary of `steps` calls, after `warm_up` uncounted ones."""
    for _ in range(warm_up):
        step()
    clock = Clock()
    clock.start()
    for _ in range(steps):
        step()
        clock.tick()
    return clock.summary()
