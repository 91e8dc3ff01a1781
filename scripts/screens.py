"""Bring the screens in the documents up to date: `.venv/bin/python scripts/screens.py`, then read the difference.

A screen keeps its shape: each piece between two `...` begins and ends at the lines most like its first and last.
"""

from __future__ import annotations

import sys
import tempfile
from difflib import SequenceMatcher
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "patches"), str(ROOT / "tests")]

from doc_pages import PAGES, blocks, printed_blocks
from docs.test_commands import RUNNING
from docs.test_screens import SCREENS


def nearest(line: str, lines: list[str], near: int) -> int:
    """Return the place of the line that is most like another, and of several the one nearest to a place."""
    return max(range(len(lines)), key=lambda at: (SequenceMatcher(None, line, lines[at]).ratio(), -abs(at - near)))


def renewed(shown: str, printed: str) -> str:
    """Return a screen with the lines that are printed now."""
    kept, lines = [], printed.splitlines()
    for piece in shown.split("...\n"):
        old = piece.splitlines()
        if old:
            first = nearest(old[0], lines, 0)
            last = first + nearest(old[-1], lines[first:], len(old) - 1)
            kept.append("".join(f"{line}\n" for line in lines[first : last + 1]))
            lines = lines[last + 1 :]
        else:
            kept.append("")
    return "...\n".join(kept)


def main() -> None:
    """Rewrite the screens of all pages."""
    for page in PAGES:
        with tempfile.TemporaryDirectory() as folder:
            screens = printed_blocks(page, Path(folder)) if page in RUNNING else []
        screens += [(one, SCREENS[name]()) for one in blocks(page) for name in SCREENS if one.mark == f"screen: {name}"]
        text = page.read_text()
        for block, printed in screens:
            text = text.replace(block.text, renewed(block.text, printed))
        page.write_text(text)


if __name__ == "__main__":
    main()
