"""The wheel holds both packages and their data, and works with the sources gone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from megatron_lines import SMALL

import pipette_launch

ROOT = Path(__file__).parent.parent
USER = """
from pipette_launch import {names}

def cost(words: list[str]) -> float:
    prediction: Prediction = predict(words, gpu="h100-sxm", nodes=2)
    reveal_type(prediction.step_time_s)
    try:
        found: Plan = plan(words, gpu="h100-sxm", nodes=2)
        reveal_type(found.chosen.layout.tp)
        return found.chosen.step_time_s
    except PlanError as error:
        wrong: PipetteError = error
        raise wrong from reveal_type(error)
"""


def sources(folder: Path) -> Path:
    """A copy of the sources, so that nothing is left in the tree."""
    names = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "__pycache__", "build", "dist", ".*_cache", "*.so")
    return Path(shutil.copytree(ROOT, folder / "sources", ignore=names))


def built(folder: Path, source: Path, **environment: str) -> Path:
    """A wheel of a folder or of an archive."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, env={**os.environ, **environment})
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, as this machine builds it."""
    folder = tmp_path_factory.mktemp("build")
    return built(folder, sources(folder))


def test_without_a_compiler_there_is_still_a_wheel(tmp_path: Path) -> None:
    """It holds nothing compiled, and the planner falls back on numpy."""
    names = zipfile.ZipFile(built(tmp_path, sources(tmp_path), CC="/bin/false")).namelist()

    assert not [name for name in names if name.endswith(".so")]
    assert "pipette_launch/cost/pipeline/engine.py" in names


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler on this machine")
def test_with_a_compiler_the_loops_in_c_are_in_the_wheel(wheel: Path) -> None:
    """Both of them, below the package, and without the path of the building machine."""
    loops = {name: zipfile.ZipFile(wheel).read(name) for name in zipfile.ZipFile(wheel).namelist() if ".so" in name}
    names = sorted(name.split(".")[0] for name in loops)

    assert ["pipette_launch/cost/pipeline/_longest_path", "pipette_launch/search/assignment/_swaps"] == names
    assert not [name for name, code in loops.items() if str(wheel.parent).encode() in code]


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


def test_the_source_archive_is_complete(wheel: Path, tmp_path: Path) -> None:
    """It holds documents and examples but no tests, and a wheel built from it holds the same files."""
    code = f"from setuptools.build_meta import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=sources(tmp_path), capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    (again := tmp_path / "again").mkdir()

    assert {"docs/start.md", "docs/pictures", "examples/pretrain_gpt.py", "examples/slurm", "Containerfile"} <= names
    assert not [name for name in names if name.startswith("tests/test")]
    assert zipfile.ZipFile(wheel).namelist() == zipfile.ZipFile(built(again, archive)).namelist()


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True)
    return python


def test_users_get_types(python: Path, tmp_path: Path) -> None:
    """In a user's own file, mypy knows all functions, results and errors of the installed package."""
    names = ", ".join(sorted({*pipette_launch.__all__} - {"__version__"}))
    (tmp_path / "user.py").write_text(USER.format(names=names))
    command = ["mypy", "--strict", "--disallow-any-expr", "--python-executable", str(python), "user.py"]
    done = subprocess.run([sys.executable, "-m", *command], check=False, capture_output=True, text=True, cwd=tmp_path)

    assert 0 == done.returncode, done.stdout
    assert ["float | None", "int", "pipette_launch.errors.PlanError"] == re.findall(
        r'Revealed type is "(?:builtins\.)?(.*)"', done.stdout
    )


def test_the_wheel_runs_without_the_sources(python: Path, tmp_path: Path) -> None:
    """Installed elsewhere and started from elsewhere, the launcher runs a script, and a prediction needs none."""
    (target,) = (python.parents[1] / "lib").glob("python3*/site-packages")
    script = tmp_path / "script.py"
    script.write_text("import pipette_launch, pipette_patches\nprint('from', pipette_launch.__file__)\n")
    environment = {**os.environ, "PYTHONPATH": str(target), "XDG_CACHE_HOME": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, str(python.with_name("pipette-launch")), "--nproc-per-node=1", str(script)],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )

    assert 0 == done.returncode, done.stderr
    assert f"from {target}" in done.stdout

    foretold = subprocess.run(
        [sys.executable, str(python.with_name("pipette")), "predict", "--world-size=8", "--gpu=H100", "gpt.py", *SMALL],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )

    assert 0 == foretold.returncode, foretold.stderr
    assert "It fits" in foretold.stdout
