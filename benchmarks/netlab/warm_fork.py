"""Turn a fork into the process that a client of the warm Python requested.

Imported by warm_server alone, and forgotten in the fork.
"""

# ruff: noqa: PTH100, PTH109, PTH115, PTH118, PTH120, PTH123, PTH208, SLF001
# /proc contains text; the code behind `python -m` is private.

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import logging
import os
import runpy
import signal
import sys
import tempfile
import threading
from importlib.machinery import PathFinder, SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "warm_")
GROUPS = "/sys/fs/cgroup/cpu"
PR_SET_PDEATHSIG = 1
_client = [0]


class Request(NamedTuple):
    """One command to run, in its client's place."""

    client: int
    files: tuple[int, ...]
    """The client's files in this process; `asked` has their numbers in the client."""
    asked: dict[str, Any]
    """See warm_client.hand_over."""


def client() -> int:
    """The process that this fork stands for."""
    return _client[0]


def end_with(parent: int) -> None:
    """Have the kernel end this process with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become(request: Request, base: list[str]) -> NoReturn:
    """Be the process that the client asked for, to its end.

    Args:
        request: the client's request.
        base: the interpreter's own part of sys.path.

    """
    asked = request.asked
    _client[0] = request.client
    place(request.files, asked["files"])
    enter(request.client)
    os.setsid()
    os.chdir(asked["folder"])
    os.umask(asked["umask"])
    for number in asked["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, asked["blocked"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    reopen(asked["files"], unbuffered=asked["unbuffered"])
    forget()
    sys.path[:] = [first_path(asked), *dict.fromkeys([*given_paths(), *base])]
    sys.executable, *_ = sys.orig_argv[:] = asked["words"]
    code = 0
    try:
        customize()
        run(asked["kind"], asked["program"], asked["arguments"])
    except SystemExit as leaving:
        code = exit_code(leaving.code)
    except BaseException as error:  # noqa: BLE001 - what Python does with what nobody catches
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    end(code)


def exit_code(given: object) -> int:
    """Return the exit code for an argument of sys.exit."""
    if given is None or isinstance(given, int):
        return (given or 0) & 0xFF
    print(given, file=sys.stderr)
    return 1


def end(code: int) -> NoReturn:
    """End as Python does, but for taking every module apart: of these that takes a second.

    Args:
        code: the exit code, or the negative number of a signal.

    """
    threading._shutdown()
    atexit._run_exitfuncs()
    # Write out the buffers of open files. `get_objects` leaves out frozen objects, and pipette-launch freezes some.
    gc.unfreeze()
    for one in gc.get_objects():
        if type(one) in {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom}:
            with contextlib.suppress(OSError, ValueError):
                one.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def place(here: tuple[int, ...], there: list[int]) -> None:
    """Close all files but the client's, and give those the client's numbers."""
    beyond = max(*here, *there, *map(int, os.listdir("/proc/self/fd"))) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, beyond) for number in here]
    os.closerange(0, beyond)
    for number, wanted in zip(moved, there, strict=True):
        os.dup2(number, wanted)
        os.close(number)


def enter(host: int) -> None:
    """Move to where a process is: control group, cores, priority, namespaces."""
    group = group_of(host)
    if group != group_of(os.getpid()):
        with open(f"{GROUPS}{group}/cgroup.procs", "w") as members:
            members.write(str(os.getpid()))
    os.sched_setaffinity(0, os.sched_getaffinity(host))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, host))
    kinds = [kind for kind in ("net", "uts", "mnt") if namespace(host, kind) != namespace(os.getpid(), kind)]
    # All are opened first: the last changes what there is to open.
    doors = [os.open(f"/proc/{host}/ns/{kind}", os.O_RDONLY) for kind in kinds]
    libc = ctypes.CDLL(None, use_errno=True)
    for door in doors:
        if libc.setns(door, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespaces of process {host}")
        os.close(door)


def group_of(process: int) -> str:
    """Return its control group of version 1 for processor time; empty without one."""
    with open(f"/proc/{process}/cgroup") as lines:
        found = [line.rstrip("\n").split(":", 2) for line in lines]
    return next((group for _, controllers, group in found if "cpu" in controllers.split(",")), "")


def namespace(process: int, kind: str) -> str:
    """The name of a namespace."""
    return os.readlink(f"/proc/{process}/ns/{kind}")


def reopen(files: list[int], *, unbuffered: bool) -> None:
    """Make new standard streams, because their kind decides how they buffer."""
    before = (sys.stdin, sys.stdout, sys.stderr)
    made = [
        stream(number, old, unbuffered=unbuffered) if number in files else None for number, old in enumerate(before)
    ]
    sys.stdin, sys.stdout, sys.stderr = made
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = made
    # Libraries made loggers while they were imported.
    for reference in logging._handlerList:
        handler = reference()
        if isinstance(handler, logging.StreamHandler) and handler.stream in before:
            handler.stream = made[before.index(handler.stream)]


def stream(number: int, old: Any, *, unbuffered: bool) -> io.TextIOWrapper:
    """One standard stream, as the interpreter makes it."""
    mode = "w" if number else "r"
    raw = io.FileIO(number, mode, closefd=False)
    raw.name = ("<stdin>", "<stdout>", "<stderr>")[number]
    is_raw = unbuffered and number > 0
    made = io.TextIOWrapper(
        raw if is_raw else io.BufferedWriter(raw) if number else io.BufferedReader(raw),
        encoding=old.encoding,
        errors=old.errors,
        newline="\n" if number else None,
        line_buffering=not is_raw and (number == 2 or raw.isatty()),
        write_through=is_raw,
    )
    made.mode = mode
    return made


def forget() -> None:
    """Drop the server's own state, including seeds: only Python renews its own in every fork."""
    tempfile.tempdir = None
    np.random.seed()  # noqa: NPY002 - the numbers that everybody shares
    torch.default_generator.seed()
    for name in ("warm_server", "warm_fork"):
        sys.modules.pop(name, None)


