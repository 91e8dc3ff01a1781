"""Writes docs/schemas: a JSON Schema of each document that `--json` prints or that lies on a disk."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

from pipette_launch.facts.devices import DeviceFile, DeviceFiles
from pipette_launch.facts.fabric import FabricSpec
from pipette_launch.facts.files import LARGEST, MOST_INTEGER, SCHEMA_VERSION, Document, has_default
from pipette_launch.facts.health import Checkup
from pipette_launch.facts.measurements import Measurements
from pipette_launch.facts.outcome import LiveJob, Outcome
from pipette_launch.facts.plan import Plan, Shortage
from pipette_launch.facts.prediction import Explained, Prediction
from pipette_launch.facts.schedule import ScheduleFile

FOLDER = Path(__file__).parent.parent / "docs" / "schemas"
DOCUMENTS: tuple[type[Document], ...] = (
    Checkup,
    DeviceFile,
    DeviceFiles,
    Explained,
    FabricSpec,
    LiveJob,
    Measurements,
    Outcome,
    Plan,
    Prediction,
    ScheduleFile,
    Shortage,
)
NUMBER = {"type": "number", "minimum": -LARGEST, "maximum": LARGEST}
SCALARS: dict[Any, dict[str, Any]] = {
    int: {"type": "integer", "minimum": -MOST_INTEGER, "maximum": MOST_INTEGER - 1},
    float: NUMBER,
    str: {"type": "string"},
    bool: {"type": "boolean"},
}


def schema(document: type[Document]) -> dict[str, Any]:
    """Return the JSON Schema of what facts/files.py reads as this document; what facts check of values is not in it."""
    parts: dict[str, Any] = {}
    whole = _object(document, parts)
    head = {"kind": {"const": document.KIND}, "schema_version": {"const": SCHEMA_VERSION}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": document.KIND,
        **whole,
        "properties": {**head, **whole["properties"]},
        "required": [*head, *whole["required"]],
        "$defs": dict(sorted(parts.items())),
    }


def text(document: type[Document]) -> str:
    """Return what stands in the schema's file."""
    return json.dumps(schema(document), indent=1) + "\n"


def path(document: type[Document]) -> Path:
    """Return where the schema of a document lies."""
    return FOLDER / f"{document.KIND}.schema.json"


def _object(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    return {
        "type": "object",
        "properties": {field.name: _value(hints[field.name], parts) for field in fields},
        "required": [field.name for field in fields if not has_default(field)],
        "additionalProperties": False,
    }


def _value(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """Schema of a field by its type, as `files.from_plain` reads it; dataclasses go into `parts` by their names."""
    if dataclasses.is_dataclass(kind):
        return _reference(kind, parts)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_value(inner[0], parts), {"type": "null"}]}
    if origin is tuple:
        return {"type": "array", "items": _value(inner[0], parts)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _value(inner[1], parts)}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    # The only other kind is NDArray[np.float64]: rows of a square matrix, or a packed text (`files.pack`).
    rows = {"type": "array", "items": {"type": "array", "items": NUMBER}}
    return SCALARS.get(kind) or {"anyOf": [rows, {"type": "string", "contentEncoding": "base64"}]}


def _reference(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    if kind.__name__ not in parts:
        parts[kind.__name__] = {}
        parts[kind.__name__] = _object(kind, parts)
    return {"$ref": f"#/$defs/{kind.__name__}"}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for one in DOCUMENTS:
        path(one).write_text(text(one), encoding="utf-8")
