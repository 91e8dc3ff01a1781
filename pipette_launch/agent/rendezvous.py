"""torchrun's rendezvous flags. Flags with which torch would wait in vain, or fail later, raise errors at once."""

from __future__ import annotations

import uuid
from argparse import Namespace
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import parse_min_max_nnodes

from pipette_launch.errors import UsageError
from pipette_launch.launch import addresses

TRUE_WORDS = ("1", "true", "t", "yes", "y")
FALSE_WORDS = ("0", "false", "f", "no", "n")
"""Values that torch reads as false in --rdzv-conf."""
STATIC_PORT = 29500
C10D_PORT = 29400
"""Default ports of torch's static and c10d rendezvous."""
STATIC_JOIN_S = 900
"""Default seconds that torch's static rendezvous waits for the nodes, and for its store."""
C10D_JOIN_S, C10D_READ_S, LAST_CALL_S = 600, 60, 30
"""Default seconds that torch's c10d rendezvous waits for the nodes, for its store, and after MIN nodes of --nnodes."""
STYLES = ("c10d", "static")
"""Values of --rdzv-backend by which nodes can meet."""
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


def conf_of(args: Namespace) -> dict[str, str]:
    """Return --rdzv-conf as torchrun reads it; raises UsageError if it is no list of NAME=VALUE."""
    found = {}
    for part in filter(None, str(args.rdzv_conf or "").strip().split(",")):
        name, _, value = (word.strip() for word in part.partition("="))
        if not (name and value):
            raise UsageError(f"--rdzv-conf {args.rdzv_conf}: {part!r} is not NAME=VALUE")
        found[name] = value
    return found


def endpoint_of(args: Namespace) -> Endpoint:
    """Return the endpoint of the rendezvous; raise UsageError if torch would refuse its host or port."""
    if becomes_standalone(args):
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
    """Return the seconds for which this node tries to reach the store of the rendezvous."""
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
    if not args.standalone and (args.rdzv_backend not in STYLES or conf_of(args).get("store_type", "tcp") != "tcp"):
        given = f"--rdzv-backend {args.rdzv_backend}" if args.rdzv_backend not in STYLES else "--rdzv-conf store_type"
        raise UsageError(
            f"{given}: the nodes meet in a TCP store only; give --rdzv-backend c10d --rdzv-endpoint HOST:PORT "
            f"(the script itself chooses nccl or gloo)"
        )
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
    if at.port == 0 and least > 1:
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
    """True if this agent connects to a store of another process."""
    must_host: bool = False
    """True if only this agent may hold the store, by --node-rank 0 or --rdzv-conf is_host=true."""
    connect_s: float = C10D_READ_S
    """Seconds for which this agent tries to reach the store."""
    join_s: float = C10D_JOIN_S
    """Seconds for which agents wait for MIN nodes of --nnodes."""
    last_call_s: float = LAST_CALL_S
    """Seconds for which agents wait for further nodes after MIN nodes of --nnodes came."""
    advice: str = ""
    """Last words of an error about too many launchers, if SLURM may have started the launchers; else empty."""

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Host and port of the rendezvous."""
        return parse_rendezvous_endpoint(self.endpoint, default_port=C10D_PORT)

    def own_address(self) -> str:
        """Return the address by which other nodes reach this node."""
        return addresses.own_address(*self.host_and_port)


def settings_of(args: Namespace, *, advice: str = "") -> RendezvousSettings:
    """Return the settings of the rendezvous on this node.

    A static rendezvous runs as c10d with the store on node 0, and agents are ordered by --node-rank.
    """
    at, given = endpoint_of(args), conf_of(args).get("is_host")
    least, most = parse_min_max_nnodes(args.nnodes)
    here = addresses.is_here(at.host)
    node_rank, join_s = -1, _whole_seconds(args, "join_timeout", C10D_JOIN_S)
    if args.rdzv_backend == "static" and not becomes_standalone(args):
        # Static waits for all nodes even if MIN is lower.
        node_rank, least, join_s = (
            int(args.node_rank),
            most,
            _whole_seconds(args, "join_timeout", connect_seconds(args)),
        )
        given = given or str(node_rank == 0)
    is_host = here and addresses.can_bind(at.port) if given is None else given.lower() in TRUE_WORDS
    return RendezvousSettings(
        endpoint=f"{at.host}:{at.port}" if becomes_standalone(args) or not args.rdzv_endpoint else args.rdzv_endpoint,
        node_rank=node_rank,
        may_host_store=node_rank == 0 or (node_rank < 0 and here),
        least_nodes=least,
        most_nodes=most,
        run_id=str(uuid.uuid4()) if becomes_standalone(args) else str(args.rdzv_id),
        flag=at.flag,
        is_here=here,
        is_client=not is_host,
        must_host=is_host and given is not None,
        connect_s=connect_seconds(args),
        join_s=join_s,
        last_call_s=_whole_seconds(args, "last_call_timeout", LAST_CALL_S),
        advice=advice,
    )


def take_over(args: Namespace, settings: RendezvousSettings) -> None:
    """Let torchrun open Pipette's rendezvous, under a name that torch's own backends do not have."""
    rendezvous_handler_registry.register(Rendezvous.BACKEND, Rendezvous)
    args.standalone = False
    args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = Rendezvous.BACKEND, settings.endpoint, settings.run_id
    # torch warns about a node rank under other backends than static.
    args.nnodes, args.node_rank = f"{settings.least_nodes}:{settings.most_nodes}", 0


class Rendezvous(RendezvousHandler):
    """Rendezvous that satisfies torch's launcher. Pipette's agents meet by themselves."""

    BACKEND = "pipette"

    def __init__(self, parameters: RendezvousParameters) -> None:
        """Take the settings of torch's launcher."""
        self._run_id = parameters.run_id

    @property
    def use_agent_store(self) -> bool:
        """True, because the agent of RANK 0 hosts the workers' store in every phase."""
        return True

    def get_backend(self) -> str:
        """Return the name that torchrun's registry compares, and that its events have."""
        return self.BACKEND

    def get_run_id(self) -> str:
        """Return --rdzv-id."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Never called."""
        raise NotImplementedError

    def is_closed(self) -> bool:
        """Return False: the agents end a job by themselves."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: the agents let new nodes in by themselves."""
        return 0

    def shutdown(self) -> bool:
        """Do nothing."""
        return True
