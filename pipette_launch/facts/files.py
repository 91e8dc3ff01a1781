"""Checks of numbers in frozen dataclasses, and the strict JSON files of these dataclasses.

A document is a dataclass with the class variable `KIND`. Reading raises FileFormatError for an unknown kind, version,
field or type, and the message names file and field.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import dataclasses
import errno
import functools
import glob
import hashlib
import json
import math
import os
import reprlib
import tempfile
import time
import types
import typing
import uuid
import zlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import FactError, FileFormatError


def check_numbers(
    fact: object, *names: str, limit: float = 1, above: bool = False, error: type[FactError] = FactError
) -> None:
    """Raise an error that names the first of the named fields below a limit, and the value of this field.

    `limit` has the field's own unit. If `above` is true, a value equal to the limit is an error too. A field with the
    value None passes.
    """
    for name in names:
        value = getattr(fact, name)
        if value is not None and not (value > limit if above else value >= limit):
            raise error(f"{name} must be {'above' if above else 'at least'} {limit:g}, got {value}")


SCHEMA_VERSION = 2
"""Version of every kind of document. A change in the meaning of a field needs a new version."""
MOST_BYTES = 512 << 20
"""Size limit of parsed files and of one unpacked matrix, in bytes. A matrix of 8,192 hosts has this size."""
MOST_ROWS = 64
"""Largest matrix that a file shows as rows of numbers. Files with a million numbers are slow to write and to read."""
MOST_INTEGER = 1 << 63
LARGEST = 1e100
"""Largest number in a file, so that the product of two numbers stays finite."""
READABLE_BYTES = 1 << 20
"""Files with more bytes have one line, because Python's JSON encoder is ten times slower with line breaks."""
_SCALARS = (str, int, float, bool, types.NoneType)
_LIMITS: dict[Any, float] = {int: MOST_INTEGER, float: LARGEST}
LEFTOVER_S = 86400.0
"""Age in seconds at which a temporary file counts as abandoned."""


class Document(Protocol):
    """A dataclass that is written to a file of its own."""

    KIND: ClassVar[str]


T = TypeVar("T")
D = TypeVar("D", bound=Document)


def to_plain(value: Any) -> Any:
    """Convert a dataclass to JSON types: dataclasses become objects, tuples and small matrices become lists."""
    if type(value) in _SCALARS:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        omits_defaults = getattr(value, "OMITS_DEFAULTS", False)
        return {field.name: to_plain(one) for field, one in values if not omits_defaults or one != field.default}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        # The first bytes of all numbers come first, then the second bytes, because equal bytes in a row compress well.
        planes = np.ascontiguousarray(value, dtype="<f8").view(np.uint8).reshape(-1, 8).T
        return value.tolist() if len(value) <= MOST_ROWS else pack(planes.tobytes())
    return value


def pack(data: bytes) -> str:
    """Compress bytes into a text for a JSON document."""
    return base64.b64encode(zlib.compress(data, level=1)).decode()


def unpack(text: str, where: str) -> bytes:
    """Unpack a result of `pack`. Raise FileFormatError for other texts, or for more than MOST_BYTES bytes."""
    try:
        return inflate(base64.b64decode(text, validate=True), where)
    except ValueError as error:
        raise FileFormatError(f"{where}: cannot be unpacked ({error})") from error


def inflate(packed: bytes, where: str) -> bytes:
    """Decompress bytes. Raise FileFormatError for bytes that zlib did not make, or for more than MOST_BYTES bytes."""
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(packed, MOST_BYTES)
    except zlib.error as error:
        raise FileFormatError(f"{where}: cannot be unpacked ({error})") from error
    if not stream.eof:
        raise FileFormatError(f"{where}: is cut off, or unpacks to more than {MOST_BYTES} bytes")
    return data


def from_plain(kind: Any, value: Any, where: str) -> Any:
    """Build an object of type `kind` from the result of `json.loads`. Errors name the place `where`.

    `kind` is a dataclass, `int`, `float`, `str`, `bool`, `X | None`, `tuple[X, ...]`, `dict[str, X]`, a Literal, or
    `NDArray[np.float64]`, which is a square matrix as a list of rows, or as a packed text.
    """
    return _reader(kind)(value, where)


