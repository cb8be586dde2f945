"""`tfdml build-horovod`: builds and installs a Horovod wheel for the installed TensorFlow."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tfdml.cli.build_codecs import compile_codecs

_LIBRARIES = "Build options of Horovod"


def build_horovod(
    gloo: Annotated[
        bool,
        typer.Option(
            "--gloo/--no-gloo",
            help="Build with Gloo, which works over TCP everywhere.",
            rich_help_panel=_LIBRARIES,
        ),
    ] = True,
    mpi: Annotated[
        bool,
        typer.Option(
            "--mpi/--no-mpi",
            help="Build with MPI, whose compiler wrapper mpicxx must be on PATH. **Untested.**",
            rich_help_panel=_LIBRARIES,
        ),
    ] = False,
    nccl: Annotated[
        bool,
        typer.Option(
            "--nccl/--no-nccl",
            help="Build with NCCL for GPUs, with the nvcc and the NCCL of HOROVOD_CUDA_HOME and "
            "HOROVOD_NCCL_HOME, or of installed wheels; not run on several GPUs.",
            rich_help_panel=_LIBRARIES,
        ),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            help="Run this many compilers at a time, each with up to 1.5 GB of memory.",
            show_default="one per core, as memory allows",
        ),
    ] = None,
    wheel_dir: Annotated[
        Path | None,
        typer.Option(
            help="Keep wheels in this directory and look for them there.",
            show_default="the user's cache directory",
        ),
    ] = None,
    only_wheel: Annotated[
        bool, typer.Option("--only-wheel", help="Build the wheel but do not install it.")
    ] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Build again even if the wheel is in the cache.")
    ] = False,
) -> None:
    """Build Horovod against the installed TensorFlow, once, and install it.

    For example:

    `tfdml build-horovod`

    `tfdml build-horovod --only-wheel --wheel-dir wheels`

    `tfdml build-horovod --nccl`

    Only `HorovodStrategy` needs it.

    Horovod 0.28.1 does not compile against a current TensorFlow: one of its source files needs
    headers that TensorFlow no longer ships. This command takes the source distribution from the
    package registry that pip is configured for, leaves that file out (it only serves XLA-compiled
    functions), builds a wheel, keeps it and installs it. Two cores take about three minutes; the
    next time the wheel comes from the cache at once.

    The wheel fits one combination of TensorFlow, Python, machine and flags. **Other nodes** of
    the same kind need no compiler: copy the wheel and run `pip install --no-deps` on it, or put
    `--wheel-dir` on a shared disk and run this command there. Horovod is compiled for CPUs with
    AVX, FMA and F16C.

    It also compiles tfdml's own codecs, as `tfdml build-codecs` does.

    Needed: a C++ compiler, make, `pip install "tfdml[horovod]"` (which brings a suitable CMake),
    and 2 GB of disk while it builds.
    """
    from tfdml.horovod_build import BuildError, BuildOptions, build, install, plan

    console = Console(highlight=False, soft_wrap=True)
    try:
        planned = plan(BuildOptions(gloo=gloo, mpi=mpi, nccl=nccl), wheel_dir)
        console.print(
            f"Horovod {planned.facts['horovod']} ({planned.options.label}) for "
            f"{planned.facts['tensorflow']}, {planned.facts['python']}",
            markup=False,
        )
        with console.status("Working…"):
            built = build(
                planned,
                jobs=jobs or default_jobs(),
                rebuild=rebuild,
                report=lambda line: console.print(f"  {line}", markup=False),
            )
        origin = "from the cache" if built.from_cache else f"built in {built.seconds:.0f} s"
        console.print(f"Wheel, {origin}: {built.wheel}", markup=False)
        if only_wheel:
            return
        with console.status("Installing…"):
            loaded = install(built.wheel)
    except BuildError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if loaded is None:
        console.print("Installed already.")
    else:
        console.print(f"Installed, and it loads ({', '.join(loaded.transports)}).", markup=False)
    try:
        compile_codecs(console)
    except BuildError as error:
        # Training works without them.
        console.print(f"The codecs are not compiled: {error}", markup=False)
    console.print("Next: `tfdml doctor` runs a two-process all-reduce.", markup=False)


def default_jobs() -> int:
    """Returns one job per core, at most one per 1.5 GiB of free memory."""
    import psutil

    by_memory = psutil.virtual_memory().available // (1536 * 1024**2)
    return max(1, min(psutil.cpu_count() or 1, by_memory))
