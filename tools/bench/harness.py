"""Harness of the benchmarks: starts jobs, reads their results and describes the machine.

A job runs a module of this package (`python -m`) on several processes: as ranks of Horovod, on the
hosts of a network lab, as workers of a TensorFlow cluster, or as the chief of one with parameter
servers. One of its processes calls `report`, and the function that has started the job returns what
was reported.

Neither TensorFlow nor typer is imported here: ranks that run PyTorch have an environment without
them.
"""

import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Directory of the tables and their numbers.
BENCHMARKS = ROOT / "tools" / "benchmarks"
_MARK = "RESULT "


def start(doc: str | None, *commands: Callable) -> None:
    """Runs a benchmark's command line.

    Args:
        doc: The module's docstring, which `--help` shows: a sentence and examples.
        *commands: A function, or several, which become commands of their names.
    """
    import typer

    # Each indented example becomes a paragraph: lines of one paragraph would be joined.
    page = re.sub(r"\n(?=    \S)", "\n\n", doc or "")
    app = typer.Typer(help=page, rich_markup_mode="markdown", add_completion=False)
    for command in commands:
        app.command(help=page if len(commands) == 1 else None)(command)
    app()


def check_choice(option: str, received: str | Sequence[str], allowed: Collection[str]) -> None:
    """Checks an option of a benchmark that takes names.

    Args:
        option: The option, such as "--only".
        received: The name that was given, or all names.
        allowed: The names that there are.

    Raises:
        typer.BadParameter: If a name is not one of them.
    """
    import typer

    names = [received] if isinstance(received, str) else received
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise typer.BadParameter(
            f"`{option}` must be one of {', '.join(map(repr, allowed))}. Received: "
            f"{', '.join(map(repr, unknown))}."
        )