@functools.cache
def _reader(kind: Any) -> Callable[[Any, str], Any]:
    """Return the function of `value` and `where` that builds an object of type `kind`."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return functools.partial(_fact, kind)
    if origin in (typing.Union, types.UnionType):
        return lambda value, where: None if value is None else _reader(inner[0])(value, where)
    if origin is tuple:
        return functools.partial(_items, inner[0])
    if origin is dict:
        return functools.partial(_dict, inner[1])
    # The origin of an NDArray type is np.ndarray before numpy 2.5, and NDArray itself from 2.5 on.
    if origin in (np.ndarray, NDArray):
        return _matrix
    return functools.partial(_literal, inner) if origin is typing.Literal else functools.partial(_scalar, kind)


def parse(text: str | bytes, source: str) -> Any:
    """Parse JSON; FileFormatError with the name `source` if the text is not JSON, too large or nested too deeply."""
    if len(text) > MOST_BYTES:
        raise FileFormatError(f"{source}: {len(text)} bytes, more than the limit of {MOST_BYTES}; remove the file")
    try:
        return json.loads(text)
    except ValueError as error:
        raise FileFormatError(f"{source}: not JSON ({error}); repair or remove the file") from error
    except RecursionError as error:
        raise FileFormatError(f"{source}: nested too deeply; repair or remove the file") from error


def dumps(document: Document, *, indent: int | None = None) -> str:
    """Return a document as JSON text: one line, or lines for readers that begin with `indent` more blanks."""
    head = {"kind": document.KIND, "schema_version": SCHEMA_VERSION}
    return json.dumps({**head, **to_plain(document)}, indent=indent, allow_nan=False)


def loads(kind: type[D], text: str | bytes, source: str) -> D:
    """Read a document from JSON text. Errors name `source`."""
    plain = parse(text, source)
    found = plain.pop("kind", None) if isinstance(plain, dict) else type(plain).__name__
    if found != kind.KIND or not isinstance(plain, dict):
        raise FileFormatError(f"{source}: expected a {kind.KIND!r} document, found {_shown(found)}")
    version = plain.pop("schema_version", None)
    if type(version) is not int or version != SCHEMA_VERSION:
        raise FileFormatError(
            f"{source}: schema_version {_shown(version)} is not {SCHEMA_VERSION}, the version that this pipette-launch "
            "reads; make the file anew, or set the number of a file that you wrote yourself"
        )
    document: D = from_plain(kind, plain, source)
    return document


def write(path: Path, document: Document, *, shared: bool = False) -> None:
    """Write a document atomically: a reader sees the whole old file or the whole new file.

    Missing folders are made. Other users may read the file if `shared` is true, as far as the umask allows.
    """
    text = dumps(document)
    write_text(path, (text if len(text) > READABLE_BYTES else dumps(document, indent=1)) + "\n", shared=shared)


def write_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Write text to a temporary file, call fsync, and rename the file. After an OSError no temporary file remains."""
    for folder in (*reversed(path.parents),) if not path.parent.exists() else ():
        if not folder.exists():
            folder.mkdir(mode=0o777 if shared else 0o700, exist_ok=True)
    # Remove temporary files of killed writers. The age limit is larger than the difference between two hosts' clocks.
    names = glob.escape(path.name) if shared else "*"
    for leftover in path.parent.glob(f".{names}.{'[0-9a-f]' * 8}"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.lstat().st_mtime > LEFTOVER_S:
                leftover.unlink()
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    # mkstemp would ignore the umask and always make a private file.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if shared else 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Make the folder of a file that will be written much later. Raise OSError if the folder is not writable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def read(path: Path, kind: type[D]) -> D:
    """Read a document from a file. Raise FileFormatError if the file is missing or damaged."""
    return loads(kind, read_bytes(path), str(path))


def read_bytes(path: Path) -> bytes:
    """Read a file of at most MOST_BYTES bytes. Raise FileFormatError if the file is larger or unreadable."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path}: cannot be read ({getattr(error, 'strerror', '') or error})") from error
    if len(data) > MOST_BYTES:
        raise FileFormatError(f"{path}: more than the limit of {MOST_BYTES} bytes; remove the file")
    return data


def kind_of(path: Path) -> str:
    """Return the kind of document in a file, or an empty string if the file is not a document."""
    try:
        plain = parse(read_bytes(path), str(path))
    except FileFormatError:
        return ""
    return str(plain.get("kind", "")) if isinstance(plain, dict) else ""


def table(package: str, name: str) -> tuple[dict[str, str], ...]:
    """Return the rows of the file `data/NAME.csv` of a package. The keys of a row are the names of the columns."""
    text = resources.files(package).joinpath(f"data/{name}.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def digest(*facts: Any) -> str:
    """Return a hash of the given objects as sixteen hexadecimal digits."""
    text = json.dumps([to_plain(fact) for fact in facts], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _checked(kind: type, value: Any, where: str) -> Any:
    if isinstance(value, kind):
        return value
    expected = "an object" if kind is dict else "a list"
    raise FileFormatError(f"{where}: expected {expected}, found {type(value).__name__}")


def _items(kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    items, read = _checked(list, value, where), _reader(kind)
    # Check many numbers as a whole, which is fast. Check single items only in a bad list, to name the bad item.
    limit = _LIMITS.get(kind)
    if limit and set(map(type, items)) == {kind} and all(-limit < item < limit for item in items):
        return tuple(items)
    return tuple(read(item, f"{where}[{index}]") for index, item in enumerate(items))


def _dict(kind: Any, value: Any, where: str) -> dict[str, Any]:
    read = _reader(kind)
    return {key: read(item, f"{where}: {key}") for key, item in _checked(dict, value, where).items()}


def _fact(kind: Any, value: Any, where: str) -> Any:
    readers, required = _fields(kind)
    if not required <= _checked(dict, value, where).keys() <= readers.keys():
        for name in sorted(value.keys() - readers.keys()):
            raise FileFormatError(f"{where}: unknown field {name!r}")
        for name in sorted(required - value.keys()):
            raise FileFormatError(f"{where}: field {name!r} is missing")
    fields = {name: read(value[name], f"{where}: {name}") for name, read in readers.items() if name in value}
    try:
        return kind(**fields)
    except FactError as error:
        raise FileFormatError(f"{where}: {error}") from error


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, Callable[[Any, str], Any]], frozenset[str]]:
    """Return the reader of each field, and the names of the fields that a file must have."""
    hints = typing.get_type_hints(kind)
    required = frozenset(field.name for field in dataclasses.fields(kind) if not has_default(field))
    return {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}, required


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Return True if files may leave a field out, because it has a default."""
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _matrix(value: Any, where: str) -> NDArray[np.float64]:
    if isinstance(value, str):
        return _unpacked_matrix(unpack(value, where), where)
    rows = []
    for index, row in enumerate(_checked(list, value, where)):
        # Check each row as a whole, which is fast. Check single numbers only in a bad row, to name the bad number.
        is_good = isinstance(row, list) and set(map(type, row)) <= {float} and bool((np.abs(row) <= LARGEST).all())
        rows.append(row if is_good else from_plain(tuple[float, ...], row, f"{where}[{index}]"))
    odd = next((index for index, row in enumerate(rows) if len(row) != len(rows)), None)
    if odd is not None:
        raise FileFormatError(f"{where}[{odd}]: {len(rows[odd])} numbers in a matrix of {len(rows)} rows")
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(rows))


