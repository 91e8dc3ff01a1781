"""Complains of commands and flags that `pipette` does not have, and names the nearest that it has."""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser, _SubParsersAction
from collections.abc import Collection, Sequence

from pipette_launch.errors import UsageError
from pipette_launch.text import did_you_mean

OTHER_NAMES = {
    "num_hosts": "nodes",
    "devices_per_host": "gpus-per-node",
    "device_kind": "device",
    "budget_s": "budget",
}
"""Flags whose name is not that of the option in Python."""


def flag_of(option: str) -> str:
    """Return the flag of `pipette` for an option of the Python functions."""
    return f"--{OTHER_NAMES.get(option, option.replace('_', '-'))}"


def nearest(word: str, known: Collection[str], *, else_say: str = "") -> str:
    """Return `; did you mean X?` for the nearest of the known words; where none is near, what else to say."""
    hint = did_you_mean(word, known)
    return f"; {hint}" if hint else else_say


def check_command(words: Sequence[str], commands: Collection[str]) -> None:
    """Raise UsageError for a first word that is no command."""
    if words and not words[0].startswith("-") and words[0] not in commands:
        hint = nearest(words[0], commands, else_say=f"; there are {', '.join(commands)}")
        raise UsageError(f"unknown command {words[0]}{hint}")


def check_flags(whole: ArgumentParser, words: Sequence[str]) -> None:
    """Raise UsageError for a flag that the command does not have; what stands behind a script is the script's own."""
    if not words or words[0].startswith("-"):
        return
    parser = command_parsers(whole)[words[0]]
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
            usual = f"; see pipette {words[0]} --help"
            behind = "; the script's own flags stand behind its name" if has_script else ""
            near = nearest(name, [one for one in options if one.startswith("--")], else_say=usual)
            raise UsageError(f"unknown flag {name}{near}{behind}")
        if not equals and options[name].nargs is None:
            next(rest, None)


def command_parsers(whole: ArgumentParser) -> dict[str, ArgumentParser]:
    """Return the parser of each command by its name."""
    subparsers = next(action for action in whole._actions if isinstance(action, _SubParsersAction))  # noqa: SLF001
    return dict(subparsers.choices)
