"""Parser of a training job's output: iteration lines, memory lines, and causes of failures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from pipette_launch.facts import files
from pipette_launch.facts.messages import Failure, FailureKind
from pipette_launch.text import MIB

_COUNT, _FIGURE = r"(\d{1,15})", r"(\d{1,15}(?:\.\d{0,15})?)"
"""Numbers that Megatron prints as %d and %f. Megatron never prints longer numbers, or numbers with two points."""
ITERATION = re.compile(rf"iteration\s+{_COUNT}/\s*{_COUNT} \|", re.ASCII)
STEP_TIME = re.compile(rf"elapsed time per iteration \(ms\): {_FIGURE} \|", re.ASCII)
LOSS = re.compile(r"lm loss: ([-+.\dE]+|INF) \|")
"""Loss in an iteration line. Megatron prints no NaN, no negative loss and, until 0.16, no loss of 0."""
MEMORY = re.compile(
    rf"\[Rank {_COUNT}\] \(after {_COUNT} iterations\) memory \(MB\) \| allocated: {_FIGURE} "
    rf"\| max allocated: {_FIGURE} \| reserved: {_FIGURE} \| max reserved: {_FIGURE}",
    re.ASCII,
)
"""Memory line. The first replica's ranks print this line after the first logged iteration, and from 0.16 on also after
the second."""
RERUN_EXIT_CODES = (16, 17)
"""Exit codes of Megatron's rerun state machine: 16 = start again with the same layout, 17 = a result was wrong."""


class Iteration(NamedTuple):
    """One iteration line of Megatron's training log, which the last rank prints."""

    iteration: int
    total: int
    step_time_s: float
    """Mean step time in seconds over the log interval."""
    loss: str | None
    """Loss as printed, so that two runs can be compared digit by digit. The loss is `None` if the line has no loss."""


def parse_iteration(line: str) -> Iteration | None:
    """Read an iteration line of any release. Return None for all other lines.

    Releases add and remove fields of the line, so the parser searches each field by name.
    """
    iteration, step_time, loss = ITERATION.search(line), STEP_TIME.search(line), LOSS.search(line)
    if not iteration or not step_time:
        return None
    return Iteration(int(iteration[1]), int(iteration[2]), float(step_time[1]) / 1e3, loss[1] if loss else None)


class MemoryLine(NamedTuple):
    """Memory of torch's allocator on one rank, from a memory line of Megatron. Megatron's MB has 2^20 bytes."""

    rank: int
    iteration: int
    allocated_bytes: int
    max_allocated_bytes: int
    reserved_bytes: int
    max_reserved_bytes: int


def parse_memory(line: str) -> MemoryLine | None:
    """Read a memory line of any release. Return None for all other lines."""
    found = MEMORY.search(line)
    if not found:
        return None
    rank, iteration, *sizes = found.groups()
    return MemoryLine(int(rank), int(iteration), *(round(float(text) * MIB) for text in sizes))


OUT_OF_MEMORY = "out of memory"
KNOWN_FAILURES = files.table("pipette_launch.megatron", "failures")
"""Kind, cause and pattern of known failures, the most specific first. The pattern's group `what` replaces `{what}`."""
EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$", re.MULTILINE)
"""Line of a traceback that names the exception. torch prints the rank at the beginning of the line."""
MISSING = re.compile(
    r"(?:FileNotFoundError|ModuleNotFoundError|ImportError): |No such file or directory|"
    r"\.idx and \.bin files cannot be found"
)
OF_ONE_RANK = re.compile(r"mp_rank_|torchinductor|\.triton|/triton")
"""Files that each rank writes for itself. If such a file is missing, the layout or chance may be the cause."""
MAY_BE_THE_LAYOUT = re.compile(
    r"parallel|pipeline|micro.?batch|divisible|world.?size|rank|stage|shape|size mismatch|state_dict|checkpoint|"
    r"connect|peer|broken pipe|time.?out|timed out|Dist\w*Error|CUDA|NCCL|gloo|memory",
    re.IGNORECASE,
)
"""Pattern of exceptions that another layout may avoid, even if two layouts had the same exception."""
OWN_WORDS = "the script refuses flags that you wrote"


def exception_in(text: str) -> str:
    """Return type and message of the last exception that a worker printed, in one line, or an empty text."""
    found = EXCEPTION.findall(text)
    return str(found[-1]).strip() if found else ""


def explain_failure(text: str) -> Failure | None:
    """Return the cause of a worker's failure, from the worker's output.

    Return None if the output shows no known failure.
    """
    for row in KNOWN_FAILURES:
        found = re.search(row["pattern"], text, re.MULTILINE)
        if not found:
            continue
        what = str(found.groupdict().get("what", "")).strip()
        # argparse names flags in the form `--typo 3 --other` or `--seed/-s: invalid int value`.
        flags = {
            "unknown-flags": [word for word in what.split() if word.startswith("--")],
            "refused-flag": what.partition(":")[0].split("/"),
        }
        kind: Any = row["kind"]
        return Failure(cause=row["cause"].format(what=what), kind=kind, flags=tuple(flags.get(kind, ())))
    return None


def failure_of(cause: str) -> Failure:
    """Return the failure that a line describes: a worker's exception, or the last line of a worker's output."""
    kind: FailureKind = "other"
    if not OF_ONE_RANK.search(cause):
        if MISSING.search(cause):
            kind = "missing"
        elif EXCEPTION.fullmatch(cause) and ": " in cause and not MAY_BE_THE_LAYOUT.search(cause):
            kind = "exception"
    return Failure(cause=cause, kind=kind)


def why_no_plan_helps(
    failure: Failure, *, before: Iterable[Failure], written: Sequence[str], given: Sequence[str] | None
) -> str:
    """Return the reason why a script, which failed before the first iteration, would fail under every plan, or "".

    `before` has failures under other layouts, `written` the user's own arguments, and `given` the arguments that the
    script got (None = the user's own).
    """
    given = written if given is None else given
    if failure.kind == "unknown-flags" and any(flag in written for flag in failure.flags):
        return OWN_WORDS
    if failure.kind == "refused-flag":
        own = {flag: _values(written, flag) for flag in failure.flags}
        if any(values and values == _values(given, flag) for flag, values in own.items()):
            return OWN_WORDS
    if failure.kind == "missing":
        return "the missing file or module is missing under every plan"
    if failure.kind == "exception" and any(failure.cause == other.cause for other in before):
        return "two layouts ended with the same exception"
    return ""


def _values(words: Sequence[str], flag: str) -> list[tuple[str, ...]]:
    """Return the words after each occurrence of a flag."""
    return [
        (joined,) if equals else tuple(takewhile(lambda word: not word.startswith("--"), words[index + 1 :]))
        for index, (name, equals, joined) in enumerate(word.partition("=") for word in words)
        if name == flag
    ]
