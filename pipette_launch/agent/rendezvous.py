"""torchrun's rendezvous flags. Flags with which torch would wait in vain, or fail later, raise errors at once."""

from __future__ import annotations

import socket
from argparse import Namespace
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    _parse_rendezvous_config,
    parse_rendezvous_endpoint,
)
from torch.distributed.run import parse_min_max_nnodes

from pipette_launch.errors import UsageError
from pipette_launch.facts.messages import Member
from pipette_launch.launch import addresses

TRUE_WORDS = ("1", "true", "t", "yes", "y")
FALSE_WORDS = ("0", "false", "f", "no", "n")
"""Values that torch reads as false in --rdzv-conf."""
STATIC_PORT = 29500
C10D_PORT = 29400
"""Default ports of torch's static and c10d rendezvous."""
STATIC_JOIN_S, STATIC_READ_S = 900, 300
"""Seconds for which torch's static rendezvous waits for the nodes and the store, and for each answer of the store."""
C10D_JOIN_S, C10D_READ_S = 600, 60
"""Default seconds that torch's c10d rendezvous waits for the nodes, and for its store."""
KEEP_ALIVE_S, CROWD = 5, 20_000
"""torch's default seconds between two renewals of a node, and squared number of nodes for which these grow by 1 s."""
ADDRESS, ENDPOINT = "--master-addr", "--rdzv-endpoint"


class Endpoint(NamedTuple):
    """Host and port of the rendezvous, and the flag that names them."""

    host: str
    port: int
    flag: str


def becomes_standalone(args: Namespace) -> bool:
    """True if torchrun chooses a free port of this machine: with --standalone, or with one static node and no port."""
    nodes = str(args.nnodes).split(":")[-1]
    is_static = args.rdzv_backend == "static"
    return bool(args.standalone) or (is_static and not args.rdzv_endpoint and args.master_port is None and nodes == "1")


def is_file(args: Namespace) -> bool:
    """True if the endpoint is the path of a file (--rdzv-conf store_type=file)."""
    return bool(args.rdzv_backend == "c10d" and conf_of(args).get("store_type", "").lower() == "file")


def conf_of(args: Namespace) -> dict[str, str]:
    """Return --rdzv-conf as torchrun reads it."""
    return dict(_parse_rendezvous_config(args.rdzv_conf or ""))


def endpoint_of(args: Namespace) -> Endpoint:
    """Return the endpoint of the rendezvous; raise UsageError if torch would refuse its host or port."""
    if becomes_standalone(args) or is_file(args):
        return Endpoint("localhost", 0, ENDPOINT)
    flag, text = ENDPOINT, str(args.rdzv_endpoint or "")
    if args.rdzv_backend == "static" and not text:
        port = STATIC_PORT if args.master_port is None else args.master_port
        flag, text = ADDRESS, f"{args.master_addr}:{port}"
    try:
        return Endpoint(*parse_rendezvous_endpoint(text, default_port=C10D_PORT), flag)
    except ValueError as error:
        why = str(error).rstrip(".")
        raise UsageError(f"{flag} {text}: {why}; give the name or address of the first node") from error


def connect_seconds(args: Namespace) -> int:
    """Return the seconds for which torch tries to reach the store of the rendezvous."""
    is_static = args.rdzv_backend == "static"
    return _whole_seconds(args, *(("timeout", STATIC_JOIN_S) if is_static else ("read_timeout", C10D_READ_S)))


def _whole_seconds(args: Namespace, name: str, default: int) -> int:
    """Return a time limit of --rdzv-conf."""
    text = conf_of(args).get(name, str(default))
    if not text.isdigit() or not int(text):
        raise UsageError(f"--rdzv-conf {name}={text}: a whole number of seconds above 0 is needed")
    return int(text)


