"""The launcher that started this one: flags from a step of SLURM, and the error about several tasks on a node."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NoReturn

from pipette_launch.defaults import SCONTROL_S
from pipette_launch.errors import ClusterError, UsageError
from pipette_launch.launch.addresses import own_address
from pipette_launch.text import say

PORTS_FROM, NUM_PORTS = 20000, 10000
STEP_STRIDE = 1009
"""Distance between the ports of two steps of a job, so that two jobs with successive ids do not share a port."""
LARGEST_STEP = 0xFFFFFFF0
"""Least step id that does not belong to srun, but to a batch script or a shell of salloc."""
PART = r"[^\[\],]+|\[[0-9,-]+\]"
"""Pattern of one part of a name in SLURM's list of nodes: text, or numbers in brackets."""
STARTED = {
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK"),
    "torchrun, ft_launcher or Ray": ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"),
}
"""Variables of a launcher that starts each process: processes of the job, processes of the node, index in the job."""
COMPLETION_INDEX = "JOB_COMPLETION_INDEX"
"""Variable of Kubernetes with the index of a pod in an indexed job."""
ONE_TASK = "srun --ntasks-per-node=1"
ONE_A_NODE = "for example mpirun -npernode 1, with --nnodes, --rdzv-backend c10d and --rdzv-endpoint HOST:PORT"
RENDEZVOUS = (
    *("nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
    *("node_rank", "master_addr", "master_port"),
)
"""Flags that set which nodes meet at which address. If the user gives one of these flags, the step sets no flags."""


def scontrol(*words: str) -> str:
    """Return the output of `scontrol`; raises OSError or subprocess.SubprocessError if scontrol is missing or fails."""
    command = ["scontrol", *words]  # clusters install it in different folders
    return subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_S, check=True).stdout


# -- the step -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmStep:
    """A step of srun, as described by the environment of one task."""

    job: int
    step: int
    restart: int
    """Number of times that the job was requeued."""
    hosts: tuple[str, ...]
    node: str
    num_tasks: int
    """Number of tasks on this node."""
    local_id: int
    """Index of this task among the tasks of the node (SLURM_LOCALID)."""
    num_gpus: int | None
    """Number of GPUs of the step on this node; None if the step requested no GPUs."""

    @property
    def name(self) -> str:
        """Unique name of this run of the step."""
        return f"{self.job}.{self.step}.{self.restart}"

    @property
    def is_first(self) -> bool:
        """True if the nodes meet at this node."""
        return self.node == self.hosts[0]

    @property
    def speaks(self) -> bool:
        """True for the first task of the first node, which prints lines for all."""
        return self.is_first and self.local_id == 0

    @property
    def launcher(self) -> str:
        """Name of the step for people."""
        return f"SLURM step {self.job}.{self.step}"

    @property
    def port(self) -> int:
        """Port where the nodes meet. Every node computes the same port."""
        return PORTS_FROM + (self.job + STEP_STRIDE * self.step) % NUM_PORTS

    def flags(self, address_of: Callable[[str], str]) -> dict[str, str]:
        """Return torchrun's flags for the nodes and GPUs of this step."""
        processes = {} if self.num_gpus is None else {"nproc_per_node": str(self.num_gpus)}
        if len(self.hosts) == 1:
            return processes
        return {
            "nnodes": str(len(self.hosts)),
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"{address_of(self.hosts[0])}:{self.port}",
            "rdzv_id": self.name,
            # Without `is_host`, torch would compare host names, but SLURM may have a different name for the node.
            "rdzv_conf": f"is_host={str(self.is_first).lower()}",
            **processes,
        }


