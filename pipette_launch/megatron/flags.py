"""Megatron's flags by release, and a parser that cuts a command line into tokens exactly as Megatron's parser does.

`benchmarks/make_flag_table.py` makes the table `data/flags.json`. Tokens keep the user's own words, so that writing a
plan changes only the flags of the layout.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, NoReturn

from pipette_launch.errors import MegatronError, check_all
from pipette_launch.facts import files
from pipette_launch.text import nearest_word

OLDEST = (0, 16)
"""Oldest supported release of Megatron. CONTRIBUTING.md says when it rises."""
CLOSE = 0.85
"""Least similarity (difflib) of a mistyped flag to the known flag.

Two swapped letters in a flag of 12 letters give 0.92.
"""
EFFECTS = {row["flag"]: row["effect"] for row in files.table("pipette_launch.megatron", "effects")}
"""Effect of each flag that no prediction and no plan reads, by destination, in the words of `docs/script_flags.md`."""
FREE_CHOICES = ("ckpt_format", "dataloader_type", "tokenizer_type")
"""Destinations that a reader uses, although an unknown value of them changes neither memory nor time of a step."""
NO_VALUE = "a value is missing"
KINDS = {"int": int, "float": float, "bool": bool, None: str}
"""Type of a flag's value, by `Flag.kind`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One option string, such as `--lr`, of one Megatron release."""

    option: str
    dest: str
    action: str
    nargs: int | str | None
    kind: str | None
    """`int`, `float` or `bool`. The type is `None` for text, even if Megatron converts the text after parsing."""
    default: Any
    choices: tuple[str | int, ...] | None = None
    """Allowed values. With None, every value is allowed."""

    @property
    def constant(self) -> bool:
        """Value that Megatron's parser stores for a flag without a value."""
        if self.action == "boolean_optional":
            return not self.option.startswith("--no-")
        return self.action != "store_false"

    @property
    def is_free(self) -> bool:
        """True if an unknown value changes neither memory nor time of a step, so that only the script judges it."""
        return self.dest in FREE_CHOICES or EFFECTS.get(self.dest, "not priced") != "not priced"

    def stored(self, words: Sequence[str]) -> tuple[Any, str]:
        """Return the value that Megatron's parser would store, and the reason why the parser refuses the words.

        The reason is empty if the parser accepts the words. Otherwise the value is the default, or the words
        themselves if only the list of choices lacks them.
        """
        if self.nargs == 0:
            return self.constant, f"{self.option}: takes no value; write it alone, or leave it out" if words else ""
        if not words and self.nargs != "*":
            return self.default, f"{self.option}: {NO_VALUE}"
        try:
            values = [KINDS[self.kind](word) for word in words]
        except ValueError:
            wrong = next(word for word in words if not _is_of(KINDS[self.kind], word))
            return self.default, f"{self.option}: invalid {self.kind} value: {wrong!r}"
        reasons = [f"{self.option} {value}: {self._unknown_value(value)}" for value in self.unknown(values)]
        return (values[0] if self.nargs is None else values), next(iter(reasons), "")

    def unknown(self, values: Sequence[object]) -> list[object]:
        """Return the values that are not among the choices, without None."""
        return [value for value in values if self.choices and value is not None and value not in self.choices]

    def _unknown_value(self, value: object) -> str:
        known = ", ".join(map(str, self.choices or ()))
        flags = ((name, flag_table(name).get(self.option)) for name in releases())
        others = [name for name, flag in flags if flag and value in (flag.choices or ())]
        near = [choice for choice in map(str, self.choices or ()) if choice.lower() == str(value).lower()]
        hint = f"Megatron {others[0]} has it" if others else "no formula has its memory and time"
        hint = f"did you mean {near[0]}?" if near else hint
        return f"unknown value {value!r}; known are {known}; {hint}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A flag with values, or one word that is not a known flag."""

    words: tuple[str, ...]
    flag: Flag | None = None
    value: Any = None
    """Value that Megatron's parser would store. The value is a list if the flag takes several values."""
    fault: str = ""
    """Reason why Megatron's parser refuses the words. The text is empty if the parser accepts them."""

    @property
    def dest(self) -> str | None:
        """Name under which Megatron stores the value. The value is `None` for an unknown word."""
        return self.flag.dest if self.flag else None


