"""Output of a training job: iteration and memory lines, the cause of a failure, and whether another plan may help."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pipette_launch.facts.messages import Failure, FailureKind
from pipette_launch.text import MIB

_COUNT, _FIGURE = r"(\d{1,15})", r"(\d{1,15}(?:\.\d{0,15})?)"
"""Numbers that Megatron prints as %d and %f. Longer numbers, or two points, are not Megatron's."""
ITERATION = re.compile(rf"iteration\s+{_COUNT}/\s*{_COUNT} \|", re.ASCII)
STEP_TIME = re.compile(rf"elapsed time per iteration \(ms\): {_FIGURE} \|", re.ASCII)
LOSS = re.compile(r"lm loss: ([-+.\dE]+|INF) \|")
"""Megatron prints no loss that is NaN, not positive (0.14 to 0.16) or negative (0.17 and later)."""
MEMORY = re.compile(
    rf"\[Rank {_COUNT}\] \(after {_COUNT} iterations\) memory \(MB\) \| allocated: {_FIGURE} "
    rf"\| max allocated: {_FIGURE} \| reserved: {_FIGURE} \| max reserved: {_FIGURE}",
    re.ASCII,
)
"""Ranks of the first replica print it after the first logged iteration, and from 0.16 on after the second."""
RERUN_EXIT_CODES = (16, 17)
"""Exit codes of Megatron's rerun state machine: start again with the same layout, or a result was wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One line of Megatron's training log; the last rank prints it."""

    iteration: int
    total: int
    step_time_s: float
    """Mean over the log interval."""
    loss: str | None
    """Text as printed, so that runs can be compared digit by digit; None if the line has no loss."""


