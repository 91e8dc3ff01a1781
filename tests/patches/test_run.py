"""A patched program runs as `python` itself would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipette_launch.errors import UsageError
from pipette_patches.run import read

ROOT = Path(__file__).parents[2]

SHOWS = """\
import json, sys
if __name__ == "__main__":
    me = sys.modules["__main__"]
    print(json.dumps([sys.argv, sys.path[0], __file__, __package__, __spec__ and __spec__.name, vars(me) is globals()]))
"""
SPAWNS = """\
import multiprocessing, sys, torch
def device(put):
    put.put((__name__, sys.argv[1:], str(torch.zeros(1, device="cuda").device)))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=device, args=(queue,))
    process.start()
    print(queue.get(timeout=60))
    process.join()
"""


def python(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run this Python in a folder, with our packages importable."""
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'patches'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=90, check=False)


PATCHED = ("-m", "pipette_patches.run", "--")


def test_patches_and_program_are_told_apart() -> None:
    """Our flags end where the program begins; the program's own are left alone."""
    program = read(["--patch", "a", "--patch=b", "--", "train.py", "--patch", "c", "-m", "x"])

    assert program.patches == ("a", "b")
    assert (program.name, program.is_module) == ("train.py", False)
    assert program.arguments == ("--patch", "c", "-m", "x")


def test_the_two_dashes_may_be_missing() -> None:
    """A launcher that eats `--` does no harm."""
    program = read(["--patch", "a", "-m", "my.train", "--lr", "1"])

    assert (program.name, program.is_module, program.arguments) == ("my.train", True, ("--lr", "1"))


@pytest.mark.parametrize("argv", [[], ["--patch"], ["--patch", "a"], ["--", "-m"], ["--patches", "a", "x.py"], ["-x"]])
def test_a_command_without_a_program_is_refused(argv: list[str]) -> None:
    """The error names the missing argument, with the usage line."""
    with pytest.raises(UsageError, match=r"usage: python -m pipette_patches\.run"):
        read(argv)


@pytest.mark.parametrize("program", [["sub/shows.py"], ["-m", "sub.shows"], ["-m", "sub"]])
def test_the_program_sees_what_python_shows_it(tmp_path: Path, program: list[str]) -> None:
    """argv, path, file, package and spec equal those of a plain run, for scripts, modules and packages."""
    (tmp_path / "sub").mkdir()
    for name in ("shows.py", "__main__.py"):
        (tmp_path / "sub" / name).write_text(SHOWS)
    plain = python(tmp_path, *program, "--flag", "value")
    patched = python(tmp_path, *PATCHED, *program, "--flag", "value")

    assert plain.stdout
    assert patched.stdout == plain.stdout


@pytest.mark.parametrize("ending", ["sys.exit(7)", "sys.exit('a reason')", "raise ValueError('boo')", "1 +"])
def test_the_program_ends_as_under_python(tmp_path: Path, ending: str) -> None:
    """Exit code, SystemExit's text and the traceback of an exception equal those of a plain run."""
    script = tmp_path / "ends.py"
    script.write_text(f"import sys\n\n\ndef end():\n    {ending}\n\n\nend()\n")
    plain = python(tmp_path, str(script))
    patched = python(tmp_path, *PATCHED, str(script))

    assert (patched.returncode, patched.stderr) == (plain.returncode, plain.stderr)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--patch", "cpu_backnd", "--", "here.py"], 1, "unknown patch 'cpu_backnd'; did you mean cpu_backend?"),
        (["--", "nowhere.py"], 2, "cannot read the script 'nowhere.py': No such file or directory"),
        (["--", "-m", "no.where"], 2, "no module named 'no.where' that python could run"),
    ],
)
def test_our_own_errors_are_one_line(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    """An error in our command line is printed without a traceback."""
    (tmp_path / "here.py").write_text("print('ran')")
    done = python(tmp_path, "-m", "pipette_patches.run", *arguments)

    assert done.returncode == code
    assert done.stderr.startswith(f"pipette_patches.run: {message}")
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


@pytest.mark.processes
def test_spawned_processes_are_patched(tmp_path: Path) -> None:
    """A process that multiprocessing spawns finds the script's names, its argv and the patch."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    done = python(tmp_path, "-m", "pipette_patches.run", "--patch", "cpu_backend", "--", "spawns.py", "--flag")

    assert done.stdout == "('__mp_main__', ['--flag'], 'cpu')\n", done.stderr
