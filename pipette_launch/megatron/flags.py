"""Megatron's flags by release, and a command line cut into tokens exactly as Megatron's own parser cuts it.

The table (`data/flags.json`) is made by `benchmarks/make_flag_table.py`. Tokens keep the user's own words, so that the
command line can be written back unchanged but for what a plan changes.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from pipette_launch.errors import MegatronError

OLDEST = (0, 14)
NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
"""What argparse takes for a value although it begins with a dash (Python 3.10 to 3.13)."""
CLOSE = 0.85
"""difflib's ratio from which a word counts as a mistyped flag: 12 letters with two of them swapped have 0.92."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One option string of one release."""

    option: str
    dest: str
    action: str
    nargs: int | str | None
    kind: str | None
    """`int`, `float`, `bool`, or None for text and for what Megatron parses itself."""
    default: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """Some words of a command line that belong together: a flag with its values, or words that are no known flag."""

    words: tuple[str, ...]
    flag: Flag | None = None
    values: tuple[str, ...] = ()

    @property
    def dest(self) -> str | None:
        """Where Megatron stores the value; None for what it does not know."""
        return self.flag.dest if self.flag else None


def release_of(version: str) -> tuple[int, int]:
    """`0.16.1` -> (0, 16); raises MegatronError for what is no version and for releases before 0.14."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if not match:
        raise MegatronError(f"Megatron version {version!r} is not of the form 0.16.1; see what the script imports")
    release = (int(match[1]), int(match[2]))
    if release < OLDEST:
        raise MegatronError(f"Megatron {version} is older than core_v0.14, the oldest release that is understood")
    return release


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files("pipette_launch.megatron").joinpath("data/flags.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def releases() -> tuple[str, ...]:
    """The releases that the table knows, oldest first."""
    return tuple(_data()["releases"])


def newest_release() -> str:
    """The newest release that the table knows, as `0.20`."""
    return releases()[-1]


def known_release(version: str) -> str:
    """The newest release in the table that is not newer than `version`."""
    wanted = release_of(version)
    return [name for name in releases() if release_of(name) <= wanted][-1]


@functools.cache
def _table(release: str) -> Mapping[str, Flag]:
    place = releases().index(release)
    table = {}
    for option, rows in _data()["flags"].items():
        for first, last, dest, action, nargs, kind, default in rows:
            if releases().index(first) <= place <= releases().index(last):
                table[option] = Flag(option=option, dest=dest, action=action, nargs=nargs, kind=kind, default=default)
    return table


def flag_table(version: str) -> Mapping[str, Flag]:
    """Every option string that Megatron registers in this release (newer ones: as in the newest known)."""
    return _table(known_release(version))


def likely_flag(option: str, version: str) -> str | None:
    """What a word that is no flag of this release was likely meant to be; None where nothing is close."""
    # A flag of another release is not a typing error.
    near = () if option in _data()["flags"] else difflib.get_close_matches(option, flag_table(version), 1, CLOSE)
    return near[0] if near else None


def tokenise(words: Sequence[str], table: Mapping[str, Flag]) -> tuple[Token, ...]:
    """Cut a command line as argparse without abbreviations does; joined, the tokens' words are the input.

    Unknown flags, their values and stray words become tokens of one word each. After a bare `--` nothing is a flag.

    Raises:
        MegatronError: a known flag has too few values, or a value where it takes none.

    """
    tokens = []
    place = 0
    end = list(words).index("--") if "--" in words else len(words)
    while place < end:
        option, explicit = _split(words[place], table)
        if option is None:
            tokens.append(Token(words=(words[place],)))
            place += 1
            continue
        flag = table[option]
        available = [] if explicit is not None else list(_values_after(words[place + 1 : end], table))
        values = (explicit,) if explicit is not None else tuple(available[: _most(flag)])
        _check_count(flag, values, explicit)
        size = 1 if explicit is not None else 1 + len(values)
        tokens.append(Token(words=tuple(words[place : place + size]), flag=flag, values=values))
        place += size
    return (*tokens, *(Token(words=(word,)) for word in words[end:]))


def _split(word: str, table: Mapping[str, Flag]) -> tuple[str | None, str | None]:
    """The known option of a word, and its value if it stands behind an equals sign."""
    if word in table:
        return word, None
    option, equals, value = word.partition("=")
    if equals and option.startswith("-") and option in table:
        return option, value
    return None, None


def _is_value(word: str, table: Mapping[str, Flag]) -> bool:
    """Whether argparse would take a word as a value rather than as a flag."""
    if not word.startswith("-") or word == "-":
        return True
    if _split(word, table)[0] is not None:
        return False
    return NEGATIVE_NUMBER.fullmatch(word) is not None or " " in word


def _values_after(words: Sequence[str], table: Mapping[str, Flag]) -> Iterator[str]:
    for word in words:
        if not _is_value(word, table):
            return
        yield word


def _most(flag: Flag) -> int | None:
    if flag.nargs in ("+", "*"):
        return None
    return 1 if flag.nargs is None else int(flag.nargs)


def _check_count(flag: Flag, values: tuple[str, ...], explicit: str | None) -> None:
    if flag.nargs == 0 and explicit is not None:
        raise MegatronError(f"{flag.option}={explicit}: {flag.option} takes no value; write it alone")
    least = 0 if flag.nargs == "*" else 1 if flag.nargs in ("+", None) else int(flag.nargs)
    if len(values) < least:
        found = f"got {' '.join(values)!r}" if values else "got none"
        raise MegatronError(f"{flag.option} needs {least} value{'s' if least != 1 else ''}, {found}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """A user's command line, read by the table of one release, with edits that leave all other words alone."""

    tokens: tuple[Token, ...]
    version: str

    @classmethod
    def parse(cls, words: Sequence[str], version: str) -> Arguments:
        """Read a command line; raises MegatronError where Megatron's parser would refuse it."""
        tokens = tokenise(words, flag_table(version))
        for token in tokens:
            _value(token)  # Megatron's parser converts, and refuses, also what a later flag replaces
        return cls(tokens=tokens, version=version)

    @property
    def table(self) -> Mapping[str, Flag]:
        """The flags of this release."""
        return flag_table(self.version)

    @property
    def words(self) -> tuple[str, ...]:
        """The command line."""
        return tuple(word for token in self.tokens for word in token.words)

    def is_given(self, dest: str) -> bool:
        """Whether the user wrote a flag for this destination."""
        return any(token.dest == dest for token in self.tokens)

    def get(self, dest: str) -> Any:
        """What Megatron's parser would store: the last value wins; None for what this release does not know."""
        for token in reversed(self.tokens):
            if token.dest == dest:
                return _value(token)
        return next((flag.default for flag in self.table.values() if flag.dest == dest), None)

    def size(self, dest: str, *, default: int = 1) -> int:
        """A whole number of at least 1, or the default where neither the user nor Megatron gives one."""
        value = self.get(dest)
        if value is None:
            return default
        if value < 1:
            raise MegatronError(f"{self.shown(dest)}: must be at least 1")
        return int(value)

    def shown(self, dest: str) -> str:
        """The user's own words for a destination, for messages: `--micro-batch-size 4`; else its option string."""
        for token in reversed(self.tokens):
            if token.dest == dest:
                return " ".join(token.words)
        return next((flag.option for flag in self.table.values() if flag.dest == dest), dest)

    def with_flag(self, option: str, *values: str) -> Arguments:
        """Give a flag, in place of its last occurrence if there is one, else at the end (but before a bare `--`)."""
        flag = self.table[option]
        new = Token(words=(option, *values), flag=flag, values=values)
        places = [i for i, token in enumerate(self.tokens) if token.dest == flag.dest]
        if places:
            tokens = (*self.tokens[: places[-1]], new, *self.tokens[places[-1] + 1 :])
        else:
            end = next((i for i, token in enumerate(self.tokens) if token.words == ("--",)), len(self.tokens))
            tokens = (*self.tokens[:end], new, *self.tokens[end:])
        return Arguments(tokens=tokens, version=self.version)

    def without(self, *dests: str) -> Arguments:
        """Delete every flag of these destinations."""
        kept = tuple(token for token in self.tokens if token.dest not in dests)
        return Arguments(tokens=kept, version=self.version)


def _value(token: Token) -> Any:
    flag = token.flag
    if flag is None:
        return None
    if flag.action in ("store_true", "store_false"):
        return flag.action == "store_true"
    if flag.action == "boolean_optional":
        return not flag.option.startswith("--no-")
    if flag.action == "help":
        return True
    values = [_convert(flag, text) for text in token.values]
    return values[0] if flag.nargs is None else values


def _convert(flag: Flag, text: str) -> Any:
    if flag.kind == "bool":
        return bool(text)
    if flag.kind is None:
        return text
    try:
        return int(text) if flag.kind == "int" else float(text)
    except ValueError:
        kind = "a whole number" if flag.kind == "int" else "a number"
        raise MegatronError(f"{flag.option} {text}: {text!r} is not {kind}") from None
