"""Checks what a link that is down does to training, between hosts of the network lab."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.test_netlab import NETLAB, needs_root
from tfdml.topology import child_environment

PROGRAM = Path(__file__).with_name("outage_program.py")
# Notes the exit code of a rank that ends by itself, and when; the lab kills those that do not.
NOTED = """
cd "$0"
"$@" >out$NETLAB_RANK 2>err$NETLAB_RANK
code=$?
echo $code >code$NETLAB_RANK
exit $code
"""
pytestmark = [pytest.mark.slow, needs_root]


@dataclasses.dataclass(frozen=True)
class Ended:
    """End of one rank.

    Attributes:
        code: Its exit code; None if the lab had to kill it.
        seconds: Seconds from the outage to its end.
        output: Its standard output and error.
        errors: Its standard error.
    """

    code: int | None
    seconds: float
    output: str
    errors: str


def train(
    directory: Path, kind: str, hosts: int, codec: str, limit: float, *outages: str
) -> list[Ended]:
    """Runs the program on hosts of one rank each; returns how each rank has ended."""
    directory.mkdir()
    begun = directory / "begun"
    command = [sys.executable, f"{NETLAB}.py", "--hosts", str(hosts), "--job", kind]
    command += [f"--outage={outage}" for outage in outages]
    command += ["--outages-after", str(begun), "--", "sh", "-c", NOTED, str(directory)]
    command += [sys.executable, str(PROGRAM), str(directory), kind, codec, str(limit)]
    environment = child_environment(PYTHONPATH=str(PROGRAM.parents[3]), TF_NUM_INTRAOP_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    ranks = [_ended(directory, rank, begun) for rank in range(hosts)]
    assert begun.exists(), (done.stderr, ranks)
    return ranks


def _ended(directory: Path, rank: int, begun: Path) -> Ended:
    code = directory / f"code{rank}"
    seconds = code.stat().st_mtime - begun.stat().st_mtime if code.exists() else float("inf")
    return Ended(
        int(code.read_text()) if code.exists() else None,
        seconds,
        (directory / f"out{rank}").read_text(),
        (directory / f"err{rank}").read_text()[-6000:],
    )


@pytest.mark.parametrize(
    ("kind", "codec", "host"),
    [
        ("horovod", "none", 1),
        ("horovod", "int8", 0),
        ("multi-worker", "none", 1),
        ("multi-worker", "int8", 0),
    ],
)
def test_training_goes_on_after_an_outage_of_10_seconds(tmp_path, kind, codec, host):
    """With the same bits as without the outage; 60 s is the default limit of silence."""
    ends = train(tmp_path / "cut", kind, 2, codec, 60, f"host{host}:0s:10s")
    assert [end.code for end in ends] == [0, 0], ends
    steps, digests = zip(*(end.output.split()[-2:] for end in ends), strict=True)
    # Else the outage was not during training.
    assert min(map(float, steps)) > 9
    undisturbed = train(tmp_path / "whole", kind, 2, codec, 60)
    assert {end.output.split()[-1] for end in undisturbed} == set(digests)
    assert len(set(digests)) == 1


@pytest.mark.parametrize(
    ("kind", "codec", "limit", "hosts", "host", "named"),
    [
        # Of two hosts, none knows on which side the fault is.
        ("horovod", "none", 8, 2, 1, [1, 0]),
        ("horovod", "int8", 8, 3, 1, [1, 0, 1]),
        ("horovod", "none", 8, 3, 0, [0, 0, 0]),
        # Horovod's exchange fails after 30 s.
        ("horovod", "none", 60, 3, 0, [0, 0, 0]),
        ("multi-worker", "none", 8, 2, 0, [1, 0]),
        ("multi-worker", "none", 8, 3, 1, [1, 0, 1]),
        ("multi-worker", "int8", 8, 3, 0, [0, 0, 0]),
    ],
)
def test_an_outage_for_good_ends_every_rank(tmp_path, kind, codec, limit, hosts, host, named):
    """Each by itself, within the limit of silence and some seconds that its end takes."""
    ends = train(tmp_path / "cut", kind, hosts, codec, limit, f"host{host}:0s")
    # Not by the lab, which would leave no code.
    assert all(end.code for end in ends), ends
    assert max(end.seconds for end in ends) < limit + 15, ends
    first = [re.search(r"on all (\d) ranks, because rank (\d) (.*)", end.errors) for end in ends]
    assert [(int(f[1]), int(f[2])) for f in first] == [(hosts, rank) for rank in named], ends
    alone = hosts > 2 and host == 0
    for rank, found in enumerate(first):
        assert found[3].startswith("hears no" if alone and rank == 0 else "fell silent"), ends
