"""The worked examples of docs/extending.md can be followed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from doc_pages import ROOT, blocks, run_shell

PAGE = ROOT / "docs" / "extending.md"


def test_each_patch_applies_and_its_command_runs(tmp_path: Path) -> None:
    """In a copy of the sources, one after the other: two kinds of change, each used by the command below it."""
    for folder in ("pipette_launch", "patches", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    pipette = tmp_path / "bin" / "pipette"
    pipette.parent.mkdir()
    pipette.write_text(f"#!{sys.executable}\nfrom pipette_launch.cli.pipette import main\nmain()\n")
    pipette.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{pipette.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path}:{tmp_path / 'patches'}",
        "GIT_CEILING_DIRECTORIES": str(tmp_path.parent),
    }
    steps = [block for block in blocks(PAGE) if block.mark in ("applies", "runs")]
    assert ["applies", "runs"] * 2 == [block.mark for block in steps]

    shell = ""
    for block in steps:
        # A heredoc of its own for each patch keeps one shell, so that a later command knows the variables before it.
        shell += f"git apply -p0 - <<'PATCH'\n{block.text}PATCH\n" if block.mark == "applies" else block.text
    printed = run_shell(shell, tmp_path, environment)

    assert "RTX-A5000" in printed
