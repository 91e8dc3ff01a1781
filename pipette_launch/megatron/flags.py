"""Megatron's flags by release, and a parser that cuts a command line into tokens exactly as Megatron's parser does.

`benchmarks/make_flag_table.py` makes the table `data/flags.json`. Tokens keep the user's own words, so that writing a
plan changes only the flags of the layout.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, NoReturn

from pipette_launch.errors import MegatronError
from pipette_launch.text import nearest_word

OLDEST = (0, 14)
CLOSE = 0.85
"""Least similarity (difflib) of a mistyped flag to the known flag.

Two swapped letters in a flag of 12 letters give 0.92.
"""
LEAST_BEGINNING = 8
"""Least characters of a shortened flag for which a note names the full flag. Megatron accepts no shortened flags."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A flag with values, or one word that is not a known flag."""

    words: tuple[str, ...]
    flag: Flag | None = None
    value: Any = None
    """Value that Megatron's parser would store. The value is a list if the flag takes several values."""

    @property
    def dest(self) -> str | None:
        """Name under which Megatron stores the value. The value is `None` for an unknown word."""
        return self.flag.dest if self.flag else None


def release_of(version: str) -> tuple[int, int]:
    """Return the release as numbers: `0.16.1` -> (0, 16). Raise MegatronError for releases before 0.14."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if not match:
        raise MegatronError(f"Megatron version {version!r} is not of the form 0.16.1; see what the script imports")
    release = (int(match[1]), int(match[2]))
    if release < OLDEST:
        raise MegatronError(f"Megatron {version} is older than core_v0.14, the oldest supported release")
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


def likely_flag(option: str, version: str) -> str:
    """Return the flag of this release that a mistyped or shortened flag probably means, or an empty string."""
    # A flag that exists in another release is not a typing error.
    if option in _data()["flags"]:
        return ""
    begun = [flag for flag in flag_table(version) if flag.startswith(option)] if len(option) >= LEAST_BEGINNING else []
    return begun[0] if len(begun) == 1 else nearest_word(option, flag_table(version), cutoff=CLOSE)


class _Record(argparse.Action):
    """Record option and value of each flag, in the order of the command line."""

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        namespace.found.append((option, value))


class _Parser(argparse.ArgumentParser):
    """Parser for the flags of one release, which raises MegatronError for an error in the command line."""

    def __init__(self, table: Mapping[str, Flag]) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        kinds = {"int": int, "float": float, "bool": bool, None: str}
        # Leave out -h, the only short flag: argparse would read any word that begins with -h as -h.
        for flag in (flag for flag in table.values() if flag.option.startswith("--")):
            kind, choices = kinds[flag.kind], flag.choices
            self.add_argument(flag.option, dest=flag.dest, nargs=flag.nargs, type=kind, choices=choices, action=_Record)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = ", ".join(str(choice) for choice in action.choices)
            raise MegatronError(f"{action.option_strings[0]} {value}: unknown value {value!r}; known are {known}")

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        flag, switched, _ = text.partition(": ignored explicit argument ")
        raise MegatronError(f"{flag}: takes no value; write it alone, or leave it out" if switched else text)


@functools.cache
def _parser(version: str) -> _Parser:
    return _Parser(flag_table(version))


def tokenise(words: Sequence[str], version: str) -> tuple[Token, ...]:
    """Cut a command line into tokens as argparse does without shortened flags.

    The words of all tokens are the command line again. Unknown flags, values of unknown flags and stray words become
    tokens of one word each. No word after a bare `--` is a flag. Raise MegatronError if a known flag has a wrong value.
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
    """A command line, read with the flags of one release. An edit of one flag leaves all other words unchanged."""

    tokens: tuple[Token, ...]
    version: str

    @classmethod
    def parse(cls, words: Sequence[str], version: str) -> Arguments:
        """Read a command line. Raise MegatronError if Megatron's parser would refuse the command line."""
        return cls(tokens=tokenise(words, version), version=version)

    @property
    def table(self) -> Mapping[str, Flag]:
        """All flags of this Megatron release, by option string."""
        return flag_table(self.version)

    @property
    def words(self) -> tuple[str, ...]:
        """The command line as words."""
        return tuple(word for token in self.tokens for word in token.words)

    @property
    def unknown_words(self) -> list[str]:
        """Words that are neither a flag of this release nor a value of such a flag."""
        return [token.words[0] for token in self.tokens if token.flag is None and token.words != ("--",)]

    def is_given(self, dest: str) -> bool:
        """Return True if the user wrote a flag for this destination."""
        return any(token.dest == dest for token in self.tokens)

    def get(self, dest: str) -> Any:
        """Return the value that Megatron would store, the last of several values.

        Return None if the release lacks the flag.
        """
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
        (new,) = tokenise((option, *map(str, values)), self.version)
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


