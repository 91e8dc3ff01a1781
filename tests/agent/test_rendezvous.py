"""Flags that cannot bring the nodes of a job together are refused at once; what torchrun accepts is accepted."""

from __future__ import annotations

import socket
from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.run import config_from_args, get_args_parser

from pipette_launch.agent.rendezvous import (
    C10D_PORT,
    STATIC_PORT,
    Rendezvous,
    check_meeting,
    connect_seconds,
    endpoint_of,
    settings_of,
    take_over,
)
from pipette_launch.errors import UsageError
from pipette_launch.launch import addresses

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
        (("--nnodes=2", "--rdzv-conf=timeout"), "--rdzv-conf timeout: 'timeout' is not NAME=VALUE"),
        (
            ("--nnodes=2", "--rdzv-backend=etcd-v2", "--rdzv-endpoint=n0:1"),
            "--rdzv-backend etcd-v2: the nodes meet in a",
        ),
        (
            ("--nnodes=2", "--rdzv-backend=nccl"),
            "--rdzv-backend nccl: the nodes meet in a TCP store only; give --rdzv-",
        ),
        (
            ("--nnodes=2", *C10D, "--rdzv-endpoint=/x", "--rdzv-conf=store_type=file"),
            "--rdzv-conf store_type: the nodes",
        ),
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
    """Only --node-rank 0 may open the store, at the master's address."""
    flags = ("--nnodes=2", "--master-addr=10.1.2.3", "--master-port=4711")
    first, second = (settings_of(parsed(*flags, f"--node-rank={rank}")) for rank in (0, 1))

    assert ("10.1.2.3:4711", 0, False, True) == (first.endpoint, first.node_rank, first.is_client, first.must_host)
    assert ("10.1.2.3:4711", 1, True, False) == (second.endpoint, second.node_rank, second.is_client, second.must_host)


def test_a_job_of_one_node_takes_any_port() -> None:
    """As torchrun does without flags, and with --standalone."""
    for flags in ((), ("--standalone",)):
        args = parsed("--nproc-per-node=2", *flags)
        if args.master_port is not None:
            pytest.skip("torch before 2.13 took a fixed port")
        place = settings_of(args)

        assert ("localhost:0", -1, "127.0.0.1") == (place.endpoint, place.node_rank, place.own_address())
        assert 36 == len(place.run_id)


def test_static_waits_for_all_nodes_as_long_as_it_is_told() -> None:
    """As under torchrun the greatest number of nodes counts, and `timeout` is heeded."""
    place = settings_of(parsed("--nnodes=1:3", "--node-rank=2", "--rdzv-conf=timeout=77"))

    assert (3, 3, 2, 77) == (place.least_nodes, place.most_nodes, place.node_rank, place.join_s)


def test_the_users_settings_win() -> None:
    """Values in --rdzv-conf count, also beside --node-rank."""
    place = settings_of(parsed("--nnodes=2", "--node-rank=0", "--rdzv-conf=join_timeout=7,is_host=false"))
    last_call = settings_of(parsed("--nnodes=1:2", *C10D, "--rdzv-conf=last_call_timeout=5"))

    assert (7, True, 5) == (place.join_s, place.is_client, last_call.last_call_s)


def test_torchrun_opens_our_rendezvous() -> None:
    """Torchrun reads the changed flags; a second job of this process is no error, and nobody warns of the node rank."""
    for _ in range(2):
        args = parsed("--nnodes=2", "--node-rank=1", "--rdzv-id=7")
        take_over(args, settings_of(args))
    config, _, _ = config_from_args(args)
    made = rendezvous_handler_registry.create_handler(
        RendezvousParameters(
            config.rdzv_backend, config.rdzv_endpoint, config.run_id, config.min_nodes, config.max_nodes
        )
    )

    assert (2, 2, 0) == (config.min_nodes, config.max_nodes, args.node_rank)
    assert isinstance(made, Rendezvous)
    assert ("7", True, "pipette") == (made.get_run_id(), made.use_agent_store, made.get_backend())


@pytest.mark.parametrize(("endpoint", "hosts"), [("localhost:1234", True), ("192.0.2.1:1234", False)])
def test_knows_whether_the_store_may_live_here(endpoint: str, hosts: bool) -> None:
    """An endpoint is here when it names this machine or one of its addresses."""
    args = parsed("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}")

    assert hosts == settings_of(args).may_host_store


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
    assert least == settings_of(parsed(*flags)).least_nodes


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--nnodes=2", "--node-rank=0"), False),
        (("--nnodes=2", "--node-rank=1"), True),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=192.0.2.1:1"), True),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=192.0.2.1:1", "--rdzv-conf=is_host=1"), False),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"), False),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-conf=is_host=no"), True),
        (("--standalone",), False),
        (("--nproc-per-node=2",), False),
    ],
)
def test_knows_who_connects_to_anothers_store(flags: tuple[str, ...], expected: bool) -> None:
    """Such a node waits for the store before torch does, and aloud."""
    assert expected == settings_of(parsed(*flags)).is_client


def test_a_port_that_is_taken_here_makes_a_client() -> None:
    """Another launcher of this machine may have been faster, as torch's own second attempt assumes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert settings_of(parsed("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}")).is_client


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("host", ["[::1]", "::1", "127.0.0.1", "localhost"])
def test_a_free_port_here_makes_a_host(host: str) -> None:
    """In IPv6 too, in which a launcher would wait for itself otherwise."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    assert not settings_of(parsed("--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}")).is_client


def test_an_address_of_this_machines_name_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lie on no interface, as behind address translation."""
    monkeypatch.setattr(addresses, "_found", lambda host: {"192.0.2.1"})
    place = settings_of(parsed("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=192.0.2.1:0"))

    assert (True, False) == (place.may_host_store, place.is_client)


@pytest.mark.parametrize("port", [0, 29777])
def test_a_static_port_stays_the_users(port: int) -> None:
    """Port 0 too, which is any free one."""
    assert f"127.0.0.1:{port}" == settings_of(parsed("--nnodes=1", f"--master-port={port}")).endpoint
