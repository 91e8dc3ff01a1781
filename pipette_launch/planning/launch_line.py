"""A pasted launch line: script, arguments, variables, nodes and processes, from the words of torchrun, srun or mpirun.

Users paste lines such as `CUDA_DEVICE_MAX_CONNECTIONS=1 srun -N 4 torchrun --nnodes 4 --nproc_per_node 8 train.py ...`.
Each program of the line takes its own words, and the words after these belong to the next program.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Final, NamedTuple

from pipette_launch.errors import UsageError

NODES, PER_NODE, WORLD = "nodes", "gpus_per_node", "world_size"
"""Sizes of a job, by the name of pipette's own option."""


class Launcher(NamedTuple):
    """Program that starts the processes of a job."""

    sizes: Mapping[str, str]
    """Size of the job that a flag states. Flags have dashes instead of underscores."""
    starts_workers: bool = False
    """True if the program starts the workers of a node itself, so that tasks of srun or mpirun are not workers."""


TORCHRUN = Launcher({"--nnodes": NODES, "--nproc-per-node": PER_NODE}, starts_workers=True)
MPI = Launcher(
    {
        **dict.fromkeys(("-n", "-np", "--n", "--np", "-c", "--ntasks"), WORLD),
        **dict.fromkeys(("-ppn", "--ppn", "-npernode", "--npernode", "-N", "-perhost"), PER_NODE),
    }
)
TASKS = {"-N": NODES, "--nodes": NODES, "-n": WORLD, "--ntasks": WORLD, "--ntasks-per-node": PER_NODE}
LAUNCHERS: Final = MappingProxyType(
    {
        **dict.fromkeys(("torchrun", "ft_launcher", "pipette-launch"), TORCHRUN),
        "deepspeed": Launcher({"--num-nodes": NODES, "--num-gpus": PER_NODE}, starts_workers=True),
        "accelerate": Launcher({"--num-machines": NODES, "--num-processes": WORLD}, starts_workers=True),
        "srun": Launcher(TASKS),
        "flux": Launcher({**TASKS, "--tasks-per-node": PER_NODE}),
        **dict.fromkeys(("mpirun", "mpiexec", "orterun", "mpiexec.hydra", "mpirun.openmpi"), MPI),
        "aprun": Launcher({"-n": WORLD, "-N": PER_NODE}),
        "horovodrun": Launcher({"-np": WORLD, "--num-proc": WORLD}),
    }
)
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "pipette_launch": "pipette-launch",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed": "deepspeed",
    "accelerate.commands.launch": "accelerate",
}
"""Launcher that `python -m MODULE` starts."""
COMMANDS = {"accelerate": ("launch",), "flux": ("run", "mini")}
"""Subcommands of a launcher."""
SHELLS = ("bash", "sh", "zsh", "dash")
WRAPPERS = (
    "apptainer cProfile conda coverage debugpy docker enroot env exec gdb ionice kubectl mamba micromamba ncu nice "
    "nohup nsys numactl omniperf pdb pixi podman podman-hpc poetry py-spy ray rocprof rocprofv2 rocprofv3 salloc "
    "sbatch scalene setsid shifter singularity stdbuf strace sudo taskset time timeout trace uv viztracer"
).split()
"""Programs that start the rest of the line, and state no size of a job."""
PYTHON = re.compile(r"(python|pypy)[\d.]*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
SWITCHES = ("--standalone", "--no-python", "--run-path", "--use-env", "--virtual-local-rank", "--no-local-rank")
"""Flags of launchers without a value, which may stand before a script whose name is not FILE.py."""
PAIRS = ("-mca", "--mca", "-gmca", "--gmca", "-genv", "--genv", "-env")
"""Flags of mpirun with two values."""
PYTHON_VALUES = ("-X", "-W", "--check-hash-based-pycs")
ENDS = re.compile(r"\d*(>|<|>>|&>|>&|\|\||\||&&|&|;).*|\d>&\d")
"""Words at which a shell ends a command."""


class Size(NamedTuple):
    """Number of nodes or processes that a line states."""

    value: int
    words: str
    """Words that state the number, such as `torchrun --nnodes 4`."""
    least: int
    """Least number of an elastic job (`--nnodes 2:4`), else `value`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchLine:
    """Command line of a job."""

    script: str = ""
    """Path of the script, or name of the module."""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the line sets."""
    sizes: Mapping[str, Size] = field(default_factory=dict)
    """Sizes of the job that the line states."""

    def merged(self, *, is_measured: bool, **given: int | None) -> dict[str, int | None]:
        """Return the sizes of the job, by pipette's options, from the line and from `given`.

        `is_measured` is true if a file has the number of hosts. Raise UsageError if a given size contradicts the line.
        """
        for name, value in given.items():
            stated = self.sizes.get(name)
            if value is not None and stated is not None and not stated.least <= value <= stated.value:
                option = f"--{name.replace('_', '-')} {value}"
                raise UsageError(f"{option} contradicts {stated.words} in the launch line; remove or correct one")
        found: dict[str, int | None] = dict.fromkeys((NODES, PER_NODE, WORLD))
        found |= {name: size.value for name, size in self.sizes.items()}
        found |= {name: value for name, value in given.items() if value is not None}
        # A launcher with a number of processes of a node, but without a number of nodes, starts one node.
        if PER_NODE in self.sizes and found[NODES] is None and found[WORLD] is None and not is_measured:
            found[NODES] = 1
        return found


def read_launch_line(words: Sequence[str], *, is_module: bool = False) -> LaunchLine:
    """Split the words of a launch line. A line without a launcher begins with the script.

    `is_module` is true if the first word is the module after `-m`. Raise UsageError if the line has no script, or if a
    launcher's size is not a number.
    """
    return _Reader([*(("python", "-m") if is_module else ()), *words]).line()


def _name(word: str) -> str:
    return PurePosixPath(word).name


def _is_program(word: str) -> bool:
    """Return whether a word starts a program that this module knows, or is a Python script."""
    name = _name(word)
    known = name in LAUNCHERS or name in SHELLS or name in WRAPPERS or PYTHON.fullmatch(name)
    return bool(known) or name.endswith((".py", ".sh"))


class _Reader:
    """Reads one launch line from left to right."""

    def __init__(self, words: Sequence[str]) -> None:
        self._rest = list(words)
        self._environment: dict[str, str] = {}
        self._sizes: list[tuple[Launcher, dict[str, Size]]] = []
        self._before = ""
        """Name of the program whose words came last."""

    def line(self) -> LaunchLine:
        script = ""
        while not script:
            self._take_assignments()
            if not self._rest:
                raise UsageError(f"{self._before or 'the launch line'} starts no script; name the script after it")
            script = self._next(_name(self._rest[0]))
        found = LaunchLine(script=script, arguments=tuple(self._rest), environment=self._environment)
        return replace(found, sizes=self._settled())

    def _next(self, name: str) -> str:
        """Take the words of the next program. Return the script, or an empty text if another program follows."""
        if PYTHON.fullmatch(name):
            return self._python()
        if name in SHELLS:
            self._shell()
        elif name in LAUNCHERS:
            return self._launcher(name)
        elif name.endswith(".py"):
            return self._rest.pop(0)
        elif name in WRAPPERS or self._wraps():
            self._wrapper(name)
        elif name.endswith(".sh"):
            raise UsageError(f"{self._rest[0]} is a shell script, which is not read; give the line that starts Python")
        else:
            return self._rest.pop(0)
        return ""

    def _take_assignments(self) -> None:
        while self._rest and (found := ASSIGNMENT.fullmatch(self._rest[0])):
            self._environment[found[1]] = found[2]
            del self._rest[0]

    def _starts_workers(self) -> bool:
        return bool(self._sizes) and self._sizes[-1][0].starts_workers

    def _wraps(self) -> bool:
        """Return whether an unknown program is a user's own wrapper, as in `./bind.sh python train.py`."""
        return not self._starts_workers() and (any(map(_is_program, self._rest[1:])) or bool(self._modules()))

    def _modules(self) -> list[int]:
        """Return the places of launchers' modules that follow `-m`, as behind a debugger."""
        pairs = enumerate(zip(self._rest, self._rest[1:], strict=False))
        return [place for place, (flag, module) in pairs if flag == "-m" and module in MODULES]

    def _python(self) -> str:
        self._before = self._rest.pop(0)
        while self._rest and self._rest[0].startswith("-"):
            word = self._rest.pop(0)
            if re.fullmatch("-[a-zA-Z]*m", word) and self._rest:
                module = self._rest.pop(0)
                if module not in MODULES and module not in WRAPPERS:
                    return module
                self._rest.insert(0, MODULES.get(module, module))
                return ""
            if re.fullmatch("-[a-zA-Z]*c", word):
                raise UsageError(f"{self._before} {word} runs a text, not a script; name the script of the job")
            if word in PYTHON_VALUES and self._rest:
                del self._rest[0]
        # `python $(which torchrun)` also starts a launcher.
        return self._rest.pop(0) if self._rest and _name(self._rest[0]) not in LAUNCHERS else ""

    def _shell(self) -> None:
        """Continue with the text after `-c`, in the command that starts a program."""
        shell = self._rest.pop(0)
        while self._rest and self._rest[0].startswith("-"):
            word = self._rest.pop(0)
            if re.fullmatch("-[a-z]*c", word) and self._rest:
                commands = [*_commands(self._rest[0])]
                self._rest = next((each for each in commands if any(map(_is_program, each))), [])
                self._before = f"{shell} {word}"
                return
        named = " ".join([shell, *self._rest[:1]])
        raise UsageError(f"{named}: shell scripts are not read; give the line that starts Python, with its values")

    def _wrapper(self, name: str) -> None:
        """Skip the words up to the next program, but keep variables that the words set."""
        self._before = name
        del self._rest[0]
        while self._rest and not _is_program(self._rest[0]):
            if 0 in self._modules():
                self._rest[:2] = [MODULES[self._rest[1]]]
                return
            found = ASSIGNMENT.fullmatch(self._rest.pop(0))
            if found:
                self._environment[found[1]] = found[2]

    def _launcher(self, name: str) -> str:
        launcher, sizes = LAUNCHERS[name], dict[str, Size]()
        self._sizes.append((launcher, sizes))
        self._before = name
        del self._rest[0]
        if self._rest and self._rest[0] in COMMANDS.get(name, ()):
            del self._rest[0]
        while self._rest and self._rest[0].startswith("-"):
            word = self._rest.pop(0)
            if word == "--":
                continue
            if launcher.starts_workers and word in ("-m", "--module"):
                return self._rest.pop(0) if self._rest else ""
            self._flag(name, word, launcher, sizes)
        return ""

    def _flag(self, name: str, word: str, launcher: Launcher, sizes: dict[str, Size]) -> None:
        """Take the value of a launcher's flag. An unknown flag has a value unless a flag or a program follows."""
        option, joined, value = word.partition("=")
        if short := re.fullmatch(r"(-[A-Za-z])(\d+)", word):
            option, joined, value = short[1], "=", short[2]
        kind = _kind(option, launcher)
        if option.replace("_", "-") in SWITCHES:
            if option == "--standalone":
                sizes[NODES] = Size(1, f"{name} --standalone", 1)
            return
        if option in PAIRS:
            del self._rest[:2]
            return
        if not joined and self._rest and not self._rest[0].startswith("-") and not _is_program(self._rest[0]):
            value = self._rest.pop(0)
            if found := ASSIGNMENT.fullmatch(value):
                # mpirun -x A=b, docker -e A=b.
                self._environment[found[1]] = found[2]
        if found := re.match(r"ppr:(\d+):node", value):
            # mpirun --map-by ppr:8:node.
            sizes[PER_NODE] = Size(int(found[1]), f"{name} {option} {value}", int(found[1]))
        if kind:
            size = _size(f"{name} {word}" if joined else f"{name} {word} {value}".rstrip(), value)
            if size:
                sizes[kind] = size

    def _settled(self) -> dict[str, Size]:
        """Return the sizes of the job. A launcher of workers decides on the processes of a node."""
        decisive = [sizes for launcher, sizes in self._sizes if launcher.starts_workers] or [
            sizes for _, sizes in self._sizes
        ]
        found: dict[str, Size] = {}
        for sizes in decisive:
            found |= sizes
        for _, sizes in self._sizes:
            nodes = sizes.get(NODES)
            if nodes and not found.setdefault(NODES, nodes).least <= nodes.value <= found[NODES].value:
                raise UsageError(f"{nodes.words} contradicts {found[NODES].words}; correct one of them")
        return found


def _kind(option: str, launcher: Launcher) -> str:
    """Return the size that a flag states; empty for other flags. torch accepts the beginning of a long flag."""
    name = option.replace("_", "-")
    if name in launcher.sizes:
        return launcher.sizes[name]
    begun = [flag for flag in TORCHRUN.sizes if launcher is TORCHRUN and flag.startswith(name)]
    return launcher.sizes[begun[0]] if len(begun) == 1 else ""


def _size(words: str, text: str) -> Size | None:
    """Read a number, or `MIN:MAX`. Return None for words such as `auto`, which only a launcher can count."""
    if (found := re.fullmatch(r"(?:(\d+)[:-])?(\d+)", text)) and int(found[2]):
        return Size(int(found[2]), words, int(found[1] or found[2]))
    if text in ("auto", "gpu", "cpu", "xpu"):
        return None
    why = "the shell did not replace the variable" if "$" in text else "an unset variable of the shell leaves it empty"
    raise UsageError(f"{words}: a number above 0 is needed; {why}")


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a shell's text, without redirections."""
    command: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        for word in (*_split(line), ";"):
            if ENDS.fullmatch(word) or word.endswith(";"):
                yield [*command, *filter(None, [word.rstrip(";")] if word.endswith(";") else [])]
                command = []
            else:
                command.append(word)


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line[:80]}: the shell's quotes do not match ({error})") from error