# Words that Megatron's parser does not accept, and the likely cause of each word.

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
"""Full flags by short names that Megatron's parser refuses. `tp` covers `--tp`, `-tp` and `--tp_size`."""
NEW_NAMES = {"--checkpoint-num-layers": "--recompute-num-layers", "--use-custom-fsdp": "--use-megatron-fsdp"}
"""New names of flags that Megatron renamed before 0.14."""
RECIPE = re.compile(r"(model)?(recipe|family|factory|config|yaml|exp|experiment)(name|file|path|dir)?|modelfamilyname")
"""Pattern of flags that name a recipe or a recipe's file in Megatron-Bridge, NeMo, Primus and other trainers."""
PRETRAINED = re.compile(r"model(id|name|path|nameorpath)?|(hf|pretrained)(model)?(id|name|path|nameorpath)?")
"""Pattern of flags that name a Hugging Face model in ms-swift, Megatron-Bridge and other trainers."""
REMEDY = "give Megatron-LM's own flags, or to pipette the saved configuration of Megatron-Bridge (--bridge-config FILE)"
DASHES = "-\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FIGURE DASH}\N{EN DASH}\N{EM DASH}\N{HORIZONTAL BAR}\N{MINUS SIGN}"
"""Characters that word processors and web pages write instead of a hyphen."""


def check_words(arguments: Arguments) -> None:
    """Raise a MegatronError that lists all flags whose spelling Megatron refuses."""
    spelt, overrides, valued = {}, {}, {}
    flag_before, value_taken = "", True
    for token in arguments.tokens:
        word = token.words[0]
        name, equals, value = word.partition("=")
        if token.flag:
            flag_before, value_taken = word, token.flag.nargs != 0
        elif name.startswith(tuple(DASHES)):
            spelt[name] = _by_letters(arguments.version).get(_letters(name), "")
            flag_before = ""
        elif equals:
            flag = _by_letters(arguments.version).get(_letters(name.rpartition(".")[2]), "")
            overrides[word] = f"{flag} {value}" if flag and (flag_before or "." in name) else ""
        elif flag_before and not value_taken and re.fullmatch("(?i)true|false|yes|no|on|off|0|1", word):
            valued[f"{flag_before} {word}"] = f"{flag_before} alone, or leave it out,"
    if any(RECIPE.fullmatch(_letters(name)) for name in spelt):
        # A recipe contains the other settings of the job, so correct spellings of these flags would not help.
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
    """Return the likely reason why the flags in `missing` are missing, and advice for the user."""
    words = arguments.unknown_words
    for pattern, reason in (
        (RECIPE, f"a recipe of another program, which is not read; {REMEDY}"),
        (PRETRAINED, f"a model, but only flags can describe its shape; {REMEDY}"),
    ):
        for place, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name.startswith("-") and pattern.fullmatch(_letters(name)):
                following = value if equals else "".join(words[place + 1 : place + 2])
                shown = name if following.startswith("-") else f"{name} {following}".rstrip()
                return f"{shown} names {reason}"
    near = {word: likely_flag(word.partition("=")[0], arguments.version) for word in words}
    meant = [f"{flag} for {word}" for word, flag in near.items() if flag in missing]
    if meant:
        # A launched script may accept other spellings than Megatron.
        return f"only Megatron's own spelling is read: {', '.join(meant)}"
    for word in words:
        if re.match(r"\s*--\S+\s+\S", word):
            return "one word contains several flags, as zsh passes $ARGS; write ${=ARGS} there, without quotes"
        if re.fullmatch(r"[+~]*\w+(\.\w+)+=.*|@?.*\.(ya?ml|toml|json|txt|sh)", word):
            return f"{word} belongs to a recipe or file, which is not read; {REMEDY}"
    return "add what is missing to the script's arguments"


def unknown_note(arguments: Arguments) -> list[str]:
    """Return a note on flags that this release lacks: the script's own flags, or typing errors.

    A launched script refuses unknown flags itself. So only commands that launch no script must report unknown flags.
    """
    version = arguments.version
    found = dict.fromkeys(
        word.partition("=")[0] for word in arguments.unknown_words if re.match(r"\s*--?[^\W\d]", word)
    )
    if not found:
        return []
    shown, stops = [], "the script stops at these flags unless the script defines them"
    for word in found:
        short, new = SHORT_SIZES.get(_letters(word).removesuffix("size")), NEW_NAMES.get(word)
        meant = short or (new if new in flag_table(version) else likely_flag(word, version))
        shown.append(f"{word} (did you mean {meant}?)" if meant else word)
    return [f"not flags of Megatron {version}, so without effect here: {', '.join(shown)}; {stops}"]


@functools.cache
def _by_letters(version: str) -> Mapping[str, str]:
    flags = (option for option in flag_table(version) if option.startswith("--"))
    # If Megatron has two spellings of a flag, the spelling with dashes comes last and is used.
    return {_letters(option): option for option in sorted(flags, key=lambda option: "_" not in option)}


def _letters(option: str) -> str:
    return re.sub(r"[^a-z0-9]", "", option.lower())
