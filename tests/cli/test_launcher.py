"""The command line of `pipette-launch`: all of torchrun's flags, our own flags, and errors."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.run import get_args_parser

from pipette_launch.cli import launcher
from pipette_launch.errors import UsageError
from pipette_launch.launch.options import Options

OWN_FLAGS = {
    "--pipette-budget",
    "--pipette-cache",
    "--pipette-device",
    "--pipette-dry-run",
    "--pipette-fix",
    "--pipette-host-order",
    "--pipette-margin",
    "--pipette-memory-margin",
    "--pipette-metrics-file",
    "--pipette-on-error",
    "--pipette-on-sick",
    "--pipette-plan",
    "--pipette-probe",
    "--pipette-quiet",
    "--pipette-schedules",
    "--pipette-spares",
    "--pipette-tolerate",
    "--pipette-trial-iters",
    "--pipette-trials",
    "--pipette-watch",
    "--pipette-watch-limit",
    "--pipette-verbose",
    "--pipette-version",
}


def options(*words: str) -> Options:
    """Return the options of `pipette-launch WORDS`."""
    return launcher.options_from(launcher.parser().parse_args(words))


def test_the_set_of_own_flags_is_frozen() -> None:
    """A new flag is a reviewed line here."""
    found = {word for word in launcher.parser()._option_string_actions if word.startswith("--pipette-")}

    assert OWN_FLAGS == found


def test_every_torchrun_flag_is_there() -> None:
    """Every spelling of torchrun's flags works and means the same."""
    stock, ours = get_args_parser()._option_string_actions, launcher.parser()._option_string_actions

    assert {word: (type(a), a.dest, a.nargs) for word, a in stock.items()} == {
        word: (type(a), a.dest, a.nargs) for word, a in ours.items() if not word.startswith("--pipette-")
    }


@pytest.mark.parametrize(
    "flags",
    [
        ["--nnodes=2", "--nproc-per-node=2"],
        ["--nnodes", "2", "--nproc_per_node", "2"],
        ["--nn", "2", "--nproc-per", "2"],
    ],
)
def test_torchruns_spellings(flags: list[str]) -> None:
    """Dashes, underscores, equals signs and torchrun's abbreviations work."""
    args = launcher.parser().parse_args([*flags, "train.py", "--lr", "1"])

    assert ("2", "2", ["--lr", "1"]) == (args.nnodes, args.nproc_per_node, args.training_script_args)


def test_flags_become_options() -> None:
    """Each of our flags sets its option."""
    made = options(
        "--pipette-fix=tp, pp",
        "--pipette-on-error=fail",
        "--pipette-budget=5",
        "--pipette-cache=off",
        "--pipette-dry-run",
        "--pipette-trials=2",
        "--pipette-trial-iters=4",
        "-m",
        "pkg.train",
        "--micro-batch-size",
        "2",
    )

    assert (2, 4, False) == (made.trials, made.trial_iters, made.is_function)
    assert (("tp", "pp"), "fail", 5.0, None, True) == (
        made.fix,
        made.on_error,
        made.budget_s,
        made.cache,
        made.dry_run,
    )
    assert ("pkg.train", ("--micro-batch-size", "2"), True) == (made.script, made.script_arguments, made.is_module)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], (0, 0, 0)),
        (["--nnodes=2:4"], (1, 0, 0)),
        (["--nnodes=2:4", "--pipette-tolerate=2", "--pipette-spares=1", "--max-restarts=3"], (2, 1, 3)),
        (["--nnodes=2:4", "--pipette-tolerate=0"], (0, 0, 0)),
    ],
)
def test_how_many_nodes_may_be_lost(flags: list[str], expected: tuple[int, int, int]) -> None:
    """The default is one lost node if --nnodes allows it."""
    made = options(*flags, "-m", "pkg.train")

    assert expected == (made.tolerate, made.spares, made.max_restarts)


