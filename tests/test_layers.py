"""Imports go one way, and only the packages that need torch or megatron-core import them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "pipette_launch").rglob("*.py"), *(ROOT / "patches").rglob("*.py")])
LONGEST_FUNCTION = 60
FAULTS = (
    ("facts/job.py", "import pipette_launch.search.solve"),
    ("cost/memory/peak.py", "from pipette_launch.probe import run"),
    ("search/solve.py", "def planted():\n    import torch"),
    ("probe/run.py", "import megatron.core"),
    ("launch/terminal.py", "import psutil"),
    ("launch/__init__.py", "from pipette_patches import registry"),
)


def contracts(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on a copy of the product, by the contracts in pyproject.toml."""
    program = (
        "from importlinter.cli import lint_imports_command as run; run(['--no-cache', '--config', 'pyproject.toml'])"
    )
    paths = f"import sys; sys.path[:0] = ['.', 'patches']; {program}"
    return subprocess.run([sys.executable, "-c", paths], cwd=root, capture_output=True, text=True, check=False)


def copied(root: Path) -> Path:
    """Copy sources and contracts into a folder."""
    for path in (*SOURCES, ROOT / "pyproject.toml"):
        place = root / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(path.read_text())
    return root


def test_imports_go_down() -> None:
    """The product keeps every contract."""
    done = contracts(ROOT)

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("path", "line"), FAULTS, ids=[path for path, _ in FAULTS])
def test_a_planted_fault_is_found(tmp_path: Path, path: str, line: str) -> None:
    """An import that goes up, sideways or to a forbidden package breaks a contract, wherever it stands in the file."""
    file = copied(tmp_path) / "pipette_launch" / path
    file.write_text(f"{file.read_text()}\n\n{line}\n")

    done = contracts(tmp_path)

    assert done.returncode == 1
    assert "BROKEN" in done.stdout


def test_packages_are_listed() -> None:
    """setup.cfg lists every package by hand, as setuptools' own search leaves pipette_patches out."""
    names = {
        ".".join(path.parent.relative_to(ROOT).parts).removeprefix("patches.")
        for path in SOURCES
        if path.name == "__init__.py"
    }
    text = (ROOT / "setup.cfg").read_text().split("packages =")[1].split("package_dir")[0]

    assert names == set(text.split())


def test_no_function_is_too_long() -> None:
    """A function has at most 60 lines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [
        (path, node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)
    ]
    sizes = {f"{path.name} {node.name}": (node.end_lineno or 0) - node.lineno + 1 for path, node in functions}

    assert {} == {name: size for name, size in sizes.items() if size > LONGEST_FUNCTION}
