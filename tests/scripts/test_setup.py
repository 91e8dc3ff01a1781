"""The README's two commands install what they need, once, and mend what an earlier run left."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT

TOOLS = ("bash", "cat", "chmod", "cksum", "cp", "dirname", "env", "flock", "grep", "ln", "mkdir", "rm", "touch")
INTERPRETER = f"""#!/bin/bash
case "$*" in
    *"-m venv "*) echo venv >>steps; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *"-m pip install"*)
        echo "pip ${{@: -1}}" >>steps
        [ ! -e offline ] || exit 1
        for command in pipette-launch ruff mypy; do
            printf '#!/bin/bash\\necho %s sees GPUs: $CUDA_VISIBLE_DEVICES\\n' $command >.venv/bin/$command
            chmod +x .venv/bin/$command
        done ;;
    *"-m compileall"*) ;;
    *"-m pytest"*) echo "pytest ${{@: -1}}" ;;
    *ensurepip*) [ -z "${{WITHOUT_ENSUREPIP:-}}" ] ;;
    -V) echo "Python 3.9.18" ;;
    *"<= sys.version_info"*) [ -z "${{TOO_OLD:-}}" ] ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
"""Stands in for python3 and for .venv/bin/python: it notes what is made and installed, and installs three commands."""


class Clone:
    """A clone without an environment, on a machine whose user is not root."""

    def __init__(self, folder: Path) -> None:
        """Copy what the scripts read; the folder's name has a space."""
        self.folder = folder / "a clone"
        self.folder.mkdir()
        for name in ("pyproject.toml", "setup.cfg", "setup.py", "constraints.txt"):
            shutil.copy(ROOT / name, self.folder)
        for name in ("scripts", ".ci"):
            shutil.copytree(ROOT / name, self.folder / name)
        for loop in (ROOT / "pipette_launch").glob("*/*/*.c"):
            copy = self.folder / loop.relative_to(ROOT)
            copy.parent.mkdir(parents=True)
            shutil.copy(loop, copy)
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        self._command("python3", INTERPRETER)
        self._command("id", "#!/bin/bash\necho 1000\n")

    def _command(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a script of the clone from another folder."""
        return subprocess.run(
            [self.folder / words[0], *words[1:]],
            check=False,
            capture_output=True,
            text=True,
            cwd="/",
            env={"PATH": str(self.bin), "HOME": str(self.folder), **environment},
            timeout=60,
        )

    def steps(self) -> list[str]:
        """Return what was made and installed since the last look."""
        noted = self.folder / "steps"
        steps = noted.read_text().splitlines() if noted.exists() else []
        noted.unlink(missing_ok=True)
        return steps


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    """A fresh one."""
    return Clone(tmp_path)


def test_the_readme_names_both_commands() -> None:
    """It names scripts/smoke and scripts/test, and CI runs the second."""
    readme = (ROOT / "README.md").read_text()

    assert all(f"`{command}`" in readme for command in ("scripts/smoke", "scripts/test"))
    assert "/scripts/test" in (ROOT / ".ci" / "run").read_text()


def test_training_installs_no_tool_of_the_tests(clone: Clone) -> None:
    """`scripts/smoke` installs the package alone and starts the launcher; a second time it only starts the launcher."""
    first = clone.run("scripts/smoke")
    assert (0, "pipette-launch sees GPUs:") == (first.returncode, first.stdout.splitlines()[-1]), first.stderr
    assert ["venv", "pip .[train]"] == clone.steps()

    again = clone.run("scripts/smoke")
    assert "pipette-launch sees GPUs:\n" == again.stdout
    assert [] == clone.steps()


def test_training_runs_on_cpus_beside_a_gpu(clone: Clone) -> None:
    """Four processes on a machine with one GPU would end in an error."""
    assert "pipette-launch sees GPUs:" == clone.run("scripts/smoke", CUDA_VISIBLE_DEVICES="0").stdout.splitlines()[-1]


def test_tests_install_what_they_need(clone: Clone) -> None:
    """From nothing: packages once, and a sentence for each command that is missing and cannot be installed."""
    done = clone.run("scripts/test", "tests/cost")
    assert (0, "pytest tests/cost") == (done.returncode, done.stdout.splitlines()[-1]), done.stderr
    assert ["venv", "pip .[train,test,docs]"] == clone.steps()
    for command in ("ip", "chromium", "zsh", "tcsh", "slurmctld"):
        assert f"{command} is not installed: tests on " in done.stdout


def test_tests_complete_the_environment_of_training(clone: Clone) -> None:
    """One environment serves both, in either order."""
    clone.run("scripts/setup")
    clone.run("scripts/setup", "test")
    clone.run("scripts/setup")

    assert ["venv", "pip .[train]", "pip .[train,test,docs]"] == clone.steps()


@pytest.mark.parametrize("changed", ["constraints.txt", "setup.cfg", "pipette_launch/search/assignment/_swaps.c"])
def test_other_requirements_are_installed(clone: Clone, changed: str) -> None:
    """After a pull that changed releases, requirements or a loop in C, the same environment is brought up to date."""
    clone.run("scripts/setup")
    (clone.folder / changed).write_text("other")
    clone.run("scripts/setup")

    assert ["venv", "pip .[train]", "pip .[train]"] == clone.steps()


def test_an_interrupted_environment_is_made_anew(clone: Clone) -> None:
    """The failure is one sentence, and nothing of the unfinished environment is kept."""
    (clone.folder / "offline").touch()
    failed = clone.run("scripts/smoke")
    assert (1, "scripts/setup: pip could not install the packages, see above; run this again\n") == (
        failed.returncode,
        failed.stderr,
    )
    rest = clone.folder / ".venv" / "half-installed"
    rest.touch()
    (clone.folder / "offline").unlink()
    assert 0 == clone.run("scripts/smoke").returncode

    assert ["venv", "pip .[train]"] * 2 == clone.steps()
    assert not rest.exists()


def test_a_moved_environment_is_made_anew(clone: Clone) -> None:
    """Its commands would start the interpreter, and a copy's the sources, of the folder where it was made."""
    clone.run("scripts/setup")
    clone.folder = clone.folder.rename(clone.folder.parent / "moved")
    clone.run("scripts/setup")

    assert ["venv", "pip .[train]"] * 2 == clone.steps()


def test_an_environment_whose_interpreter_is_gone_is_made_anew(clone: Clone) -> None:
    """An upgrade of the system's Python leaves a link to nothing."""
    clone.run("scripts/setup")
    python = clone.folder / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/no/such/python3")
    done = clone.run("scripts/setup")

    assert 0 == done.returncode, done.stderr
    assert ["venv", "pip .[train]"] * 2 == clone.steps()


def test_an_environment_of_the_users_own_is_completed(clone: Clone) -> None:
    """Nothing that setup did not make is removed."""
    own = clone.folder / ".venv" / "own"
    (own.parent / "bin").mkdir(parents=True)
    own.touch()
    shutil.copy(clone.bin / "python3", own.parent / "bin" / "python")
    clone.run("scripts/setup")

    assert ["pip .[train]"] == clone.steps()
    assert own.exists()


@pytest.mark.parametrize(
    ("machine", "sentence"),
    [
        ({"TOO_OLD": "1", "PYTHON": "python3"}, "needs Python 3.10 to 3.13, and python3 is Python 3.9.18; install one"),
        ({"PYTHON": "/no/such/python"}, "needs Python 3.10 to 3.13, and /no/such/python is missing; install one"),
        ({"WITHOUT_ENSUREPIP": "1"}, "python3 lacks the module ensurepip; install it (on Debian and Ubuntu: python3."),
    ],
    ids=["old", "missing", "without-ensurepip"],
)
def test_an_unsuitable_python_ends_in_a_sentence(clone: Clone, machine: dict[str, str], sentence: str) -> None:
    """Nothing is made, and the sentence names the interpreter and the way out."""
    done = clone.run("scripts/smoke", **machine)

    assert 1 == done.returncode
    assert sentence in done.stderr
    assert [] == clone.steps()