def current_step(environ: Mapping[str, str], expand: Callable[[str], tuple[str, ...]]) -> SlurmStep | None:
    """Return the step of this process; None if this process is not part of a step that describes the job.

    A shell on a terminal (`srun --pty`) does not describe the job, because commands in the shell run on one node. A
    step of a heterogeneous job does not describe the job, because the step's list of nodes covers only one component.
    """
    number = environ.get("SLURM_STEP_ID", "")
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    if not number.isdigit() or int(number) >= LARGEST_STEP or not nodes or not environ.get("SLURM_JOB_ID"):
        return None
    if "SLURM_PTY_PORT" in environ or "SLURM_HET_SIZE" in environ:
        return None
    hosts = expand(nodes)
    index = int(environ.get("SLURM_NODEID", "0"))
    node = environ.get("SLURMD_NODENAME", "")
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    return SlurmStep(
        job=int(environ["SLURM_JOB_ID"]),
        step=int(number),
        restart=int(environ.get("SLURM_RESTART_COUNT", "0")),
        hosts=hosts,
        node=node if node in hosts else hosts[index],
        num_tasks=tasks_on(index, environ.get("SLURM_STEP_TASKS_PER_NODE", "1")),
        local_id=int(environ.get("SLURM_LOCALID", "0")),
        num_gpus=int(gpus) if gpus.isdigit() and int(gpus) else None,
    )


def tasks_on(index: int, words: str) -> int:
    """Return the number of tasks of a node: `2(x3),1` is 2 tasks on each of 3 nodes, and 1 task on the fourth node."""
    counts: list[int] = []
    for word in words.split(","):
        count, _, repeats = word.partition("(x")
        counts += [int(count)] * int(repeats.rstrip(")") or 1)
    return counts[index] if index < len(counts) else 1


def several_launchers(environ: Mapping[str, str]) -> str:
    """Return advice that ends a sentence if the step starts several launchers on the node; else an empty text."""
    number, index = environ.get("SLURM_STEP_ID", ""), environ.get("SLURM_NODEID", "0")
    count = tasks_on(int(index), environ.get("SLURM_STEP_TASKS_PER_NODE", "1")) if index.isdigit() else 1
    if not number.isdigit() or int(number) >= LARGEST_STEP or count == 1:
        return ""
    return (
        f"; SLURM starts {count} tasks on this node, each with a launcher: start one per node with "
        "srun --ntasks-per-node=1, and give --node-rank=$SLURM_NODEID"
    )


# -- names of nodes -----------------------------------------------------------------------------------------------


def expand(nodes: str) -> tuple[str, ...]:
    """Expand a list of nodes such as `a[1-3,07],b` by scontrol, or by `parse` in a container without scontrol."""
    try:
        done = scontrol("show", "hostnames", nodes)
    except (OSError, subprocess.SubprocessError):
        return parse(nodes)
    return tuple(done.split()) or parse(nodes)


def parse(nodes: str) -> tuple[str, ...]:
    """Expand a list of nodes such as `a[1-3,07],b`; raises UsageError if the text has another format."""
    if not re.fullmatch(f"(?:{PART})+(?:,(?:{PART})+)*", nodes):
        raise UsageError(f"{nodes!r} is not a list of nodes that SLURM writes; give --nnodes and --rdzv-endpoint")

    def choices(part: str) -> list[str]:
        """Expand `[01-3,7]` to 01, 02, 03, 7: each number has at least the digits of the first number in its range."""
        if not part.startswith("["):
            return [part]
        ranges = [one.partition("-") for one in part[1:-1].split(",")]
        return [
            str(number).zfill(len(low)) for low, _, high in ranges for number in range(int(low), int(high or low) + 1)
        ]

    words = re.findall(f"(?:{PART})+", nodes)
    return tuple("".join(name) for word in words for name in product(*map(choices, re.findall(PART, word))))


def _reachable(node: str) -> str:
    """Return a name of a node that other nodes can resolve, or the address that SLURM uses."""
    with contextlib.suppress(OSError):
        socket.getaddrinfo(node, None)
        return node
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = re.search(r"\bNodeAddr=(\S+)", scontrol("show", "node", node))
        return found[1] if found else node
    return node


# -- flags from a step --------------------------------------------------------------------------------------------


