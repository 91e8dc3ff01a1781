"""Error classes for all errors that a user sees, one class for each cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class PipetteError(Exception):
    """An error that a user can act on. The message names the problem, the value and a remedy."""

    exit_code = 1


class UsageError(PipetteError):
    """A flag is unknown, malformed, contradicts another flag, or names a thing that does not exist."""

    exit_code = 2


class OptionError(UsageError):
    """An option has a wrong value. The message names options as in Python, and commands rename options to flags."""

    def __init__(self, options: str | Sequence[str], problem: str) -> None:
        super().__init__(options, problem)
        self.options = (options,) if isinstance(options, str) else tuple(options)
        self.problem = problem

    def __str__(self) -> str:
        return f"{' and '.join(self.options)} {self.problem}"

    def renamed(self, name_of: Callable[[str], str]) -> OptionError:
        """Return the same error, with each option's name replaced by `name_of(option)`."""
        return OptionError([name_of(option) for option in self.options], self.problem)


def check_share(option: str, share: float) -> None:
    """Raise OptionError unless the value of an option is a share: at least 0 and below 1."""
    if not 0 <= share < 1:
        raise OptionError(option, f"must be at least 0 and below 1 (0.08 is 8 %), got {share:g}")


class FactError(PipetteError, ValueError):
    """A value in a dataclass of `facts` is impossible, such as a negative size, or contradicts another value."""


class LayoutError(FactError):
    """The parallel degrees do not form a legal layout."""


class MegatronError(PipetteError):
    """The script's Megatron flags are missing, contradictory or unknown."""


def check_all(errors: Iterable[MegatronError]) -> None:
    """Raise one MegatronError that lists all errors of a command line. Do nothing without errors."""
    texts = list(dict.fromkeys(map(str, errors)))
    if len(texts) == 1:
        raise MegatronError(texts[0])
    if texts:
        *first, last = [f"({number}) {text}" for number, text in enumerate(texts, 1)]
        sentences = [text if text.endswith("?") else f"{text}." for text in first]
        raise MegatronError(" ".join([f"{len(texts)} faults:", *sentences, last]))


class ClusterError(PipetteError):
    """The job's machines cannot run the job."""


class ProbeError(PipetteError):
    """A warm-up worker died, hung or returned no measurement."""


class PlanError(PipetteError):
    """No plan exists, or the plan belongs to another job."""


class FileFormatError(PipetteError):
    """A file is damaged, has another version, or was not written by pipette-launch."""
