"""What the command line takes from a SLURM step, and when it takes nothing."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from pipette_launch import cli
from pipette_launch.errors import ClusterError
from pipette_launch.launch.slurm import take

if TYPE_CHECKING:
    from argparse import Namespace

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "localhost,node-without-address.invalid",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "localhost",
    "SLURM_GPUS_ON_NODE": "4",
    "PATH": "",
}
TAKEN = ("2", "4", "c10d", "localhost:20007", "7.0.0")
TORCHRUNS = ("1:1", "1", "static", "", "none")


def filled(monkeypatch: pytest.MonkeyPatch, *flags: str, **variables: str) -> Namespace:
    """The flags of a job whose first task runs here."""
    for name, value in (STEP | variables).items():
        monkeypatch.setenv(name, value)
    words = [*flags, "train.py"]
    args = cli.parser().parse_args(words)
    environ = STEP | variables
    take.take(args, take.given(cli.parser(), words, environ), environ)
    return args


def values(args: Namespace) -> tuple[str, ...]:
    """What says who meets where."""
    return args.nnodes, args.nproc_per_node, args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id


def test_a_step_fills_in_what_is_not_given(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All five come from the step, and the first node says so in one line."""
    assert TAKEN == values(filled(monkeypatch, "--max-restarts=2"))
    assert (
        "pipette-launch: taken from SLURM step 7.0: --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:20007 "
        "--rdzv-id=7.0.0 --rdzv-conf=is_host=true --nproc-per-node=4\n"
    ) == capsys.readouterr().err


def test_a_given_number_of_processes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """--nproc-per-node and --local-addr go with what is taken."""
    args = filled(monkeypatch, "--nproc-per-node=3", PET_LOCAL_ADDR="10.1.1.1")

    assert ("2", "3", "10.1.1.1") == (args.nnodes, args.nproc_per_node, args.local_addr)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--nnodes", "1:1"),
        ("--rdzv-backend", "static"),
        ("--rdzv-endpoint", "a:1"),
        ("--rdzv_id", "x"),
        ("--rdzv-conf", "read_timeout=3"),
        ("--node-rank", "0"),
        ("--master-addr", "127.0.0.1"),
        ("--master-port", "29500"),
    ],
)
def test_nothing_is_taken_beside_a_flag_for_the_rendezvous(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    """Whoever gives one flag or PET_ variable, even with torchrun's default, gets what torchrun makes of it."""
    expected = cli.parser().parse_args([flag, value, "train.py"])

    assert vars(expected) == vars(filled(monkeypatch, flag, value))
    name = f"PET_{flag[2:].replace('-', '_').upper()}"
    assert vars(expected) == vars(filled(monkeypatch, **{name: value}))
    assert "" == capsys.readouterr().err


def test_standalone_and_no_step_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """--standalone is a rendezvous of its own; a batch script is no step."""
    assert TORCHRUNS == values(filled(monkeypatch, "--standalone"))
    assert TORCHRUNS == values(filled(monkeypatch, SLURM_STEP_ID=""))


def test_a_port_in_use_is_an_error_with_the_flags_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other nodes could not know of another port, so the first says how to name one."""
    with (
        socket.create_server(("", 20007)),
        pytest.raises(ClusterError, match=r"port 20007 of localhost.* give another"),
    ):
        filled(monkeypatch)