def checked_options(words: list[str]) -> Options:
    """Run all checks between argv and the launch."""
    whole = launcher.parser()
    launcher.check_own_flags(whole, words)
    return launcher.options_from(launcher.parsed(whole, words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--pipette-bugdet=5", "train.py"], "unknown flag --pipette-bugdet; did you mean --pipette-budget?"),
        (["--nnodes", "1", "--pipette-xyzzy", "train.py"], "unknown flag --pipette-xyzzy; known flags are "),
        (["--pipette-budget=soon", "train.py"], "--pipette-budget: invalid float value: 'soon'"),
        (["--pipette-budget=-1", "train.py"], "--pipette-budget must be above 0 seconds, got -1"),
        (["--pipette-trials=few", "train.py"], "--pipette-trials: invalid int value: 'few'"),
        (["--pipette-trials=-1", "train.py"], "--pipette-trials must be at least 0, got -1"),
        (["--pipette-tolerate=-1", "train.py"], "--pipette-tolerate must be at least 0, got -1"),
        (["--pipette-spares=one", "train.py"], "--pipette-spares: invalid int value: 'one'"),
        (["--pipette-trial-iters=2", "train.py"], "--pipette-trial-iters must be at least 3, got 2"),
        (["--pipette-budget=inf", "train.py"], "--pipette-budget must be finite, got inf; name"),
        (["--pipette-margin=2", "train.py"], "--pipette-margin must be at least 0 and below 1"),
        (["--pipette-fix=tp,pq", "train.py"], "pq"),
        (["--nproc-per-node=0", "train.py"], "--nproc-per-node needs a number above 0, or auto, cpu, gpu or xpu"),
        (["--nproc-per-node=two", "train.py"], "got 'two'"),
        (["--nnodes=2:1", "train.py"], "--nnodes needs a number above 0, or MIN:MAX with MIN not above MAX, got '2:1'"),
        (["--nnodes=0", "train.py"], "got '0'"),
        (["--nnodes=some", "train.py"], "got 'some'"),
        (["--nnodes=1:2:3", "train.py"], "got '1:2:3'"),
        (["--max-restarts=-1", "train.py"], "--max-restarts must be at least 0, got -1"),
        (["nowhere.py"], "nowhere.py: no such file"),
        (["train.py", "--pipette-budget=5"], "--pipette-budget=5 is after the script's name"),
    ],
)
def test_bad_flags_are_explained(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the flag, its value and what to do."""
    with pytest.raises(UsageError) as caught:
        checked_options(words)
    with pytest.raises(SystemExit):
        launcher._exit_with(caught.value)

    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--pipette-bugdet", "5"], "unknown flag --pipette-bugdet; did you mean --pipette-budget?"),
        (["--nnodes", "2:1"], "--nnodes needs a number above 0, or MIN:MAX with MIN not above MAX, got '2:1'"),
    ],
    ids=["ours", "torchrun's"],
)
def test_a_bad_flag_exits_with_2(words: list[str], expected: str) -> None:
    """The exit code is argparse's, with one line and no traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "pipette_launch", *words, "train.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
    )

    assert (2, f"pipette-launch: error: {expected}\n") == (done.returncode, done.stderr)


def test_a_start_pays_only_for_what_it_needs() -> None:
    """Imports run without garbage collections, and modules that price and search are not imported."""
    code = (
        "import gc, sys\n"
        "whole = []\n"
        "gc.callbacks.append(lambda phase, info: whole.append(phase) if info['generation'] == 2 else None)\n"
        "from pipette_launch.cli import main\n"
        "main(['--pipette-version'])\n"
        "rooms = ('pipette_launch.cost', 'pipette_launch.search')\n"
        "print('torch' in sys.modules, 'pipette_launch.launch.node_controller' in sys.modules,\n"
        "      len(whole), gc.isenabled(),\n"
        "      [name for name in sys.modules if name.startswith(rooms)])\n"
    )

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert ran.stdout.splitlines()[-1] == "True True 0 True []", ran.stdout


def test_collections_stay_off_where_they_were() -> None:
    """A disabled garbage collector stays disabled."""
    gc.disable()
    try:
        with launcher._without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_torchs_own_lines_are_kept_from_the_launcher_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers do not inherit the setting, and the user's own value stays."""
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    with launcher._without_torch_warnings():
        assert "ERROR" == os.environ["TORCH_CPP_LOG_LEVEL"]
    assert "TORCH_CPP_LOG_LEVEL" not in os.environ

    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    with launcher._without_torch_warnings():
        pass
    assert "INFO" == os.environ["TORCH_CPP_LOG_LEVEL"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--rdzv-endpoint", "host:99999999"], "--rdzv-endpoint host:99999999: "),
        (["--rdzv-endpoint", "a b:1"], "--rdzv-endpoint a b:1: "),
        (["--rdzv-conf", "timeout"], "--rdzv-conf timeout: "),
    ],
)
def test_a_rendezvous_that_torch_would_refuse_is_named(words: list[str], expected: str) -> None:
    """The user gets an error instead of torch's traceback."""
    with pytest.raises(UsageError, match=expected):
        options(*words, str(Path(__file__)))


@pytest.mark.parametrize(
    ("flags", "advice", "local_id", "is_noted"),
    [
        (["--nnodes=1"], "; SLURM", "0", True),
        (["--standalone"], "; SLURM", "0", True),
        (["--nnodes=1"], "; SLURM", "1", False),
        (["--nnodes=2"], "; SLURM", "0", False),
        (["--nnodes=1"], "", "0", False),
    ],
)
def test_tasks_that_each_train_alone_are_noted(
    capsys: pytest.CaptureFixture[str], flags: list[str], advice: str, local_id: str, is_noted: bool
) -> None:
    """The note appears once on a node; the tasks train as under torchrun."""
    launcher._note_lone_tasks(launcher.parser().parse_args([*flags, "train.py"]), advice, {"SLURM_LOCALID": local_id})

    expected = "pipette-launch: each task of this step trains a job of its own; SLURM\n" if is_noted else ""
    assert expected == capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RendezvousConnectionError("no route to host\nmore"), "the nodes cannot meet: no route to host; check"),
        (RendezvousTimeoutError(), "the nodes cannot meet: too few nodes came in time; check"),
    ],
)
def test_nodes_that_cannot_meet_get_a_sentence(
    capsys: pytest.CaptureFixture[str], error: Exception, expected: str
) -> None:
    """One line replaces torch's traceback, with torchrun's exit code."""

    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as end:
        launcher._end_as_torchrun(fail)

    assert 1 == end.value.code
    assert capsys.readouterr().err.startswith(f"pipette-launch: error: {expected}")