def release_of(version: str) -> tuple[int, int]:
    """Return the release as numbers: `0.16.1` -> (0, 16). Raise MegatronError for releases before OLDEST."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if not match:
        raise MegatronError(f"Megatron version {version!r} is not of the form 0.16.1; see what the script imports")
    release = (int(match[1]), int(match[2]))
    if release < OLDEST:
        oldest = "core_v{}.{}".format(*OLDEST)
        raise MegatronError(f"Megatron {version} is older than {oldest}, the oldest supported release")
    return release


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files("pipette_launch.megatron").joinpath("data/flags.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def releases() -> tuple[str, ...]:
    """Return the releases in the table, oldest first."""
    return tuple(_data()["releases"])


def newest_release() -> str:
    """Return the newest release in the table, as `0.20`."""
    return releases()[-1]


def known_release(version: str) -> str:
    """Return the newest release in the table that is not newer than `version`."""
    wanted = release_of(version)
    return [name for name in releases() if release_of(name) <= wanted][-1]


@functools.cache
def flag_defaults(version: str) -> Mapping[str, Any]:
    """Return the defaults of a release by destination."""
    # Several flags may set one destination, and the default of the first flag counts.
    return {flag.dest: flag.default for flag in [*flag_table(version).values()][::-1]}


@functools.cache
def flag_table(version: str) -> Mapping[str, Flag]:
    """Return every option string of a release. A release newer than the table has the newest flags in the table."""
    place = releases().index(known_release(version))
    table = {}
    for option, rows in _data()["flags"].items():
        for first, last, dest, action, nargs, kind, default, *choices in rows:
            if releases().index(first) <= place <= releases().index(last):
                fields = {"dest": dest, "action": action, "nargs": nargs, "kind": kind, "default": default}
                table[option] = Flag(option=option, **fields, choices=tuple(choices[0]) if choices else None)
    return table


def _releases_of(option: str) -> list[str]:
    """Return the releases that have a flag, oldest first."""
    return [release for release in releases() if option in flag_table(release)]


@functools.cache
def known_dests() -> frozenset[str]:
    """Return the destinations of all flags of all releases."""
    return frozenset(dest for rows in _data()["flags"].values() for _, _, dest, *_ in rows)


def likely_flag(option: str, version: str) -> str:
    """Return the flag of this release that a mistyped flag probably means, or an empty string."""
    # A flag that exists in another release is not a typing error.
    if option in _data()["flags"]:
        return ""
    plain = "--" + re.sub(r"[\W_]+", "-", option.lower()).strip("-")
    return nearest_word(plain, flag_table(version), cutoff=CLOSE)


def _is_of(kind: Callable[[str], object], word: str) -> bool:
    try:
        kind(word)
    except ValueError:
        return False
    return True


class _Record(argparse.Action):
    """Record option and words of each flag, in the order of the command line."""

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        namespace.found.append((option, value if isinstance(value, list) else [] if value is None else [value]))


class _Parser(argparse.ArgumentParser):
    """Parser that assigns words to the flags of one release. `Flag.stored` judges the words."""

    def __init__(self, table: Mapping[str, Flag]) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        # With these numbers of values, a flag without a value does not stop the parser.
        lenient = {None: "?", "+": "*"}
        # Leave out -h, the only short flag: argparse would read any word that begins with -h as -h.
        for flag in (flag for flag in table.values() if flag.option.startswith("--")):
            nargs = lenient.get(flag.nargs, flag.nargs) if not isinstance(flag.nargs, int) else flag.nargs
            self.add_argument(flag.option, dest=flag.dest, nargs=nargs, action=_Record)

    def error(self, message: str) -> NoReturn:
        raise MegatronError(message.removeprefix("argument "))


@functools.cache
def _parser(version: str) -> _Parser:
    return _Parser(flag_table(version))


def tokenise(words: Sequence[str], version: str) -> tuple[Token, ...]:
    """Cut a command line into tokens as argparse does without shortened flags.

    The words of all tokens are the command line again. Unknown flags, values of unknown flags and stray words become
    tokens of one word each. No word after a bare `--` is a flag. A token has a `fault` if Megatron's parser would
    refuse its words. Raise MegatronError if a flag of three values has another number of values.
    """
    end = list(words).index("--") if "--" in words else len(words)
    table = flag_table(version)
    seen = argparse.Namespace(found=[])
    # argparse stops at a switch with a value, so the value is judged here.
    bare = [name if _is_switch(table.get(name)) else word for word in words[:end] for name in [word.partition("=")[0]]]
    _parser(version).parse_known_args(bare, seen)
    tokens = []
    place = 0
    for option, values in seen.found:
        while words[place].partition("=")[0] != option:
            tokens.append(Token(words=(words[place],)))
            place += 1
        flag, is_joined = table[option], words[place] != option
        after = place + 1 + (0 if is_joined else len(values))
        stored, fault = flag.stored([words[place].partition("=")[2]] if is_joined else values)
        tokens.append(Token(words=tuple(words[place:after]), flag=flag, value=stored, fault=fault))
        place = after
    return (*tokens, *(Token(words=(word,)) for word in words[place:]))


def _is_switch(flag: Flag | None) -> bool:
    return flag is not None and flag.nargs == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """A command line, read with the flags of one release. An edit of one flag leaves all other words unchanged."""

    tokens: tuple[Token, ...]
    version: str

    @classmethod
    def parse(cls, words: Sequence[str], version: str) -> Arguments:
        """Read a command line.

        Raise MegatronError that lists all words that Megatron's parser would refuse, except free values.
        """
        found = cls.cut(words, version)
        check_all(found.faults())
        return found

    @classmethod
    def cut(cls, words: Sequence[str], version: str) -> Arguments:
        """Read a command line, including words that Megatron's parser would refuse."""
        return cls(tokens=tokenise(words, version), version=version)

    def faults(self) -> list[MegatronError]:
        """Return an error for each flag whose words Megatron's parser would refuse, except free values."""
        found = [token for token in self.tokens if token.fault and not self._is_free(token)]
        bare = dict.fromkeys(token.words[0] for token in found if len(token.words) == 1 and not _is_switch(token.flag))
        reason = f"{NO_VALUE}; an unset variable of the shell leaves a flag without its value"
        texts = [token.fault for token in found if token.words[0] not in bare]
        return [MegatronError(text) for text in ([f"{', '.join(bare)}: {reason}"] if bare else []) + texts]

    @property
    def free_values(self) -> list[str]:
        """Flags with values that Megatron's parser would refuse, although they change neither memory nor time."""
        return [" ".join(token.words) for token in self.tokens if token.fault and self._is_free(token)]

    @staticmethod
    def _is_free(token: Token) -> bool:
        values = token.value if isinstance(token.value, list) else [token.value]
        return token.flag is not None and token.flag.is_free and bool(token.flag.unknown(values))

    @property
    def faulty_dests(self) -> set[str]:
        """Destinations of the flags whose words Megatron's parser would refuse."""
        return {token.flag.dest for token in self.tokens if token.flag and token.fault}

    @property
    def table(self) -> Mapping[str, Flag]:
        """All flags of this Megatron release, by option string."""
        return flag_table(self.version)

    @property
    def words(self) -> tuple[str, ...]:
        """The command line as words."""
        return tuple(word for token in self.tokens for word in token.words)

    @property
    def flag_tokens(self) -> tuple[Token, ...]:
        """Tokens before a bare `--`, after which argparse reads no flags."""
        bare = [place for place, token in enumerate(self.tokens) if token.words == ("--",)]
        return self.tokens[: bare[0]] if bare else self.tokens

    @property
    def unknown_words(self) -> list[str]:
        """Words that are neither a flag of this release nor a value of such a flag."""
        return [token.words[0] for token in self.tokens if token.flag is None and token.words != ("--",)]

    @property
    def stray_words(self) -> list[str]:
        """Words that belong to no flag, neither of this release nor of the script."""
        found, may_be_value = [], False
        for token in self.flag_tokens:
            is_flag = re.match(r"\s*--?[^\W\d]", token.words[0]) is not None
            if token.flag is None and not is_flag and not may_be_value and token.words[0] != "-":
                found.append(token.words[0])
            may_be_value = token.flag is None and (is_flag or may_be_value)
        return found

    def is_given(self, dest: str) -> bool:
        """Return True if the user wrote a flag for this destination."""
        assert dest in known_dests(), f"no release of Megatron has a flag for {dest}"
        return any(token.dest == dest for token in self.tokens)

    def get(self, dest: str) -> Any:
        """Return the value that Megatron would store, the last of several values.

        Return None if the release lacks the flag.
        """
        assert dest in known_dests(), f"no release of Megatron has a flag for {dest}"
        for token in reversed(self.tokens):
            if token.dest == dest:
                return token.value
        return flag_defaults(self.version).get(dest)

    def size(self, dest: str, *, default: int = 1) -> int:
        """Return a flag's number of at least 1, or `default` if neither the user nor Megatron gives a number."""
        value = self.get(dest)
        if value is None:
            return default
        if value < 1:
            raise self.refusal("must be at least 1", dest)
        if value >= 1 << 63:
            raise MegatronError(f"{self.shown(dest)[:80]}: does not fit into 64 bits")
        return int(value)

    def choice(self, dest: str, known: Collection[str]) -> str:
        """Return a value that must be one of the known values. Raise MegatronError for any other value."""
        value: str = self.get(dest)
        if value not in known:
            raise self.refusal(f"unknown value {value!r}; known are {', '.join(known)}", dest)
        return value

    def shown(self, dest: str) -> str:
        """Return the flag and value that the user wrote, `--micro-batch-size 4`, or only the flag that sets `dest`."""
        for token in reversed(self.tokens):
            if token.dest == dest:
                return " ".join(token.words)
        return self.option(dest)

    def option(self, dest: str) -> str:
        """Return the first flag of a destination, or the destination itself if this release has no flag."""
        return next((flag.option for flag in self.table.values() if flag.dest == dest), dest)

    def shown_given(self, *dests: str) -> str:
        """Return the user's own words for the given flags among these destinations, joined by `and`."""
        return " and ".join(self.shown(dest) for dest in dests if self.is_given(dest))

    def refusal(self, reason: str, *dests: str) -> MegatronError:
        """Return the error `FLAG VALUE and FLAG VALUE: reason`."""
        return MegatronError(f"{' and '.join(map(self.shown, dests))}: {reason}")

    def with_flag(self, option: str, *values: object) -> Arguments:
        """Replace the last occurrence of a flag, or add the flag at the end, but before a bare `--`."""
        (new,) = self.parse((option, *map(str, values)), self.version).tokens
        places = [i for i, token in enumerate(self.tokens) if token.dest == new.dest]
        ends = [i for i, token in enumerate(self.tokens) if token.words == ("--",)]
        start = places[-1] if places else ends[0] if ends else len(self.tokens)
        return replace(self, tokens=(*self.tokens[:start], new, *self.tokens[start + bool(places) :]))

    def with_value(self, dest: str, *values: object) -> Arguments:
        """Set the flag of a destination. A flag that is a switch gets no value."""
        return self.with_flag(self.option(dest), *values)

    def without(self, *dests: str) -> Arguments:
        """Delete every flag of these destinations."""
        return replace(self, tokens=tuple(token for token in self.tokens if token.dest not in dests))