def threads_each(processes: int) -> int:
    """Returns the number of threads per process if the processes share the cores evenly."""
    return max(1, (os.cpu_count() or 1) // processes)


def environment(threads: int, **variables: str) -> dict[str, str]:
    """Returns the environment of a job's processes.

    They find this package and the recipes' modules from any working directory.

    Args:
        threads: Number of threads of TensorFlow and OpenMP in each process.
        **variables: Further environment variables.
    """
    paths = [str(ROOT), str(ROOT / "recipes"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        **variables,
    }


def module_command(module: str, *arguments: str, python: Path | str = sys.executable) -> list[str]:
    """Returns the command that runs a module."""
    return [str(python), "-m", module, *arguments]


def horovodrun(*options: str) -> list[str]:
    """Returns the beginning of the command of a Horovod job."""
    return [sys.executable, str(Path(sys.executable).with_name("horovodrun")), *options]


def run_job(module: str, *arguments: str, processes: int = 2, timeout: float = 900.0) -> Any:
    """Runs a module on some ranks of Horovod, which share the cores evenly.

    Args:
        module: The module's name.
        *arguments: The module's arguments.
        processes: The number of ranks; one is started without `horovodrun`.
        timeout: Seconds until the job is ended.

    Returns:
        What a rank has passed to `report`.

    Raises:
        RuntimeError: If no rank reports a result; with the end of their output.
    """
    command = module_command(module, *arguments)
    if processes > 1:
        command = [*horovodrun("-np", str(processes)), *command]
    return result_of(command, environment(threads_each(processes)), timeout)


def run_on_hosts(
    module: str,
    *arguments: str,
    hosts: int,
    rate: str,
    job: str = "none",
    python: Path | str = sys.executable,
    threads: int | None = None,
    timeout: float | None = None,
    progress: bool = False,
    ranks: int = 1,
    network: Sequence[str] = (),
    **variables: str,
) -> Any:
    """Runs a module on all hosts of a network lab; needs root.

    Args:
        module: The module's name.
        *arguments: The module's arguments.
        hosts: The number of hosts.
        rate: Limit of a host's outgoing traffic, such as "100mbit"; unlimited if empty.
        job: Kind of job that the hosts form: see `tools/netlab --help`.
        python: Python that runs the module.
        threads: Number of threads per process; by default they share the cores evenly.
        timeout: Seconds until the job is ended.
        progress: Whether to show the processes' stderr while they run.
        ranks: The number of ranks on each host.
        network: Further options of `tools/netlab`, such as `["--latency", "5ms"]`. What the lab
            tells of its relay is shown if there is `progress`.
        **variables: Further variables of their environment.

    Returns:
        What a process has passed to `report`.

    Raises:
        RuntimeError: If no process reports a result.
    """
    lab = [str(ROOT / "tools" / "netlab"), "--hosts", str(hosts), "--job", job]
    lab += ["--rate", rate] if rate else []
    lab += ["--ranks", str(ranks), *network]
    command = [*lab, "--", *module_command(module, *arguments, python=python)]
    own = environment(threads or threads_each(hosts * ranks), **variables)
    return result_of(command, own, timeout, progress)


def run_with_servers(
    module: str, *arguments: str, workers: int, timeout: float, **variables: str
) -> Any:
    """Runs a module as the chief of a cluster with workers and one parameter server.

    Args:
        module: The module's name.
        *arguments: The module's arguments.
        workers: The number of workers; each task uses one thread.
        timeout: Seconds until the job is ended.
        **variables: More variables of the tasks' environment.

    Returns:
        What the chief has passed to `report`.

    Raises:
        RuntimeError: If it reports nothing.
    """
    launch = module_command("tfdml.cli.main", "launch", "--workers", str(workers), "--ps", "1")
    command = [*launch, "--", "-m", module, *arguments]
    return result_of(command, environment(1, **variables), timeout)


def run_workers(
    module: str, *arguments: str, workers: int = 2, timeout: float, **variables: str
) -> Any:
    """Runs a module as the workers of a TensorFlow cluster, by `TF_CONFIG` alone.

    Args:
        module: The module's name.
        *arguments: The module's arguments.
        workers: The number of workers, which share the cores evenly.
        timeout: Seconds until the job is ended.
        **variables: More variables of their environment.

    Returns:
        What worker 0 has passed to `report`.

    Raises:
        RuntimeError: If it reports nothing.
    """
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for open_socket in sockets:
        open_socket.close()
    command = module_command(module, *arguments)
    configs = [
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        for index in range(workers)
    ]
    own = [
        environment(threads_each(workers), TF_CONFIG=json.dumps(config), **variables)
        for config in configs
    ]
    others = [
        subprocess.Popen(command, env=each, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for each in own[1:]
    ]
    try:
        return result_of(command, own[0], timeout)
    finally:
        for worker in others:
            worker.kill()
            worker.wait()


def result_of(
    command: Sequence[str],
    environment: dict[str, str],
    timeout: float | None,
    progress: bool = False,
) -> Any:
    """Runs a command; returns the value that one of its processes has passed to `report`.

    Args:
        command: Command to run.
        environment: Environment variables of the command.
        timeout: Seconds until it is ended.
        progress: Whether to show its stderr while it runs.

    Raises:
        RuntimeError: If nothing is reported; with the end of the output.
    """
    done = _run(command, environment, timeout, progress)
    if _MARK not in done.stdout:
        raise RuntimeError(f"A job must report a result. {_received(done)}")
    return json.loads(done.stdout.split(_MARK, 1)[1].splitlines()[0])


def finish(command: Sequence[str], environment: dict[str, str], timeout: float) -> None:
    """Runs a command that leaves its result in files.

    Args:
        command: Command to run.
        environment: Environment variables of the command.
        timeout: Seconds until it is ended.

    Raises:
        RuntimeError: If it fails; with the end of the output.
    """
    done = _run(command, environment, timeout)
    if done.returncode:
        raise RuntimeError(f"A job must end without an error. {_received(done)}")


def _run(
    command: Sequence[str],
    environment: dict[str, str],
    timeout: float | None,
    progress: bool = False,
) -> subprocess.CompletedProcess:
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=None if progress else subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:
        _end(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _end(process: subprocess.Popen) -> None:
    """Ends a job and all its descendants: ranks would outlive a killed launcher."""
    import psutil

    family = psutil.Process(process.pid).children(recursive=True)
    for member in [process, *family]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.communicate()
    psutil.wait_procs(family, timeout=10)


def _received(done: subprocess.CompletedProcess) -> str:
    output = done.stdout[-2000:] + (done.stderr or "")[-4000:]
    command = " ".join(done.args)
    return f"Received: exit code {done.returncode} of `{command}`, which printed:\n{output}"


def report(result: Any) -> None:
    """Reports a job's result; called by one of its processes."""
    print(_MARK + json.dumps(result), flush=True)


def conditions(
    packages: Sequence[str] = ("tensorflow-cpu", "keras", "horovod"), load: bool = False
) -> str:
    """Returns the versions, the machine and the date as text.

    Args:
        packages: The packages whose versions are named, where they are installed.
        load: Whether the machine's load is named instead of its kind of processors.
    """
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    kind = f"load {os.getloadavg()[0]:.1f}" if load else platform.machine()
    return (
        f"{', '.join(versions)}, Python {platform.python_version()}; {os.cpu_count()} cores, "
        f"{kind}, {platform.system()}; {date.today()}"
    )
