"""The `tfdml` command: puts the subcommands together."""

from typing import Annotated

import typer

import tfdml
from tfdml import topology
from tfdml.cli import (
    bench,
    build_codecs,
    build_horovod,
    chaos,
    checkpoints,
    doctor,
    launch,
    records,
    serve,
    test,
)
from tfdml.runtime.startup_noise import filter_import_of_tensorflow

app = typer.Typer(
    name="tfdml",
    help=(
        "Multi-GPU and multi-node training for Keras 3 on TensorFlow.\n\n"
        "On a new machine: `tfdml build-horovod` once, then `tfdml doctor`, then start your "
        "training script on two processes by `tfdml launch --horovod --workers 2 train.py`."
    ),
    rich_markup_mode="markdown",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("bench")(bench.bench)
app.command("build-codecs")(build_codecs.build_codecs)
app.command("build-horovod")(build_horovod.build_horovod)
app.command("chaos", context_settings=chaos.SETTINGS)(chaos.chaos)
app.command("doctor")(doctor.doctor)
app.command("launch", context_settings=launch.SETTINGS)(launch.launch)
app.command("serve")(serve.serve)
app.command("test")(test.self_test)
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(records.app, name="records")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"tfdml {tfdml.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Holds the options of `tfdml` itself."""


def main() -> None:
    """Runs the command line of this process."""
    filter_import_of_tensorflow()
    topology.set_default("TF_CPP_MIN_LOG_LEVEL", "2")
    app()


if __name__ == "__main__":
    main()
