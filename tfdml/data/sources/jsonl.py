"""JSON Lines: one object per line."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from tfdml.data.format import storage
from tfdml.data.format.inference import infer
from tfdml.data.format.schema import Schema
from tfdml.data.sources.selected_columns import ColumnOptions
from tfdml.data.sources.source import Row, sample_of
from tfdml.data.sources.text import SAMPLED_ROWS, UTF8_BOM, TextSource


class JsonlSource(TextSource):
    """Files with one JSON object per line; nested objects become dotted names.

    Args:
        paths: Paths of the files.
        schema: Schema of the objects; inferred from the first rows by default.
        options: Columns to leave out.
    """

    def __init__(
        self,
        paths: list[str],
        schema: Schema | None = None,
        options: ColumnOptions | None = None,
    ):
        super().__init__(paths, quoted=False)
        options = options or ColumnOptions()
        # A schema has only the columns that are left: which others there are is not known.
        self._names = [*(schema or ()), *options.drop]
        self.inferred = schema is None
        self.schema = self._infer(options) if schema is None else schema

    def _infer(self, options: ColumnOptions) -> Schema:
        rows = (row for chunk in self.chunks()[:64] for row in self.rows(chunk.key))
        sample = sample_of(itertools.islice(rows, SAMPLED_ROWS), self._paths)
        self._names = list(dict.fromkeys(name for values in sample for name in values))
        return infer(
            {name: value for name, value in values.items() if not options.drops(name)}
            for values in sample
        )

    @property
    def column_names(self) -> list[str]:
        """Names of the columns of the first rows, or of the schema that was given."""
        return self._names

    def _header(self, path: str) -> int:
        return len(UTF8_BOM) if storage.read_range(path, 0, 3) == UTF8_BOM else 0

    def _parse(self, text: str, where: str, first: int) -> Iterator[Row]:
        number = first
        # Not `splitlines`: it ends lines at characters that JSON allows in strings.
        for line in text.split("\n"):
            if not line.strip("\r"):
                continue
            try:
                values = json.loads(line, object_pairs_hook=_unique)
                if not isinstance(values, dict):
                    raise ValueError(f"must be an object. Received: {line[:60]!r}")
                yield Row(f"{where}, row {number}", flatten(values))
            except (ValueError, RecursionError) as error:
                yield Row(f"{where}, row {number}", None, f"is not JSON: {error}")
            number += 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"a name appears twice in {[name for name, _ in pairs]}")
    return values


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Returns an object with nested objects flattened: `{"a": {"b": 1}}` becomes `{"a.b": 1}`.

    Raises:
        ValueError: If two values get the same name.
    """
    if not any(isinstance(value, dict) for value in values.values()):
        return values
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = flatten(value) if isinstance(value, dict) else None
        for key, v in (
            {f"{name}.{k}": v for k, v in inner.items()}.items() if inner else [(name, value)]
        ):
            if key in flat:
                raise ValueError(f"two values have the name {key!r}")
            flat[key] = v
    return flat
