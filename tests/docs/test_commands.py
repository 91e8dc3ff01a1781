"""What the documents tell people to type works, and prints what they show."""

from __future__ import annotations

import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, blocks, name_of, run_shell

_END = "-- end of a block --"
APART = ROOT / "docs" / "extending.md"  # whose commands need its patches: tests/docs/test_extending.py
RUNNING = [page for page in PAGES if page != APART and any(block.mark == "runs" for block in blocks(page))]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_is_marked(page: Path) -> None:
    """Each bash block says by a comment in front of it that a test runs it, or why none does."""
    for block in blocks(page):
        if block.language in {"bash", "sh"}:
            assert re.fullmatch(r"runs|not run: \w.*", block.mark), block.text
        else:
            assert not re.match(r"(python|torchrun|srun|sbatch|scripts/|cd )", block.text), "a command without `bash`"
        if block.mark == "prints":
            assert block.language == ""


def test_many_pages_have_commands_that_run() -> None:
    """A mark that is misspelt, or is no longer found, cannot pass as a page without commands."""
    assert {"README.md", "docs/start.md", "docs/tutorial.md", "docs/planning.md"} <= {name_of(one) for one in RUNNING}


@pytest.mark.parametrize("page", RUNNING, ids=name_of)
def test_commands_run_and_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    """The blocks of a page that are marked run one after the other in one shell, as a reader would type them."""
    for folder in ("examples", "docs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    all_blocks = blocks(page)
    running = [block for block in all_blocks if block.mark == "runs"]
    shell = f"echo '{_END}'\n".join(block.text for block in running)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "1",
    }
    printed = iter(run_shell(shell, tmp_path, environment).split(f"{_END}\n"))
    output = {id(block): text for block, text in zip(running, printed, strict=True)}
    for before, block in pairwise(all_blocks):
        if block.mark == "prints":
            for piece in re.split(r"^ *\.\.\.\n", block.text, flags=re.MULTILINE):
                assert piece in output[id(before)]
