"""What a subcommand of `pipette` brings along."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand: a new one is a module with one of these, and a line in `main.COMMANDS`."""

    summary: str
    """For the list of all commands; one line."""
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    """Do it, print the answer to stdout, and return the exit code; raises PipetteError for what the user can mend."""
    pass_on: Callable[[Sequence[str]], None] | None = None
    """Takes the words behind the command as they are, where they are another program's, and exits."""
