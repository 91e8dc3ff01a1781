"""Puts what a SLURM step says in the place of torchrun's flags that were not given."""

from __future__ import annotations

import socket
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from pipette_launch.agent.sync.endpoint import holder
from pipette_launch.agent.sync.rendezvous import RendezvousSettings
from pipette_launch.errors import ClusterError
from pipette_launch.launch.slurm import step as steps

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Collection, Mapping, Sequence

    from pipette_launch.launch.slurm.step import Step

RENDEZVOUS = (
    *("nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
    *("node_rank", "master_addr", "master_port"),
)
"""Who gives one of these says himself which nodes meet where: then nothing is taken from SLURM."""
WITH_RENDEZVOUS = ("nproc_per_node", "local_addr")


def given(parser: ArgumentParser, words: Sequence[str], environ: Mapping[str, str]) -> set[str]:
    """Return which of the flags above were given, on the command line or as torchrun's PET_ variables."""
    unset = object()
    names = (*RENDEZVOUS, *WITH_RENDEZVOUS)
    # argparse leaves an attribute that is there already, unless its flag is given.
    read = parser.parse_args(list(words), Namespace(**dict.fromkeys(names, unset)))
    return {name for name in names if getattr(read, name) is not unset or f"PET_{name.upper()}" in environ}


def take(args: Namespace, given: Collection[str], environ: Mapping[str, str]) -> Step | None:
    """Fill in `args` what was not given, say so on the first node, and return the step.

    None where nothing was taken: there is no step, or the user has said which nodes meet where.
    """
    step = None if set(given) & set(RENDEZVOUS) else steps.read(environ, steps.expand)
    if step is None:
        return None
    flags = step.flags(_reachable)
    processes = step.processes()
    if processes is not None:
        flags["nproc_per_node"] = str(processes)
    if "rdzv_endpoint" in flags:
        if step.is_first and step.local_id == 0:
            _see_that_it_is_free(step)
        address = _own_address(flags["rdzv_endpoint"])
        flags |= {"local_addr": address} if address else {}
    taken = {name: value for name, value in flags.items() if name not in given}
    vars(args).update(taken)
    if taken and step.is_first and step.local_id == 0:
        words = " ".join(f"--{name.replace('_', '-')}={value}" for name, value in taken.items())
        sys.stderr.write(f"pipette-launch: taken from SLURM step {step.job}.{step.step}: {words}\n")
    return step


def _reachable(node: str) -> str:
    """What to call a node: its name in SLURM need not be a host name."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        return steps.node_address(node)
    return node


def _own_address(endpoint: str) -> str:
    """Return the address of this node towards the endpoint; empty where it is a loopback address or cannot be told."""
    found = RendezvousSettings(endpoint=endpoint, node_rank=-1, may_host_store=False).own_address()
    return found if found != socket.getfqdn() and not found.startswith("127.") else ""


def _see_that_it_is_free(step: Step) -> None:
    """Raise ClusterError where another program holds the port; the other nodes could not know of another one."""
    try:
        with socket.create_server(("", step.port)):
            pass
    except OSError as error:
        raise ClusterError(
            f"port {step.port} of {step.node}, which follows from SLURM's job id, is held by {holder(step.port)[0]}; "
            f"give another: --nnodes {len(step.hosts)} --rdzv-backend c10d --rdzv-endpoint {step.hosts[0]}:PORT "
            f"--rdzv-id {step.job}"
        ) from error
