"""Whether a script failed because of the plan, or would fail under every plan alike."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import takewhile

from pipette_launch.megatron.logs import REFUSED_FLAG, UNKNOWN_FLAGS

EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$", re.MULTILINE)
"""The line of a traceback that names the exception; torch puts the rank before it."""
MISSING = re.compile(
    r"(?:FileNotFoundError|ModuleNotFoundError|ImportError): |No such file or directory|"
    r"\.idx and \.bin files cannot be found"
)
OF_ONE_RANK = re.compile(r"mp_rank_|torchinductor|\.triton|/triton")
"""Files that ranks write for themselves: which of them are there depends on the layout, or on chance."""
MAY_BE_THE_LAYOUT = re.compile(
    r"parallel|pipeline|micro.?batch|divisible|world.?size|rank|stage|shape|size mismatch|state_dict|checkpoint|"
    r"connect|peer|broken pipe|time.?out|timed out|Dist\w*Error|CUDA|NCCL|gloo|memory",
    re.IGNORECASE,
)
"""Exceptions that two layouts may share and a third may not, and those of ranks that miss another one."""


def exception_in(text: str) -> str:
    """Return the last exception that a worker printed, type and message in one line; empty where there is none."""
    found = EXCEPTION.findall(text)
    return str(found[-1]).strip() if found else ""


def why_no_plan_helps(
    cause: str, *, before: Collection[str], written: Sequence[str], given: Sequence[str] | None
) -> str:
    """Say why a script that died before its first iteration would die under every plan; empty where one may help.

    Args:
        cause: why it died, in the words of `explain_failure`, or its exception in one line.
        before: the causes of deaths under other layouts.
        written: the user's own words for the script.
        given: the words that it was given; None for the user's own.

    """
    if _refuses_own_words(cause, written, written if given is None else given):
        return "the words that the script refuses are your own"
    if OF_ONE_RANK.search(cause):
        return ""
    if MISSING.search(cause):
        return "what is missing is missing under every plan"
    has_message = EXCEPTION.fullmatch(cause) and ": " in cause
    if has_message and cause in before and not MAY_BE_THE_LAYOUT.search(cause):
        return "it is the same under two layouts"
    return ""


def _refuses_own_words(cause: str, written: Sequence[str], given: Sequence[str]) -> bool:
    """Whether argparse refused a flag that only the user wrote, or one whose values the plan did not change."""
    _, is_unknown, flags = cause.partition(UNKNOWN_FLAGS)
    if is_unknown:
        return any(word.startswith("--") and word in written for word in flags.split())
    _, is_refused, what = cause.partition(REFUSED_FLAG)
    names = what.partition(":")[0].split("/") if is_refused else []
    return any(values and values == _values(given, name) for name in names for values in [_values(written, name)])


def _values(words: Sequence[str], flag: str) -> list[tuple[str, ...]]:
    """What stands behind each mention of a flag."""
    return [
        (joined,) if equals else tuple(takewhile(lambda word: not word.startswith("--"), words[index + 1 :]))
        for index, (name, equals, joined) in enumerate(word.partition("=") for word in words)
        if name == flag
    ]
