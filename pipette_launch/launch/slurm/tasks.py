"""One task per GPU: the first task of a node is its agent, the others wait for its end and exit with its code.

They meet at a socket without a file (an abstract name of Linux): nothing is left of it, and it closes however the agent
ends. Each of the others tells the agent its cores: SLURM may have bound every task to its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from pipette_launch.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
