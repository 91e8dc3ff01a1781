"""Strict reader of data files: errors name file, line and column."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipette_launch.errors import PipetteError

Converter = Callable[[str], Any]
"""Turns the text of a cell into a value. Raises ValueError that names the expected form."""


class DataError(PipetteError):
    """A data file cannot be read: the message names file, line and column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a table, with the requested columns only."""

    line: int
    """From 1, as editors count."""
    values: Mapping[str, Any]

    def __getitem__(self, column: str) -> Any:
        return self.values[column]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A data file as read."""

    path: Path
    digest: str
    rows: tuple[Row, ...]


def text(cell: str) -> str:
    """Return the text of a cell, which may be blank."""
    return cell


def word(cell: str) -> str:
    """Return the text of a cell; a blank cell is an error."""
    if not cell.strip():
        raise ValueError("a text that is not blank")
    return cell.strip()


def whole(cell: str) -> int:
    """Return a whole number of at least 0; `8.0` counts as 8."""
    value = number(cell)
    if not value.is_integer():
        raise ValueError("a whole number of at least 0")
    return int(value)


def size(cell: str) -> int:
    """Return a whole number of at least 1."""
    value = whole(cell)
    if value < 1:
        raise ValueError("a whole number of at least 1")
    return value


def number(cell: str) -> float:
    """Return a finite number of at least 0: nothing that is measured here is negative."""
    try:
        value = float(cell)
    except ValueError:
        raise ValueError("a number of at least 0") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError("a number of at least 0")
    return value


def optional(converter: Converter) -> Converter:
    """Return None for a blank cell, else its converted value."""
    return lambda cell: converter(cell) if cell.strip() else None


def one_of(*known: str) -> Converter:
    """Accept these words only."""

    def convert(cell: str) -> str:
        if cell.strip() not in known:
            raise ValueError(f"one of {', '.join(known)}")
        return cell.strip()

    return convert


def read_table(path: Path, columns: Mapping[str, Converter]) -> Table:
    """Read a CSV with `#` comment lines, a header and at least these columns; others are left alone.

    Raises:
        DataError: the file cannot be read, lacks a column, or has a cell that is not what its column holds.

    """
    data = _bytes_of(path)
    try:
        decoded = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a UTF-8 text ({error.reason} at byte {error.start})") from error
    lines = [(place, line) for place, line in enumerate(decoded.splitlines(), 1) if not line.startswith("#")]
    lines = [(place, line) for place, line in lines if line.strip()]
    if not lines:
        raise DataError(f"{path}: no header; expected the columns {', '.join(columns)}")
    header = next(csv.reader([lines[0][1]]))
    _check_header(path, lines[0][0], header, columns)
    rows = tuple(_row(path, place, line, header, columns) for place, line in lines[1:])
    return Table(path=path, digest=digest(data), rows=rows)


def _check_header(path: Path, line: int, header: list[str], columns: Mapping[str, Converter]) -> None:
    missing = [name for name in columns if name not in header]
    if missing:
        raise DataError(f"{path}, line {line}: the header lacks the column {', '.join(missing)}")
    repeated = sorted({name for name in columns if header.count(name) > 1})
    if repeated:
        raise DataError(f"{path}, line {line}: the header has the column {', '.join(repeated)} more than once")


def _row(path: Path, place: int, line: str, header: list[str], columns: Mapping[str, Converter]) -> Row:
    cells = next(csv.reader([line]))
    if len(cells) != len(header):
        raise DataError(f"{path}, line {place}: {len(cells)} cells under a header of {len(header)}")
    named = dict(zip(header, cells, strict=True))
    where = f"{path}, line {place}"
    return Row(line=place, values={name: _cell(where, name, named[name], columns[name]) for name in columns})


def _cell(where: str, name: str, content: str, converter: Converter) -> Any:
    try:
        return converter(content)
    except ValueError as error:
        raise DataError(f"{where}, column {name}: {content!r} is not {error}") from None


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and object of each line; raises DataError for a line that is no JSON object."""
    for place, line in enumerate(_bytes_of(path).decode("utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {place}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {place}: a JSON {type(record).__name__}, not an object")
        yield place, record


def digest(data: bytes) -> str:
    """Return the first 12 hexadecimal digits of SHA-256: enough to tell data files apart."""
    return hashlib.sha256(data).hexdigest()[:12]


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
