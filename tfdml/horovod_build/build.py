"""Build of a Horovod wheel: cache lookup, checks, source, compilation, and storing the wheel."""

import dataclasses
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from tfdml import topology
from tfdml.horovod_build import child, cuda, requirements, source_archive
from tfdml.horovod_build.cache import WheelCache, cache_directory, wheel_facts
from tfdml.horovod_build.errors import BuildError
from tfdml.horovod_build.options import BuildOptions

# Two cores take under three minutes; CUDA on a slow machine takes much longer.
_BUILD_SECONDS = 2 * 3600
_PERCENT = re.compile(rb"\[ *(\d+)%\]")

Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """Plan of a build.

    Attributes:
        facts: Everything that changes the wheel.
        options: Transports to build with.
        wheels: Cache of wheels.
        work: Directory of sources, logs and build trees.
        gpu: CUDA and NCCL, for a build with NCCL.
    """

    facts: dict[str, object]
    options: BuildOptions
    wheels: WheelCache
    work: Path
    gpu: cuda.Libraries | None = None

    @property
    def log(self) -> Path:
        """Path of the log of the newest build of this wheel."""
        return self.work / "logs" / f"{self.wheels.entry(self.facts).name}.log"


@dataclasses.dataclass(frozen=True)
class Built:
    """A wheel that is ready to install.

    Attributes:
        wheel: Path of the wheel.
        from_cache: Whether it was built before.
        seconds: Seconds that finding or building it took.
        log: Log of its build; None if it came from the cache.
    """

    wheel: Path
    from_cache: bool
    seconds: float
    log: Path | None


def plan(options: BuildOptions, wheel_dir: Path | None = None) -> BuildPlan:
    """Determines which wheel fits this environment.

    Args:
        options: Transports to build with.
        wheel_dir: Directory of wheels; the user's cache directory by default.

    Returns:
        Plan of the build.

    Raises:
        BuildError: If TensorFlow is not installed, or CUDA or NCCL for a build with NCCL.
    """
    work = cache_directory()
    wheels = WheelCache((wheel_dir or work / "wheels").expanduser().absolute())
    environment = topology.child_environment()
    tensorflow = requirements.installed_tensorflow()
    facts = wheel_facts(source_archive.VERSION, tensorflow, options, environment)
    gpu = cuda.find(environment) if options.nccl else None
    return BuildPlan({**facts, **(gpu.facts() if gpu else {})}, options, wheels, work, gpu)


def build(planned: BuildPlan, *, jobs: int, report: Report, rebuild: bool = False) -> Built:
    """Returns the planned wheel, from the cache or built now.

    Concurrent builds of the same wheel are serialized: the second waits and takes the first's.

    Args:
        planned: Result of `plan`.
        jobs: Maximum number of concurrent compilers.
        report: Callable that receives a line for every step.
        rebuild: Whether to build even if the cache has the wheel.

    Returns:
        The wheel and its origin.

    Raises:
        BuildError: If something is missing, or the build fails.
    """
    began = time.monotonic()
    wheels = planned.wheels
    if not rebuild and (wheel := wheels.find(planned.facts)):
        return Built(wheel, True, time.monotonic() - began, None)
    try:
        wheels.root.mkdir(parents=True, exist_ok=True)
        planned.log.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(
            "The directories of wheels and logs must be writable.",
            received=str(error),
            fix="Choose others with `--wheel-dir` and XDG_CACHE_HOME.",
        ) from error
    with _WheelLock(wheels.entry(planned.facts), report):
        if not rebuild and (wheel := wheels.find(planned.facts)):
            return Built(wheel, True, time.monotonic() - began, None)
        wheel = _build(planned, jobs, report)
    return Built(wheel, False, time.monotonic() - began, planned.log)


def _build(planned: BuildPlan, jobs: int, report: Report) -> Path:
    options, log = planned.options, planned.log
    environment = options.environment(topology.child_environment())
    environment.update(MAKEFLAGS=f"-j{jobs}", TF_CPP_MIN_LOG_LEVEL="3")
    compiler = requirements.find_compiler(environment)
    cmake = requirements.find_cmake(environment)
    requirements.require_python_packages()
    if options.mpi:
        requirements.require_mpi(environment)
    requirements.require_disk(planned.work)
    environment["HOROVOD_CMAKE"] = cmake
    log.write_text(f"{planned.facts}\ncompiler {compiler}, cmake {cmake}\n", encoding="utf-8")
    report(f"Log: {log}")

    archive = source_archive.fetch(planned.work / "sources", environment, log)
    report(f"Source: {archive.name}, verified")
    with tempfile.TemporaryDirectory(prefix="build-", dir=planned.work) as scratch:
        root = source_archive.unpack(archive, Path(scratch))
        if planned.gpu is not None:
            environment.update(planned.gpu.variables(Path(scratch), environment.get("PATH", "")))
        report(f"Compiling with {jobs} job{'s' if jobs > 1 else ''}; two cores take 2 to 3 minutes")
        wheel = compile_wheel(root, Path(scratch) / "wheel", environment, log, report)
        return planned.wheels.add(wheel, planned.facts)


def compile_wheel(
    root: Path, target: Path, environment: Mapping[str, str], log: Path, report: Report
) -> Path:
    """Builds the wheel of an unpacked source tree.

    Args:
        root: Root of the source tree.
        target: Directory to create for the wheel.
        environment: Environment variables of the build.
        log: File that the output is appended to.
        report: Callable that receives lines of progress.

    Returns:
        Path of the wheel.

    Raises:
        BuildError: If the build fails; it quotes the compiler's errors and names the log.
    """
    target.mkdir()
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps"]
    command += ["--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(target), str(root)]
    ended = child.run(
        command,
        environment=environment,
        timeout=_BUILD_SECONDS,
        cwd=root.parent,
        log=log,
        on_tick=_progress(report),
    )
    wheels = list(target.glob("horovod-*.whl"))
    if not ended.ok or len(wheels) != 1:
        limit = f"stopped after {_BUILD_SECONDS} s" if ended.timed_out else "failed"
        raise BuildError(
            f"Horovod's build must end with a wheel, but it {limit}.",
            received=f"exit code {ended.returncode}, and these last lines:\n"
            f"{source_archive.last_lines(_errors(ended.output), 12)}\n",
            fix="Fix what the log reports, and run the command again.",
            log=log,
        )
    return wheels[0]


def _errors(output: str) -> str:
    """Returns the compiler's error lines if any, otherwise the whole output."""
    errors = [
        line for line in output.splitlines() if re.search(r"error:|Error \d|CMake Error", line)
    ]
    return "\n".join(errors) or output


def _progress(report: Report) -> Callable[[Path], None]:
    """Returns a callback that reports make's percentage in steps of 20."""
    reported = 0

    def look(log: Path) -> None:
        nonlocal reported
        with log.open("rb") as opened:
            opened.seek(max(0, log.stat().st_size - 65536))
            found = _PERCENT.findall(opened.read())
        percent = int(found[-1]) // 20 * 20 if found else 0
        if percent > reported:
            reported = percent
            report(f"Compiled {percent} %")

    return look


class _WheelLock:
    """Context manager that holds the lock of one wheel; reports if it has to wait."""

    def __init__(self, entry: Path, report: Report) -> None:
        self._lock = FileLock(str(entry.with_name(f".{entry.name}.lock")))
        self._report = report

    def __enter__(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            self._report("Another build of this wheel is running: waiting for it")
            self._lock.acquire(timeout=_BUILD_SECONDS)

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