def parse_iteration(line: str) -> Iteration | None:
    """Read an iteration line of any release from 0.14 on; None for every other line.

    Releases add and remove fields of the line, so each field is searched by its name.
    """
    iteration, step_time = ITERATION.search(line), STEP_TIME.search(line)
    if not iteration or not step_time:
        return None
    loss = LOSS.search(line)
    return Iteration(
        iteration=int(iteration[1]),
        total=int(iteration[2]),
        step_time_s=float(step_time[1]) / 1e3,
        loss=loss[1] if loss else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLine:
    """Memory of torch's allocator on one rank, from a line in which Megatron counts MB of 2^20 bytes."""

    rank: int
    iteration: int
    allocated_bytes: int
    max_allocated_bytes: int
    reserved_bytes: int
    max_reserved_bytes: int


def parse_memory(line: str) -> MemoryLine | None:
    """Read a memory line of any release from 0.14 on; None for every other line."""
    found = MEMORY.search(line)
    if not found:
        return None
    allocated, max_allocated, reserved, max_reserved = (round(float(text) * MIB) for text in found.groups()[2:])
    return MemoryLine(
        rank=int(found[1]),
        iteration=int(found[2]),
        allocated_bytes=allocated,
        max_allocated_bytes=max_allocated,
        reserved_bytes=reserved,
        max_reserved_bytes=max_reserved,
    )


OUT_OF_MEMORY = "out of memory"
RANK_MONITORS = "a rank monitor beside each rank, which only ft_launcher starts, not pipette-launch or torchrun"
KNOWN_FAILURES: tuple[tuple[FailureKind, str, str], ...] = (
    (
        "out-of-memory",
        r"torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation",
        f"{OUT_OF_MEMORY}: torch's allocator could not get the GPU memory it asked for",
    ),
    (
        "out-of-memory",
        r"NCCL WARN Cuda failure.*out of memory|ncclUnhandledCudaError.*out of memory",
        f"{OUT_OF_MEMORY}: NCCL's buffers",
    ),
    (
        "out-of-memory",
        r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
        f"{OUT_OF_MEMORY}: a CUDA library's workspace",
    ),
    (
        "out-of-host-memory",
        r"DefaultCPUAllocator: can't allocate memory|\bMemoryError\b|Cannot allocate memory|std::bad_alloc",
        f"{OUT_OF_MEMORY}: the host's memory is exhausted",
    ),
    # oneDNN prints no cause: the kernel for a new shape gets no buffer.
    (
        "out-of-host-memory",
        r"RuntimeError: could not create a primitive\s*$",
        f"{OUT_OF_MEMORY}: a kernel of oneDNN got no buffer",
    ),
    (
        "out-of-host-memory",
        r"Memory cgroup out of memory|oom-kill|oom_kill|Out of memory: Killed process|OOM Killed",
        f"{OUT_OF_MEMORY}: the kernel or the batch system killed a process",
    ),
    ("other", r"No space left on device", "no space is left on the disk that it writes to"),
    # torch's writer of checkpoints prints no cause.
    (
        "other",
        r"inline_container\.cc[^\n]*(?:unexpected pos|write failed)",
        "a checkpoint could not be written; its disk may be full",
    ),
    (
        "other",
        r"\(TP, PP\) mismatch after resume",
        "the plan does not fit the checkpoint: its optimizer state cannot change TP or PP; fix tp and pp",
    ),
    (
        "other",
        r"Number of unpadded elements in each bucket need to be the same",
        "the plan does not fit the checkpoint: its optimizer state was saved with other gradient buckets",
    ),
    (
        "other",
        r"CUDA_DEVICE_MAX_CONNECTIONS to 1|FSDP always requires CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_DEVICE_MAX_CONNECTIONS does not suit this configuration",
    ),
    (
        "other",
        r"not divisible by micro batch|contiguous micro-batches in a|dependency bubbles|without also enabling sequence",
        "Megatron refuses this configuration: the plan is illegal, which is a defect of the planner",
    ),
    (
        "missing",
        r"FT_RANK_MONITOR_IPC_SOCKET env var",
        f"--enable-ft-package needs {RANK_MONITORS} (docs/reliability.md)",
    ),
    (
        "missing",
        r"checkpointing save dir must be set to enable fault tolerance",
        "--enable-ft-package needs --save, where it keeps its time-outs",
    ),
    ("other", r"torch distributed is already initialized", "torch.distributed was initialised before Megatron"),
    ("unknown-flags", r"error: unrecognized arguments: (?P<what>.+)", "the script does not know the flags {what}"),
    ("refused-flag", r"error: argument (?P<what>.+)", "the script refuses a flag: {what}"),
    ("other", r"(?:NCCL|ncclSystemError|ncclRemoteError|ncclInternalError)[^\n]*(?:error|Error)", "NCCL failed"),
    ("other", r"Watchdog caught collective operation timeout", "a collective operation timed out"),
)
"""Kind, pattern and meaning of known failures, the most specific first; the pattern's group fills `{what}`."""
EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$", re.MULTILINE)
"""The line of a traceback that names the exception; torch prints the rank before it."""
MISSING = re.compile(
    r"(?:FileNotFoundError|ModuleNotFoundError|ImportError): |No such file or directory|"
    r"\.idx and \.bin files cannot be found"
)
OF_ONE_RANK = re.compile(r"mp_rank_|torchinductor|\.triton|/triton")
"""Files that each rank writes for itself, so their absence depends on the layout or on chance."""
MAY_BE_THE_LAYOUT = re.compile(
    r"parallel|pipeline|micro.?batch|divisible|world.?size|rank|stage|shape|size mismatch|state_dict|checkpoint|"
    r"connect|peer|broken pipe|time.?out|timed out|Dist\w*Error|CUDA|NCCL|gloo|memory",
    re.IGNORECASE,
)
"""Exceptions that another layout may avoid even if two layouts share them, such as the loss of another rank."""
OWN_WORDS = "the words that the script refuses are your own"


def exception_in(text: str) -> str:
    """Return the last exception that a worker printed, type and message in one line; empty without one."""
    found = EXCEPTION.findall(text)
    return str(found[-1]).strip() if found else ""


def explain_failure(text: str) -> Failure | None:
    """Return why a worker failed, from its output; None if no known failure is in it."""
    for kind, pattern, meaning in KNOWN_FAILURES:
        found = re.search(pattern, text, re.MULTILINE)
        if found:
            named = {name: value.strip() for name, value in found.groupdict().items()}
            what = named.get("what", "")
            flags: tuple[str, ...] = ()
            # argparse prints `--typo 3 --other`, or `--seed/-s: invalid int value`.
            if kind == "unknown-flags":
                flags = tuple(word for word in what.split() if word.startswith("--"))
            elif kind == "refused-flag":
                flags = tuple(what.partition(":")[0].split("/"))
            return Failure(cause=meaning.format(**named), kind=kind, flags=flags)
    return None


def failure_of(cause: str) -> Failure:
    """Return the failure with its kind, from one line of a worker: its exception or its last output."""
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
    """Return why a script that failed before its first iteration would fail under every plan; empty if one may help.

    Args:
        failure: the latest.
        before: failures under other layouts.
        written: the user's own words for the script.
        given: the words that the script got; None for the user's own.

    """
    given = written if given is None else given
    if failure.kind == "unknown-flags" and any(flag in written for flag in failure.flags):
        return OWN_WORDS
    if failure.kind == "refused-flag":
        own = {flag: _values(written, flag) for flag in failure.flags}
        if any(values and values == _values(given, flag) for flag, values in own.items()):
            return OWN_WORDS
    if failure.kind == "missing":
        return "what is missing is missing under every plan"
    if failure.kind == "exception" and any(failure.cause == other.cause for other in before):
        return "it is the same under two layouts"
    return ""


def _values(words: Sequence[str], flag: str) -> list[tuple[str, ...]]:
    """Return the words behind each occurrence of a flag."""
    return [
        (joined,) if equals else tuple(takewhile(lambda word: not word.startswith("--"), words[index + 1 :]))
        for index, (name, equals, joined) in enumerate(word.partition("=") for word in words)
        if name == flag
    ]
