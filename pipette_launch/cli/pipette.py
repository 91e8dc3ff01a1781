"""The command `pipette`, which parses the command line, runs one subcommand, and prints an error in one line."""

from __future__ import annotations

import sys
import textwrap
from argparse import REMAINDER, ArgumentParser, Namespace, RawDescriptionHelpFormatter, _SubParsersAction
from collections.abc import Mapping, Sequence

from pipette_launch import __version__, errors
from pipette_launch.cli import jobs, plan, show
from pipette_launch.cli.flags import EXAMPLE_ARGS, Subcommand, flag_of
from pipette_launch.errors import MegatronError, OptionError, PipetteError, UsageError
from pipette_launch.text import did_you_mean, escape_log_lines, printable

BAD_INPUT = (UsageError, MegatronError, errors.FactError, errors.FileFormatError, errors.ClusterError)
"""Types of errors in the command line or a named file. These errors exit with 2, as argparse does."""
SHELLS = ("bash", "zsh", "tcsh")
PATHS = {"FILE", "DIR", "PLAN", "SCRIPT", "WHERE"}
"""Placeholders in help texts that a shell completes as a path."""
CORRECTIONS = {
    # If zsh sources shtab's script, the script starts a completion at once and fails.
    "zsh": {"$zsh_eval_context[-1] == eval": "$zsh_eval_context[-1] == (eval|file)"},
    # shtab's script for tcsh completes no file names after the first flag, although a script or a plan may follow.
    "tcsh": {"'p/*/()/'": "'p/*/f/'"},
}
"""Replacements (old, new) in the completion scripts that shtab writes."""


def _add_completion_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="shell of the script")


def _complete(args: Namespace) -> int:
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise PipetteError("shtab is not installed; pip install shtab") from error
    whole = parser()
    actions = [action for one in command_parsers(whole).values() for action in one._actions]  # noqa: SLF001
    for action in actions:
        if action.nargs == REMAINDER or PATHS & set(str(action.metavar).split("|")):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    if args.shell == "tcsh":
        # tcsh does not distinguish subcommands, so a flag gets the choices that it has under any subcommand.
        flags = [action for action in actions if action.option_strings and action.choices]
        for flag in flags:
            same = [one for one in flags if one.option_strings == flag.option_strings]
            flag.choices = tuple(dict.fromkeys(choice for one in same for choice in one.choices or ()))
    script = shtab.complete(whole, args.shell)
    for shtabs, ours in CORRECTIONS.get(args.shell, {}).items():
        script = script.replace(shtabs, ours)
    sys.stdout.write(script)
    return 0


COMMANDS: Mapping[str, Subcommand] = {
    "predict": plan.PREDICT,
    "plan": plan.PLAN,
    "report": show.REPORT,
    "order": show.ORDER,
    "explain": show.EXPLAIN,
    "devices": show.DEVICES,
    "doctor": jobs.DOCTOR,
    "probe": jobs.PROBE,
    "watch": jobs.WATCH,
    "completion": Subcommand(
        summary="Print a script with which bash, zsh or tcsh completes commands and flags.",
        add_arguments=_add_completion_arguments,
        run=_complete,
        examples=(
            'pipette completion bash   # ~/.bashrc: eval "$(pipette completion bash)"',
            "pipette completion zsh   # into a file _pipette in a folder of $fpath",
        ),
        exit_codes="0 the script was printed; 1 shtab is not installed; 2 unknown shell",
    ),
}


def parser() -> ArgumentParser:
    """Return the parser of all subcommands."""
    whole = ArgumentParser(
        prog="pipette",
        description="Measures, predicts and plans in separate commands; the command pipette-launch replaces torchrun.",
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
    lines = [f"  {line}" for line in command.examples]
    if any("$ARGS" in line for line in lines):
        # A shell splits $ARGS at spaces and at line ends, so no line may end inside a flag.
        wrapped = textwrap.wrap(f"ARGS='{EXAMPLE_ARGS}'", 70, break_on_hyphens=False)
        lines.insert(0, textwrap.indent("\n      ".join(wrapped), "  "))
    return "\n".join(["examples:", *lines, "", f"exit codes: {command.exit_codes}"])


def main(argv: Sequence[str] | None = None) -> None:
    """Run `pipette`. The exit code is the subcommand's, or 2 for wrong input."""
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
    if not words[0].startswith("-"):
        if command is None:
            hint = did_you_mean(words[0], COMMANDS, otherwise=f"commands are {', '.join(COMMANDS)}")
            raise UsageError(f"unknown command {words[0]}; {hint}")
        _check_flags(command_parsers(whole)[words[0]], words)
    args = whole.parse_args(words)
    return COMMANDS[args.command].run(args)


def _check_flags(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Raise UsageError for an unknown flag of a subcommand. Words after a script's name belong to the script."""
    options = parser._option_string_actions  # noqa: SLF001 - argparse has no public list of its flags
    has_script = any(action.nargs == REMAINDER for action in parser._actions)  # noqa: SLF001
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("--"):
            if has_script and not word.startswith("-"):
                return
            continue
        name, equals, _ = word.partition("=")
        if name not in options:
            known = [one for one in options if one.startswith("--")]
            hint = did_you_mean(name, known, otherwise=f"see pipette {words[0]} --help")
            script = "; the script's own flags follow its name" if has_script else ""
            raise UsageError(f"unknown flag {name}; {hint}{script}")
        if not equals and options[name].nargs is None:
            next(rest, None)


def command_parsers(whole: ArgumentParser) -> dict[str, ArgumentParser]:
    """Return the parsers of the subcommands by name."""
    subparsers = next(action for action in whole._actions if isinstance(action, _SubParsersAction))  # noqa: SLF001
    return dict(subparsers.choices)
