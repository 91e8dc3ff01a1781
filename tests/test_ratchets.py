"""Four figures of the sources may only fall; `ratchets.json` holds their limits."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))  # at the end: tests has a module `screens` too
from prose import Line, findings, per_thousand_words  # noqa: E402

LIMITS = json.loads((ROOT / "ratchets.json").read_text())
SOURCES = [*(ROOT / "pipette_launch").rglob("*.py"), *(ROOT / "patches").rglob("*.py")]
LONGEST_FUNCTION = 60


def num_lines() -> int:
    """Count the lines of the product."""
    return sum(len(path.read_text().splitlines()) for path in SOURCES)


def import_percent() -> float:
    """Return the share of import lines in the product, in percent."""
    imports = (ast.Import, ast.ImportFrom)
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, imports)]
    return 100 * sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes) / num_lines()


FIGURES = {
    "prose_findings_per_1000_words": per_thousand_words,
    "product_lines": num_lines,
    "product_files": lambda: len(SOURCES),
    "import_lines_percent": import_percent,
}


def test_each_figure_has_a_limit() -> None:
    """The file names these figures and no others."""
    assert set(FIGURES) == set(LIMITS)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_stays_below_its_limit(name: str) -> None:
    """A figure is at most its limit, and the limit follows a figure that has fallen by more than 3 % and by 0.5."""
    figure, limit = FIGURES[name](), LIMITS[name]

    assert figure <= limit, f"{name} is {figure:.2f}: raising its limit takes a line in docs/design.md, section Limits"
    assert limit - max(0.03 * limit, 0.5) <= figure, f"{name} is {figure:.2f}: lower its limit in ratchets.json"


def test_no_function_is_too_long() -> None:
    """A function has at most 60 lines."""
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, kinds)]
    sizes = {f"{path.name} {node.name}": (node.end_lineno or 0) - node.lineno + 1 for path, node in functions}

    assert {} == {name: size for name, size in sizes.items() if size > LONGEST_FUNCTION}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("What a layout needs.", "question word"),
        ("At most so many slots.", "number without its name"),
        ("Its peak is that of the fullest rank.", "pronoun for a noun"),
        ("Its peers are none.", "none for no"),
        ("Whatever it needs is added.", "clause for a noun"),
        ("Workers are told the plan.", "a program speaks"),
        ("It ends. Of two ranks the first counts.", "topic in front"),
        (" ".join(["word"] * 33), "long sentence"),
    ],
)
def test_each_rule_finds_its_kind(text: str, rule: str) -> None:
    """A planted sentence breaks its rule."""
    found = findings(Line(path=ROOT, number=1, text=text, is_first=True))

    assert rule in found


def test_a_plain_sentence_is_fine() -> None:
    """A short sentence with its nouns breaks no rule."""
    assert [] == findings(Line(path=ROOT, number=1, text="Number of links between two hosts.", is_first=True))
