"""Reads a job step from its environment, and turns it into values of torchrun's flags."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipette_launch.agent.rendezvous import RendezvousSettings
from pipette_launch.agent.rendezvous_handler import holder
from pipette_launch.agent.signals import scontrol
from pipette_launch.errors import ClusterError, UsageError

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


def current_step(environ: Mapping[str, str], expand: Callable[[str], tuple[str, ...]]) -> Step | None:
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


RENDEZVOUS = (
    *("nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
    *("node_rank", "master_addr", "master_port"),
)
"""Who gives one of these says himself which nodes meet where: then nothing is taken from SLURM."""
WITH_RENDEZVOUS = ("nproc_per_node", "local_addr")


def given_flags(parser: ArgumentParser, words: Sequence[str], environ: Mapping[str, str]) -> set[str]:
    """Return which of the flags above were given_flags, on the command line or as torchrun's PET_ variables."""
    unset = object()
    names = (*RENDEZVOUS, *WITH_RENDEZVOUS)
    # argparse leaves an attribute that is there already, unless its flag is given_flags.
    read = parser.parse_args(list(words), Namespace(**dict.fromkeys(names, unset)))
    return {name for name in names if getattr(read, name) is not unset or f"PET_{name.upper()}" in environ}


def take_flags(args: Namespace, given_flags: Collection[str], environ: Mapping[str, str]) -> Step | None:
    """Fill in `args` what was not given_flags, say so on the first node, and return the step.

    None where nothing was taken: there is no step, or the user has said which nodes meet where.
    """
    step = None if set(given_flags) & set(RENDEZVOUS) else current_step(environ, expand)
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
    taken = {name: value for name, value in flags.items() if name not in given_flags}
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
        return node_address(node)
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


MEET_S = 300.0
"""How long a task waits for the first one to be there: imports on a busy file system take minutes."""
LATE_S = 60.0
"""How long an agent that has ended waits for tasks that are not there yet."""
POLL_S = 0.2
CREDENTIALS = struct.Struct("3i")
"""What the kernel says of a peer: process, user, group."""
NOT_OUR_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Siblings:
    """The other tasks of this node, as the agent sees them; none until `open`."""

    def __init__(self) -> None:
        self._door: socket.socket | None = None
        self._awaited = 0
        self._met: list[socket.socket] = []
        self._all_met = threading.Event()
        self._cores: set[int] = set()

    def open(self, name: str, count: int) -> None:
        """Let `count` other tasks come, and give this process their cores too."""
        self._awaited = count
        self._cores = set(os.sched_getaffinity(0))
        self._door = _socket()
        try:
            self._door.bind(_address(name))
        except OSError as error:
            raise ClusterError(
                f"another process of this machine has taken the socket of step {name} ({error}); start one task per "
                "node: srun --ntasks-per-node=1"
            ) from error
        self._door.listen(count)
        threading.Thread(target=self._meet, args=(self._door,), daemon=True).start()

    def _meet(self, door: socket.socket) -> None:
        while len(self._met) < self._awaited:
            peer, _ = door.accept()
            cores = peer.recv(1 << 16).decode() if _is_ours(peer) else ""
            if not cores:
                peer.close()
                continue
            self._cores |= {int(core) for core in cores.split(",")}
            # By the process id: the main thread's cores are what workers inherit.
            os.sched_setaffinity(os.getpid(), self._cores)
            self._met.append(peer)
        self._all_met.set()

    def tell(self, code: int) -> None:
        """Tell the others which code to exit with."""
        if self._door is None:
            return
        self._all_met.wait(LATE_S)
        for peer in self._met:
            with contextlib.suppress(OSError):
                peer.sendall(str(code).encode())

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Tell the others how the block ends; an exception is an exit with 1, as is the agent's sudden end."""
        try:
            yield
        except SystemExit as end:
            self.tell(end.code if isinstance(end.code, int) else int(end.code is not None))
            raise
        except BaseException:
            self.tell(1)
            raise
        self.tell(0)


def await_agent(name: str, *, clock: Callable[[], float] = time.monotonic) -> int:
    """Wait for the end of this node's agent; returns its exit code.

    Signals to the step are the agent's business: it may still save a checkpoint when this task, too, is told to end.

    Raises:
        ClusterError: there is no agent.

    """
    for number in NOT_OUR_END:
        signal.signal(number, signal.SIG_IGN)
    ends_s = clock() + MEET_S
    while True:
        with _socket() as agent:
            try:
                agent.connect(_address(name))
            except OSError:
                if clock() > ends_s:
                    raise ClusterError(
                        f"task 0 of this node did not start in {MEET_S:.0f} s; look at its output, or start one task "
                        "per node: srun --ntasks-per-node=1"
                    ) from None
                time.sleep(POLL_S)
                continue
            if not _is_ours(agent):
                raise ClusterError(f"the socket of step {name} is another user's; start one task per node")
            agent.sendall(",".join(map(str, sorted(os.sched_getaffinity(0)))).encode())
            return int(agent.recv(16) or b"1")


def _socket() -> socket.socket:
    # In packets: one write is one read.
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(name: str) -> str:
    return f"\0pipette-launch/{os.getuid()}/{name}"


def _is_ours(peer: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(found)[1] == os.getuid())
