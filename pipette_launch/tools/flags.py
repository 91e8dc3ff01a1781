"""What subcommands of `pipette` are made of: their shape, and the flags that several of them share."""

from __future__ import annotations

import math
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pipette_launch.defaults import MARGIN, MEMORY_MARGIN, SEARCH_BUDGET_S, SEED

EXAMPLE_ARGS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--vocab-size 32000 --tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 128 --train-iters 100 "
    "--bf16"
)
"""A job for the examples of help texts: a GPT of 7 B."""
EXIT_CODES = "0 answered, whatever the answer says; 1 could not be done; 2 what was typed, or a file, makes no sense"


class Subcommand(NamedTuple):
    """A new subcommand is a module with one of these, and a line in `main.COMMANDS`."""

    summary: str
    """For the list of all commands; one line."""
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    """Do it, print the answer to stdout, and return the exit code; raises PipetteError for what the user can mend."""
    examples: tuple[str, ...] = ()
    """Command lines for the end of its help; those that need a job use `$ARGS`, which is `EXAMPLE_ARGS`."""
    exit_codes: str = EXIT_CODES
    """For the end of its help."""
    pass_on: Callable[[Sequence[str]], None] | None = None
    """Takes the words behind the command as they are, where they are another program's, and exits."""


def seconds(text: str) -> float:
    """Read a budget for argparse, which names the flag of one that is none."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"needs seconds, at least 0 and finite, got {text}")
    return value


def fraction(text: str) -> float:
    """Read a part of a whole for argparse, which names the flag of one that is none."""
    value = _number(text)
    if not 0 <= value < 1:
        raise ArgumentTypeError(f"must be at least 0 and below 1 (0.08 is 8 %), got {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"needs a number, got {text!r}") from None


def add_size_flags(parser: ArgumentParser, *, nodes: str, gpus: str) -> None:
    """Add the flags that count nodes and devices, with their helps; torchrun's spellings mean the same."""
    parser.add_argument("--nodes", "--nnodes", "--hosts", metavar="N", type=int, help=nodes)
    parser.add_argument(
        "--gpus-per-node",
        "--nproc-per-node",
        "--nproc_per_node",
        metavar="N",
        dest="gpus_per_node",
        type=int,
        help=gpus,
    )


def add_machine_flags(parser: ArgumentParser) -> None:
    """Add the flags that say on which machines."""
    machines = parser.add_mutually_exclusive_group()
    machines.add_argument("--cluster", metavar="FILE", type=Path, help="cluster.json that a warm-up measured")
    machines.add_argument(
        "--gpu",
        metavar="NAME|FILE",
        help="imagine hosts with this device, e.g. h100-sxm; pipette devices lists names and writes files",
    )
    add_size_flags(
        parser, nodes="hosts of the job", gpus="devices and ranks on each (default: as usual for --gpu, else 8)"
    )
    parser.add_argument(
        "--world-size",
        metavar="N",
        type=int,
        help="ranks of the job; may take the place of --nodes or --gpus-per-node",
    )
    parser.add_argument(
        "--fabric", metavar="FILE|NAME", help="network between the hosts of --gpu: a file, uniform, or fat-tree-2:1 ..."
    )


def add_search_flags(parser: ArgumentParser, *, margin: float = MARGIN) -> None:
    """Add the flags that say how to look and what counts as better; `margin` is the default of --margin."""
    add = parser.add_argument
    add(
        "--budget",
        metavar="SECONDS",
        type=seconds,
        default=SEARCH_BUDGET_S,
        help=f"processor time that the search may take (default {SEARCH_BUDGET_S:g})",
    )
    add(
        "--schedules",
        metavar="NAMES",
        default="stock",
        help="pipeline schedules that a plan may use, as --pipette-schedules: stock, all, or names (default stock)",
    )
    add("--seed", metavar="N", type=int, default=SEED, help=f"seed of the search's random numbers (default {SEED})")
    add(
        "--margin",
        metavar="FRACTION",
        type=fraction,
        default=margin,
        help=f"another plan replaces your own only if it saves more than this part of the step (default {margin:g})",
    )
    add(
        "--fix",
        metavar="NAMES",
        default="",
        help="parts of the layout that must stay as they are: tp,pp,dp,cp,ep,vpp,mbs,recompute,...",
    )


def add_reading_flags(parser: ArgumentParser) -> None:
    """Add the flags that say when a configuration fits, and which Megatron reads the script's flags."""
    parser.add_argument(
        "--memory-margin",
        metavar="FRACTION",
        type=fraction,
        default=MEMORY_MARGIN,
        help=f"part of the device memory that must stay free (default {MEMORY_MARGIN})",
    )
    parser.add_argument(
        "--megatron-version",
        metavar="V",
        help="the Megatron release that reads the flags, e.g. 0.16.1 (default: what SCRIPT would import)",
    )


def add_detail_flags(parser: ArgumentParser) -> None:
    """Add the flags that say how much the screen shows."""
    detail = parser.add_mutually_exclusive_group()
    detail.add_argument("-q", "--quiet", action="store_true", help="one line: what was chosen and what it saves")
    detail.add_argument("-v", "--verbose", action="store_true", help="everything, all notes among it")


def add_script(
    parser: ArgumentParser,
    *,
    what: str = "SCRIPT",
    about: str = "as in the job's own command; the file need not exist here",
) -> None:
    """Add the script and its own flags; --help shows the script as `what` with the sentence `about`."""
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for torchrun")
    parser.add_argument("script", metavar=what, help=about)
    parser.add_argument(
        "arguments", metavar="ARGS", nargs=REMAINDER, help="the script's own flags, exactly as in the job"
    )
