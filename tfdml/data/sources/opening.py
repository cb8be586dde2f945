"""Selection of the source for an input, by its name."""

import os

from tfdml.data.format import manifest as manifests
from tfdml.data.format import storage
from tfdml.data.format.image_options import ImageOptions
from tfdml.data.format.schema import Schema
from tfdml.data.sources.source import Source

KINDS = (
    *("images", "csv", "jsonl", "parquet", "numpy", "hdf5", "idx", "tfrecord"),
    *("tfds", "huggingface"),
)
_ENDINGS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".npy": "numpy",
    ".npz": "numpy",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
    ".tfrecord.gz": "tfrecord",
}


def open_source(
    inputs: list[str],
    *,
    kind: str | None = None,
    schema: Schema | None = None,
    images: ImageOptions | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    split: str | None = None,
    delimiter: str | None = None,
) -> Source:
    """Opens an input.

    Args:
        inputs: Paths of files of one kind, or of one directory. NumPy and IDX files may be given as
            `NAME=PATH`, which names their feature.
        kind: One of `KINDS`; derived from the names by default.
        schema: Schema of the records; inferred from the input by default.
        images: Processing of images.
        image_column: Column with paths of images, of a table.
        label_column: Column with names of classes, of such a table.
        split: Split to read, of TensorFlow Datasets, Hugging Face and tfdml's own data sets.
        delimiter: Delimiter of CSV; by default a comma, or a tab for `.tsv`.

    Raises:
        MissingPackageError: If the input needs a package that is not installed.
        ValueError: If the input does not exist, is of no known kind, or is damaged.
    """
    paths = [value.split("=", 1)[1] if _is_named(value) else value for value in inputs]
    for path in paths:
        if not storage.exists(path):
            raise ValueError(f"`input` must exist. Received: {path!r}.")
    kind = kind or _kind(paths)
    if kind not in KINDS:
        raise ValueError(f"`kind` must be one of {KINDS}. Received: kind={kind!r}.")
    if kind in ("csv", "jsonl"):
        return _table(
            paths, kind, schema, images, image_column, label_column, delimiter or _tab(paths)
        )
    if kind == "images":
        from tfdml.data.sources.images import ImageFolderSource

        return ImageFolderSource(_single_path(paths, kind), images)
    if kind == "parquet":
        from tfdml.data.sources.parquet import ParquetSource

        return ParquetSource(paths, schema)
    if kind in ("numpy", "hdf5", "idx"):
        return _arrays(inputs, paths, schema)
    if kind == "tfrecord":
        return _tfrecords(paths, schema, split)
    from tfdml.data.sources import hub

    if kind == "tfds":
        return hub.TfdsSource(_single_path(paths, kind), split or "train")
    return hub.HuggingFaceSource(_single_path(paths, kind), split)


def _is_named(value: str) -> bool:
    return "=" in value and value.split("=", 1)[0].isidentifier()


def _single_path(paths: list[str], kind: str) -> str:
    if len(paths) != 1:
        raise ValueError(f"`input` of kind {kind} must be one directory. Received: {paths}.")
    return paths[0]


def _tab(paths: list[str]) -> str:
    return "\t" if paths[0].endswith(".tsv") else ","


def _kind(paths: list[str]) -> str:
    """Returns the kind that the names indicate.

    Raises:
        ValueError: If they indicate none, or several.
    """
    kinds = {_kind_of(path) for path in paths}
    if len(kinds) != 1:
        raise ValueError(f"All inputs must be of one kind. Received: {sorted(map(str, kinds))}.")
    kind = kinds.pop()
    if kind is None:
        raise ValueError(
            f"`input` must have a name that shows its kind. Received: {paths[0]!r}. Give `kind`, "
            f"one of {KINDS}."
        )
    return kind


def _kind_of(path: str) -> str | None:
    for ending, kind in _ENDINGS.items():
        if path.endswith(ending):
            return kind
    names = set(storage.names_in(path))
    if "dataset_info.json" in names and "features.json" in names:
        return "tfrecord" if any(n.endswith(manifests.SUFFIX) for n in names) else "tfds"
    if "dataset_dict.json" in names or "state.json" in names:
        return "huggingface"
    if any(name.endswith(manifests.SUFFIX) for name in names):
        return "tfrecord"
    if names:
        return "images"
    if os.path.isdir(path):
        return "images"
    head = storage.read_range(path, 0, 3)
    if head[:2] == b"\x1f\x8b" or (head[:2] == b"\0\0" and len(head) > 2):
        return "idx"
    return None


def _table(
    paths: list[str],
    kind: str,
    schema: Schema | None,
    images: ImageOptions | None,
    image_column: str | None,
    label_column: str | None,
    delimiter: str,
) -> Source:
    from tfdml.data.sources.csv import CsvSource
    from tfdml.data.sources.jsonl import JsonlSource

    if kind == "csv":
        table: Source = CsvSource(paths, schema, delimiter)
    else:
        table = JsonlSource(paths, schema)
    if image_column is None:
        return table
    from tfdml.data.sources.images import ImageTableSource

    return ImageTableSource(table, image_column, label_column, images)


def _arrays(inputs: list[str], paths: list[str], schema: Schema | None) -> Source:
    from tfdml.data.sources.arrays import ArraySource, arrays_in

    arrays: dict[str, tuple[str, str]] = {}
    for value, path in zip(inputs, paths, strict=True):
        found = arrays_in(path)
        if _is_named(value):
            found = {value.split("=", 1)[0]: location for location in found.values()}
        twice = sorted(arrays.keys() & found.keys())
        if twice:
            raise ValueError(
                f"Each array must have a unique name. Received: {twice} twice. Name them: "
                f"NAME=PATH."
            )
        arrays |= found
    return ArraySource(arrays, schema)


def _tfrecords(paths: list[str], schema: Schema | None, split: str | None) -> Source:
    from tfdml.data.sources.tfrecords import TfrecordSource

    if len(paths) == 1 and (paths[0].endswith(manifests.SUFFIX) or storage.names_in(paths[0])):
        manifest = manifests.load(paths[0])
        shards = [manifest.path_of(shard) for shard in manifest.shards(split)]
        return TfrecordSource(shards, schema or manifest.schema)
    return TfrecordSource(paths, schema)
