"""Definition of a `pipette` subcommand, and the flags that several subcommands share."""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pipette_launch.defaults import MARGIN, MEMORY_MARGIN, SEARCH_BUDGET_S, SEED
from pipette_launch.errors import UsageError

EXAMPLE_ARGS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--vocab-size 32000 --tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 128 --train-iters 100 "
    "--bf16 --use-distributed-optimizer"
)
"""Script flags of a GPT with 7 billion parameters that fits on two H100 nodes, for the examples of help texts."""
EXIT_CODES = "0 the command printed an answer; 1 it found no answer; 2 the command line or a file is wrong"
OTHER_NAMES = {"device_kind": "device", "budget_s": "budget", "num_ranked": "top"}
"""Flag of each Python option whose name differs from the flag's name."""


class Subcommand(NamedTuple):
    """One subcommand of `pipette`; `pipette.COMMANDS` lists all subcommands."""

    summary: str
    """Summary of the subcommand on one line, for the list of commands."""
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    """Function that prints the result to stdout and returns the exit code; raises PipetteError for user mistakes."""
    examples: tuple[str, ...] = ()
    """Command lines for the help text; `$ARGS` stands for `EXAMPLE_ARGS`."""
    exit_codes: str = EXIT_CODES
    pass_on: Callable[[Sequence[str]], None] | None = None
    """Function that replaces this process by another program, and gets the unparsed words after the subcommand. If this
    field is None, `pipette` parses the words itself."""


def flag_of(option: str) -> str:
    """Return the `pipette` flag of an option of the Python functions."""
    return f"--{OTHER_NAMES.get(option, option.replace('_', '-'))}"


def names(text: str) -> tuple[str, ...]:
    """Read names between commas for argparse."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the `with` block into an error that names the flag and the flag's file."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be written ({error.strerror})") from error


def add_size_flags(parser: ArgumentParser, *, nodes: str, gpus: str) -> None:
    """Add the flags that count nodes and devices, with torchrun's spellings as synonyms."""
    parser.add_argument("--nodes", "--nnodes", "--hosts", metavar="N", type=int, help=nodes)
    spellings = "--gpus-per-node", "--nproc-per-node", "--nproc_per_node"
    parser.add_argument(*spellings, metavar="N", type=int, help=gpus)


def add_machine_flags(parser: ArgumentParser) -> None:
    """Add the flags that name the machines."""
    machines = parser.add_mutually_exclusive_group()
    machines.add_argument("--cluster", metavar="FILE", type=Path, help="cluster.json of a warm-up")
    text = "hosts with this device, such as h100-sxm, without measurements; pipette devices lists the names"
    machines.add_argument("--gpu", metavar="NAME|FILE", help=text)
    add_size_flags(
        parser,
        nodes="hosts of the job",
        gpus="devices and ranks of each host (default: usual number of the device, else 8)",
    )
    parser.add_argument(
        "--world-size", metavar="N", type=int, help="number of ranks; can replace --nodes or --gpus-per-node"
    )
    parser.add_argument(
        "--fabric", metavar="FILE|NAME", help="network between the hosts of --gpu: a file, uniform, or fat-tree-N:1"
    )


def add_search_flags(parser: ArgumentParser) -> None:
    """Add the flags that steer the search."""
    add = parser.add_argument
    text = f"limit of the search in seconds of processor time (default {SEARCH_BUDGET_S:g})"
    add("--budget", metavar="SECONDS", dest="budget_s", type=float, default=SEARCH_BUDGET_S, help=text)
    text = "pipeline schedules that a plan may use, as for --pipette-schedules: stock (default), all, or names"
    add("--schedules", metavar="NAMES", default="stock", help=text)
    add("--seed", metavar="N", type=int, default=SEED, help=f"seed of the search's random numbers (default {SEED})")
    text = f"share of your step that a plan must save to replace your configuration (default {MARGIN:g})"
    add("--margin", metavar="FRACTION", type=float, default=MARGIN, help=text)
    text = "parts of your layout to keep: tp,pp,dp,cp,ep,vpp,mbs,recompute,..."
    add("--fix", metavar="NAMES", type=names, default=(), help=text)


def add_reading_flags(parser: ArgumentParser) -> None:
    """Add the flags for the free memory and the Megatron version."""
    text = f"share of device memory to keep free (default {MEMORY_MARGIN})"
    parser.add_argument("--memory-margin", metavar="FRACTION", type=float, default=MEMORY_MARGIN, help=text)
    text = "Megatron release whose flags are read, such as 0.16.1 (default: the release that SCRIPT would import)"
    parser.add_argument("--megatron-version", metavar="V", help=text)
    text = "configuration that Megatron-Bridge saved, for ARGS that are overrides of a recipe"
    parser.add_argument("--bridge-config", metavar="FILE", type=Path, help=text)


def add_script(parser: ArgumentParser) -> None:
    """Add the arguments for the script and the script's flags."""
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for torchrun")
    text = (
        "script of the job, which need not exist on this machine; torchrun, srun and other launchers may stand before"
    )
    parser.add_argument("script", metavar="SCRIPT", help=text)
    parser.add_argument(
        "arguments", metavar="ARGS", nargs=REMAINDER, help="the script's own flags, exactly as in the job"
    )
