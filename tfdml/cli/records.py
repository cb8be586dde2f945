"""`tfdml records`: inspects and verifies TFRecords; `records_convert` has the conversion."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfdml.cli.records_convert import convert
from tfdml.cli.row_progress import row_progress

app = typer.Typer(
    no_args_is_help=True,
    help=(
        "Convert data to sharded TFRecords, inspect them, and verify them.\n\n"
        "For example:\n\n"
        "`tfdml records convert photos -o data/photos`\n\n"
        "`tfdml records verify data/photos`"
    ),
)


app.command()(convert)


@app.command()
def verify(
    path: Annotated[str, typer.Argument(help="The data set's directory, or its manifest.")],
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Rewrite damaged shards without their bad records."),
    ] = False,
    ledger: Annotated[
        Path | None,
        typer.Option(
            help="Check with the ledger of `read_tfrecords(ledger=...)` that each epoch was exact."
        ),
    ] = None,
) -> None:
    """Check every digest, every record's checksum, and all counts against the manifest.

    For example:

    `tfdml records verify data/photos`

    `tfdml records verify data/photos --repair`

    The exit code is 0 if nothing is damaged, and otherwise 1, even after a repair.
    """
    from tfdml.data.check.verification import verify as check

    try:
        with row_progress() as bar:
            task = bar.add_task("Verifying", total=None)
            report = check(path, repair, lambda shard: bar.update(task, advance=shard.records))
        for problem in report.problems:
            typer.echo(str(problem))
        typer.echo(f"{report.records} records are sound.")
        if repair and report.problems:
            typer.echo(f"Repaired: {report.dropped} records dropped.")
        sound = report.sound and (ledger is None or _prove(str(ledger)))
    except (ValueError, OSError) as error:
        typer.echo(f"tfdml records verify: {error}", err=True)
        raise typer.Exit(1) from error
    if not sound:
        raise typer.Exit(1)


def _prove(ledger: str) -> bool:
    from tfdml.data.read.ledger import Account

    account = Account(ledger)
    for epoch, samples in account.epochs.items():
        state = "incomplete" if epoch in account.unfinished else "whole"
        typer.echo(f"epoch {epoch}: {samples} samples used, {state}")
    for problem in account.problems:
        typer.echo(problem)
    if not account.problems:
        typer.echo("No sample was used twice or lost.")
    return not account.problems


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="The data set's directory, or its manifest.")],
    split: Annotated[
        str | None, typer.Option(help="Split to show.", show_default="the first one")
    ] = None,
    examples: Annotated[int, typer.Option(min=0, help="Number of records to show.")] = 3,
    label: Annotated[
        str | None, typer.Option(help="Feature whose classes are counted.", show_default="found")
    ] = None,
    sheet: Annotated[
        Path | None, typer.Option(help="Draw the first images into this PNG file.")
    ] = None,
) -> None:
    """Show the schema, counts, a few records, and the number of records of each class.

    For example:

    `tfdml records inspect data/photos --examples 1`

    `tfdml records inspect data/photos --split train --sheet photos.png`
    """
    from tfdml.data.check import inspection
    from tfdml.data.format import manifest as manifests

    try:
        manifest = manifests.load(path)
        split = split or sorted(manifest.splits)[0]
        console = Console(highlight=False)
        console.print(_shards(manifest))
        console.print(_features(manifest))
        for i, record in enumerate(inspection.examples(manifest, split, examples)):
            console.print(f"{split} {i}:", markup=False)
            for name, value in record.items():
                console.print(f"  {name}: {inspection.shown(value)}", markup=False, soft_wrap=True)
        if balance := inspection.balance(manifest, split, label):
            console.print(_balance(balance))
        if sheet is not None:
            count = inspection.contact_sheet(manifest, split, sheet)
            console.print(f"{count} images: {sheet}", markup=False)
    except (ValueError, OSError) as error:
        typer.echo(f"tfdml records inspect: {error}", err=True)
        raise typer.Exit(1) from error


def _shards(manifest) -> Table:
    table = Table("Split", "Records", "Shards", "MB", title=f"{manifest.name}")
    for split, shards in sorted(manifest.splits.items()):
        megabytes = sum(s.bytes for s in shards) / 1e6
        records = str(sum(s.records for s in shards))
        table.add_row(split, records, str(len(shards)), f"{megabytes:.1f}")
    return table


def _features(manifest) -> Table:
    table = Table("Feature", "Kind", "Shape", "Classes")
    for name, feature in sorted(manifest.schema.items()):
        kind = f"{feature.kind} {feature.dtype}".strip()
        table.add_row(escape(name), kind, str(list(feature.shape)), str(len(feature.classes) or ""))
    return table


def _balance(balance: dict[str, int]) -> Table:
    table, total = Table("Class", "Records", "%"), sum(balance.values())
    for name, count in balance.items():
        table.add_row(escape(name), str(count), f"{100 * count / total:.1f}")
    return table
