"""The wheel holds both packages and their data, and works with the sources gone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from megatron_lines import SMALL

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy of the sources so that nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("build")
    sources = folder / "sources"
    names = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "__pycache__", "build", "dist", ".*_cache")
    shutil.copytree(ROOT, sources, ignore=names)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(sources)], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_what_it_should(wheel: Path) -> None:
    """Every module of both packages, their data and type markers; no tests, no generic top-level name."""
    names = zipfile.ZipFile(wheel).namelist()
    modules = {
        str(path.relative_to(base))
        for base, package in ((ROOT, "pipette_launch"), (ROOT / "patches", "pipette_patches"))
        for path in (base / package).rglob("*.py")
    }

    assert set() == modules - set(names)
    assert {"pipette_launch", "pipette_patches"} == {name.split("/")[0] for name in names if ".dist-info" not in name}
    for data in ("pipette_launch/py.typed", "pipette_patches/py.typed", "pipette_launch/megatron/data/flags.json"):
        assert data in names


def test_the_wheel_runs_without_the_sources(wheel: Path, tmp_path: Path) -> None:
    """Installed elsewhere and started from elsewhere, the launcher runs a script, and a prediction needs none."""
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*install, str(wheel)], check=True)
    script = tmp_path / "script.py"
    script.write_text("import pipette_launch, pipette_patches\nprint('from', pipette_launch.__file__)\n")
    environment = {**os.environ, "PYTHONPATH": str(target), "XDG_CACHE_HOME": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, str(target / "bin" / "pipette-launch"), "--nproc-per-node=1", str(script)],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )

    assert 0 == done.returncode, done.stderr
    assert f"from {target}" in done.stdout

    foretold = subprocess.run(
        [sys.executable, str(target / "bin" / "pipette"), "predict", "--world-size=8", "--gpu=H100", "gpt.py", *SMALL],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )

    assert 0 == foretold.returncode, foretold.stderr
    assert "It fits" in foretold.stdout
