"""Stands for a process that was forked elsewhere: hands it everything of its own, and shares its fate.

Runs at every start of a warm Python, so it imports nothing but what is built in. What a fork cannot imitate (an unknown
option, another environment of the libraries, another megatron-core) is left to a real interpreter, and written down.
"""

# ruff: noqa: PTH109, PTH112, PTH113, PTH120, PTH123, PTH208
# Pathlib takes longer to import than all the rest takes to run.

import _signal
import _socket
import marshal
import os
import sys

# Variables that libraries read at import, or the interpreter at its start.
READ_EARLY = (
    "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_", "MALLOC_", "LOGLEVEL",
    "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_",
)  # fmt: skip
READ_LATE = ("PYTHONPATH", "PYTHON_EXEC", "PYTHONUNBUFFERED", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR")
THREADS = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""They say nothing new where they equal OMP_NUM_THREADS."""
PATCHED = (["pipette_patches.run", "--patch", "cpu_backend"], ["pipette_launch.probe.run"])
"""Modules that apply the patch `cpu_backend` before they compute."""
PASSED_ON = (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 14, 15, 16, 26, 27, 29, 30, 31)
"""Signals that ask something of a program; a terminal's, and those that Python ignores, are not among them."""
TETHER = 64
"""The signal by which the forked process asks to end when the parent of this one does."""
PR_SET_PDEATHSIG = 1


def early(environment: dict[str, str]) -> dict[str, str]:
    """The variables that were read before a fork, and cannot be read again."""
    threads = environment.get("OMP_NUM_THREADS")
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_EARLY) and not name.startswith(READ_LATE) and not (name in THREADS and value == threads)
    }


def read(words: list[str]) -> dict | None:
    """Read Python's own command line; None if only Python itself understands it."""
    rest, unbuffered = list(words), bool(os.environ.get("PYTHONUNBUFFERED"))
    while rest and rest[0] == "-u":
        unbuffered = bool(rest.pop(0))
    if not rest:
        return None
    kind = {"-m": "module", "-c": "code"}.get(rest[0], "script")
    if kind != "script":
        rest.pop(0)
    if not rest or (kind == "script" and (rest[0].startswith("-") or not os.path.isfile(rest[0]))):
        return None
    return {"kind": kind, "program": rest[0], "arguments": rest[1:], "unbuffered": unbuffered}


def family(command: dict) -> str:
    """Return the interpreter to fork: with a megatron-core that is patched for the CPU, or without megatron-core."""
    line = [command["program"], *command["arguments"]]
    is_patched = command["kind"] == "module" and any(line[: len(words)] == words for words in PATCHED)
    return "patched" if is_patched else "plain"


def shadowed(command: dict, homes: dict[str, str]) -> str:
    """The package that this program would import from another place than the fork has it from; empty if none."""
    words = [command["program"], *command["arguments"]]
    folders = [os.path.dirname(os.path.realpath(word)) for word in words if word.endswith(".py")]
    folders += [] if command["kind"] == "script" else [os.getcwd()]
    before = os.environ.get("PYTHONPATH", "")
    folders += [os.path.realpath(folder) for folder in before.split(":")] if before else []
    for folder in folders:
        for name, home in homes.items():
            if folder != home and os.path.isdir(f"{folder}/{name.replace('.', '/')}"):
                return f"{name} in {folder}"
    return ""


def main(settings: dict) -> None:
    """Have this command line run by a fork and end as it ends."""
    command = read(sys.argv[1:])
    if command is None:
        become_real(settings, "a command line that only Python understands")
    known = settings["families"][family(command)]
    changed = {name for name, _ in set(early(dict(os.environ)).items()) ^ set(settings["early"].items())}
    if changed:
        become_real(settings, f"another {', '.join(sorted(changed))}")
    package = shadowed(command, known["homes"])
    if package:
        become_real(settings, f"{package} comes first")
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    parent = os.getppid()
    connection.connect(known["socket"])
    hand_over(connection, command, parent)
    share_fate(connection)


def become_real(settings: dict, reason: str) -> None:
    """Be an ordinary interpreter."""
    with open(settings["log"], "a") as log:
        log.write(f"{reason}: {' '.join(sys.argv[1:])[:200]}\n")
    os.execv(settings["python"], [settings["python"], *sys.argv[1:]])  # noqa: S606 - this very process


def hand_over(connection: _socket.socket, command: dict, parent: int) -> None:
    """Send everything that makes a process: arguments, variables, folder, files, and its handling of signals."""
    ignored = [number for number in PASSED_ON if _signal.getsignal(number) == _signal.SIG_IGN]

    def pass_on(number: int, _frame: object) -> None:
        if number == TETHER:
            end_with(parent)
        else:
            connection.send(bytes([number]))

    files = inherited(connection.fileno())
    # A signal in the middle of the message would be read as a part of it.
    blocked = _signal.pthread_sigmask(_signal.SIG_BLOCK, PASSED_ON)
    message = marshal.dumps(
        command
        | {
            "words": sys.argv,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "files": files,
            "umask": os.umask(0o22),
            "ignored": ignored,
            "blocked": [int(number) for number in blocked],
            "leads": os.getpgid(0) == os.getpid(),
        }
    )
    handles = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, handles)] if files else []
    connection.sendmsg([len(message).to_bytes(8, "big")], rights)
    for number in {*PASSED_ON, TETHER} - set(ignored):
        _signal.signal(number, pass_on)
    connection.sendall(message)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, blocked)
    # A reader of a pipe must not wait for this process.
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in files:
        os.dup2(nothing, number)


def inherited(own: int) -> list[int]:
    """Files that were open when this program started."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue  # The listing itself.
        found.append(int(name))
    return sorted(set(found) - {own})


def end_with(parent: int) -> None:
    """Have the kernel end this process when its parent dies, and with it the forked one."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), _signal.SIGKILL)


def share_fate(connection: _socket.socket) -> None:
    """Wait for the forked process's end, and end so."""
    said = b""
    while len(said) < 4:
        more = connection.recv(4 - len(said))
        if not more:
            # The server is gone, and the forked process with it.
            os.kill(os.getpid(), _signal.SIGKILL)
        said += more
    status = int.from_bytes(said, "big")
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    import resource

    # It has dumped its core already, if it did.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = os.WTERMSIG(status)
    if number != _signal.SIGKILL:
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
