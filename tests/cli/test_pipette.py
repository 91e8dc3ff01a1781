"""Common properties of all subcommands: help texts, names of flags, exit codes, and hints for misspelt words."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements

from pipette_launch.cli import launcher
from pipette_launch.cli.flags import EXAMPLE_ARGS, EXIT_CODES
from pipette_launch.cli.pipette import COMMANDS, command_parsers, main, parser
from pipette_launch.facts import files
from pipette_launch.planning.predict import predict

SAME_EVERYWHERE = {
    "--nodes": {"--nodes", "--nnodes", "--hosts"},
    "--gpus-per-node": {"--gpus-per-node", "--nproc-per-node", "--nproc_per_node"},
}
QUICK = "--budget 0.2 --fix cp,ep,vpp,order,overlap,recompute,mbs"


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int | str | None, str, str]:
    """Return exit code, stdout and stderr of `pipette WORDS`."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_ends_with_examples_and_exit_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A help text has at least two examples and lists the exit codes."""
    code, out, _ = answer([name, "--help"], capsys)

    assert 0 == code
    assert 2 <= out.partition("examples:")[2].count(f"  pipette {name}")
    assert f"exit codes: {COMMANDS[name].exit_codes}\n" in out


@pytest.mark.parametrize("name", [name for name in COMMANDS if "$ARGS" in "".join(COMMANDS[name].examples)])
def test_a_shell_reads_the_flags_of_a_help_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of `ARGS='...'` in a help text give the flags of a job that fits on the machines of the examples."""
    assignment = re.search(r"ARGS='[^']*'", answer([name, "--help"], capsys)[1])
    assert assignment
    words = subprocess.check_output(["/bin/bash", "-c", f"{assignment[0]}; echo $ARGS"], text=True).split()

    assert "fits" == predict(words, gpu="H100", nodes=2).verdict


def test_alone_it_lists_all_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Stderr lists the commands; the exit code is argparse's for a missing command."""
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = answer([], capsys)

    assert (2, "") == (code, out)
    assert [] == [
        name for name, one in COMMANDS.items() if not re.search(rf"^ +{name}\s+{one.summary}$", err, re.MULTILINE)
    ]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("probe", "doctor", "watch")])
def test_the_examples_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every example of a help text exits with 0, if its files exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ARGS", EXAMPLE_ARGS)
    plan_words = f"plan --gpu h100 --nodes 1 --megatron-version 0.16.1 {QUICK} --out a.plan.json p.py {EXAMPLE_ARGS}"
    assert 0 == answer(plan_words.split(), capsys)[0]
    (tmp_path / "b.plan.json").write_text((tmp_path / "a.plan.json").read_text())
    files.write(tmp_path / "cluster.json", tiny_measurements(tiny_cluster(1, 8, memory_bytes=80 << 30)))
    for line in COMMANDS[name].examples:
        words = shlex.split(os.path.expandvars(line), comments=True)[1:]
        if name == "plan" and "--cluster" not in words:
            words[1:1] = QUICK.split() if "--fix" not in words else ["--budget", "0.2"]
        code, out, err = answer(words, capsys)

        assert (0, "") == (code, err), line
        assert out, line


@pytest.mark.parametrize("line", COMMANDS["probe"].examples)
def test_the_examples_of_probe_are_read(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """pipette-launch parses the examples; nothing is measured."""
    monkeypatch.setenv("ARGS", EXAMPLE_ARGS)
    words = shlex.split(os.path.expandvars(line), comments=True)[2:]
    words = words[2:] if words[0] == "--out" else words
    args = launcher.parser().parse_args(words)

    assert "pretrain_gpt.py" == args.training_script
    assert EXAMPLE_ARGS.split() == args.training_script_args


@pytest.mark.parametrize("line", COMMANDS["watch"].examples)
def test_the_examples_of_watch_are_read(line: str) -> None:
    """The examples are parsed; there is no running job to show."""
    args = parser().parse_args(line.split()[1:])

    assert args.once or args.json


@pytest.mark.parametrize("line", COMMANDS["doctor"].examples)
def test_the_examples_of_doctor_are_answered(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code depends on this machine."""
    code, out, err = answer(line.split()[1:], capsys)

    assert code in (0, 1)
    assert "" == err
    assert out


def test_the_same_things_have_the_same_names() -> None:
    """A command that counts nodes or devices accepts our spellings and torchrun's."""
    for name, one in command_parsers(parser()).items():
        flags = {flag for action in one._actions for flag in action.option_strings}
        for ours, spellings in SAME_EVERYWHERE.items():
            assert not flags & spellings or spellings <= flags, (name, ours)
        assert name in ("probe", "order", "completion") or "--json" in flags


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("plna --gpu h100", "pipette COMMAND: error: unknown command plna; did you mean plan?"),
        ("xyz", "unknown command xyz; commands are predict, plan,"),
        ("plan --gpuu h100 --nodes 1 p.py", "pipette plan: error: unknown flag --gpuu; did you mean --gpu?"),
        ("predict --gpu-per-node=4 p.py", "unknown flag --gpu-per-node; did you mean --gpus-per-node?"),
        ("report --jsno", "unknown flag --jsno; did you mean --json?"),
        ("doctor --q", "unknown flag --q; see pipette doctor --help"),
        ("predict --gpu h100-smx --nodes 1 p.py --bf16", "did you mean H100-SXM, H800-SXM, H200?"),
        ("predict --gpu h100 --fabric fat-tre-2:1 --nodes 1 p.py --bf16", "did you mean fat-tree-2:1?"),
    ],
)
def test_misspelt_words_get_their_nearest(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Hints exist for commands, flags, devices and fabrics; the exit code is 2."""
    code, out, err = answer(words.split(), capsys)

    assert (2, "") == (code, out)
    assert complaint in err


def test_flags_of_the_script_are_no_flags_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """Words after the script's name are never ours."""
    words = f"predict --world-size 8 p.py {EXAMPLE_ARGS} --gpuu 1"

    assert 0 == answer(words.split(), capsys)[0]


def test_help_waits_for_nothing_heavy() -> None:
    """A help text imports neither numpy nor torch nor rich."""
    code = (
        "import sys\nfrom pipette_launch.cli.pipette import main\n"
        "try:\n    main(['plan', '--help'])\n"
        "except SystemExit:\n    print({'numpy', 'torch', 'rich', 'shtab'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert shown.endswith("set()\n")
    assert "1 it found no answer" in EXIT_CODES
