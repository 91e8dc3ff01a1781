"""Words of a command line that Megatron's parser does not take, with their likely cause."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

from pipette_launch.errors import MegatronError
from pipette_launch.megatron.flags import Arguments, flag_table, likely_flag

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
