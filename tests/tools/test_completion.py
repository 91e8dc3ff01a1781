"""`pipette completion` prints what a shell reads."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipette_launch.tools.completion import SHELLS
from pipette_launch.tools.main import main

BASH = shutil.which("bash") or "bash"


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `pipette completion SHELL` prints."""
    with pytest.raises(SystemExit) as caught:
        main(["completion", shell])
    out, err = capsys.readouterr()
    assert (0, "") == (caught.value.code, err)
    return out


def completed(words: str, capsys: pytest.CaptureFixture[str], folder: str = ".") -> set[str]:
    """What bash offers for the last of these words."""
    typed = f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}"
    whole = f"{script('bash', capsys)}\n{typed}\n_shtab_pipette\nprintf '%s\\n' ${{COMPREPLY[@]}}\n"
    return set(subprocess.check_output([BASH, "-c", whole], text=True, cwd=folder).split())


def test_bash_parses_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    """`bash -n` finds no error in it."""
    subprocess.run([BASH, "-n"], check=True, input=script("bash", capsys), text=True)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_the_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its script names a command, and where the shell has completion by command a flag of it."""
    words = script(shell, capsys)

    assert "doctor" in words
    assert shell == "tcsh" or "--memory-margin" in words


def test_bash_completes_commands_flags_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    """The script at work, in bash itself."""
    assert {"plan"} == completed("pipette pla", capsys)
    assert {"--gpu", "--gpus-per-node"} == completed("pipette plan --gpu", capsys)
    assert {"auto"} == completed("pipette doctor --device a", capsys)


def test_bash_completes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan behind `report`, and a measurement behind a flag."""
    for name in ("a.plan.json", "b.cluster.json"):
        (tmp_path / name).touch()

    assert {"a.plan.json"} == completed("pipette report a.", capsys, str(tmp_path))
    assert {"b.cluster.json"} == completed("pipette plan --cluster b", capsys, str(tmp_path))


def test_without_shtab_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is that of what could not be done."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as caught:
        main(["completion", "bash"])
    expected = "pipette completion: error: shtab is not installed; pip install 'pipette-launch[completion]'\n"

    assert 1 == caught.value.code
    assert ("", expected) == capsys.readouterr()
