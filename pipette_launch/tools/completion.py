"""`pipette completion` prints a script by which a shell completes commands and flags."""

from __future__ import annotations

import sys
from argparse import REMAINDER, ArgumentParser, Namespace

from pipette_launch.errors import PipetteError
from pipette_launch.tools.flags import Subcommand
from pipette_launch.tools.misspelt import command_parsers

SHELLS = ("bash", "zsh", "tcsh")
PATHS = {"FILE", "DIR", "PLAN", "SCRIPT", "WHERE"}
"""Names in help texts of what the shell completes as a path."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the word of `pipette completion`."""
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")


def run(args: Namespace) -> int:
    """Print the script; returns 0. Raises PipetteError where shtab, which writes it, is not installed."""
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise PipetteError("shtab is not installed; pip install 'pipette-launch[completion]'") from error
    # main imports this module.
    from pipette_launch.tools.main import parser

    whole = parser()
    for one in command_parsers(whole).values():
        for action in one._actions:  # noqa: SLF001 - argparse has no public list of them
            if action.nargs == REMAINDER or PATHS & set(str(action.metavar).split("|")):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(whole, args.shell))
    return 0


COMMAND = Subcommand(
    summary="Print a script by which bash, zsh or tcsh completes commands and flags.",
    add_arguments=add_arguments,
    run=run,
    examples=(
        'pipette completion bash   # ~/.bashrc: eval "$(pipette completion bash)"',
        "pipette completion zsh   # into a file _pipette in a folder of $fpath",
    ),
    exit_codes="0 the script was printed; 1 shtab is not installed; 2 there is no such shell",
)
"""For `main.COMMANDS`."""
