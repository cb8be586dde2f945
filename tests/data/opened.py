"""Reads the rows of an input as a conversion does."""

from tfdml.data.format.values import encoder
from tfdml.data.sources.opening import open_source


def rows(path, **options) -> list[dict]:
    """Returns the rows; raises an error for the first row that a conversion rejects."""
    source = open_source([str(path)], **options)
    encode = encoder(source.schema)
    found = []
    for chunk in source.chunks():
        for row in source.rows(chunk.key):
            if row.values is None:
                raise ValueError(f"{row.where}: {row.reason}")
            try:
                encode(row.values)
            except ValueError as error:
                raise ValueError(f"{row.where}: {error}") from error
            found.append(row.values)
    return found


def stored(path) -> list[dict]:
    """Returns the rows as they are stored, unchecked."""
    source = open_source([str(path)])
    return [row.values for chunk in source.chunks() for row in source.rows(chunk.key)]
