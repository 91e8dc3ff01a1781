"""`pipette probe` measures the machines of a job as `pipette-launch` would, writes cluster.json, and trains nothing."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from pipette_launch.errors import UsageError
from pipette_launch.tools.flags import Subcommand

OUT = "--out"
DEFAULT = "cluster.json"


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `pipette probe --help` shows; see `pass_on` for how the words are really read."""
    parser.usage = "pipette probe [--out FILE] [FLAGS OF pipette-launch] SCRIPT [ARGS ...]"
    parser.add_argument(OUT, metavar="FILE", default=DEFAULT, help=f"where to write ({DEFAULT}), on the first node")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="SCRIPT",
        help="flags, script and its arguments as for pipette-launch, on every node of the job: they say which nodes "
        "meet, and whose layers to time",
    )


def run(args: Namespace) -> int:
    """Say what is missing: everything else goes the way of `pass_on`."""
    raise UsageError(f"no script: pipette probe needs the words that pipette-launch gets, not {args.words}")


def pass_on(words: Sequence[str]) -> None:
    """Become `pipette-launch --pipette-probe FILE ...`: torch's launcher wants signals and exits of its own."""
    out, rest = DEFAULT, list(words)
    if rest and rest[0].startswith(f"{OUT}="):
        out, rest = rest[0].partition("=")[2], rest[1:]
    elif rest and rest[0] == OUT:
        if len(rest) == 1:
            raise UsageError(f"{OUT} needs a file")
        out, rest = rest[1], rest[2:]
    os.execv(sys.executable, launcher_command(out, rest))  # noqa: S606


def launcher_command(out: str, words: Sequence[str]) -> list[str]:
    """Return the command of `pipette-launch` that measures and writes to `out`; `words` are flags, script, ARGS."""
    return [sys.executable, "-m", "pipette_launch", "--pipette-probe", out, *words]


COMMAND = Subcommand(
    summary="Measure the machines of a job, write cluster.json, and train nothing.",
    add_arguments=add_arguments,
    run=run,
    examples=(
        "pipette probe --out one.cluster.json --nproc-per-node 8 pretrain_gpt.py $ARGS",
        "pipette probe --nnodes 2 --nproc-per-node 8 --rdzv-endpoint node0:29500 pretrain_gpt.py $ARGS   # on both",
    ),
    pass_on=pass_on,
)
"""For `main.COMMANDS`."""
