"""Launchers that started this one: torchrun's flags from the variables of SLURM, mpirun or torch, and a node's tasks.

With one task per GPU, the first task of a node is the node's agent. The other tasks wait for the agent's end and exit
with the agent's code. The tasks of a node meet at a socket with an abstract Linux name, which leaves no file behind and
closes with the agent's process. Each task sends its cores to the agent, because a launcher may have bound every task to
a different set of cores.
"""

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
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from pipette_launch.defaults import LATE_S, MEET_S, SCONTROL_S
from pipette_launch.errors import ClusterError, UsageError
from pipette_launch.launch.addresses import own_address

PORTS_FROM, NUM_PORTS = 20000, 10000
MASTER_PORT = 29500
STEP_STRIDE = 1009
"""Distance between the ports of two steps of a job, so that two jobs with successive ids do not share a port."""
LARGEST_STEP = 0xFFFFFFF0
"""Least step id that does not belong to srun, but to a batch script or a shell of salloc."""
PART = r"[^\[\],]+|\[[0-9,-]+\]"
"""Pattern of one part of a name in SLURM's list of nodes: text, or numbers in brackets."""
SIZES = {
    "Open MPI": (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    "torch": ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"),
}
"""Variables of a launcher that starts each process: processes of the job and of the node, index in the job and the
node. Ray Train and all descendants of torchrun set torch's variables."""
COMPLETION_INDEX = "JOB_COMPLETION_INDEX"
"""Variable of Kubernetes with the index of a pod in an indexed job."""
RENDEZVOUS = (
    *("nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
    *("node_rank", "master_addr", "master_port"),
)
"""Flags that set which nodes meet at which address. If the user gives one of these flags, the step sets no flags."""
POLL_S = 0.2
CREDENTIALS = struct.Struct("3i")
"""Format of a socket peer's process, user and group, as the kernel reports these ids."""


def scontrol(*words: str) -> str:
    """Return the output of `scontrol`; raises OSError or subprocess.SubprocessError if scontrol is missing or fails."""
    command = ["scontrol", *words]  # clusters install it in different folders
    return subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_S, check=True).stdout


NOT_OUR_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


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
    visible_devices: str | None

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

    def processes(self) -> int | None:
        """Return the number of workers: one per task, or one per GPU of a lone task.

        None keeps torchrun's default. Raises UsageError if the task that starts all workers sees too few GPUs.
        """
        if self.num_tasks == 1:
            return self.num_gpus
        visible = None if self.visible_devices is None else len([one for one in self.visible_devices.split(",") if one])
        if self.num_gpus is not None and visible is not None and visible < self.num_tasks:
            raise UsageError(
                f"{self.node} runs {self.num_tasks} tasks, and task {self.local_id} sees only GPU "
                f"{self.visible_devices}; one task starts the workers of a whole node, so let each task see all GPUs "
                f"of its node (srun --gpus-per-node={max(self.num_tasks, self.num_gpus)} without --gpus-per-task and "
                "--gpu-bind), or start one task per node (srun --ntasks-per-node=1)"
            )
        return self.num_tasks

    def flags(self, address_of: Callable[[str], str]) -> dict[str, str]:
        """Return torchrun's flags for the nodes of this step; empty on one node."""
        if len(self.hosts) == 1:
            return {}
        return {
            "nnodes": str(len(self.hosts)),
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"{address_of(self.hosts[0])}:{self.port}",
            "rdzv_id": self.name,
            # Without `is_host`, torch would compare host names, but SLURM may have a different name for the node.
            "rdzv_conf": f"is_host={str(self.is_first).lower()}",
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
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
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


# -- processes of mpirun, Ray Train or a descendant of torchrun --------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedProcess:
    """One of the processes that another launcher started, as described by the variables of `SIZES`."""

    launcher: str
    num_nodes: int
    num_tasks: int
    """Number of processes on this node."""
    rank: int
    local_id: int
    address: str
    """MASTER_ADDR, where the nodes meet."""
    port: int
    has_store: bool
    """True if a store of the other launcher already listens at the port, as under torchrun."""
    node: str = field(default_factory=socket.gethostname)

    @property
    def name(self) -> str:
        """Name of the job, equal in all processes."""
        return f"{self.address}:{self.port}"

    @property
    def speaks(self) -> bool:
        """True for one process of the job, which prints lines for all."""
        return self.rank == 0

    def processes(self) -> int | None:
        """Return the number of workers: one per process. None for a lone process keeps torchrun's default."""
        return self.num_tasks if self.num_tasks > 1 else None

    def flags(self, _address_of: Callable[[str], str]) -> dict[str, str]:
        """Return torchrun's flags for the nodes of the job; empty on one node."""
        if self.num_nodes == 1:
            return {}
        if not self.address:
            raise UsageError(
                f"{self.launcher} started processes on {self.num_nodes} nodes, and MASTER_ADDR does not name the first "
                "host; give it to all processes (mpirun -x MASTER_ADDR=HOST)"
            )
        flags = {
            "nnodes": str(self.num_nodes),
            "rdzv_backend": "c10d",
            "rdzv_endpoint": self.name,
            "rdzv_id": self.name,
        }
        return flags | ({"rdzv_conf": "is_host=false"} if self.has_store else {})


def started_process(environ: Mapping[str, str]) -> StartedProcess | None:
    """Return the description of this process by mpirun or by torch's variables; None without these variables."""
    for launcher, names in SIZES.items():
        found = [environ.get(name, "") for name in names]
        if not all(text.isdigit() for text in found) or (launcher == "torch" and "MASTER_ADDR" not in environ):
            continue
        size, local_size, rank, local_id = map(int, found)
        if not local_size or size % local_size:
            raise UsageError(
                f"{launcher} started {size} processes, and {local_size} of them on this node; start the same number on "
                "each node"
            )
        return StartedProcess(
            launcher=launcher,
            num_nodes=size // local_size,
            num_tasks=local_size,
            rank=rank,
            local_id=local_id,
            address=environ.get("MASTER_ADDR", ""),
            port=int(environ.get("MASTER_PORT", MASTER_PORT)),
            has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    return None


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


def take_flags(
    args: Namespace, given: Collection[str], environ: Mapping[str, str]
) -> SlurmStep | StartedProcess | None:
    """Set the missing flags in `args` from another launcher, print them once, and return the other launcher's task.

    Returns None if there is no other launcher, or the user gave flags that set where nodes meet.
    """
    index = environ.get(COMPLETION_INDEX, "")
    if index.isdigit() and "master_addr" in given and "node_rank" not in given:
        sys.stderr.write(f"pipette-launch: taken from {COMPLETION_INDEX}: --node-rank={index}\n")
        args.node_rank = int(index)
    task: SlurmStep | StartedProcess | None = None
    if not set(given) & set(RENDEZVOUS):
        # mpirun and Ray may run inside a step of SLURM.
        task = started_process(environ) or current_step(environ, expand)
    if task is None:
        return None
    flags = task.flags(_reachable)
    processes = task.processes()
    if processes is not None:
        flags["nproc_per_node"] = str(processes)
    if "rdzv_endpoint" in flags:
        if task.speaks and isinstance(task, SlurmStep):
            _check_port(task)
        host, _, port = flags["rdzv_endpoint"].rpartition(":")
        address = own_address(host.strip("[]"), int(port))
        # A host name or a loopback address means that the address towards the endpoint is unknown.
        if address != socket.getfqdn() and not address.startswith("127."):
            flags["local_addr"] = address
    taken = {name: value for name, value in flags.items() if name not in given}
    vars(args).update(taken)
    if taken and task.speaks:
        words = " ".join(f"--{name.replace('_', '-')}={value}" for name, value in taken.items())
        sys.stderr.write(f"pipette-launch: taken from {task.launcher}: {words}\n")
    return task


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


# -- the tasks of one node ----------------------------------------------------------------------------------------


class Siblings:
    """Connections of the agent to the other tasks of its node; `open` lets the tasks connect."""

    def __init__(self) -> None:
        self._door: socket.socket | None = None
        self._awaited = 0
        self._met: list[socket.socket] = []
        self._all_met = threading.Event()
        self._cores: set[int] = set()

    def open(self, name: str, count: int) -> None:
        """Let `count` other tasks connect, and add the cores of these tasks to this process."""
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
            # The main thread gets the cores (by process id), because workers inherit the main thread's cores.
            os.sched_setaffinity(os.getpid(), self._cores)
            self._met.append(peer)
        self._all_met.set()

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Send the exit code to the other tasks at the end of the block; after an exception the code is 1."""
        code = 1
        try:
            yield
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            raise
        finally:
            if self._door is not None:
                self._all_met.wait(LATE_S)
            for peer in self._met:
                with contextlib.suppress(OSError):
                    peer.sendall(str(code).encode())


def await_agent(name: str, *, clock: Callable[[], float] = time.monotonic) -> int:
    """Wait for the end of this node's agent, and return its exit code; raises ClusterError if there is no agent.

    A waiting task ignores signals to the step, because the agent handles the signals and may still save a checkpoint.
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
    # In a packet socket each write arrives as one piece.
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(name: str) -> str:
    return f"\0pipette-launch/{os.getuid()}/{name}"


def _is_ours(peer: socket.socket) -> bool:
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(found)[1] == os.getuid())
