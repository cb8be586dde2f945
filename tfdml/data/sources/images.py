"""Image files: one folder per class, or a table of paths."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import fsspec

from tfdml.data.format import storage
from tfdml.data.format.image_options import EXTENSIONS, ImageOptions
from tfdml.data.format.images import prepare
from tfdml.data.format.schema import IMAGE, INT64, STRING, Feature, Schema
from tfdml.data.sources.source import Chunk, Row, Source

CHUNK_IMAGES = 64


class ImageFolderSource(Source):
    """A folder with one folder per class; the classes are sorted by name.

    Records have an `image`, its `label`, and the name of its `file`.

    Args:
        folder: Path of the folder.
        options: Processing of the images.
        skip: Whether to leave out files beside the class folders, and folders without files,
            instead of refusing them.

    Raises:
        ValueError: If there are no classes, a class has no images, an image is outside the classes,
            or links form a cycle.
    """

    def __init__(self, folder: str, options: ImageOptions | None = None, skip: bool = False):
        self._folder, self._options = folder.rstrip("/"), options or ImageOptions()
        self.folder, self.settings = self._folder, dataclasses.asdict(self._options)
        names = files_below(self._folder)
        outside = [name for name in names if b"/" not in name]
        classes = sorted({name.split(b"/", 1)[0] for name in names} - set(outside))
        empty = [
            os.fsdecode(e) for e in _folders(self._folder) if os.fsencode(e) not in set(classes)
        ]
        if not classes:
            raise ValueError(
                f"An image folder must have one folder per class, each with images. Received: "
                f"{folder}, with no such folder. Files of another kind need --kind."
            )
        strays = [f"{_shown(name)} beside the class folders" for name in outside]
        strays += [f"{name}/ without images" for name in empty]
        if strays and not skip:
            raise ValueError(
                f"An image folder must have one folder per class, each with images. Received: "
                f"{_first(strays)} in {folder}. Move or remove them, or skip them with --on-error "
                f"skip."
            )
        if strays:
            self.notices = (f"Skipped in {folder}: {_first(strays)}.",)
        self._names = names = [name for name in names if b"/" in name]
        labels = {name: i for i, name in enumerate(classes)}
        self._labels = [labels[name.split(b"/", 1)[0]] for name in names]
        self.schema = Schema(
            image=Feature(IMAGE),
            label=Feature(INT64, classes=tuple(_shown(c) for c in classes)),
            file=Feature(STRING),
        )

    @property
    def files(self) -> list[str]:
        """Paths of the image files."""
        return [storage.join(self._folder, os.fsdecode(name)) for name in self._names]

    def chunks(self) -> list[Chunk]:
        """Returns ranges of files."""
        sizes = [storage.size(path) for path in self.files]
        return [
            Chunk((b, min(b + CHUNK_IMAGES, len(sizes))), len(part), sum(part))
            for b in range(0, len(sizes), CHUNK_IMAGES)
            for part in [sizes[b : b + CHUNK_IMAGES]]
        ]

    def rows(self, key: Any) -> Iterator[Row]:
        """Yields the images of a range."""
        for i in range(*key):
            name = self._names[i]
            path = storage.join(self._folder, os.fsdecode(name))
            yield image_row(
                path, self._options, lambda image, i=i: {
                    "image": image, "label": self._labels[i], "file": self._names[i]
                }
            )  # fmt: skip

    def read(self, chunk: Chunk, begin: int, end: int) -> Iterator[Row]:
        """Yields the images `begin` to `end` (exclusive) of a chunk."""
        first, _ = chunk.key
        return self.rows((first + begin, first + end))


class ImageTableSource(Source):
    """A table with a column of image paths, which are replaced by the images.

    Args:
        table: Table: a CSV or JSON Lines source.
        column: Column of paths, relative to the table's folder.
        label: Column of class names, if they are not numbers already.
        options: Processing of the images.

    Raises:
        ValueError: If a column does not exist.
    """

    def __init__(
        self, table: Source, column: str, label: str | None, options: ImageOptions | None = None
    ):
        for name in (column, *([label] if label else [])):
            if table.schema.get(name) is None:
                raise ValueError(
                    f"`{'label' if name == label else 'column'}` must be a column. Received: "
                    f"{name!r} of {sorted(table.schema)}."
                )
        self._table, self._column, self._label = table, column, label
        self.inferred, self.nonfinite, self.notices = (
            table.inferred,
            table.nonfinite,
            table.notices,
        )
        self._options = options or ImageOptions()
        self.settings = {**table.settings, **dataclasses.asdict(self._options)}
        self._folder = table.files[0].rsplit("/", 1)[0] if "/" in table.files[0] else "."
        self.schema = Schema(table.schema)
        self.schema[column] = Feature(IMAGE)
        self._classes: dict[str, int] = {}
        if label and table.schema[label].kind == STRING:
            names = {
                row.values[label]
                for chunk in table.chunks()
                for row in table.rows(chunk.key)
                if row.values
            }
            self._classes = {name: i for i, name in enumerate(sorted(names))}
            self.schema[label] = Feature(INT64, classes=tuple(sorted(names)))

    @property
    def files(self) -> list[str]:
        """Paths of the table's files; the images are named in them."""
        return self._table.files

    def chunks(self) -> list[Chunk]:
        """Returns the table's chunks, with the sizes of the images."""
        found = []
        for chunk in self._table.chunks():
            sizes = 0
            for row in self._table.rows(chunk.key):
                path = self._path(row.values[self._column]) if row.values else ""
                sizes += storage.size(path) if path and storage.exists(path) else 0
            found.append(chunk._replace(bytes=sizes))
        return found

    def _path(self, name: str) -> str:
        return name if "://" in name or name.startswith("/") else storage.join(self._folder, name)

    def rows(self, key: Any) -> Iterator[Row]:
        """Yields the rows of a chunk of the table, with their images."""
        for row in self._table.rows(key):
            if row.values is None:
                yield row
                continue
            values = dict(row.values)
            if self._classes:
                values[self._label] = self._classes[values[self._label]]
            path = self._path(values[self._column])
            found = image_row(
                path, self._options, lambda image, v=values: {**v, self._column: image}
            )
            yield found._replace(where=f"{row.where} ({found.where})")


