#!/usr/bin/env python3
"""List sentences of comments, docstrings and documents that a reader probably has to read twice.

`python scripts/prose.py [--base REV] [PATH ...]` prints one line per finding, `path:line: rule: text`, then the number
of findings per 1,000 words. `--base REV` checks only lines that were added since a revision. A finding is a place to
look at: a listed sentence may be fine, and a bad one may be missing.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEFAULT = ("pipette_launch", "patches", "docs", "README.md", "CONTRIBUTING.md")
AT_THE_START = ("question word", r"^(What|Of|Where|Which|Whose|Whether|How|That|Those|So many|And|Nor)\b")
RULES = (
    ("number without its name", r"(?i)\bso (many|much|few)\b(?! that)"),
    ("pronoun for a noun", r"(?i)\b(that|those) of\b"),
    ("pronoun for a noun", r"(?i)\b(such a one|the one that|that one|one that|of one so|the other's)\b"),
    ("none for no", r"(?i)\b(is|are|has|have|was|were) (none|no (matter|one))\b"),
    ("clause for a noun", r"(?i)\b(whatever|whoever|whichever|what (is|are|was|it|they|the|a|one|else)\b)"),
    ("a program speaks", r"(?i)\b(is|are|was|were|be) (told|said|asked)\b|\btells? (how|what|which|whether|of)\b"),
    ("topic in front", r"(?<=[.:;] )Of [a-z]"),
)
MOST_WORDS = 32
"""Words of the longest sentence that is not listed."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of prose."""

    path: Path
    number: int
    text: str
    is_first: bool
    """It starts a comment or a docstring."""


def lines_of(path: Path) -> Iterator[Line]:
    """Yield the lines of prose in a Python or Markdown file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        fenced = False
        for number, text in enumerate(source.splitlines(), 1):
            fenced ^= text.startswith("```")
            if not fenced and text.strip() and not text.startswith(("#", "<!--", "```")):
                yield Line(path=path, number=number, text=text.strip(" -|*>"), is_first=False)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("#!", "# ruff", "# type", "# noqa")):
            yield Line(path=path, number=token.start[0], text=token.string.lstrip("# "), is_first=True)
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                for offset, part in enumerate(text.splitlines()):
                    if part.strip():
                        yield Line(path=path, number=node.lineno + offset, text=part.strip(), is_first=offset == 0)


def findings(line: Line) -> list[str]:
    """Return the names of the rules that a line breaks."""
    rules = (AT_THE_START, *RULES) if line.is_first else RULES
    found = [name for name, pattern in rules if re.search(pattern, line.text)]
    too_long = any(len(part.split()) > MOST_WORDS for part in re.split(r"[.;:|] ", line.text))
    return [*found, "long sentence"] if too_long else found


def files_of(names: Sequence[str]) -> list[Path]:
    """Return the Python and Markdown files at or below the given paths."""
    paths = [ROOT / name for name in names]
    below = [[path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")]) for path in paths]
    return [path for group in below for path in group]


def per_thousand_words(names: Sequence[str] = DEFAULT) -> float:
    """Return the findings per 1,000 words of prose."""
    lines = [line for path in files_of(names) for line in lines_of(path)]
    return 1000 * sum(len(findings(line)) for line in lines) / sum(len(line.text.split()) for line in lines)


def _added_since(revision: str) -> set[tuple[Path, int]]:
    command = ["git", "diff", "-U0", "--no-renames", revision]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    added: set[tuple[Path, int]] = set()
    path = ROOT
    for text in diff.splitlines():
        if text.startswith("+++ b/"):
            path = ROOT / text[6:]
        elif found := re.match(r"@@ [^+]*\+(\d+)(?:,(\d+))? @@", text):
            start, count = int(found[1]), int(found[2] or 1)
            added.update((path, number) for number in range(start, start + count))
    return added


def main() -> None:
    """Print the findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=DEFAULT)
    parser.add_argument("--base", metavar="REV", help="check only lines added since this revision")
    options = parser.parse_args()
    added = _added_since(options.base) if options.base else None
    words = count = 0
    for path in files_of(options.paths):
        for line in lines_of(path):
            if added is not None and (path, line.number) not in added:
                continue
            words += len(line.text.split())
            for name in findings(line):
                count += 1
                print(f"{path.relative_to(ROOT)}:{line.number}: {name}: {line.text}")
    print(f"{count} findings in {words} words: {1000 * count / max(words, 1):.2f} per 1,000")


if __name__ == "__main__":
    main()