def first_path(asked: dict[str, Any]) -> str:
    """Return the first entry that Python puts on sys.path."""
    script = os.path.dirname(os.path.realpath(asked["program"]))
    return str({"module": os.getcwd(), "code": "", "script": script}[asked["kind"]])


def given_paths() -> list[str]:
    """The folders of PYTHONPATH."""
    given = os.environ.get("PYTHONPATH", "")
    return [os.path.abspath(entry) for entry in given.split(os.pathsep)] if given else []


def customize() -> None:
    """Import the sitecustomize of PYTHONPATH, as Python does at its start."""
    if PathFinder.find_spec("sitecustomize", given_paths()) is not None:
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def run(kind: str, program: str, arguments: list[str]) -> None:
    """Run a module, a script or code as Python's command line would."""
    sys.excepthook = show_error
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.argv[:] = [{"module": "-m", "code": "-c", "script": program}[kind], *arguments]
    if kind == "module":
        run_module(program, main)
    elif kind == "code":
        exec(compile(program, "<string>", "exec", dont_inherit=True), vars(main))  # noqa: S102
    else:
        file = os.path.abspath(program)
        vars(main).update(__file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))
        with open(file, "rb") as source:
            code = compile(source.read(), file, "exec", dont_inherit=True)
        exec(code, vars(main))  # noqa: S102


def run_module(name: str, main: ModuleType) -> None:
    """`-m`; where the module was imported before, it runs a second time beside that, as under Python itself."""
    known = sys.modules.get(name)
    if known is not None and not hasattr(known, "__path__"):
        # Python would warn of it, which no fresh interpreter does.
        del sys.modules[name]
    try:
        _, spec, code = runpy._get_module_details(name, SystemExit)
    finally:
        if known is not None:
            sys.modules[name] = known
    sys.argv[0] = spec.origin
    runpy._run_code(code, vars(main), None, "__main__", spec)


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Let the traceback of what nobody catches begin where the program does."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(OURS):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