def _unpacked_matrix(data: bytes, where: str) -> NDArray[np.float64]:
    size = math.isqrt(len(data) // 8)
    if 8 * size * size != len(data):
        raise FileFormatError(f"{where}: {len(data)} bytes are no square matrix")
    planes = np.frombuffer(data, np.uint8).reshape(8, -1)
    matrix: NDArray[np.float64] = planes.T.copy().view("<f8").reshape(size, size)
    if not (np.abs(matrix) <= LARGEST).all():
        raise FileFormatError(f"{where}: a number is not finite, or larger than the limit of {LARGEST:g}")
    return matrix


def _literal(known: tuple[Any, ...], value: Any, where: str) -> Any:
    if any(type(value) is type(one) and value == one for one in known):
        return value
    raise FileFormatError(f"{where}: {_shown(value)} is not one of {', '.join(map(repr, known))}")


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and type(value) is int and abs(value) < MOST_INTEGER:
        return float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise FileFormatError(f"{where}: expected {kind.__name__}, found {_shown(value)}")
    if kind is int and not -MOST_INTEGER <= value < MOST_INTEGER:
        raise FileFormatError(f"{where}: {_shown(value)} does not fit into 64 bits")
    if kind is float and abs(value) > LARGEST:
        raise FileFormatError(f"{where}: {value!r} is larger than the limit of {LARGEST:g}")
    return value


def _shown(value: Any) -> str:
    try:
        return _SHORT.repr(value)
    except ValueError:  # str() raises ValueError for an integer with too many digits
        return "a number of thousands of digits"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80
