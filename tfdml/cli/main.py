"""Entry point of the `tfdml` command, which assembles the subcommands."""

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
    estimate_memory,
    hang_report,
    launch,
    records,
    serve,
    test,
    timeline,
    verify,
)
from tfdml.runtime.startup_noise import filter_import_of_tensorflow

app = typer.Typer(
    name="tfdml",
    help=(
        "Train Keras 3 models on several GPUs or machines with TensorFlow.\n\n"
        "Start a training script on two processes; this needs no compiler:\n\n"
        "`tfdml launch --workers 2 train.py`\n\n"
        "The same with Horovod, which is compiled once:\n\n"
        "`tfdml build-horovod`\n\n"
        "`tfdml launch --horovod --workers 2 train.py`"
    ),
    rich_markup_mode="markdown",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_TRAIN, _CHECK = "Train", "Check and measure"
_FILES, _COMPILE = "Data and checkpoints", "Compile (optional)"
app.command("launch", rich_help_panel=_TRAIN, context_settings=launch.SETTINGS)(launch.launch)
app.command("serve", rich_help_panel=_TRAIN)(serve.serve)
app.command("doctor", rich_help_panel=_CHECK)(doctor.doctor)
app.command("hang-report", rich_help_panel=_CHECK)(hang_report.hang_report)
app.command("test", rich_help_panel=_CHECK)(test.self_test)
app.command("bench", rich_help_panel=_CHECK)(bench.bench)
app.command("verify", rich_help_panel=_CHECK, context_settings=verify.SETTINGS)(verify.verify)
app.command("estimate-memory", rich_help_panel=_CHECK, context_settings=estimate_memory.SETTINGS)(
    estimate_memory.estimate_memory
)
app.command("timeline", rich_help_panel=_CHECK)(timeline.timeline)
app.command("chaos", rich_help_panel=_CHECK, context_settings=chaos.SETTINGS)(chaos.chaos)
app.add_typer(records.app, name="records", rich_help_panel=_FILES)
app.add_typer(checkpoints.app, name="checkpoints", rich_help_panel=_FILES)
app.command("build-horovod", rich_help_panel=_COMPILE)(build_horovod.build_horovod)
app.command("build-codecs", rich_help_panel=_COMPILE)(build_codecs.build_codecs)


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
