"""An interpreter that has imported all heavy modules, and forks itself for each client.

    python warm_server.py FOLDER [MODULE ...]

Two families serve, each at a socket of its own: `plain` has torch and the launchers; `patched`, forked from it, has the
patch `cpu_backend` and megatron-core too. What is asked for runs in a fork (see warm_fork). A script, not a module, so
that no package of the benchmarks is left behind in the forks.
"""

# ruff: noqa: PTH100, PTH119, PTH208
# /proc contains text.

import gc
import json
import marshal
import os
import pkgutil
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import warm_fork
from warm_fork import Request

MEGATRON = (
    "megatron.core.parallel_state", "megatron.core.tensor_parallel", "megatron.core.dist_checkpointing",
    "megatron.core.distributed", "megatron.core.models.gpt", "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer", "megatron.core.optimizer.distrib_optimizer", "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel", "megatron.core.pipeline_parallel.schedules", "megatron.core.transformer.module",
    "megatron.core.transformer.moe.experts", "megatron.core.utils",
)  # fmt: skip
TETHER = 64
"""As in warm_client."""
MAX_FILES = 250
"""As many as one message can carry."""
PATIENCE_S = 10.0
"""Seconds for a client's whole request."""


class Job(NamedTuple):
    """One forked process."""

    pid: int
    connection: socket.socket
    leads: bool
    """True if the client leads a process group: then a signal goes to the whole group."""

    def signal(self, number: int) -> None:
        """Pass a signal on; the process is not reaped yet, so its number is still its own."""
        with suppress(ProcessLookupError):
            # Before the fork has become the requested process, it leads no group.
            if self.leads and os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)


def main(folder: str, *more: str) -> None:
    """Serve until standard input ends; in a fork, run the request and return when it ends.

    Args:
        folder: of the sockets.
        more: modules that `patched` imports beside megatron-core's.

    """
    base = paths_of_the_interpreter()
    load(["torch.distributed.run", "psutil", "pipette_launch.probe.lockstep", "pipette_patches.registry"])
    # A worker's parent is its client's, so it is the client that must die with it.
    sys.modules["pipette_launch.probe.lockstep"].end_with_parent = lambda: os.kill(warm_fork.client(), TETHER)
    load(modules_of("pipette_launch"))
    packages = ["torch", "numpy", "pipette_launch", "pipette_patches"]
    parent = os.getpid()
    if os.fork():
        request = serve(f"{folder}/plain", packages, sys.stdin.fileno())
    else:
        warm_fork.end_with(parent)
        sys.modules["pipette_patches.registry"].apply("cpu_backend")
        load(["pipette_patches.workload"])
        sys.modules["pipette_patches.workload"].load("cpu")
        load(MEGATRON)
        # Megatron-LM's trainer keeps the functions that it imports, so the player of scripts replaces them before.
        sys.modules["pipette_patches.play"].open_door()
        load(more)
        request = serve(f"{folder}/patched", [*packages, "megatron.core"], None)
    warm_fork.become(request, base)


def paths_of_the_interpreter() -> list[str]:
    """Return sys.path without the entries of the command line and PYTHONPATH."""
    before = os.environ.get("PYTHONPATH", "")
    given = {os.path.abspath(entry) for entry in before.split(os.pathsep)} if before else set()
    return [entry for entry in sys.path[1:] if entry not in given]


def load(names: Iterable[str]) -> None:
    """Import modules."""
    for name in names:
        __import__(name)


def modules_of(package: str) -> Iterable[str]:
    """All modules of a package but its command lines."""
    found = pkgutil.walk_packages(sys.modules[package].__path__, f"{package}.")
    return (module.name for module in found if not module.name.endswith("__main__"))


def serve(name: str, packages: Iterable[str], owner: int | None) -> Request:
    """Fork for every client, pass signals on, tell ends; returns in forks only.

    Args:
        name: of the socket, without `.sock`.
        packages: whose folders clients should know.
        owner: a file; when it ends, so does this process, and with it all forks.

    """
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("the imports have started threads, which a fork would lose")
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{name}.sock")
    listener.listen(128)
    # megatron.core is at home where the folder megatron is: that package has no file of its own.
    folders = {package: sys.modules[package].__path__[0] for package in packages}
    homes = {package: path[: -len(package) - 1] for package, path in folders.items()}
    print(json.dumps({"family": os.path.basename(name), "homes": homes, "socket": f"{name}.sock"}), flush=True)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    if owner is not None:
        selector.register(owner, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if selector.get_map().get(key.fd) is not key:
                continue  # Its process ended in this very round.
            if key.fd == owner:
                os._exit(0)
            elif key.fileobj is listener:
                request = accept(listener, selector)
                if request is not None:
                    return request
            elif key.fd == key.fileobj:
                tell_end(key.fd, key.data, selector)
            else:
                listen_to(key.data, selector)


def accept(listener: socket.socket, selector: selectors.BaseSelector) -> Request | None:
    """Take a request and fork; returns it in the fork only."""
    connection, _ = listener.accept()
    try:
        request = receive(connection)
    except (OSError, EOFError):
        connection.close()
        return None
    server = os.getpid()
    pid = os.fork()
    if not pid:
        warm_fork.end_with(server)
        connection.close()
        leave(selector)
        return request
    for number in request.files:
        os.close(number)
    job = Job(pid=pid, connection=connection, leads=request.asked["leads"])
    selector.register(connection, selectors.EVENT_READ, job)
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, job)
    return None


def leave(selector: selectors.BaseSelector) -> None:
    """Close what belongs to the server, now: objects that did it later would close files of the program."""
    for key in list(selector.get_map().values()):
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
    selector.close()


def receive(connection: socket.socket) -> Request:
    """Read the request of a client."""
    connection.settimeout(PATIENCE_S)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    head, files, _, _ = socket.recv_fds(connection, 8, MAX_FILES)
    wanted, message = int.from_bytes(head, "big"), b""
    while len(message) < wanted:
        more = connection.recv(wanted - len(message))
        if not more:
            raise EOFError
        message += more
    client, _, _ = struct.unpack("3i", credentials)
    return Request(client=client, files=tuple(files), asked=marshal.loads(message))  # noqa: S302 - of our own client


def listen_to(job: Job, selector: selectors.BaseSelector) -> None:
    """Pass signals on; a client that is gone takes its process with it."""
    try:
        said = job.connection.recv(64)
    except OSError:
        said = b""
    for number in said or bytes([signal.SIGKILL]):
        job.signal(number)
    if not said:
        selector.unregister(job.connection)


def tell_end(handle: int, job: Job, selector: selectors.BaseSelector) -> None:
    """Reap a process and tell its client how it ended."""
    _, status = os.waitpid(job.pid, 0)
    selector.unregister(handle)
    os.close(handle)
    with suppress(KeyError):
        selector.unregister(job.connection)
    with suppress(OSError):
        job.connection.sendall(status.to_bytes(4, "big"))
    job.connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
