"""Megatron's flags by release, and a command line cut into tokens by argparse, as Megatron's own parser cuts it.

The table (`data/flags.json`) is made by `benchmarks/make_flag_table.py`. Tokens keep the user's own words, so that the
command line can be written back unchanged but for what a plan changes.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NoReturn

from pipette_launch.errors import MegatronError
from pipette_launch.text import nearest_word

OLDEST = (0, 14)
CLOSE = 0.85
"""difflib's ratio from which a word counts as a mistyped flag: 12 letters with two of them swapped have 0.92."""
LEAST_BEGINNING = 8
"""Characters of a flag's beginning from which a note names the flag; Megatron's parser takes no abbreviation."""


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
    choices: tuple[str | int, ...] | None = None
    """Values that Megatron's parser takes; None for any."""

    @property
    def constant(self) -> bool:
        """What is stored for a flag that takes no value."""
        return (
            not self.option.startswith("--no-") if self.action == "boolean_optional" else self.action != "store_false"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """Some words of a command line that belong together: a flag with its values, or words that are no known flag."""

    words: tuple[str, ...]
    flag: Flag | None = None
    value: Any = None
    """What Megatron's parser would store: a list where the flag takes several values."""

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
def flag_defaults(version: str) -> Mapping[str, Any]:
    """Each destination of a release and what Megatron stores there where no flag is given."""
    defaults: dict[str, Any] = {}
    for flag in flag_table(version).values():
        defaults.setdefault(flag.dest, flag.default)
    return defaults


@functools.cache
def flag_table(version: str) -> Mapping[str, Flag]:
    """Every option string that Megatron registers in this release (newer ones: as in the newest known)."""
    place = releases().index(known_release(version))
    table = {}
    for option, rows in _data()["flags"].items():
        for first, last, dest, action, nargs, kind, default, *choices in rows:
            if releases().index(first) <= place <= releases().index(last):
                fields = {"dest": dest, "action": action, "nargs": nargs, "kind": kind, "default": default}
                table[option] = Flag(option=option, **fields, choices=tuple(choices[0]) if choices else None)
    return table


def likely_flag(option: str, version: str) -> str | None:
    """What a word that is no flag of this release was likely meant to be; None where nothing is close."""
    # A flag of another release is not a typing error.
    if option in _data()["flags"]:
        return None
    begun = [flag for flag in flag_table(version) if flag.startswith(option)] if len(option) >= LEAST_BEGINNING else []
    return (begun[0] if len(begun) == 1 else nearest_word(option, flag_table(version), cutoff=CLOSE)) or None


class _Record(argparse.Action):
    """Keeps option and value of each flag, in the order of the command line."""

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        namespace.found.append((option, value))


class _Parser(argparse.ArgumentParser):
    """Megatron's flags of one release; an error in the command line is raised, in argparse's words."""

    def __init__(self, table: Mapping[str, Flag]) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        kinds = {"int": int, "float": float, "bool": bool, None: str}
        # Without -h, the only short one: to such a one argparse lets others be joined.
        for flag in (flag for flag in table.values() if flag.option.startswith("--")):
            kind, choices = kinds[flag.kind], flag.choices
            self.add_argument(flag.option, dest=flag.dest, nargs=flag.nargs, type=kind, choices=choices, action=_Record)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = ", ".join(str(choice) for choice in action.choices)
            raise MegatronError(f"{action.option_strings[0]} {value}: {value!r} is not understood; known are {known}")

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        flag, switched, _ = text.partition(": ignored explicit argument ")
        raise MegatronError(f"{flag}: takes no value; write it alone, or leave it out" if switched else text)


@functools.cache
def _parser(version: str) -> _Parser:
    return _Parser(flag_table(version))


def tokenise(words: Sequence[str], version: str) -> tuple[Token, ...]:
    """Cut a command line as argparse without abbreviations does; joined, the tokens' words are the input.

    Unknown flags, their values and stray words become tokens of one word each. After a bare `--` nothing is a flag.

    Raises:
        MegatronError: a known flag has too few values or one of another type, or a value where it takes none.

    """
    end = list(words).index("--") if "--" in words else len(words)
    seen = argparse.Namespace(found=[])
    _parser(version).parse_known_args(list(words[:end]), seen)
    table = flag_table(version)
    tokens = []
    place = 0
    for option, value in seen.found:
        while words[place].partition("=")[0] != option:
            tokens.append(Token(words=(words[place],)))
            place += 1
        flag = table[option]
        count = len(value) if isinstance(value, list) else 1
        after = place + (1 if words[place] != option else 1 + count)
        stored = flag.constant if flag.nargs == 0 else value
        tokens.append(Token(words=tuple(words[place:after]), flag=flag, value=stored))
        place = after
    return (*tokens, *(Token(words=(word,)) for word in words[place:]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """A user's command line, read by the table of one release, with edits that leave all other words alone."""

    tokens: tuple[Token, ...]
    version: str

    @classmethod
    def parse(cls, words: Sequence[str], version: str) -> Arguments:
        """Read a command line; raises MegatronError where Megatron's parser would refuse it."""
        return cls(tokens=tokenise(words, version), version=version)

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
                return token.value
        return flag_defaults(self.version).get(dest)

    def size(self, dest: str, *, default: int = 1) -> int:
        """A whole number of at least 1, or the default where neither the user nor Megatron gives one."""
        value = self.get(dest)
        if value is None:
            return default
        if value < 1:
            raise MegatronError(f"{self.shown(dest)}: must be at least 1")
        if value >= 1 << 63:
            raise MegatronError(f"{self.shown(dest)[:80]}: does not fit into 64 bits")
        return int(value)

    def choice(self, dest: str, known: Collection[str]) -> str:
        """Return one of some words; raises MegatronError for any other value."""
        value: str = self.get(dest)
        if value not in known:
            raise MegatronError(f"{self.shown(dest)}: {value!r} is not understood; known are {', '.join(known)}")
        return value

    def shown(self, dest: str) -> str:
        """The user's own words for a destination, for messages: `--micro-batch-size 4`; else its option string."""
        for token in reversed(self.tokens):
            if token.dest == dest:
                return " ".join(token.words)
        return next((flag.option for flag in self.table.values() if flag.dest == dest), dest)

    def with_flag(self, option: str, *values: str) -> Arguments:
        """Give a flag, in place of its last occurrence if there is one, else at the end (but before a bare `--`)."""
        (new,) = tokenise((option, *values), self.version)
        places = [i for i, token in enumerate(self.tokens) if token.dest == new.dest]
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


SHORT_SIZES = {
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "gbs": "--global-batch-size",
    "mbs": "--micro-batch-size",
    "pp": "--pipeline-model-parallel-size",
    "tp": "--tensor-model-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
}
"""Short names of sizes, which Megatron's parser does not take: `--tp`, `-tp` and `--tp_size` by the letters `tp`."""
NEW_NAMES = {
    "--checkpoint-num-layers": "--recompute-num-layers",
    "--use-custom-fsdp": "--use-megatron-fsdp",
}
"""Flags that Megatron renamed before 0.14."""
RECIPE = re.compile(r"(model)?(recipe|family|factory|config|yaml|exp|experiment)(name|file|path|dir)?|modelfamilyname")
"""Letters of flags that name a recipe or its file in Megatron-Bridge, NeMo, Primus and others."""
PRETRAINED = re.compile(r"model(id|name|path|nameorpath)?|(hf|pretrained)(model)?(id|name|path|nameorpath)?")
"""Letters of flags that name a model of Hugging Face in ms-swift, Megatron-Bridge and others."""
DASHES = "-\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FIGURE DASH}\N{EN DASH}\N{EM DASH}\N{HORIZONTAL BAR}\N{MINUS SIGN}"
"""Signs that word processors and web pages put in the place of a dash."""


def check_words(arguments: Arguments) -> None:
    """Raise MegatronError for words that give a value of Megatron's in another spelling, naming all of them."""
    spelt, overrides, valued = {}, {}, {}
    flag_before, value_taken = "", True
    for token in arguments.tokens:
        word = token.words[0]
        name, equals, value = word.partition("=")
        if token.flag:
            flag_before, value_taken = word, token.flag.nargs != 0
        elif name.startswith(tuple(DASHES)):
            spelt[name] = _same_letters(name, arguments.version)
            flag_before = ""
        elif equals:
            flag = _same_letters(name.rpartition(".")[2], arguments.version)
            overrides[word] = f"{flag} {value}" if flag and (flag_before or "." in name) else ""
        elif flag_before and not value_taken and re.fullmatch("(?i)true|false|yes|no|on|off|0|1", word):
            valued[f"{flag_before} {word}"] = f"{flag_before} alone, or leave it out,"
    if any(RECIPE.fullmatch(_letters(name)) for name in spelt):
        # The rest of a job stands in the recipe, so other spellings do not help.
        return
    for found, rule in (
        (spelt, "Megatron's flags have plain dashes, not underscores or capitals"),
        (overrides, "Megatron-LM takes its values as flags, not as NAME=VALUE"),
        (valued, "Megatron's switches take no value"),
    ):
        pairs = [f"{right} for {wrong}" for wrong, right in found.items() if right]
        if pairs:
            raise MegatronError(f"{rule}: write {', '.join(pairs)}")


def why_missing(arguments: Arguments, missing: Sequence[str]) -> str:
    """Return the likely reason why flags are missing, and what to do.

    Args:
        arguments: the user's own.
        missing: flags that Megatron needs.

    """
    words = _unknown(arguments)
    for pattern, reason in (
        (RECIPE, "a recipe of another program, which is not read"),
        (PRETRAINED, "a model, and its shape is read from flags alone"),
    ):
        for place, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name.startswith("-") and pattern.fullmatch(_letters(name)):
                following = value if equals else "".join(words[place + 1 : place + 2])
                shown = name if following.startswith("-") else f"{name} {following}".rstrip()
                return f"{shown} names {reason}; give Megatron-LM's own flags"
    near = {word: likely_flag(word.partition("=")[0], arguments.version) for word in words}
    meant = [f"{flag} for {word}" for word, flag in near.items() if flag in missing]
    if meant:
        # A script that is launched may take its own spelling alone.
        return f"only Megatron's own spelling is read: {', '.join(meant)}"
    for word in words:
        if re.match(r"\s*--\S+\s+\S", word):
            return "several flags stand in one word, as zsh passes $ARGS; write ${=ARGS} there, and no quotes"
        if re.fullmatch(r"[+~]*\w+(\.\w+)+=.*|@?.*\.(ya?ml|toml|json|txt|sh)", word):
            return f"{word} belongs to a recipe or file, which is not read; give Megatron-LM's own flags"
    return "add what is missing to the script's arguments"


def unknown_note(arguments: Arguments) -> list[str]:
    """Name the flags that this release does not have: the script's own, or typing errors.

    A script that is launched refuses unknown flags itself; commands that launch none must name them.
    """
    version = arguments.version
    found = dict.fromkeys(word.partition("=")[0] for word in _unknown(arguments) if re.match(r"\s*--?[^\W\d]", word))
    if not found:
        return []
    shown = (f"{word} (did you mean {flag}?)" if (flag := _meant(word, version)) else word for word in found)
    names, stops = ", ".join(shown), "it stops at them unless the script adds them"
    return [f"not flags of Megatron {version}, so without effect here: {names}; {stops}"]


def _meant(word: str, version: str) -> str | None:
    short, new = SHORT_SIZES.get(_letters(word).removesuffix("size")), NEW_NAMES.get(word)
    return short or (new if new in flag_table(version) else likely_flag(word, version))


def _unknown(arguments: Arguments) -> list[str]:
    return [token.words[0] for token in arguments.tokens if token.flag is None and token.words != ("--",)]


def _same_letters(name: str, version: str) -> str:
    """Return the flag of this release that differs from a name in case and signs alone, or an empty string."""
    return _by_letters(version).get(_letters(name), "")


@functools.cache
def _by_letters(version: str) -> Mapping[str, str]:
    flags = (option for option in flag_table(version) if option.startswith("--"))
    # If Megatron has two spellings, the spelling with dashes comes last and counts.
    return {_letters(option): option for option in sorted(flags, key=lambda option: "_" not in option)}


def _letters(option: str) -> str:
    return re.sub(r"[^a-z0-9]", "", option.lower())