def drop_outer_flags(environ: MutableMapping[str, str]) -> None:
    """Remove PET_ variables in a worker of torchrun, because that torchrun took its own flags from them."""
    if "TORCHELASTIC_RUN_ID" in environ:
        for name in [name for name in environ if name.startswith("PET_")]:
            del environ[name]


def given_flags(parser: ArgumentParser, words: Sequence[str], environ: Mapping[str, str]) -> set[str]:
    """Return the flags of `RENDEZVOUS` that the user gave, on the command line or as torchrun's PET_ variables."""
    unset = object()
    names = (*RENDEZVOUS, "nproc_per_node", "local_addr")
    # argparse overwrites an existing attribute only if the command line has the attribute's flag.
    read = parser.parse_args(list(words), Namespace(**dict.fromkeys(names, unset)))
    return {name for name in names if getattr(read, name) is not unset or f"PET_{name.upper()}" in environ}


def take_flags(args: Namespace, given: Collection[str], environ: Mapping[str, str]) -> None:
    """Set the missing flags in `args` from a step of SLURM or an index of Kubernetes, and print them once.

    Flags of the user that set where nodes meet keep SLURM's values out. Without such flags, several launchers on a node
    would not meet: the job's first one raises UsageError, and the others exit without a message.
    """
    index = environ.get(COMPLETION_INDEX, "")
    if index.isdigit() and "master_addr" in given and "node_rank" not in given:
        say(f"taken from {COMPLETION_INDEX}: --node-rank={index}")
        args.node_rank = int(index)
    if set(given) & set(RENDEZVOUS):
        return
    # mpirun and Ray may run inside a step of SLURM.
    _check_alone(environ)
    step = current_step(environ, expand)
    if step is None:
        return
    if step.num_tasks > 1:
        _refuse(f"SLURM starts {step.num_tasks} tasks on a node, each with a launcher", ONE_TASK, speaks=step.speaks)
    flags = step.flags(_reachable)
    if "rdzv_endpoint" in flags:
        if step.speaks:
            _check_port(step)
        host, _, port = flags["rdzv_endpoint"].rpartition(":")
        address = own_address(host.strip("[]"), int(port))
        # A host name or a loopback address means that the address towards the endpoint is unknown.
        if address != socket.getfqdn() and not address.startswith("127."):
            flags["local_addr"] = address
    taken = {name: value for name, value in flags.items() if name not in given}
    vars(args).update(taken)
    if taken and step.speaks:
        words = " ".join(f"--{name.replace('_', '-')}={value}" for name, value in taken.items())
        say(f"taken from {step.launcher}: {words}")


def _check_alone(environ: Mapping[str, str]) -> None:
    """Raise UsageError in a process that mpirun or torch's variables describe as one of several."""
    for launcher, names in STARTED.items():
        found = [environ.get(name, "") for name in names]
        if all(text.isdigit() for text in found) and int(found[0]) > 1:
            size, local_size, rank = map(int, found)
            started = f"{launcher} started {size} launchers, {local_size} of them on this node"
            _refuse(started, ONE_A_NODE, speaks=rank == 0)


def _refuse(what: str, cure: str, *, speaks: bool) -> NoReturn:
    if speaks:
        raise UsageError(f"{what}; start one launcher on each node, which starts a worker for each GPU: {cure}")
    sys.exit(UsageError.exit_code)


def _check_port(step: SlurmStep) -> None:
    """Raise ClusterError if another program uses the port, because the other nodes could not learn a different port."""
    try:
        with socket.create_server(("", step.port)):
            pass
    except OSError as error:
        raise ClusterError(
            f"port {step.port} of {step.node}, which follows from SLURM's job id, is in use; ss -ltnp names the "
            f"process; give another: --nnodes {len(step.hosts)} --rdzv-backend c10d "
            f"--rdzv-endpoint {step.hosts[0]}:PORT --rdzv-id {step.job}"
        ) from error
