"""`tfdml records convert`: converts data to sharded TFRecords, and says what was left out."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tfdml.cli.row_progress import row_progress
from tfdml.cli.sizes import image_size

if TYPE_CHECKING:
    from tfdml.data.format.manifest import DatasetManifest

# Number of reasons for rejected rows that are printed.
_REASONS = 5


def convert(
    inputs: Annotated[
        list[str],
        typer.Argument(help="Files of one kind, or one directory, or arrays as NAME=PATH."),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", help="Directory to write to, which must be empty.")
    ],
    name: Annotated[str, typer.Option(help="Name of the data set.")] = "data",
    kind: Annotated[
        str | None,
        typer.Option(
            help="Kind of the input: images, csv, jsonl, parquet, numpy, hdf5, idx, tfrecord, tfds "
            "or huggingface.",
            show_default="from the file names",
        ),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            help='JSON file with the features, such as {"label": "int64"}.',
            show_default="inferred from the input",
        ),
    ] = None,
    image_column: Annotated[
        str | None, typer.Option(help="Column of a table with paths of images.")
    ] = None,
    label_column: Annotated[
        str | None, typer.Option(help="Column of that table with the class names.")
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(help="Delimiter of CSV.", show_default="detected")
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Column to leave out; may be given several times."),
    ] = None,
    on_missing: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[COLUMN=]RULE",
            help="Rule for rows without a value in a column, such as `age=nan`, or in any: store "
            "`nan` or `default=VALUE`, or `skip` the row; may be given several times.",
        ),
    ] = None,
    input_split: Annotated[
        str | None, typer.Option(help="Split to read, of an input that has splits.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="Splits to write and their parts, such as train=0.9,test=0.1.")
    ] = "train",
    split_key: Annotated[
        str | None, typer.Option(help="Feature by whose value records are assigned to splits.")
    ] = None,
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", help="Shuffle all records with this seed.")
    ] = None,
    shards: Annotated[
        int | None, typer.Option(min=1, help="Number of shards, over all splits.")
    ] = None,
    shard_mb: Annotated[int, typer.Option(min=1, help="Approximate size of a shard in MB.")] = 150,
    gzip: Annotated[bool, typer.Option("--gzip", help="Compress the shards with gzip.")] = False,
    resize: Annotated[
        str | None, typer.Option(metavar="HEIGHTxWIDTH", help="Resize images to this size.")
    ] = None,
    image_format: Annotated[
        str | None,
        typer.Option(help="Encode images again as jpeg or png instead of keeping their bytes."),
    ] = None,
    quality: Annotated[int, typer.Option(min=1, max=100, help="Quality of JPEG.")] = 95,
    fix_images: Annotated[
        bool,
        typer.Option(
            "--fix-images",
            help="Convert images that TensorFlow would read wrongly to upright 8-bit RGB.",
        ),
    ] = False,
    on_error: Annotated[
        str,
        typer.Option(help="Stop at a bad row (strict), or write it to a file of rejects (skip)."),
    ] = "strict",
    max_errors: Annotated[
        int | None, typer.Option(min=0, help="Number of rows that may be skipped.")
    ] = None,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Accept NaN and infinity.")
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            "-p",
            min=1,
            help="Number of processes.",
            show_default="one per core, one for a small input",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a conversion that was interrupted.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove a data set of the same name first.")
    ] = False,
) -> None:
    """Convert files to sharded TFRecords, with a manifest and an index.

    For example:

    `tfdml records convert photos -o data/photos --split train=0.9,test=0.1 --shuffle 1`

    `tfdml records convert image=images.gz label=labels.gz --kind idx -o data/digits`

    `tfdml records convert people.csv -o data/people --on-missing age=nan --drop name`

    The bytes written are the same for any number of processes. `--resume` continues an interrupted
    conversion. TensorFlow Datasets opens the result with `tfds.builder_from_directory`.

    The exit code is 0 if all is well, 1 after an error, and 3 if the data set was written but more
    than a tenth of the rows were rejected, unless `--max-errors` allows it.
    """
    from tfdml.data.format.image_options import ImageOptions
    from tfdml.data.format.schema import Schema
    from tfdml.data.sources.opening import open_source
    from tfdml.data.sources.selected_columns import ColumnOptions
    from tfdml.data.write.convert import convert as run
    from tfdml.data.write.plan import ConversionOptions

    try:
        images = ImageOptions(image_size(resize, "resize"), image_format, quality, fix_images)
        options = ConversionOptions(
            name,
            shards,
            shard_mb << 20,
            gzip,
            _splits(split),
            split_key,
            shuffle,
            on_error,
            max_errors,
            allow_nonfinite,
        )
        source = open_source(
            inputs,
            kind=kind,
            schema=Schema.from_json(_json(schema)) if schema else None,
            images=images,
            image_column=image_column,
            label_column=label_column,
            split=input_split,
            delimiter=delimiter,
            columns=ColumnOptions.parse(drop or [], on_missing or []),
            skip_strays=on_error == "skip",
        )
        for notice in source.notices:
            typer.echo(f"NOTE: {notice}", err=True)
        with row_progress() as bar:
            task = bar.add_task("Converting", total=None)
            manifest = run(
                source,
                output,
                options,
                processes=processes,
                resume=resume,
                overwrite=overwrite,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except KeyboardInterrupt:
        typer.echo("tfdml records convert: interrupted. Continue with --resume.", err=True)
        raise typer.Exit(130) from None
    except (ValueError, OSError) as error:
        typer.echo(f"tfdml records convert: {error}", err=True)
        raise typer.Exit(1) from error
    if not _report(manifest) and max_errors is None:
        raise typer.Exit(3)


def _json(path: Path) -> Any:
    """Reads the file of `--schema`."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f'`schema` must be JSON, such as {{"label": "int64"}}. Received: {path}: {error}.'
        ) from error


def _report(manifest: "DatasetManifest") -> bool:
    """Prints what was written and what was left out; returns whether few rows were rejected."""
    from tfdml.data.write import rejects

    counts = manifest.counts
    skipped = f" + {counts['skipped']} skipped" if counts["skipped"] else ""
    shards = sum(map(len, manifest.splits.values()))
    typer.echo(
        f"{counts['in']} in = {counts['written']} written + {counts['rejected']} rejected"
        f"{skipped}, in {shards} shard{'s' * (shards > 1)}: {manifest.path}"
    )
    rows = rejects.load(manifest) if counts["in"] > counts["written"] else []
    few = counts["rejected"] <= rejects.MANY_REJECTED * counts["in"]
    if not few:
        typer.echo(
            f"WARNING: {counts['rejected'] / counts['in']:.0%} of the rows were rejected.", err=True
        )
    if rows:
        reasons = rejects.reasons(rows)
        for reason, number in reasons[:_REASONS]:
            typer.echo(f"  {number} x {reason}", err=True)
        if len(reasons) > _REASONS:
            typer.echo(f"  and {len(reasons) - _REASONS} more reasons", err=True)
        typer.echo(f"Each of these rows, with its reason: {rejects.path_of(manifest)}", err=True)
    return few


def _splits(text: str) -> tuple[tuple[str, float], ...]:
    if "=" not in text and "," not in text:
        return ((text, 1.0),)
    try:
        return tuple((n, float(r)) for n, r in (part.split("=") for part in text.split(",")))
    except ValueError as error:
        raise ValueError(
            f"`split` must be a name, or names with their parts, such as train=0.9,test=0.1. "
            f"Received: {text!r}."
        ) from error
