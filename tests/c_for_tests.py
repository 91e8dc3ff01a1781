"""The inner loops in C, compiled from the sources of the tree."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@functools.cache
def _built() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pipette-c-"))
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--force"]
    folders = ["--build-lib", str(folder), "--build-temp", str(folder / "temp")]
    subprocess.run([*command, *folders], check=True, cwd=ROOT, capture_output=True)
    return folder


def in_c(name: str) -> ModuleType:
    """Compile the sources and return one module; a test that finds no compiler is skipped, as it can tell nothing.

    Args:
        name: below the package, such as `cost.pipeline._longest_path`.

    """
    if not shutil.which("cc"):
        pytest.skip("no C compiler on this machine: the loops in C cannot be compared with numpy's")
    *rooms, last = name.split(".")
    (path,) = _built().joinpath("pipette_launch", *rooms).glob(f"{last}.*")
    spec = importlib.util.spec_from_file_location(last, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
