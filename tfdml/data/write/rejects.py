"""Rows that a conversion left out: collection, limits, and a summary of the reasons."""

import collections
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdml.data.format import storage
from tfdml.data.format.manifest import DatasetManifest
from tfdml.data.write.plan import ConversionOptions

REJECTS = ".rejects.jsonl"
# Part of the rows above which a data set should not be used before its rejects have been looked at.
MANY_REJECTED = 0.1


class TooManyErrors(ValueError):
    """A row could not be converted, and no row, or no more rows, may be skipped."""


class Rejects:
    """Rows of one step that were left out.

    Args:
        options: Options of the conversion: whether rows with errors are skipped, and how many.

    Attributes:
        rows: Position ("where") and "reason" of each row; "skipped" is true for those that
            `on_missing` asks to leave out.
    """

    def __init__(self, options: ConversionOptions):
        self._options = options
        self.rows: list[dict[str, Any]] = []
        self._errors = 0

    def skip(self, where: str, reason: str) -> None:
        """Notes a row that the options ask to leave out."""
        self.rows.append({"where": where, "reason": reason, "skipped": True})

    def add(self, where: str, reason: str) -> None:
        """Notes a row that cannot be converted.

        Raises:
            TooManyErrors: If the row may not be skipped.
        """
        if self._options.on_error == "strict":
            raise TooManyErrors(
                f"{where}: {reason}. Fix it, or skip such rows with --on-error skip."
            )
        self.rows.append({"where": where, "reason": reason})
        self._errors += 1
        check_errors(self._options, self._errors, self.rows[-1])


def errors_in(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the rows that could not be converted, without those left out on purpose."""
    return [row for row in rows if not row.get("skipped")]


def check_errors(options: ConversionOptions, count: int, last: Mapping[str, Any]) -> None:
    """Raises `TooManyErrors` if `count` rows, `last` among them, may not be skipped."""
    if options.max_errors is not None and count > options.max_errors:
        raise TooManyErrors(
            f"At most {options.max_errors} rows may be skipped (--max-errors). Received: {count}, "
            f"of which one is {last['where']}: {last['reason']}."
        )


def path_of(manifest: DatasetManifest) -> str:
    """Returns the path of the file with a data set's rejects."""
    return storage.join(manifest.directory, manifest.name + REJECTS)


def save(manifest: DatasetManifest, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the file with a data set's rejects."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    storage.write_bytes(path_of(manifest), lines.encode())


def load(manifest: DatasetManifest) -> list[dict[str, Any]]:
    """Returns the rejects of a data set; an empty list if it has none."""
    path = path_of(manifest)
    if not storage.exists(path):
        return []
    return [json.loads(line) for line in storage.read_bytes(path).decode().splitlines()]


def reasons(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Returns one reason of each kind and the number of rows with it, the most frequent first."""
    examples: dict[str, str] = {}
    counts: collections.Counter[str] = collections.Counter()
    for row in rows:
        kind = _without_values(row["reason"])
        examples.setdefault(kind, row["reason"])
        counts[kind] += 1
    return [(examples[kind], count) for kind, count in counts.most_common()]


def _without_values(reason: str) -> str:
    # json's messages end with a position.
    return re.sub(r": line \d+ column.*", "", reason.split(" Received:")[0])
