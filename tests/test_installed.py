"""Tests of the messages for missing packages."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

from pipette_launch.errors import PipetteError
from pipette_launch.installed import MODULES, check_installed

ROOT = Path(__file__).parent.parent


def test_the_packages_are_those_of_the_requirements() -> None:
    """The extra `train` lists them and megatron-core, which a checkout can replace."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    listed = settings["options.extras_require"]["train"].split()

    assert {*MODULES, "megatron-core"} == {one.partition(">")[0] for one in listed}


def test_what_may_be_missing_is_no_error_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another package is missing, both are named."""
    monkeypatch.setitem(sys.modules, "torch", None)
    check_installed(but=frozenset({"torch"}))
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(PipetteError, match="not installed: psutil, torch; pip install psutil torch"):
        check_installed(but=frozenset({"torch"}))


@pytest.mark.parametrize("words", [["--nproc-per-node", "2", "train.py"], ["--help"]], ids=["job", "help"])
@pytest.mark.parametrize("missing", ["torch", "torch,psutil"])
@pytest.mark.parametrize(
    "start",
    ["runpy.run_module('pipette_launch', run_name='__main__')", "from pipette_launch import cli; cli.main()"],
    ids=["python -m", "command"],
)
def test_the_launcher_says_what_is_missing(start: str, missing: str, words: list[str]) -> None:
    """One sentence has the command that installs it, the exit code is 1, and there is no traceback."""
    code = f"import runpy, sys; sys.modules.update(dict.fromkeys({missing.split(',')})); {start}"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    names = sorted(missing.split(","))

    assert (1, "") == (done.returncode, done.stdout)
    assert done.stderr == (
        f"pipette-launch: error: pipette-launch needs packages that are not installed: {', '.join(names)}; "
        f"pip install {' '.join(names)} (docs/start.md, Install: choose the build of torch)\n"
    )
