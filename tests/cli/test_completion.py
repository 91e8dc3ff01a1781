"""`pipette completion` prints a script for the shell."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from pipette_launch.cli.pipette import SHELLS, main

BASH = shutil.which("bash") or "bash"


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of `pipette completion SHELL`."""
    with pytest.raises(SystemExit) as caught:
        main(["completion", shell])
    out, err = capsys.readouterr()
    assert (0, "") == (caught.value.code, err)
    return out


def completed(words: str, capsys: pytest.CaptureFixture[str], folder: str = ".") -> set[str]:
    """Return bash's offers for the last of these words."""
    typed = f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}"
    whole = f"{script('bash', capsys)}\n{typed}\n_shtab_pipette\nprintf '%s\\n' ${{COMPREPLY[@]}}\n"
    return set(subprocess.check_output([BASH, "-c", whole], text=True, cwd=folder).split())


def test_bash_parses_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    """`bash -n` finds no error in it."""
    subprocess.run([BASH, "-n"], check=True, input=script("bash", capsys), text=True)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_the_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script names a command and, for shells that complete by command, one of its flags."""
    words = script(shell, capsys)

    assert "doctor" in words
    assert shell == "tcsh" or "--memory-margin" in words


def test_bash_completes_commands_flags_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    """Bash itself runs the script."""
    assert {"plan"} == completed("pipette pla", capsys)
    assert {"--gpu", "--gpus-per-node"} == completed("pipette plan --gpu", capsys)
    assert {"auto"} == completed("pipette doctor --device a", capsys)


def test_bash_completes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files are offered after `report`, after a flag with a file, and after --gpu, which also takes names."""
    for name in ("a.plan.json", "b.cluster.json"):
        (tmp_path / name).touch()

    assert {"a.plan.json"} == completed("pipette report a.", capsys, str(tmp_path))
    assert {"b.cluster.json"} == completed("pipette plan --cluster b", capsys, str(tmp_path))
    assert {"a.plan.json"} == completed("pipette predict --gpu a", capsys, str(tmp_path))


def keyed(argv: list[str], lines: list[str], keys: str, expected: str, folder: Path) -> str:
    """Type lines and keys into a shell on a terminal; return its output up to the expected text."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        # tcsh completes only on a terminal of some kind; on none zsh writes no control characters between the letters.
        os.execvpe(argv[0], argv, {**os.environ, "TERM": "dumb" if argv[0] == "zsh" else "vt100", "LC_ALL": "C"})  # noqa: S606
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))

    def shown(end: str) -> str:
        text, deadline_s = "", time.monotonic() + 15
        while end not in text and select.select([terminal], [], [], max(deadline_s - time.monotonic(), 0))[0]:
            text += os.read(terminal, 1 << 16).decode(errors="replace")
        return text

    try:
        os.write(terminal, "\n".join([*lines, "echo rea''dy", ""]).encode())
        before = shown("\nready")
        os.write(terminal, keys.encode())
        return before + shown(expected)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


ZSH_COMPLETION = "autoload -Uz compinit && compinit -u -D"
WAYS = {
    "zsh-eval": ("zsh -f -i", [ZSH_COMPLETION, 'eval "$(cat ./_pipette)"']),
    "zsh-source": ("zsh -f -i", [ZSH_COMPLETION, "source ./_pipette"]),
    "zsh-fpath": ("zsh -f -i", ["fpath=($PWD $fpath)", ZSH_COMPLETION]),
    "tcsh-source": ("tcsh -f", ["source ./_pipette"]),
}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("pipette pla", "pipette plan "),
        ("pipette doctor --device a", "--device auto "),
        ("pipette plan --cluster b", "--cluster b.cluster.json "),
        ("pipette report a.", "report a.plan.json "),
        ("pipette plan --gpu H100 --nodes 1 tr", "--nodes 1 train.py "),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_other_shells_complete(
    way: str, keys: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scripts work evaluated, sourced, and in zsh's folder of functions."""
    argv, lines = WAYS[way][0].split(), WAYS[way][1]
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    for name in ("a.plan.json", "b.cluster.json", "train.py"):
        (tmp_path / name).touch()
    (tmp_path / "_pipette").write_text(script(argv[0], capsys))

    shown = keyed(argv, lines, f"{keys}\t", expected, tmp_path)

    assert expected in shown
    assert "only be called" not in shown


def test_without_shtab_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1: the work failed."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as caught:
        main(["completion", "bash"])
    expected = "pipette completion: error: shtab is not installed; pip install shtab\n"

    assert 1 == caught.value.code
    assert ("", expected) == capsys.readouterr()
