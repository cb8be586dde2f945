"""Selection of a table's columns, and values for cells that have none."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdml.data.format.schema import FLOAT, INT64, STRING, Feature, Schema
from tfdml.data.format.values import encoder
from tfdml.data.sources.source import Chunk, Row, Source

NAN, SKIP, DEFAULT = "nan", "skip", "default"
# Stands for all columns that no other rule names.
_OTHERS = ""
_FORMS = "nan, skip or default=VALUE, alone or after a column's name, as in age=nan"


@dataclasses.dataclass(frozen=True)
class OnMissing:
    """Rule for rows in which a column has no value.

    Attributes:
        action: "nan" stores NaN, "default" stores `default`, and "skip" leaves the row out.
        default: Text of the value that "default" stores.
    """

    action: str
    default: str = ""


@dataclasses.dataclass(frozen=True)
class ColumnOptions:
    """Columns to leave out, and rules for missing values.

    Attributes:
        drop: Names of columns to leave out; the name of an object leaves out all of its fields.
        on_missing: Rule of each column that has one; "" has the rule of all others.
    """

    drop: tuple[str, ...] = ()
    on_missing: Mapping[str, OnMissing] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(cls, drop: Sequence[str], on_missing: Sequence[str]) -> "ColumnOptions":
        """Returns the options that command-line values describe.

        Args:
            drop: Names of columns.
            on_missing: Rules such as "skip", "age=nan" and "city=default=unknown".

        Raises:
            ValueError: If a rule has another form, or a column has two.
        """
        rules: dict[str, OnMissing] = {}
        for text in on_missing:
            name, rule = _OTHERS, _rule(text)
            if rule is None and "=" in text:
                name, rest = text.split("=", 1)
                rule = _rule(rest)
            if rule is None or (name in rules):
                why = "one rule for a column" if rule else _FORMS
                raise ValueError(f"`on_missing` must be {why}. Received: {text!r}.")
            rules[name] = rule
        return cls(tuple(drop), rules)

    def drops(self, name: str) -> bool:
        """Returns whether a column is left out."""
        return any(name == dropped or name.startswith(f"{dropped}.") for dropped in self.drop)

    def rule(self, name: str) -> OnMissing | None:
        """Returns the rule for missing values of a column, if there is one."""
        return self.on_missing.get(name, self.on_missing.get(_OTHERS))

    def names(self, name: str) -> bool:
        """Returns whether a rule names this very column."""
        return name in self.on_missing

    def check_names(self, columns: Sequence[str]) -> None:
        """Checks that the options name columns of the input.

        Raises:
            ValueError: If one does not exist.
        """
        for option, names in (("drop", self.drop), ("on_missing", self.on_missing)):
            for name in names:
                fields = any(column.startswith(f"{name}.") for column in columns)
                if name != _OTHERS and name not in columns and not (option == "drop" and fields):
                    raise ValueError(
                        f"`{option}` must name columns of the input, {sorted(columns)}. Received: "
                        f"{name!r}."
                    )


def _rule(text: str) -> OnMissing | None:
    if text in (NAN, SKIP):
        return OnMissing(text)
    if text.startswith(f"{DEFAULT}="):
        return OnMissing(DEFAULT, text.split("=", 1)[1])
    return None


class SelectedColumns(Source):
    """Columns of another source, without those that are dropped and with missing values filled in.

    A value is missing if its row does not have the column, or has None in it.

    Args:
        source: Source of the rows.
        options: Columns to leave out, and rules for missing values.

    Raises:
        ValueError: If an option names a column that does not exist, or gives a value that the
            column cannot hold.
    """

    def __init__(self, source: Source, options: ColumnOptions):
        options.check_names(source.column_names)
        self._source, self._options = source, options
        self.folder, self.notices = source.folder, source.notices
        self.inferred = source.inferred
        self.settings = {**source.settings, **json.loads(json.dumps(dataclasses.asdict(options)))}
        self.schema = Schema(
            {
                name: _feature(name, feature, options.rule(name), options.names(name))
                for name, feature in source.schema.items()
                if not options.drops(name)
            }
        )
        if not self.schema:
            raise ValueError(f"`drop` must leave a column. Received: {list(options.drop)}.")
        self._fills = {name: self._fill(name) for name in self.schema}
        self.nonfinite = frozenset(n for n in self.schema if options.rule(n) == OnMissing(NAN))

    def _fill(self, name: str) -> Any:
        """Returns the value to store where a column has none; None if there is no such value."""
        rule = self._options.rule(name)
        if rule is None or rule.action == SKIP:
            return None
        if rule.action == NAN:
            return math.nan if self.schema[name].kind == FLOAT else None
        return _default(name, self.schema[name], rule.default, self._options.names(name))

    @property
    def kind(self) -> str:
        """Name of the kind of input."""
        return self._source.kind

    @property
    def column_names(self) -> list[str]:
        """Names of the columns that are left."""
        return list(self.schema)

    @property
    def files(self) -> list[str]:
        """Paths of the files that are read."""
        return self._source.files

    def chunks(self) -> list[Chunk]:
        """Returns the chunks of the source."""
        return self._source.chunks()

    def rows(self, key: Any) -> Iterator[Row]:
        """Yields the rows of a chunk."""
        return map(self._selected, self._source.rows(key))

    def read(self, chunk: Chunk, begin: int, end: int) -> Iterator[Row]:
        """Yields rows `begin` to `end` (exclusive) of a chunk."""
        return map(self._selected, self._source.read(chunk, begin, end))

    def columns(self, chunk: Chunk, begin: int, end: int) -> Iterator[dict[str, Any]]:
        """Yields the values of sound rows by feature, many rows at once; see `Source.columns`."""
        for values in self._source.columns(chunk, begin, end):
            yield {name: column for name, column in values.items() if name in self.schema}

    def _selected(self, row: Row) -> Row:
        if row.values is None:
            return row
        # Columns that are not in the schema stay: the encoder reports them. An object that is null
        # has none of its fields.
        selected = {
            name: value
            for name, value in row.values.items()
            if name not in self._fills
            and not self._options.drops(name)
            and not (value is None and self._is_object(name))
        }
        missing = []
        for name, fill in self._fills.items():
            value = row.values.get(name)
            if value is None and fill is None:
                missing.append(name)
            else:
                selected[name] = fill if value is None else value
        if not missing:
            return row._replace(values=selected)
        rules = [self._options.rule(name) for name in missing]
        if any(rule and rule.action == SKIP for rule in rules):
            return Row(row.where, None, f"columns {missing} have no value", skipped=True)
        name = missing[0]
        forms = f"{name}=default=VALUE or {name}=skip"
        if self.schema[name].shape == () and self.schema[name].kind in (INT64, FLOAT):
            forms = f"{name}=nan, {forms}"
        return Row(
            row.where,
            None,
            f"columns {missing} must have values. Received: none. Say what to store with "
            f"--on-missing {forms}",
        )

    def _is_object(self, name: str) -> bool:
        return any(column.startswith(f"{name}.") for column in self.schema)


def _feature(name: str, feature: Feature, rule: OnMissing | None, named: bool) -> Feature:
    """Returns the feature that can hold NaN too, if the rule asks for it."""
    if rule is None or rule.action != NAN:
        return feature
    if feature.shape == () and feature.kind == INT64 and not feature.classes:
        return Feature(FLOAT)
    if feature.kind != FLOAT or feature.is_variable:
        if not named:
            return feature
        raise ValueError(
            f"`on_missing` nan must be for a column of numbers. Received: {name!r}, of "
            f"{feature.kind}. Use {name}=default=VALUE or {name}=skip."
        )
    return feature


def _default(name: str, feature: Feature, text: str, named: bool) -> Any:
    """Returns the value that a default's text stands for; None if a rule for all does not fit."""
    if feature.kind == STRING and feature.shape == ():
        return text
    try:
        value = feature.classes.index(text) if text in feature.classes else json.loads(text)
        encoder(Schema({name: feature}))({name: value})
    except ValueError as error:
        if not named:
            return None
        raise ValueError(
            f"`on_missing` must give column {name!r} a value of its type, {feature.kind} of shape "
            f"{feature.shape}. Received: {text!r}."
        ) from error
    return value
