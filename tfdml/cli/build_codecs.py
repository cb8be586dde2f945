"""`tfdml build-codecs`: compiles the operations of compressed training."""

from typing import Annotated

import typer
from rich.console import Console


def build_codecs(
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Compile again even if they are compiled already.")
    ] = False,
) -> None:
    """Compile the codecs of compressed training for the installed TensorFlow.

    For example:

    `tfdml build-codecs`

    `tfdml build-codecs --rebuild`

    On CPUs, all codecs except `RandomK` and `PowerSGD` in turns then take less time, down to a
    tenth, and send the same bits; only `PowerSGD`'s matrices are summed in a different order.
    Without compiled codecs, or with GPUs, XLA compiles TensorFlow's own operations.

    Needs a C++ compiler and takes half a minute; `tfdml build-horovod` does it too. The compiled
    codecs are for CPUs with AVX2 and FMA, or 64-bit ARM (**untested**), and are stored within the
    installed package.
    """
    from tfdml.horovod_build import BuildError

    console = Console(highlight=False, soft_wrap=True)
    try:
        compile_codecs(console, rebuild)
    except BuildError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def compile_codecs(console: Console, rebuild: bool = False) -> None:
    """Compiles the codecs and prints their path.

    Raises:
        BuildError: If they cannot be compiled.
    """
    from tfdml.native.build import build

    with console.status("Compiling the codecs…"):
        file, new = build(rebuild)
    console.print(f"Codecs, {'compiled' if new else 'compiled before'}: {file}", markup=False)
