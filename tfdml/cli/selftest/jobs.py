"""Jobs of `tfdml test`: their strategies and commands, and a function that runs one."""

import dataclasses
import importlib.util
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

from tfdml.cli.selftest.events import Event, Reader, without_events
from tfdml.runtime.launch.job_hosts import Host
from tfdml.runtime.launch.supervisor import TERM_SECONDS
from tfdml.topology import child_environment

# Time limit for a job that hangs. A job takes seconds, on a busy machine a minute or two.
JOB_SECONDS = 300.0
_EXACT, _COMPRESSED = 1e-4, 1e-3


@dataclasses.dataclass(frozen=True)
class StrategyRun:
    """One training run.

    Attributes:
        name: Name, as in `Event.run`.
        title: Full name in messages.
        label: Name in the table, below the first run of its job.
        tolerance: Largest allowed difference of losses and weights from those of one process; None
            for a run that only has to train.
    """

    name: str
    title: str
    label: str
    tolerance: float | None = _EXACT


@dataclasses.dataclass(frozen=True)
class StrategyJob:
    """Training runs of one strategy, one after the other in the same processes.

    Attributes:
        strategy: Name of the strategy in `tfdml.cli.selftest.program`.
        runs: Training runs.
        options: Options of `tfdml launch`; None for one process that needs no launcher.
        on_hosts: Whether `--hosts` applies to the job.
    """

    strategy: str
    runs: tuple[StrategyRun, ...]
    options: tuple[str, ...] | None = ()
    on_hosts: bool = True

    @property
    def reports_by_rank(self) -> bool:
        """True if each process reports, False if one reports for all."""
        return self.options is not None and "--ps" not in self.options


def _run(name: str, title: str) -> StrategyRun:
    return StrategyRun(name, title, title)


REFERENCE = StrategyJob(
    "one_process", (_run("one_process", "one process, plain Keras"),), None, False
)
JOBS = (
    StrategyJob("mirrored", (_run("mirrored", "MirroredStrategy"),), None, False),
    StrategyJob(
        "multi_worker_mirrored",
        (
            _run("multi_worker_mirrored", "MultiWorkerMirroredStrategy"),
            StrategyRun(
                "compressed",
                'MultiWorkerMirroredStrategy(compression="qsgd")',
                '  compression="qsgd"',
                _COMPRESSED,
            ),
        ),
    ),
    StrategyJob("horovod", (_run("horovod", "HorovodStrategy"),), ("--horovod",)),
    StrategyJob(
        "parameter_server",
        (
            _run("parameter_server", "ParameterServerStrategy"),
            StrategyRun(
                "asynchronous", "asynchronous ParameterServerStrategy", "  asynchronous", None
            ),
        ),
        ("--ps", "1"),
        on_hosts=False,
    ),
)


@dataclasses.dataclass(frozen=True)
class JobResult:
    """Result of a job.

    Attributes:
        code: Exit code.
        events: Events sent by its ranks.
        errors: Standard error, and standard output without the events.
        timed_out: Whether it was ended at its time limit.
    """

    code: int
    events: list[Event]
    errors: str
    timed_out: bool


def is_installed(job: StrategyJob) -> bool:
    """Returns whether the packages that the job needs are installed."""
    return job.strategy != "horovod" or importlib.util.find_spec("horovod") is not None


def command(job: StrategyJob, workers: int, hosts: str, parsed_hosts: list[Host]) -> list[str]:
    """Returns the command that runs a job, which can also be run by hand.

    Args:
        job: Job to run.
        workers: Number of processes, or devices, on this machine.
        hosts: Value of `--hosts`, or "".
        parsed_hosts: Parsed value of `--hosts`.
    """
    program = ["-m", "tfdml.cli.selftest.program", job.strategy]
    if job.options is None:
        return [sys.executable, *program, "--devices", str(workers)]
    launch = [sys.executable, "-m", "tfdml.cli.main", "launch", *job.options]
    if hosts and job.on_hosts:
        most = max(host.ranks for host in parsed_hosts)
        return [*launch, "--hosts", hosts, "--", *program, "--ranks-here", str(most)]
    return [*launch, "--workers", str(workers), "--", *program, "--ranks-here", str(workers)]


def run(
    arguments: list[str], on_event: Callable[[Event], None], seconds: float = JOB_SECONDS
) -> JobResult:
    """Runs a job's command to its end; none of its processes outlives this one.

    Args:
        arguments: Command to run.
        on_event: Callable that receives each event as it arrives.
        seconds: Time limit in seconds.
    """
    events: list[Event] = []
    beside: list[str] = []
    timed_out = threading.Event()
    reader = Reader()
    with tempfile.TemporaryFile() as errors:
        # The supervisor ends the job and all its processes when its standard input closes, either
        # by this process or because this process is gone.
        process = subprocess.Popen(
            [sys.executable, "-m", "tfdml.runtime.launch.supervisor", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=child_environment(),
            start_new_session=True,
        )

        def end() -> None:
            timed_out.set()
            process.stdin.close()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            for raw in process.stdout:
                found, rest = reader.read(raw.decode(errors="replace"))
                events += found
                beside.append(rest)
                for event in found:
                    on_event(event)
        finally:
            timer.cancel()
            process.stdin.close()
            try:
                code = process.wait(2 * TERM_SECONDS + 5)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            process.stdout.close()
        errors.seek(0)
        written = errors.read().decode(errors="replace")
    return JobResult(code, events, without_events(written) + "".join(beside), timed_out.is_set())
