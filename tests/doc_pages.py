"""The pages that people read: which there are, their links, headings, and fenced blocks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pipette_launch.megatron.flags import newest_release

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "examples" / "README.md"])
_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n\n?)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_END = "-- end of a block --"
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block, and the comment in front of it that says what becomes of it."""

    mark: str
    """What holds it.

    `runs`, `prints` (by the block before, with `...` for lines that are left out), `screen: NAME` of test_screens.py,
    or `not run: REASON`.
    """
    language: str
    text: str


def name_of(page: Path) -> str:
    """Return the path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    found = _FENCE.finditer(page.read_text())
    return [Block(mark=one["mark"] or "", language=one["language"], text=one["text"]) for one in found]


def links(page: Path) -> list[str]:
    """Return the targets of all links of a page outside of fenced blocks that lead to no other server."""
    prose = _FENCE.sub("", page.read_text())
    return [target for target in _LINK.findall(prose) if not re.match(r"\w+:", target)]


def anchors(page: Path) -> set[str]:
    """Return what links may name behind # of a page, as GitHub makes it of its headings."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def run_shell(text: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run the lines of blocks in one shell, which ends at the first that fails; returns what they print."""
    done = subprocess.run(
        ["/bin/bash", "-c", f"set -euo pipefail\n{text}"],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=120,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def lacks(printed: str, shown: str) -> str:
    """Return the first lines of a screen that are not printed in this order, or nothing; `...` stands for any lines."""
    rest = f"\n{printed}"
    for piece in filter(None, re.split(r"^ *\.\.\.\n", shown, flags=re.MULTILINE)):
        _, found, rest = rest.partition(f"\n{piece}")
        if not found:
            return f"{piece}\nis not in\n{printed}"
        rest = f"\n{rest}"
    return ""


def printed_blocks(page: Path, folder: Path) -> list[tuple[Block, str]]:
    """Run the marked commands of a page in one shell; returns each screen with all that its commands printed."""
    for name in ("examples", "docs"):
        (folder / name).symlink_to(ROOT / name)
    # Readers without Megatron get the answers of the newest known release, whatever is installed here.
    (folder / "megatron" / "core").mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), (*newest_release().split("."), "0"), strict=True)
    text = "".join(f"{name} = {number}\n" for name, number in numbers)
    (folder / "megatron" / "core" / "package_info.py").write_text(text)
    all_blocks = blocks(page)
    running = [block for block in all_blocks if block.mark == "runs"]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "1",
    }
    printed = iter(
        run_shell(f"echo '{_END}'\n".join(block.text for block in running), folder, environment).split(f"{_END}\n")
    )
    output = {id(block): text for block, text in zip(running, printed, strict=True)}
    return [(block, output[id(before)]) for before, block in pairwise(all_blocks) if block.mark == "prints"]
