"""`pipette completion` prints a script by which a shell completes commands and flags."""

from __future__ import annotations

import sys
from argparse import REMAINDER, Action, ArgumentParser, Namespace
from collections.abc import Sequence

from pipette_launch.errors import PipetteError
from pipette_launch.tools.flags import Subcommand
from pipette_launch.tools.misspelt import command_parsers

SHELLS = ("bash", "zsh", "tcsh")
PATHS = {"FILE", "DIR", "PLAN", "SCRIPT", "WHERE"}
"""Names in help texts of what the shell completes as a path."""
MENDED = {
    # In a file that is sourced, shtab's script would complete at once, and fail.
    "zsh": {"$zsh_eval_context[-1] == eval": "$zsh_eval_context[-1] == (eval|file)"},
    # shtab offers nothing behind the first flag; a script or a plan may stand there.
    "tcsh": {"'p/*/()/'": "'p/*/f/'"},
}
"""What is changed in the scripts that shtab writes for a shell."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the word of `pipette completion`."""
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")


def run(args: Namespace) -> int:
    """Print the script; returns 0. Raises PipetteError where shtab, which writes it, is not installed."""
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise PipetteError("shtab is not installed; pip install shtab") from error
    # main imports this module.
    from pipette_launch.tools.main import parser

    whole = parser()
    actions = [action for one in command_parsers(whole).values() for action in one._actions]  # noqa: SLF001
    for action in actions:
        if action.nargs == REMAINDER or PATHS & set(str(action.metavar).split("|")):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    if args.shell == "tcsh":
        _share_choices(actions)
    script = shtab.complete(whole, args.shell)
    for shtabs, ours in MENDED.get(args.shell, {}).items():
        script = script.replace(shtabs, ours)
    sys.stdout.write(script)
    return 0


def _share_choices(actions: Sequence[Action]) -> None:
    """Let a flag have the choices that it has under any command: tcsh does not know which command is typed."""
    flags = [action for action in actions if action.option_strings and action.choices]
    for flag in flags:
        same = [one for one in flags if one.option_strings == flag.option_strings]
        flag.choices = tuple(dict.fromkeys(choice for one in same for choice in one.choices or ()))


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
