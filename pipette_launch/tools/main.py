"""`pipette COMMAND ...`: parse, run one command, and turn its errors into one sentence."""

from __future__ import annotations

import sys
import textwrap
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence

from pipette_launch import __version__
from pipette_launch.errors import (
    ClusterError,
    FactError,
    FileFormatError,
    MegatronError,
    OptionError,
    PipetteError,
    UsageError,
)
from pipette_launch.installed import explained_import_error
from pipette_launch.text import escape_log_lines, printable
from pipette_launch.tools import compare, completion, devices, doctor, explain, plan, predict, probe, report, watch
from pipette_launch.tools.flags import EXAMPLE_ARGS, Subcommand
from pipette_launch.tools.misspelt import check_command, check_flags, flag_of

COMMANDS: Mapping[str, Subcommand] = {
    "predict": predict.COMMAND,
    "plan": plan.COMMAND,
    "compare": compare.COMMAND,
    "report": report.COMMAND,
    "explain": explain.COMMAND,
    "devices": devices.COMMAND,
    "doctor": doctor.COMMAND,
    "probe": probe.COMMAND,
    "watch": watch.COMMAND,
    "completion": completion.COMMAND,
}
BAD_INPUT = (UsageError, MegatronError, FactError, FileFormatError, ClusterError)
"""Errors of what was typed or of a file that was named: they exit with 2, as argparse's own do."""


def parser() -> ArgumentParser:
    """Return the parser of all commands."""
    whole = ArgumentParser(
        prog="pipette",
        description="The parts of pipette-launch one by one; `pipette-launch` itself takes torchrun's place.",
        epilog="pipette COMMAND --help shows examples and exit codes.",
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"pipette {__version__}")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        one = commands.add_parser(
            name,
            help=command.summary,
            description=command.summary,
            epilog=_epilog(command),
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(one)
    return whole


def _epilog(command: Subcommand) -> str:
    """What stands below the flags in a help text: examples and exit codes."""
    lines = [f"  {line}" for line in command.examples]
    if any("$ARGS" in line for line in lines):
        # A shell splits $ARGS at line ends too.
        lines.insert(0, textwrap.fill(f"ARGS='{EXAMPLE_ARGS}'", 78, initial_indent="  ", subsequent_indent=" " * 8))
    return "\n".join(["examples:", *lines, "", f"exit codes: {command.exit_codes}"])


def main(argv: Sequence[str] | None = None) -> None:
    """Run `pipette`; exits with 0 when there is an answer, whatever it says, and with 2 for input that makes none."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words and words[0] in COMMANDS else "COMMAND"
    escape_log_lines()
    try:
        code = _run(words)
    except PipetteError as error:
        if isinstance(error, OptionError):
            error = error.renamed(flag_of)
        sys.stderr.write(f"pipette {name}: error: {printable(str(error))}\n")
        code = 2 if isinstance(error, BAD_INPUT) else error.exit_code
    sys.exit(code)


def _run(words: Sequence[str]) -> int:
    command = COMMANDS.get(words[0]) if words else None
    if command is not None and command.pass_on is not None and not {"-h", "--help"} & set(words[1:2]):
        command.pass_on(words[1:])
        return 0
    whole = parser()
    if not words:
        whole.print_help(sys.stderr)
        return UsageError.exit_code
    check_command(words, COMMANDS)
    check_flags(whole, words)
    args = whole.parse_args(words)
    try:
        return COMMANDS[args.command].run(args)
    except ModuleNotFoundError as error:
        raise explained_import_error(error) from error
