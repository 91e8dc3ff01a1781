"""Reads a job step from its environment, and turns it into values of torchrun's flags."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipette_launch.agent.scontrol import scontrol
from pipette_launch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PORTS_FROM, NUM_PORTS = 20000, 10000
STEP_STRIDE = 1009
"""Between the ports of a job's steps, so that the next step does not get the port of the next job."""
LARGEST_STEP = 0xFFFFFFF0
"""Step ids from here on are no steps of srun: the batch script, a shell of salloc."""
PART = r"[^\[\],]+|\[[0-9,-]+\]"
"""Of a name in a list of nodes: text, or numbers to choose from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step of srun, as one of its tasks sees it."""

    job: int
    step: int
    restart: int
    """How often the job was requeued."""
    hosts: tuple[str, ...]
    node: str
    num_tasks: int
    """On this node."""
    local_id: int
    """Of this task among those of its node."""
    num_gpus: int | None
    """Of the step on this node; None where it asked for none."""
    visible_devices: str | None

    @property
    def name(self) -> str:
        """What no other step, and no earlier run of this one, is called."""
        return f"{self.job}.{self.step}.{self.restart}"

    @property
    def is_first(self) -> bool:
        """Whether this is the node that the others meet at."""
        return self.node == self.hosts[0]

    @property
    def port(self) -> int:
        """Where the nodes meet; all of them work it out alike."""
        return PORTS_FROM + (self.job + STEP_STRIDE * self.step) % NUM_PORTS

    def processes(self) -> int | None:
        """Return how many workers this node gets: one for each task, else one for each GPU; None: as torchrun.

        Raises:
            UsageError: SLURM lets the task that starts all workers see fewer GPUs than there are tasks.

        """
        if self.num_tasks == 1:
            return self.num_gpus
        visible = None if self.visible_devices is None else len([one for one in self.visible_devices.split(",") if one])
        if self.num_gpus is not None and visible is not None and visible < self.num_tasks:
            raise UsageError(
                f"{self.node} runs {self.num_tasks} tasks, and task {self.local_id} sees only GPU "
                f"{self.visible_devices}; one task starts the workers of a whole node, so let each see all of its GPUs "
                f"(srun --gpus-per-node={max(self.num_tasks, self.num_gpus)} without --gpus-per-task and --gpu-bind), "
                "or start one task per node (srun --ntasks-per-node=1)"
            )
        return self.num_tasks

    def flags(self, address_of: Callable[[str], str]) -> dict[str, str]:
        """Return torchrun's flags for the nodes of this step, by name; none on one node, as torchrun needs none there.

        Args:
            address_of: what other nodes call a node.

        """
        if len(self.hosts) == 1:
            return {}
        return {
            "nnodes": str(len(self.hosts)),
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"{address_of(self.hosts[0])}:{self.port}",
            "rdzv_id": self.name,
            # torch would guess it from the host name, which need not be what SLURM calls the node.
            "rdzv_conf": f"is_host={str(self.is_first).lower()}",
        }


def read(environ: Mapping[str, str], expand: Callable[[str], tuple[str, ...]]) -> Step | None:
    """Return the step that this process is a task of; None where there is none that could say what the job is.

    A shell on a terminal (`srun --pty`) is none: what is started there by hand runs on its node alone. Nor is a step
    of a heterogeneous job, whose list of nodes holds one component only.

    Args:
        environ: the variables of this process.
        expand: turns a list of nodes in SLURM's notation into their names.

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
    return Step(
        job=int(environ["SLURM_JOB_ID"]),
        step=int(number),
        restart=int(environ.get("SLURM_RESTART_COUNT", "0")),
        hosts=hosts,
        node=node if node in hosts else hosts[index],
        num_tasks=tasks_on(index, environ.get("SLURM_STEP_TASKS_PER_NODE", "1")),
        local_id=int(environ.get("SLURM_LOCALID", "0")),
        num_gpus=int(gpus) if gpus.isdigit() and int(gpus) else None,
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
    )


def tasks_on(index: int, words: str) -> int:
    """Return how many tasks a node has: `2(x3),1` means two on each of the first three nodes, one on the fourth."""
    counts: list[int] = []
    for word in words.split(","):
        count, _, repeats = word.partition("(x")
        counts += [int(count)] * int(repeats.rstrip(")") or 1)
    return counts[index] if index < len(counts) else 1


def several_launchers(environ: Mapping[str, str]) -> str:
    """Return the end of a sentence: this step starts several tasks on the node, and each a launcher; else empty."""
    number = environ.get("SLURM_STEP_ID", "")
    index = environ.get("SLURM_NODEID", "0")
    if not number.isdigit() or int(number) >= LARGEST_STEP or not index.isdigit():
        return ""
    count = tasks_on(int(index), environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    if count == 1:
        return ""
    return (
        f"; SLURM starts {count} tasks on this node, each with a launcher: start one per node with "
        "srun --ntasks-per-node=1, and give --node-rank=$SLURM_NODEID"
    )


def expand(nodes: str) -> tuple[str, ...]:
    """Return the names in a list such as `a[1-3,07],b`, by scontrol; containers often lack it, then by `parse`."""
    try:
        done = scontrol("show", "hostnames", nodes)
    except (OSError, subprocess.SubprocessError):
        return parse(nodes)
    return tuple(done.split()) or parse(nodes)


def parse(nodes: str) -> tuple[str, ...]:
    """Return the names in a list such as `a[1-3,07],b`.

    Raises:
        UsageError: it is no such list.

    """
    if not re.fullmatch(f"(?:{PART})+(?:,(?:{PART})+)*", nodes):
        raise UsageError(f"{nodes!r} is no list of nodes that SLURM writes; give --nnodes and --rdzv-endpoint")
    found: list[str] = []
    for word in re.findall(f"(?:{PART})+", nodes):
        names = [""]
        for part in re.findall(PART, word):
            choices = _numbers(part[1:-1]) if part.startswith("[") else [part]
            names = [name + choice for name in names for choice in choices]
        found += names
    return tuple(found)


def _numbers(ranges: str) -> list[str]:
    """`1-3,07` -> 1, 2, 3, 07: each as wide as the first of its range."""
    found = []
    for one in ranges.split(","):
        low, _, high = one.partition("-")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return found


def node_address(node: str) -> str:
    """Return the address that SLURM uses for a node; its name where it will not say."""
    try:
        found = re.search(r"\bNodeAddr=(\S+)", scontrol("show", "node", node))
    except (OSError, subprocess.SubprocessError):
        return node
    return found[1] if found else node
