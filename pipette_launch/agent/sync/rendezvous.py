"""Where the nodes meet: torchrun's rendezvous flags, with what torch would otherwise guess said outright."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from pipette_launch.agent.sync.meeting_flags import (
    C10D_JOIN_S,
    C10D_PORT,
    C10D_READ_S,
    ENDPOINT,
    TRUE_WORDS,
    Endpoint,
    becomes_standalone,
    conf_of,
    connect_seconds,
    endpoint_of,
    is_file,
    whole_seconds,
)
from pipette_launch.facts.messages import Member

if TYPE_CHECKING:
    from argparse import Namespace

STATIC_READ_S = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class RendezvousSettings:
    """The rendezvous as this node sees it."""

    endpoint: str
    node_rank: int
    """Under static rendezvous; -1 elsewhere."""
    may_host_store: bool
    """Whether the rendezvous store may live in this agent."""
    least_nodes: int = 1
    """How few nodes may train: MIN of --nnodes; static rendezvous always waits for all."""
    most_nodes: int = 1
    run_id: str = "none"
    """--rdzv-id, which all launchers of a job share."""
    flag: str = ENDPOINT
    """The flag that gives the endpoint."""
    is_here: bool = True
    """True if the endpoint's host is this machine."""
    is_client: bool = False
    """True if another process holds torch's store, and torch connects to it."""
    connect_s: float = C10D_READ_S
    """Seconds for which torch tries to connect."""
    join_s: float = C10D_JOIN_S
    """Seconds for which torch waits for the nodes."""
    advice: str = ""
    """End of a sentence about too many launchers, where SLURM may have started them; else empty."""

    def store_elsewhere(self) -> Member | None:
        """Return where torch's store under c10d is, unless it may live in this agent."""
        host, port = parse_rendezvous_endpoint(self.endpoint, default_port=C10D_PORT)
        if self.may_host_store or not port:
            return None
        return Member(token="rendezvous", address=host, port=port, node_rank=-1)  # noqa: S106  a name, no secret

    def own_address(self) -> str:
        """Return the address at which the other nodes reach this one: that of the interface towards the endpoint."""
        host, port = parse_rendezvous_endpoint(self.endpoint, default_port=C10D_PORT)
        if _is_loopback(host):
            return "127.0.0.1"
        try:
            family, _, _, _, target = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                # Nothing is sent: connecting a datagram socket only asks the kernel for the route.
                probe.connect(target)
                address = str(probe.getsockname()[0])
        except (OSError, UnicodeError):
            return socket.getfqdn()
        # The endpoint's own host may resolve its name to 127.0.1.1, which no other node can use.
        return socket.getfqdn() if _is_loopback(address) else address


def settle(args: Namespace, *, advice: str = "") -> RendezvousSettings:
    """Say outright what torch would guess, in `args`, and return what this node needs to know.

    Static rendezvous cannot form a second round and reuses its keys at every restart, so it is run as c10d with the
    store on node 0; the agents are then ordered by --node-rank, as static promises.
    """
    at = endpoint_of(args)
    node_rank = -1
    connect_s = connect_seconds(args)
    if args.rdzv_backend == "static" and not becomes_standalone(args):
        node_rank = int(args.node_rank)
        args.rdzv_endpoint = args.rdzv_endpoint or f"{args.master_addr}:{at.port}"
        args.rdzv_backend = "c10d"
        # Static waits for all nodes, whatever the least number; and torch warns of a node rank under c10d.
        args.nnodes, args.node_rank = args.nnodes.split(":")[-1], 0
        _set(args, is_host=str(node_rank == 0).lower(), join_timeout=connect_s, read_timeout=STATIC_READ_S)
    torchs = _torch_guess(at.host)
    here = torchs or _is_here(at.host)
    is_tcp = args.rdzv_backend == "c10d" and not args.standalone and not is_file(args)
    if is_tcp and torchs != here:
        # torch would take no node for the host; with its own guess it would try again as a client, so ours is
        # only said where its guess is wrong, and where no other agent of this machine was faster.
        _set(args, is_host=str(here and _can_bind(at.port)).lower())
    given = conf_of(args).get("is_host")
    is_host = here and _can_bind(at.port) if given is None else given.lower() in TRUE_WORDS
    least, most = (int(word) for word in (args.nnodes.split(":")[0], args.nnodes.split(":")[-1]))
    return RendezvousSettings(
        endpoint=_endpoint(args, at),
        node_rank=node_rank,
        may_host_store=node_rank == 0 or (node_rank < 0 and here),
        least_nodes=least,
        most_nodes=most,
        run_id=str(args.rdzv_id),
        flag=at.flag,
        is_here=here,
        is_client=is_tcp and not is_host,
        connect_s=connect_s,
        join_s=whole_seconds(args, "join_timeout", C10D_JOIN_S),
        advice=advice,
    )


def _endpoint(args: Namespace, at: Endpoint) -> str:
    """Return the endpoint in torch's notation; a store in a file belongs to no host, so it counts as this one's."""
    if is_file(args):
        return f"{socket.gethostname()}:0"
    return f"{at.host}:{at.port}" if args.standalone or not args.rdzv_endpoint else str(args.rdzv_endpoint)


def _set(args: Namespace, **settings: object) -> None:
    """Add settings to --rdzv-conf; what the user set there stays."""
    given = conf_of(args)
    args.rdzv_conf = ",".join(f"{name}={value}" for name, value in {**given, **settings, **given}.items())


def _can_bind(port: int) -> bool:
    """True if torch can open its store, which listens on all addresses of this machine."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        with socket.create_server(("", port), family=family, dualstack_ipv6=is_dual):
            return True
    except OSError:
        return False


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _torch_guess(host: str) -> bool | None:
    """Return whether torch takes this machine for the host; None where this machine's name has no address."""
    try:
        return _matches_machine_hostname(host)
    except (OSError, UnicodeError):
        return None


def _is_here(host: str) -> bool:
    """Whether a host name or address is this machine's; torch's own guess only looks at the host name."""
    if _is_loopback(host) or host in (socket.gethostname(), socket.getfqdn()):
        return True
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    try:
        return any(info[4][0] in own for info in socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False
