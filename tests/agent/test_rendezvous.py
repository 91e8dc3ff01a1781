"""Flags that cannot bring the nodes of a job together are refused at once; what torchrun accepts is accepted."""

from __future__ import annotations

import socket
from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from pipette_launch.agent import rendezvous
from pipette_launch.agent.rendezvous import C10D_PORT, STATIC_PORT, check_meeting, connect_seconds, endpoint_of, settle
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
        (("--nnodes=2", "--master_addr="), "--master-addr :29500: The hostname of"),
        (("--nnodes=2", *C10D, "--rdzv_endpoint=:29500"), "--rdzv-endpoint :29500: The hostname of"),
        (("--nnodes=2", "--master-addr=n[0-1]"), "--master-addr n[0-1]:29500: The hostname of"),
        (("--nnodes=2", *C10D, "--rdzv-endpoint=n[0-1]:29500"), "--rdzv-endpoint n[0-1]:29500: The hostname of"),
        (
            ("--nnodes=2", "--master-addr=tcp://n0"),
            "--master-addr tcp://n0:29500: The ",
        ),
        (("--nnodes=2", *C10D, "--rdzv-endpoint=http://n0:1"), "--rdzv-endpoint http://n0:1: The "),
        (("--nnodes=2", "--master-addr=10.0.0.1 10.0.0.2"), "--master-addr 10.0.0.1 10.0.0.2:29500: The hostname of"),
        (("--nnodes=2", "--master-port=99999"), "--master-addr 127.0.0.1:99999: The port number of"),
        (("--nnodes=2", "--master-port=-1"), "--master-addr 127.0.0.1:-1: The "),
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


def test_static_runs_as_c10d_on_node_0() -> None:
    """Static rendezvous becomes c10d with an explicit host, at the master's address."""
    args = parsed("--nnodes=2", "--node-rank=1", "--master-addr=10.1.2.3", "--master-port=4711")

    place = settle(args)

    assert ("c10d", "10.1.2.3:4711") == (args.rdzv_backend, args.rdzv_endpoint)
    assert "is_host=false" in args.rdzv_conf
    assert (1, False) == (place.node_rank, place.may_host_store)


def test_one_node_stays_torchruns_affair() -> None:
    """Torchrun turns a single static node into a local rendezvous itself; before 2.13 it took a fixed port."""
    args = parsed("--nproc-per-node=2")
    expected = ("static", -1) if args.master_port is None else ("c10d", 0)

    place = settle(args)

    assert (*expected, "127.0.0.1") == (args.rdzv_backend, place.node_rank, place.own_address())


def test_static_waits_for_all_nodes_as_long_as_it_is_told() -> None:
    """As under torchrun the greatest number of nodes counts, `timeout` is heeded, and nobody warns of the node rank."""
    args = parsed("--nnodes=1:3", "--node-rank=2", "--rdzv-conf=timeout=77")

    rendezvous_settings = settle(args)

    assert ("3", 0, 2) == (args.nnodes, args.node_rank, rendezvous_settings.node_rank)
    assert "join_timeout=77" in args.rdzv_conf.split(",")


def test_the_users_settings_win() -> None:
    """A value in --rdzv-conf is not overwritten."""
    args = parsed("--nnodes=2", "--node-rank=0", "--rdzv-conf=join_timeout=7,is_host=false")

    settle(args)

    assert args.rdzv_conf.startswith("join_timeout=7,is_host=false,read_timeout=")


@pytest.mark.parametrize(("endpoint", "hosts"), [("localhost:1234", True), ("192.0.2.1:1234", False)])
def test_knows_whether_the_store_may_live_here(endpoint: str, hosts: bool) -> None:
    """An endpoint is here when it names this machine or one of its addresses."""
    args = parsed("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}")

    assert hosts == settle(args).may_host_store


def test_the_endpoints_own_node_hosts_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host name resolves to another address torch takes no node for the host; the interface's tells."""
    monkeypatch.setattr(rendezvous, "_matches_machine_hostname", lambda host: False)
    args = parsed("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")

    settle(args)

    assert "is_host=true" == args.rdzv_conf


@pytest.mark.parametrize(
    ("flags", "least"),
    [
        (("--nnodes=15:16", "--rdzv-backend=c10d", "--rdzv-endpoint=192.0.2.1:1"), 15),
        (("--nnodes=16", "--rdzv-backend=c10d", "--rdzv-endpoint=192.0.2.1:1"), 16),
        (("--nnodes=15:16", "--node-rank=3"), 16),
        (("--nproc-per-node=2",), 1),
        (("--standalone",), 1),
    ],
)
def test_knows_how_few_nodes_may_train(flags: tuple[str, ...], least: int) -> None:
    """MIN of --nnodes, but for static rendezvous, which waits for all."""
    assert least == settle(parsed(*flags)).least_nodes


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--nnodes=2", "--node-rank=0"), False),
        (("--nnodes=2", "--node-rank=1"), True),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=192.0.2.1:1"), True),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=192.0.2.1:1", "--rdzv-conf=is_host=1"), False),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"), False),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-conf=is_host=no"), True),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=/x", "--rdzv-conf=store_type=file"), False),
        (("--nnodes=2", "--rdzv-backend=etcd-v2", "--rdzv-endpoint=192.0.2.1:1"), False),
        (("--standalone",), False),
        (("--nproc-per-node=2",), False),
    ],
)
def test_knows_who_connects_to_anothers_store(flags: tuple[str, ...], expected: bool) -> None:
    """Such a node waits for the store before torch does, and aloud."""
    assert expected == settle(parsed(*flags)).is_client


def test_a_port_that_is_taken_here_makes_a_client() -> None:
    """Another launcher of this machine may have been faster, as torch's own second attempt assumes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert settle(parsed("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}")).is_client


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("host", ["[::1]", "::1", "127.0.0.1", "localhost"])
def test_a_free_port_here_makes_a_host(host: str) -> None:
    """In IPv6 too, in which a launcher would wait for itself otherwise."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    assert not settle(parsed("--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}")).is_client


def test_an_address_of_this_machines_name_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lie on no interface, as behind address translation; torch opens its store there."""
    monkeypatch.setattr(rendezvous, "_matches_machine_hostname", lambda host: True)
    place = settle(parsed("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=192.0.2.1:0"))

    assert (True, False) == (place.may_host_store, place.is_client)


@pytest.mark.parametrize(("host", "is_host"), [("192.0.2.1", "false"), ("127.0.0.1", "true")])
def test_a_machine_whose_name_has_no_address_is_told(monkeypatch: pytest.MonkeyPatch, host: str, is_host: str) -> None:
    """Torch would end with a traceback while it guesses."""

    def refuse(_host: str) -> bool:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(rendezvous, "_matches_machine_hostname", refuse)
    args = parsed("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:0")
    settle(args)

    assert f"is_host={is_host}" == args.rdzv_conf


@pytest.mark.parametrize("port", [0, 29777])
def test_a_static_port_stays_the_users(port: int) -> None:
    """Port 0 too, which is any free one."""
    args = parsed("--nnodes=1", f"--master-port={port}")

    settle(args)

    assert f"127.0.0.1:{port}" == args.rdzv_endpoint
