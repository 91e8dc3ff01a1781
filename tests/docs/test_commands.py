"""What the documents tell people to type works, and prints what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, blocks, lacks, name_of, printed_blocks

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
    for block, printed in printed_blocks(page, tmp_path):
        assert "" == lacks(printed, block.text)