def unread_words(arguments: Arguments) -> list[str]:
    """Return the unknown flags and the words without a flag, each with the flag or release that the user may mean."""
    flags = (word.partition("=")[0] for word in arguments.unknown_words if re.match(r"\s*--?[^\W\d]", word))
    shown = []
    for word in dict.fromkeys(flags):
        near, others = likely_flag(word, arguments.version), _releases_of(word)
        other = f" (in {others[0]} to {others[-1]})" if others else ""
        shown.append(f"{word} (did you mean {near}?)" if near else f"{word}{other}")
    return [*shown, *(word or "'' (an unset variable in quotes?)" for word in dict.fromkeys(arguments.stray_words))]


def why_missing(arguments: Arguments) -> str:
    """Return advice for a command line that lacks flags, with the words that were not read."""
    unread = unread_words(arguments)
    advice = "add what is missing to the script's arguments"
    return (
        f"{advice}; words that are no flags of Megatron {arguments.version}: {', '.join(unread)}" if unread else advice
    )


def unknown_note(arguments: Arguments) -> list[str]:
    """Return notes on flags and values that this release lacks: the script's own, or typing errors.

    A launched script refuses unknown words itself. So only commands that launch no script must report unknown words.
    """
    version, notes = arguments.version, []
    if free := ", ".join(dict.fromkeys(arguments.free_values)):
        stops = "the script stops at these values unless the script defines them"
        notes.append(f"not values of Megatron {version}, so without effect here: {free}; {stops}")
    if unread := ", ".join(unread_words(arguments)):
        stops = "the script stops at these flags unless the script defines them"
        notes.append(f"not flags of Megatron {version}, so without effect here: {unread}; {stops}")
    return notes
