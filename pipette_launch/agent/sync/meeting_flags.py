"""torchrun's flags for the meeting of the nodes; values on which torch would wait or fail later are refused here."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config, parse_rendezvous_endpoint
from torch.distributed.run import parse_min_max_nnodes

from pipette_launch.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

TRUE_WORDS = ("1", "true", "t", "yes", "y")
FALSE_WORDS = ("0", "false", "f", "no", "n")
"""torch's spellings in --rdzv-conf."""
STATIC_PORT = 29500
C10D_PORT = 29400
"""torch's own, where the endpoint has no port."""
STATIC_JOIN_S = 900
"""Seconds for which torchrun's static rendezvous waits for the nodes and for its store."""
C10D_JOIN_S, C10D_READ_S = 600, 60
"""Seconds for which torch's c10d rendezvous waits for the nodes, and for its store."""
ADDRESS, ENDPOINT = "--master-addr", "--rdzv-endpoint"


class Endpoint(NamedTuple):
    """Host and port where the nodes meet, and the flag that gives them."""

    host: str
    port: int
    flag: str


def becomes_standalone(args: Namespace) -> bool:
    """True if torchrun meets on a free port of this machine: --standalone, or one static node without a port."""
    nodes = str(args.nnodes).split(":")[-1]
    is_static = args.rdzv_backend == "static"
    return bool(args.standalone) or (is_static and not args.rdzv_endpoint and args.master_port is None and nodes == "1")


def is_file(args: Namespace) -> bool:
    """True if the endpoint is the path of a file, which c10d takes for its store on request."""
    return bool(args.rdzv_backend == "c10d" and conf_of(args).get("store_type", "").lower() == "file")


def conf_of(args: Namespace) -> dict[str, str]:
    """Return --rdzv-conf as torchrun reads it."""
    pairs = [pair.partition("=") for pair in (args.rdzv_conf or "").split(",") if pair]
    return {name.strip(): value.strip() for name, _, value in pairs}


def endpoint_of(args: Namespace) -> Endpoint:
    """Return where the nodes meet.

    Raises:
        UsageError: torch would refuse the host or the port.

    """
    if becomes_standalone(args) or is_file(args):
        return Endpoint("localhost", 0, ENDPOINT)
    flag, text = ENDPOINT, str(args.rdzv_endpoint or "")
    if args.rdzv_backend == "static" and not text:
        port = STATIC_PORT if args.master_port is None else args.master_port
        flag, text = ADDRESS, f"{args.master_addr}:{port}"
    try:
        host, port = parse_rendezvous_endpoint(text, default_port=C10D_PORT)
    except ValueError as error:
        raise UsageError(_refused(args, flag, text, str(error))) from error
    return Endpoint(host, port, flag)


def connect_seconds(args: Namespace) -> int:
    """Return how long torchrun tries to reach the store of the rendezvous."""
    is_static = args.rdzv_backend == "static"
    return whole_seconds(args, *(("timeout", STATIC_JOIN_S) if is_static else ("read_timeout", C10D_READ_S)))


def whole_seconds(args: Namespace, name: str, default: int) -> int:
    """Return a time-out of --rdzv-conf."""
    text = conf_of(args).get(name, str(default))
    if not text.isdigit() or not int(text):
        raise UsageError(f"--rdzv-conf {name}={text}: a whole number of seconds above 0 is needed")
    return int(text)


def _refused(args: Namespace, flag: str, text: str, error: str) -> str:
    """Return a sentence for an endpoint that torch refuses."""
    if flag == ADDRESS:
        if "port number" in error:
            return f"--master-port {args.master_port}: a port is a number from 1 to 65535"
        text = str(args.master_addr)
    if not (text.rpartition(":")[0] if flag == ENDPOINT else text):
        return f"{flag} {text or repr(text)}: the host is missing; an unset variable of the shell leaves it empty"
    if "[" in text:
        return (
            f"{flag} {text}: one host is needed, not a list of nodes; take the first that "
            "scontrol show hostnames $SLURM_JOB_NODELIST prints"
        )
    if "://" in text:
        return f"{flag} {text}: leave out {text.partition('://')[0]}://, the host alone is needed"
    return f"{flag} {text}: {error}"


def check_meeting(args: Namespace, *, advice: str = "") -> None:
    """Raise UsageError where the flags cannot bring the nodes of a job together, however long torch waits.

    Args:
        args: torchrun's flags.
        advice: how the surroundings, as SLURM, may have led to such flags.

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
    meets_here_only = becomes_standalone(args)
    if args.rdzv_backend == "static" and not meets_here_only:
        _check_rank(args, most, advice)
        least = most
    if args.standalone and least > 1:
        raise UsageError(
            f"--standalone is a job of one node, and --nnodes {args.nnodes} needs {least}; give one of them"
        )
    if at.port == 0 and least > 1 and not is_file(args):
        raise UsageError(
            f"{at.flag} with port 0 takes any free port, which the other nodes of --nnodes {args.nnodes} cannot know; "
            f"give a port"
        )


def _check_rank(args: Namespace, most: int, advice: str) -> None:
    rank = int(args.node_rank)
    if 0 <= rank < most:
        return
    ranks = "its only node has rank 0" if most == 1 else f"node ranks go from 0 to {most - 1}"
    raise UsageError(
        f"--node-rank {rank} in a job of --nnodes {args.nnodes}: {ranks}; give --nnodes the number of launchers, or "
        f"start fewer{advice}"
    )