def check_meeting(args: Namespace, *, advice: str = "") -> None:
    """Raise UsageError if the nodes could never meet with these flags of torchrun.

    `advice` ends an error about too many launchers: it names the SLURM setting that may start several launchers.
    """
    try:
        _parse_rendezvous_config(args.rdzv_conf or "")
    except ValueError as error:
        raise UsageError(f"--rdzv-conf {args.rdzv_conf}: {error}") from error
    at = endpoint_of(args)
    connect_seconds(args)
    host = conf_of(args).get("is_host", "true")
    if host.lower() not in (*TRUE_WORDS, *FALSE_WORDS):
        raise UsageError(f"--rdzv-conf is_host={host}: true or false is needed")
    least, most = parse_min_max_nnodes(args.nnodes)
    if args.rdzv_backend == "static" and not becomes_standalone(args):
        rank, least = int(args.node_rank), most
        if not 0 <= rank < most:
            ranks = "its only node has rank 0" if most == 1 else f"node ranks go from 0 to {most - 1}"
            raise UsageError(
                f"--node-rank {rank} in a job of --nnodes {args.nnodes}: {ranks}; give --nnodes the number of "
                f"launchers, or start fewer{advice}"
            )
    if args.standalone and least > 1:
        raise UsageError(
            f"--standalone is a job of one node, and --nnodes {args.nnodes} needs {least}; give one of them"
        )
    if at.port == 0 and least > 1 and not is_file(args):
        raise UsageError(
            f"{at.flag} with port 0 takes any free port, which the other nodes of --nnodes {args.nnodes} cannot know; "
            f"give a port"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RendezvousSettings:
    """Settings of the rendezvous on this node."""

    endpoint: str
    node_rank: int
    """--node-rank of a static rendezvous; -1 for other backends."""
    may_host_store: bool
    """True if this agent may hold the store of the rendezvous."""
    least_nodes: int = 1
    """Fewest nodes that train: MIN of --nnodes, or all nodes of a static rendezvous."""
    most_nodes: int = 1
    run_id: str = "none"
    """--rdzv-id, equal on all launchers of a job."""
    flag: str = ENDPOINT
    """Flag that names the endpoint."""
    is_here: bool = True
    """True if the endpoint's host is this machine."""
    is_client: bool = False
    """True if torch connects to a store of another process."""
    connect_s: float = C10D_READ_S
    """Seconds for which torch tries to reach the store."""
    join_s: float = C10D_JOIN_S
    """Seconds for which torch waits for the nodes."""
    advice: str = ""
    """Last words of an error about too many launchers, if SLURM may have started the launchers; else empty."""

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Host and port of the rendezvous."""
        return parse_rendezvous_endpoint(self.endpoint, default_port=C10D_PORT)

    def store_elsewhere(self) -> Member | None:
        """Return the address of torch's c10d store; None if this agent may hold the store."""
        host, port = self.host_and_port
        if self.may_host_store or not port:
            return None
        return Member(token="rendezvous", address=host, port=port, node_rank=-1)  # noqa: S106  a name, no secret

    def own_address(self) -> str:
        """Return the address by which other nodes reach this node."""
        return addresses.own_address(*self.host_and_port)


def settle(args: Namespace, *, advice: str = "") -> RendezvousSettings:
    """Write torch's guesses into `args` as explicit flags, and return the settings of this node.

    A static rendezvous cannot form a second round and reuses its keys at each restart. For this reason a static
    rendezvous runs as c10d with the store on node 0, and agents are ordered by --node-rank.
    """
    at, node_rank, connect_s = endpoint_of(args), -1, connect_seconds(args)
    if args.rdzv_backend == "static" and not becomes_standalone(args):
        node_rank = int(args.node_rank)
        args.rdzv_endpoint = args.rdzv_endpoint or f"{args.master_addr}:{at.port}"
        args.rdzv_backend = "c10d"
        # Static waits for all nodes even if MIN is lower, and torch warns about a node rank under c10d.
        args.nnodes, args.node_rank = args.nnodes.split(":")[-1], 0
        _set(args, is_host=str(node_rank == 0).lower(), join_timeout=connect_s, read_timeout=STATIC_READ_S)
    try:
        torchs_guess: bool | None = _matches_machine_hostname(at.host)
    except (OSError, UnicodeError):  # The name of this machine has no address.
        torchs_guess = None
    here = torchs_guess or addresses.is_here(at.host)
    is_tcp = args.rdzv_backend == "c10d" and not args.standalone and not is_file(args)
    if is_tcp and torchs_guess != here:
        # Set is_host only if torch would guess wrongly, because torch retries as a client after a right guess. The port
        # is in use if another agent of this machine was faster.
        _set(args, is_host=str(here and addresses.can_bind(at.port)).lower())
    given = conf_of(args).get("is_host")
    is_host = here and addresses.can_bind(at.port) if given is None else given.lower() in TRUE_WORDS
    if is_file(args):
        endpoint = f"{socket.gethostname()}:0"  # A store in a file counts as a store of this host.
    else:
        endpoint = f"{at.host}:{at.port}" if args.standalone or not args.rdzv_endpoint else str(args.rdzv_endpoint)
    least, most = parse_min_max_nnodes(args.nnodes)
    if args.rdzv_backend == "c10d" and most**2 // CROWD > KEEP_ALIVE_S:
        # Until all nodes have come, each node rewrites the list of all nodes at every interval.
        _set(args, keep_alive_interval=most**2 // CROWD)
    return RendezvousSettings(
        endpoint=endpoint,
        node_rank=node_rank,
        may_host_store=node_rank == 0 or (node_rank < 0 and here),
        least_nodes=least,
        most_nodes=most,
        run_id=str(args.rdzv_id),
        flag=at.flag,
        is_here=here,
        is_client=is_tcp and not is_host,
        connect_s=connect_s,
        join_s=_whole_seconds(args, "join_timeout", C10D_JOIN_S),
        advice=advice,
    )


def _set(args: Namespace, **settings: object) -> None:
    """Add settings to --rdzv-conf, but keep the user's settings."""
    given = conf_of(args)
    args.rdzv_conf = ",".join(f"{name}={value}" for name, value in {**given, **settings, **given}.items())
