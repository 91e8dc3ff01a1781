"""Tests of the JSON Schemas in docs/schemas against the reader in facts/files.py."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fuzz.readers import DOCUMENTS as EXAMPLES
from jsonschema import Draft202012Validator

from pipette_launch.errors import FileFormatError
from pipette_launch.facts import files
from pipette_launch.facts.files import Document
from pipette_launch.facts.prediction import Explained, Explanation
from scripts import schemas

EXPLAINED = Explained(keys=(Explanation(key="mfu", what="w", unit="", how="h", source="s", value="1 %"),))
MADE: dict[str, Any] = {**{kind: made for kind, (made, _) in EXAMPLES.items()}, "explained": EXPLAINED}

each_document = pytest.mark.parametrize("document", schemas.DOCUMENTS, ids=lambda one: one.KIND)


def plain(document: type[Document]) -> dict[str, Any]:
    """Return a real document of this kind in JSON types."""
    found: dict[str, Any] = json.loads(files.dumps(MADE[document.KIND]))
    return found


def is_valid(document: type[Document], value: dict[str, Any]) -> bool:
    """Return True if the committed schema allows a document."""
    return Draft202012Validator(json.loads(schemas.path(document).read_text())).is_valid(value)


def is_read(document: type[Document], value: dict[str, Any]) -> bool:
    """Return True if facts/files.py reads a document."""
    try:
        files.loads(document, json.dumps(value), "here")
    except FileFormatError:
        return False
    return True


def test_the_committed_schemas_are_those_of_the_facts() -> None:
    """`python scripts/schemas.py` writes them after a change of a fact. Schemas of removed kinds are deleted."""
    expected = {schemas.path(one): schemas.text(one) for one in schemas.DOCUMENTS}

    assert expected == {path: path.read_text() for path in schemas.FOLDER.iterdir()}


def test_every_kind_that_the_page_names_has_a_schema() -> None:
    """docs/files.md names each kind and links its schema."""
    page = (schemas.FOLDER.parent / "files.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    named = {word for cell in cells for word in re.findall("`([a-z-]+)`", cell)}

    assert {one.KIND for one in schemas.DOCUMENTS} <= named
    assert not [one.KIND for one in schemas.DOCUMENTS if f"(schemas/{schemas.path(one).name})" not in page]


@each_document
def test_a_real_document_is_valid(document: type[Document]) -> None:
    """The schema is valid, and allows the output of `files.dumps`."""
    Draft202012Validator.check_schema(schemas.schema(document))

    assert is_valid(document, plain(document))


@each_document
def test_a_broken_document_is_neither_valid_nor_read(document: type[Document]) -> None:
    """Wrong kind, wrong version, unknown field, and each field with a wrong type."""
    made = plain(document)
    broken = [{**made, "kind": "other"}, {**made, "schema_version": 99}, {**made, "unknown": 1}]
    broken += [{**made, name: {"neither": ["nor"]}} for name in made]

    assert not [one for one in broken if is_valid(document, one) or is_read(document, one)]


@each_document
def test_a_field_may_be_missing_where_reading_has_a_default(document: type[Document]) -> None:
    """Schema and reader agree on each field."""
    made = plain(document)
    for name in made:
        value = {key: item for key, item in made.items() if key != name}

        assert is_valid(document, value) == is_read(document, value), name
