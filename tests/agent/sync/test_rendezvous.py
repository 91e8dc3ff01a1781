"""Rendezvous flags: what torch would guess is said outright, what the user said stays."""

import socket
from argparse import Namespace

import pytest
from torch.distributed.run import get_args_parser

from pipette_launch.agent.sync import rendezvous
from pipette_launch.agent.sync.rendezvous import settle


def parsed(*flags: str) -> Namespace:
    """Flags as torchrun's parser reads them."""
    args: Namespace = get_args_parser().parse_args([*flags, "script.py"])
    return args


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
