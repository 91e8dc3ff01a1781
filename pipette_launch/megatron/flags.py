"""Megatron's flags by release, and a parser that cuts a command line into tokens exactly as Megatron's parser does.

`benchmarks/make_flag_table.py` makes the table `data/flags.json`. Tokens keep the user's own words, so that writing a
plan changes only the flags of the layout.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
LEAST_BEGINNING = 8
"""Least characters of a shortened flag for which a note names the full flag. Megatron accepts no shortened flags."""
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
        near = [choice for choice in map(str, self.choices or ()) if _letters(choice) == _letters(str(value))]
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
    """Return the flag of this release that a mistyped or shortened flag probably means, or an empty string."""
    # A flag that exists in another release is not a typing error.
    if option in _data()["flags"]:
        return ""
    begun = [flag for flag in flag_table(version) if flag.startswith(option)] if len(option) >= LEAST_BEGINNING else []
    return begun[0] if len(begun) == 1 else nearest_word(option, flag_table(version), cutoff=CLOSE)


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
"""New names of flags that Megatron renamed before OLDEST."""
RECIPE = re.compile(r"(model)?(recipe|family|factory|config|yaml|exp|experiment)(name|file|path|dir)?|modelfamilyname")
"""Pattern of flags that name a recipe or a recipe's file in Megatron-Bridge, NeMo, Primus and other trainers."""
PRETRAINED = re.compile(r"model(id|name|path|nameorpath)?|(hf|pretrained)(model)?(id|name|path|nameorpath)?")
"""Pattern of flags that name a Hugging Face model in ms-swift, Megatron-Bridge and other trainers."""
REMEDY = "give Megatron-LM's own flags, or to pipette the saved configuration of Megatron-Bridge (--bridge-config FILE)"
DASHES = "-\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FIGURE DASH}\N{EN DASH}\N{EM DASH}\N{HORIZONTAL BAR}\N{MINUS SIGN}"
"""Characters that word processors and web pages write instead of a hyphen."""


def word_faults(arguments: Arguments) -> Iterator[MegatronError]:
    """Yield an error for each rule of spelling that the command line breaks, with all flags that break the rule."""
    spelt, overrides, valued = {}, {}, {}
    flag_before, value_taken = "", True
    for token in arguments.flag_tokens:
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
            yield MegatronError(f"{rule}: write {', '.join(pairs)}")


def why_missing(arguments: Arguments, missing: Sequence[str]) -> str:
    """Return the likely reason why the flags in `missing` are missing, and advice for the user."""
    words = arguments.unknown_words
    for pattern, reason in (
        (RECIPE, f"a recipe of another program, which is not read; {REMEDY}"),
        (PRETRAINED, f"a model, but only flags can describe its shape; {REMEDY}"),
    ):
        for place, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name.startswith("-") and pattern.fullmatch(_letters(name.rpartition(".")[2])):
                following = value if equals else "".join(words[place + 1 : place + 2])
                shown = name if following.startswith("-") else f"{name} {following}".rstrip()
                return f"{shown} names {reason}"
    near = {word: likely_flag(word.partition("=")[0], arguments.version) for word in words}
    meant = [f"{flag} for {word}" for word, flag in near.items() if flag in missing]
    if meant:
        # A launched script may accept other spellings than Megatron.
        return f"only Megatron's own spelling is read: {', '.join(meant)}"
    return _why_unread(arguments, missing) or "add what is missing to the script's arguments"


def _why_unread(arguments: Arguments, missing: Sequence[str]) -> str:
    """Return why words that may have the missing flags were not read; empty if no word is suspect."""
    words, strays = arguments.unknown_words, arguments.stray_words
    if any(re.match(r"\s*--\S+\s+\S", word) for word in words):
        return "one word contains several flags, as zsh passes $ARGS; write ${=ARGS} there, without quotes"
    recipes = [word for word in words if re.fullmatch(r"[+~]*\w+(\.\w+)+=.*|@.*", word)]
    recipes += [word for word in strays if re.fullmatch(r".*\.(ya?ml|toml|json|txt|sh)", word)]
    if recipes:
        return f"{recipes[0]} belongs to a recipe or file, which is not read; {REMEDY}"
    hidden = {word for token in arguments.tokens[len(arguments.flag_tokens) :] for word in token.words}
    if hidden.intersection(missing):
        return "Megatron reads no flag after the word --; remove this word"
    for word in (word.partition("=")[0] for word in words if word.startswith("--")):
        has = _releases_of(word)
        if has:
            return f"{word} is a flag of Megatron {has[0]} to {has[-1]}; --megatron-version {has[-1]} reads it"
    return ""


def unknown_note(arguments: Arguments) -> list[str]:
    """Return notes on flags and values that this release lacks: the script's own, or typing errors.

    A launched script refuses unknown words itself. So only commands that launch no script must report unknown words.
    """
    version = arguments.version
    free = dict.fromkeys(arguments.free_values)
    stops = "the script stops at these values unless the script defines them"
    notes = [f"not values of Megatron {version}, so without effect here: {', '.join(free)}; {stops}"] if free else []
    stray = dict.fromkeys(arguments.stray_words)
    if stray:
        shown_words = ", ".join(word or "'' (an unset variable in quotes?)" for word in stray)
        notes.append(f"words without a flag, at which Megatron stops: {shown_words}")
    found = dict.fromkeys(
        word.partition("=")[0] for word in arguments.unknown_words if re.match(r"\s*--?[^\W\d]", word)
    )
    if not found:
        return notes
    shown, stops = [], "the script stops at these flags unless the script defines them"
    for word in found:
        short, new = SHORT_SIZES.get(_letters(word).removesuffix("size")), NEW_NAMES.get(word)
        meant = short or (new if new in flag_table(version) else likely_flag(word, version))
        known = _releases_of(word)
        other = f" (in {known[0]} to {known[-1]})" if known else ""
        shown.append(f"{word} (did you mean {meant}?)" if meant else f"{word}{other}")
    return [*notes, f"not flags of Megatron {version}, so without effect here: {', '.join(shown)}; {stops}"]


@functools.cache
def _by_letters(version: str) -> Mapping[str, str]:
    flags = (option for option in flag_table(version) if option.startswith("--"))
    # If Megatron has two spellings of a flag, the spelling with dashes comes last and is used.
    return {_letters(option): option for option in sorted(flags, key=lambda option: "_" not in option)}


def _letters(option: str) -> str:
    return re.sub(r"[^a-z0-9]", "", option.lower())
