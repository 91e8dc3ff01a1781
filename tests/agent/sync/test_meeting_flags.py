"""Flags that cannot bring the nodes of a job together are refused at once; what torchrun accepts is accepted."""

from __future__ import annotations

from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from pipette_launch.agent.sync.meeting_flags import C10D_PORT, STATIC_PORT, check_meeting, connect_seconds, endpoint_of
from pipette_launch.errors import UsageError

STATIC = ("--master-addr=127.0.0.1", "--master-port=29501")
C10D = ("--rdzv-backend=c10d",)


def parsed(*flags: str) -> Namespace:
    """Flags as torchrun's parser reads them."""
    args: Namespace = get_args_parser().parse_args([*flags, "script.py"])
    return args


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--nnodes=1", "--node_rank=1", *STATIC), "--node-rank 1 in a job of --nnodes 1: its only node has rank 0; "),
        (("--nnodes", "1", "--node-rank", "7", *STATIC), "--node-rank 7 in a job of --nnodes 1: its only node"),
        (("--node_rank=1", "--master_port=29500"), "--node-rank 1 in a job of --nnodes 1:1: its only node has rank 0"),
        (("--nnodes=1", "--node-rank=1", "--rdzv-endpoint=n0:29500"), "--node-rank 1 in a job of --nnodes 1: its only"),
        (("--nnodes=2", "--node_rank=2"), "--node-rank 2 in a job of --nnodes 2: node ranks go from 0 to 1; "),
        (("--nnodes=2", "--node_rank=-1"), "--node-rank -1 in a job of --nnodes 2: node ranks go from 0 to 1; "),
        (("--nnodes=1:4", "--node_rank=4"), "--node-rank 4 in a job of --nnodes 1:4: node ranks go from 0 to 3; "),
    ],
)
def test_a_node_rank_beyond_the_nodes_is_refused(flags: tuple[str, ...], expected: str) -> None:
    """In either spelling, alone or beside the right launchers, with the surroundings' advice at the end."""
    with pytest.raises(UsageError) as caught:
        check_meeting(parsed(*flags), advice="; SLURM starts 8 tasks")

    assert str(caught.value).startswith(expected)
    assert str(caught.value).endswith("start fewer; SLURM starts 8 tasks")


