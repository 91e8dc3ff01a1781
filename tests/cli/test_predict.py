"""`pipette predict`: from a command line to answers, exit codes and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements
from megatron_lines import TEXT

from pipette_launch.cli.pipette import COMMANDS, main, parser
from pipette_launch.facts import files
from pipette_launch.facts.prediction import Prediction

JOB = f"--megatron-version 0.16.1 pretrain_gpt.py {TEXT} --pipeline-model-parallel-size 4"
LAUNCHED = JOB.replace(" pretrain_gpt.py", " torchrun --nnodes 2 --nproc_per_node 4 pretrain_gpt.py")


def answer(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int | str | None, str, str]:
    """Return exit code, stdout and stderr of `pipette predict WORDS`."""
    with pytest.raises(SystemExit) as caught:
        main(["predict", *words.split()])
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"--gpu H100 --world-size 8 {JOB}", "It fits: stage 0, the fullest,"),
        (f"--gpu H100 --nodes 1 --nproc-per-node 8 {JOB}", "8 ranks on 1 host x 8 H100-SXM"),
        (f"--gpu H100 --nnodes=1 --nproc_per_node=8 {JOB}", "8 ranks on 1 host x 8 H100-SXM"),
        (f"--world-size 8 {JOB}", "Memory only: stage 0, the fullest, needs"),
        (f"--world-size 8 --stage 3 {JOB}", "Memory only: the stage shown needs"),
        (f"--world-size 8 --rank 7 {JOB}", "Rank 7 is pp 3, dp 1, cp 0, tp 0."),
        (f"--world-size 8 --device cpu {JOB}", "8 ranks on CPUs of unknown type"),
        (f"--gpu H100 --world-size 8 -m {JOB}", "pretrain_gpt.py: "),
        (f"--gpu H100 {LAUNCHED}", "8 ranks on 2 hosts x 4 H100-SXM"),
        (f"--gpu H100 --nodes 2 {LAUNCHED}", "8 ranks on 2 hosts x 4 H100-SXM"),
        (LAUNCHED, "Memory only: stage 0, the fullest, needs"),
        (
            f"--gpu L40S --world-size 8 {JOB} --hidden-size 16384 --micro-batch-size 8 --seq-length 32",
            "It does not fit",
        ),
    ],
)
def test_answers(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every answer exits with 0 and prints nothing to stderr."""
    code, out, err = answer(words, capsys)

    assert (0, "") == (code, err)
    assert expected in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (JOB, "--world-size is missing: give this number, or the number of hosts"),
        (
            f"--nodes 1 {LAUNCHED}",
            "--nodes 1 contradicts torchrun --nnodes 2 in the launch line; remove or correct one",
        ),
        (f"--world-size 16 {LAUNCHED}", "--world-size 16 does not agree with 2 hosts and 4 devices per host"),
        ("--gpu H100 bash run.sh", "bash run.sh: shell scripts are not read"),
        (f"--world-size 0 {JOB}", "--world-size must be at least 1, got 0"),
        (f"--world-size many {JOB}", "argument --world-size: invalid int value: 'many'"),
        (f"--world-size 6 {JOB}", "--pipeline-model-parallel-size 4 needs a multiple of 4 ranks, but the job has 6"),
        (f"--world-size 8 --gpu H1OO {JOB}", "unknown device 'H1OO'"),
        (f"--gpu H100 --cluster c.json {JOB}", "not allowed with argument --gpu"),
        (f"--world-size 8 --rank 8 {JOB}", "--rank must be between 0 and 7, got 8"),
        (f"--world-size 8 --rank 1 --stage 1 {JOB}", "not allowed with argument"),
        (
            f"--world-size 8 --memory-margin 8 {JOB}",
            "--memory-margin must be at least 0 and below 1 (0.08 is 8 %), got 8",
        ),
        (
            f"--world-size 8 --num-layers 2 {JOB}",
            "unknown flag --num-layers; see pipette predict --help; the script's own flags follow",
        ),
        ("--world-size 8", "the following arguments are required: SCRIPT"),
        ("--world-size 8 pretrain_gpt.py", "the command line lacks --num-layers"),
        (f"--world-size 8 {JOB} --attention-backend warp", "--attention-backend warp: unknown value 'warp'"),
        (f"--world-size 8 {JOB} --num-layers -2", "--num-layers -2"),
        (f"--cluster nowhere.json {JOB}", "nowhere.json: cannot be read"),
    ],
)
def test_complaints(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad input exits with 2 and prints one line to stderr and nothing to stdout."""
    code, out, err = answer(words, capsys)

    assert (2, "") == (code, out)
    assert complaint in err
    assert err.splitlines()[-1].startswith("pipette predict: error: ")


def test_a_cluster_of_another_size_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the file, its size and the given size."""
    path = tmp_path / "cluster.json"
    files.write(path, tiny_measurements(tiny_cluster(1, 4)))
    code, _, err = answer(f"--cluster {path} --world-size 8 {JOB}", capsys)

    assert 2 == code
    assert f"{path} has 1 host x 4 devices = 4 ranks, but the job has 8 ranks" in err


def test_json_is_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    """The document has kind, version and `fits`, and can be read back."""
    code, out, _ = answer(f"--json --gpu H100 --world-size 8 {JOB}", capsys)
    plain = json.loads(out)

    assert (0, "prediction", 2, True) == (code, plain["kind"], plain["schema_version"], plain["fits"])
    assert files.loads(Prediction, out, "stdout").stages[3].pp_rank == 3


def test_words_behind_the_script_are_the_scripts() -> None:
    """Words that look like our flags are still the script's."""
    args = parser().parse_args("predict --world-size 8 train.py --rank 5 --json --world-size 4".split())

    assert (8, None, False) == (args.world_size, args.rank, args.json)
    assert ["--rank", "5", "--json", "--world-size", "4"] == args.arguments


def test_the_flags_are_frozen() -> None:
    """A new flag is a reviewed line here."""
    commands = next(action for action in parser()._actions if action.dest == "command")
    flags = {
        flag for action in commands.choices["predict"]._actions for flag in action.option_strings if flag[:2] == "--"
    }

    known = {"completion", "devices", "doctor", "explain", "order", "plan", "predict"}
    known |= {"probe", "report", "watch"}
    assert known == set(COMMANDS)
    assert {
        "--cluster",
        "--device",
        "--fabric",
        "--gpu",
        "--gpus-per-node",
        "--help",
        "--hosts",
        "--json",
        "--megatron-version",
        "--bridge-config",
        "--memory-margin",
        "--module",
        "--nnodes",
        "--nodes",
        "--nproc-per-node",
        "--nproc_per_node",
        "--rank",
        "--stage",
        "--world-size",
    } == flags


@pytest.mark.parametrize(("words", "code"), [([], 2), (["divine"], 2), (["--version"], 0), (["--help"], 0)])
def test_the_command_itself(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command there is an error; help and version exit with 0."""
    with pytest.raises(SystemExit) as caught:
        main(words)

    assert code == caught.value.code
    assert "pipette" in "".join(capsys.readouterr())
