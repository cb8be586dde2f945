"""Text files whose records end at line breaks, cut into chunks between records."""

import abc
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdml.data.format import storage
from tfdml.data.sources.source import Chunk, Row, Source

CHUNK_BYTES = 4 << 20
SAMPLED_ROWS = 1000
_NEWLINE, _RETURN, _QUOTE = b'\n\r"'
_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
UTF8_BOM = b"\xef\xbb\xbf"


class TextSource(Source):
    """Text files whose records end at line breaks.

    Args:
        paths: Paths of the files.
        quoted: Whether a line break between quotation marks does not end a record.

    Raises:
        ValueError: If a file is empty or in UTF-16.
    """

    def __init__(self, paths: list[str], quoted: bool):
        self._paths, self._quoted = paths, quoted
        for path in paths:
            head = storage.read_range(path, 0, 4)
            if not head:
                raise ValueError(f"An input must have rows. Received: {path}, which is empty.")
            if head[:2] in _BOMS:
                raise ValueError(
                    f"An input must be in UTF-8. Received: {path}, in {_BOMS[head[:2]]}. Convert "
                    f"it with `iconv -f utf-16 -t utf-8`."
                )

    @property
    def files(self) -> list[str]:
        """Paths of the files."""
        return self._paths

    @abc.abstractmethod
    def _header(self, path: str) -> int:
        """Returns the offset of the first record of a file."""

    @abc.abstractmethod
    def _parse(self, text: str, where: str, first: int) -> Iterator[Row]:
        """Yields the rows of a chunk's text; `first` is the number of its first record."""

    def chunks(self) -> list[Chunk]:
        """Returns the chunks, found in one pass over all bytes."""
        found = []
        for path in self._paths:
            number = 1
            for offset, length, rows in split(path, self._header(path), self._quoted):
                found.append(Chunk((path, offset, length, number), rows, length))
                number += rows
        return found

    def rows(self, key: Any) -> Iterator[Row]:
        """Yields the rows of a chunk."""
        path, offset, length, first = key
        data = storage.read_range(path, offset, length)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            yield from self._undecodable(data, path, first)
            return
        yield from self._parse(text, path, first)

    def _undecodable(self, data: bytes, path: str, first: int) -> Iterator[Row]:
        """Yields the rows of a chunk that is not entirely UTF-8."""
        for begin, end in records(data, self._quoted):
            try:
                yield from self._parse(data[begin:end].decode(), path, first)
            except UnicodeDecodeError as error:
                reason = f"must be in UTF-8. Received: byte {data[begin + error.start]:#04x}"
                yield Row(f"{path}, row {first}", None, reason)
            first += 1


def ends_of_records(data: bytes, quoted: bool) -> np.ndarray:
    """Returns the offsets of the ends of records, just after their line breaks: int64.

    Args:
        data: Bytes that begin with a record.
        quoted: Whether to ignore line breaks between quotation marks.
    """
    array = np.frombuffer(data, np.uint8)
    breaks = np.flatnonzero(array == _NEWLINE)
    if quoted:
        quotes = np.flatnonzero(array == _QUOTE)
        # A break outside quotation marks has an even number of them before it.
        breaks = breaks[np.searchsorted(quotes, breaks) % 2 == 0]
    return breaks + 1


def records(data: bytes, quoted: bool) -> list[tuple[int, int]]:
    """Returns the begin and end of each record that is not blank."""
    ends = ends_of_records(data, quoted).tolist()
    if not ends or ends[-1] < len(data):
        ends.append(len(data))
    begins = [0, *ends[:-1]]
    return [(b, e) for b, e in zip(begins, ends, strict=True) if data[b:e].strip(b"\r\n")]


def split(path: str, begin: int, quoted: bool) -> Iterator[tuple[int, int, int]]:
    """Yields the offset, size in bytes and number of records of each chunk of a file."""
    rest, offset = b"", begin
    with storage.open_read(path) as file:
        file.seek(begin)
        while data := file.read(CHUNK_BYTES):
            rest += data
            ends = ends_of_records(rest, quoted)
            if not len(ends):
                continue
            length = int(ends[-1])
            if count := _count(rest, ends):
                yield offset, length, count
            rest, offset = rest[length:], offset + length
    if rest.strip(b"\r\n"):
        yield offset, len(rest), 1


def _count(data: bytes, ends: np.ndarray) -> int:
    """Returns the number of records that are not blank."""
    lengths = np.diff(ends, prepend=0)
    array = np.frombuffer(data, np.uint8)
    blank = (lengths == 1) | ((lengths == 2) & (array[np.maximum(ends - 2, 0)] == _RETURN))
    return int(len(ends) - blank.sum())
