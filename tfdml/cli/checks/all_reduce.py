"""Check that runs a real all-reduce on two local processes, started by `horovodrun`."""

import json
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tfdml import topology
from tfdml.cli.checks.finding import Finding, error, ok
from tfdml.horovod_build import child

_NAME = "All-reduce"
MEBIBYTES = 16
SECONDS = 90


def check_all_reduce(transports: Sequence[str], seconds: float = SECONDS) -> Finding:
    """Runs the all-reduce and checks its result.

    Args:
        transports: Transports that Horovod was built with.
        seconds: Time limit of both processes.
    """
    horovodrun = shutil.which("horovodrun", path=sysconfig.get_path("scripts"))
    if horovodrun is None:
        return error(
            _NAME,
            "horovodrun is not in this Python environment",
            "Install Horovod again: tfdml build-horovod",
        )
    with tempfile.TemporaryDirectory(prefix="tfdml-") as scratch:
        answer = Path(scratch) / "answer.json"
        command = [horovodrun, "-np", "2", *(["--gloo"] if "gloo" in transports else [])]
        command += [sys.executable, "-m", "tfdml.cli.checks.all_reduce", str(answer)]
        ended = child.run(
            command,
            environment=topology.child_environment(TF_CPP_MIN_LOG_LEVEL="3"),
            timeout=seconds,
        )
        if ended.timed_out or not ended.ok or not answer.exists():
            return _failure(ended, seconds)
        measured = json.loads(answer.read_text(encoding="utf-8"))
    return ok(
        _NAME,
        f"{MEBIBYTES} MiB between 2 processes in {measured['milliseconds']:.0f} ms",
    )


def _failure(ended: child.ChildResult, seconds: float) -> Finding:
    how = (
        f"not finished after {seconds:.0f} s"
        if ended.timed_out
        else f"exit code {ended.returncode}"
    )
    lines = [line for line in ended.output.splitlines() if line.strip()]
    return error(
        _NAME,
        "\n".join([f"2 processes: {how}", *(line[:200] for line in lines[-6:])]),
        "Fix the problems above first. Then look for a firewall on the loopback interface, and "
        "for a horovodrun of another Python environment.",
    )


def _take_part(answer: Path) -> None:
    import time

    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    tf.config.set_visible_devices([], "GPU")
    values = tf.fill([MEBIBYTES * 1024 * 1024 // 4], float(hvd.rank() + 1))
    times = []
    for step in range(4):
        began = time.perf_counter()
        total = hvd.allreduce(values, op=hvd.Sum, name=f"doctor.{step}")
        times.append(time.perf_counter() - began)
        expected = hvd.size() * (hvd.size() + 1) / 2
        if hvd.size() != 2 or not bool(tf.reduce_all(total == expected)):
            raise SystemExit(
                f"the sum over {hvd.size()} processes must be {expected} everywhere. "
                f"Received: {total.numpy()[:4]}"
            )
    if hvd.rank() == 0:
        answer.write_text(json.dumps({"milliseconds": min(times) * 1000}), encoding="utf-8")
    hvd.shutdown()


if __name__ == "__main__":
    _take_part(Path(sys.argv[1]))