def image_row(path: str, options: ImageOptions, values: Any) -> Row:
    """Returns the row of an image file, with the values `values(image)`."""
    where = _shown(os.fsencode(path))
    if not path.lower().endswith(EXTENSIONS):
        return Row(where, None, "is not an image file according to its name")
    try:
        return Row(where, values(prepare(storage.read_bytes(path), options)))
    except (ValueError, OSError) as error:
        return Row(where, None, str(error))


def files_below(folder: str) -> list[bytes]:
    """Returns the relative paths of all files below a folder, sorted; hidden ones are skipped.

    Raises:
        ValueError: If the folder does not exist, or links form a cycle.
    """
    if not storage.is_local(folder):
        fs, root = fsspec.core.url_to_fs(folder)
        found = [p[len(root.rstrip("/")) + 1 :] for p in fs.find(root)]
        return sorted(os.fsencode(p) for p in found if "/." not in f"/{p}")
    if not os.path.isdir(folder):
        raise ValueError(f"`input` must be a folder. Received: {folder!r}.")
    root, found = os.fsencode(folder), []
    pending = [(root, (os.path.realpath(root),))]
    while pending:
        directory, above = pending.pop()
        for entry in os.scandir(directory):
            if entry.name.startswith(b"."):
                continue
            if entry.is_dir():
                real = os.path.realpath(entry.path)
                if real in above:
                    raise ValueError(
                        f"`input` must not have links that lead in a circle. Received: "
                        f"{_shown(entry.path)}, which leads to {_shown(real)}. Remove the link."
                    )
                pending.append((entry.path, (*above, real)))
            else:
                # A broken link too: it is a row that cannot be read.
                found.append(os.path.relpath(entry.path, root))
    return sorted(found)


def _first(names: list[str]) -> str:
    """Returns the first three names, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _folders(folder: str) -> list[str]:
    if not storage.is_local(folder):
        return []
    return sorted(e.name for e in os.scandir(folder) if e.is_dir() and e.name[:1] != ".")


def _shown(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
