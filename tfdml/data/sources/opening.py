"""Selection of the source for an input, by its name."""

import os

from tfdml.data.format import manifest as manifests
from tfdml.data.format import storage
from tfdml.data.format.image_options import ImageOptions
from tfdml.data.format.schema import Schema
from tfdml.data.sources.selected_columns import ColumnOptions, SelectedColumns
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
    columns: ColumnOptions | None = None,
    skip_strays: bool = False,
) -> Source:
    """Opens an input.

    Args:
        inputs: Paths of files of one kind, or of one directory. NumPy and IDX files may be given as
            `NAME=PATH`, which names their feature. A directory with tables or arrays of one kind
            stands for its files.
        kind: One of `KINDS`; derived from the names by default.
        schema: Schema of the records; inferred from the input by default.
        images: Processing of images.
        image_column: Column with paths of images, of a table.
        label_column: Column with names of classes, of such a table.
        split: Split to read, of TensorFlow Datasets, Hugging Face and tfdml's own data sets.
        delimiter: Delimiter of CSV; detected in the first rows by default.
        columns: Columns to leave out, and rules for rows in which a column has no value.
        skip_strays: Whether to leave out files beside the class folders of images, and folders
            without images, instead of refusing them.

    Raises:
        MissingPackageError: If the input needs a package that is not installed.
        ValueError: If the input does not exist, is of no known kind, or is damaged.
    """
    paths = [value.split("=", 1)[1] if _is_named(value) else value for value in inputs]
    for path in paths:
        if not storage.exists(path):
            raise ValueError(f"`input` must exist. Received: {path!r}.")
    if len(paths) == 1 and inputs == paths:
        inputs = paths = _files_of_one_kind(paths[0]) or paths
    kind = kind or _kind(paths)
    if kind not in KINDS:
        raise ValueError(f"`kind` must be one of {KINDS}. Received: kind={kind!r}.")
    columns = columns or ColumnOptions()
    if kind == "images":
        from tfdml.data.sources.images import ImageFolderSource

        source: Source = ImageFolderSource(_single_path(paths, kind), images, skip_strays)
    elif kind == "csv":
        from tfdml.data.sources.csv import CsvSource

        source = CsvSource(paths, schema, delimiter, columns)
    elif kind == "jsonl":
        from tfdml.data.sources.jsonl import JsonlSource

        source = JsonlSource(paths, schema, columns)
    elif kind == "parquet":
        from tfdml.data.sources.parquet import ParquetSource

        source = ParquetSource(paths, schema, columns)
    elif kind in ("numpy", "hdf5", "idx"):
        source = _arrays(inputs, paths, schema, columns)
    elif kind == "tfrecord":
        source = _tfrecords(paths, schema, split)
    elif kind == "tfds":
        from tfdml.data.sources.hub import TfdsSource

        source = TfdsSource(_single_path(paths, kind), split or "train")
    else:
        from tfdml.data.sources.hub import HuggingFaceSource

        source = HuggingFaceSource(_single_path(paths, kind), split)
    source = SelectedColumns(source, columns)
    if image_column is None or kind not in ("csv", "jsonl"):
        return source
    from tfdml.data.sources.images import ImageTableSource

    return ImageTableSource(source, image_column, label_column, images)


def _is_named(value: str) -> bool:
    return "=" in value and value.split("=", 1)[0].isidentifier()


def _single_path(paths: list[str], kind: str) -> str:
    if len(paths) != 1:
        raise ValueError(f"`input` of kind {kind} must be one directory. Received: {paths}.")
    return paths[0]


def _files_of_one_kind(directory: str) -> list[str]:
    """Returns the tables or arrays in a directory; an empty list if it holds anything else.

    Raises:
        ValueError: If it holds IDX files, whose arrays need names.
    """
    names = [name for name in storage.names_in(directory) if not name.startswith(".")]
    paths = [storage.join(directory, name) for name in names]
    kinds = {_kind_by_ending(name) for name in names}
    if len(kinds) == 1 and None not in kinds:
        return paths
    if kinds == {None} and all(_is_idx(path) for path in paths):
        raise ValueError(
            f"IDX files must be given by the name of their feature. Received: the directory "
            f"{directory!r}. For example: {_named_idx(paths)}."
        )
    return []


def _kind_by_ending(name: str) -> str | None:
    return next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), None)


def _is_idx(path: str) -> bool:
    if storage.names_in(path) or os.path.isdir(path):
        return False
    head = storage.read_range(path, 0, 3)
    return head[:2] == b"\x1f\x8b" or (head[:2] == b"\0\0" and len(head) > 2)


def _named_idx(paths: list[str]) -> str:
    """Returns arguments that name the arrays of the last set of IDX files, such as MNIST's."""
    found = {}
    for path in paths:
        for word, feature in (("image", "image"), ("label", "label")):
            if word in path.rsplit("/", 1)[-1]:
                found[feature] = path
    return " ".join(f"{name}={path}" for name, path in (found or {"image": paths[0]}).items())


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
    if kind := _kind_by_ending(path):
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
    return "idx" if _is_idx(path) else None


def _arrays(
    inputs: list[str], paths: list[str], schema: Schema | None, options: ColumnOptions
) -> Source:
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
    return ArraySource(arrays, schema, options)


def _tfrecords(paths: list[str], schema: Schema | None, split: str | None) -> Source:
    from tfdml.data.sources.tfrecords import TfrecordSource

    if len(paths) == 1 and (paths[0].endswith(manifests.SUFFIX) or storage.names_in(paths[0])):
        manifest = manifests.load(paths[0])
        shards = [manifest.path_of(shard) for shard in manifest.shards(split)]
        return TfrecordSource(shards, schema or manifest.schema)
    return TfrecordSource(paths, schema)