def test_a_node_rank_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun reads each flag from a variable PET_ too."""
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NODE_RANK", "3")

    with pytest.raises(UsageError, match="--node-rank 3 in a job of --nnodes 2"):
        check_meeting(parsed())


@given(nodes=st.integers(1, 40), rank=st.integers(-3, 45))
def test_static_ranks_are_those_of_the_nodes(nodes: int, rank: int) -> None:
    """Refused exactly where no node of the job has that rank."""
    args = parsed(f"--nnodes={nodes}", f"--node-rank={rank}", *STATIC)

    try:
        check_meeting(args)
        is_accepted = True
    except UsageError:
        is_accepted = False

    assert (rank in range(nodes)) == is_accepted


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--nnodes=2", "--master_addr="), "--master-addr '': the host is missing"),
        (("--nnodes=2", *C10D, "--rdzv_endpoint=:29500"), "--rdzv-endpoint :29500: the host is missing"),
        (("--nnodes=2", "--master-addr=n[0-1]"), "--master-addr n[0-1]: one host is needed, not a list of nodes; "),
        (("--nnodes=2", *C10D, "--rdzv-endpoint=n[0-1]:29500"), "--rdzv-endpoint n[0-1]:29500: one host is needed"),
        (
            ("--nnodes=2", "--master-addr=tcp://n0"),
            "--master-addr tcp://n0: leave out tcp://, the host alone is needed",
        ),
        (("--nnodes=2", *C10D, "--rdzv-endpoint=http://n0:1"), "--rdzv-endpoint http://n0:1: leave out http://"),
        (("--nnodes=2", "--master-addr=10.0.0.1 10.0.0.2"), "--master-addr 10.0.0.1 10.0.0.2: The hostname of"),
        (("--nnodes=2", "--master-port=99999"), "--master-port 99999: a port is a number from 1 to 65535"),
        (("--nnodes=2", "--master-port=-1"), "--master-port -1: a port is a number from 1 to 65535"),
        (("--nnodes=2", *C10D, "--rdzv-endpoint=n0:99999"), "--rdzv-endpoint n0:99999: The port number of"),
        (("--nnodes=2", *C10D, "--rdzv-endpoint=n0:"), "--rdzv-endpoint n0:: The port number of"),
        (("--nnodes=2", *C10D, "--rdzv-endpoint=n0:http"), "--rdzv-endpoint n0:http: The port number of"),
        (("--nnodes=2", *C10D, "--rdzv-endpoint=n0:0"), "--rdzv-endpoint with port 0 takes any free port"),
        (("--nnodes=2", "--master-port=0"), "--master-addr with port 0 takes any free port"),
        (("--nnodes=2", "--standalone"), "--standalone is a job of one node, and --nnodes 2 needs 2; give one of them"),
        (("--nnodes=2", *C10D, "--rdzv-conf=is_host=maybe"), "--rdzv-conf is_host=maybe: true or false is needed"),
        (("--nnodes=2", "--rdzv-conf=timeout"), "--rdzv-conf timeout: "),
        (("--nnodes=2", "--rdzv-conf=timeout=soon"), "--rdzv-conf timeout=soon: a whole number of seconds above 0"),
        (("--nnodes=2", *C10D, "--rdzv-conf=read_timeout=0"), "--rdzv-conf read_timeout=0: a whole number of seconds"),
    ],
)
def test_an_endpoint_that_cannot_be_met_at_is_refused(flags: tuple[str, ...], expected: str) -> None:
    """The flag that was given is named with its value, whichever style of rendezvous it belongs to."""
    with pytest.raises(UsageError) as caught:
        check_meeting(parsed(*flags))

    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--standalone",),
        ("--nnodes=1", "--node_rank=1"),
        ("--nnodes=1", "--node_rank=1", "--master_addr=nowhere"),
        ("--nnodes=1", "--master-port=0"),
        ("--nnodes=2", "--node-rank=1"),
        ("--nnodes=1:2", "--node-rank=1"),
        ("--nnodes=2", "--master-addr=::1", "--master-port=1"),
        ("--nnodes=2", "--node-rank=1", "--rdzv-endpoint=n0:29500"),
        ("--nnodes=2", *C10D),
        ("--nnodes=2", *C10D, "--rdzv-endpoint=n0", "--node-rank=5"),
        ("--nnodes=2", *C10D, "--rdzv-endpoint=[::1]:29500"),
        ("--nnodes=1:4", *C10D, "--rdzv-endpoint=localhost:0"),
        ("--nnodes=2", *C10D, "--rdzv-endpoint=/tmp/store", "--rdzv-conf=store_type=file"),
    ],
)
def test_what_torchrun_accepts_is_accepted(flags: tuple[str, ...]) -> None:
    """A rank or an address that torchrun ignores is no contradiction."""
    check_meeting(parsed(*flags))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--nnodes=2",), ("127.0.0.1", STATIC_PORT, "--master-addr")),
        (("--nnodes=1", "--master-port=0"), ("127.0.0.1", 0, "--master-addr")),
        (("--nnodes=2", "--rdzv-endpoint=n0:7"), ("n0", 7, "--rdzv-endpoint")),
        (("--nnodes=2", *C10D, "--rdzv-endpoint=n0"), ("n0", C10D_PORT, "--rdzv-endpoint")),
        (("--nnodes=2", *C10D), ("localhost", C10D_PORT, "--rdzv-endpoint")),
        (("--standalone", "--master-addr=n0"), ("localhost", 0, "--rdzv-endpoint")),
    ],
)
def test_where_the_nodes_meet(flags: tuple[str, ...], expected: tuple[str, int, str]) -> None:
    """Host and port with torch's own defaults, and the flag that gives them."""
    assert expected == endpoint_of(parsed(*flags))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), 900),
        (("--rdzv-conf=timeout=77,read_timeout=5",), 77),
        (C10D, 60),
        ((*C10D, "--rdzv-conf=timeout=77,read_timeout=5"), 5),
    ],
)
def test_how_long_torchrun_tries_to_connect(flags: tuple[str, ...], expected: int) -> None:
    """As long as torchrun does for each style."""
    assert expected == connect_seconds(parsed("--nnodes=2", *flags))
