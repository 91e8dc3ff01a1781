"""Parser of a training job's output: iteration lines, memory lines, and causes of failures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pipette_launch.facts.messages import Failure, FailureKind
from pipette_launch.text import MIB

_COUNT, _FIGURE = r"(\d{1,15})", r"(\d{1,15}(?:\.\d{0,15})?)"
"""Numbers that Megatron prints as %d and %f. Megatron never prints longer numbers, or numbers with two points."""
ITERATION = re.compile(rf"iteration\s+{_COUNT}/\s*{_COUNT} \|", re.ASCII)
STEP_TIME = re.compile(rf"elapsed time per iteration \(ms\): {_FIGURE} \|", re.ASCII)
LOSS = re.compile(r"lm loss: ([-+.\dE]+|INF) \|")
"""Loss in an iteration line. Megatron prints no loss that is NaN, or negative (until 0.16 also not 0)."""
MEMORY = re.compile(
    rf"\[Rank {_COUNT}\] \(after {_COUNT} iterations\) memory \(MB\) \| allocated: {_FIGURE} "
    rf"\| max allocated: {_FIGURE} \| reserved: {_FIGURE} \| max reserved: {_FIGURE}",
    re.ASCII,
)
"""Memory line of ranks of the first replica, after the first logged iteration, from 0.16 on after the second."""
RERUN_EXIT_CODES = (16, 17)
"""Exit codes of Megatron's rerun state machine: 16 = start again with the same layout, 17 = a result was wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One iteration line of Megatron's training log, which the last rank prints."""

    iteration: int
    total: int
    step_time_s: float
    """Mean step time in seconds over the log interval."""
    loss: str | None
    """Loss as printed, so that two runs can be compared digit by digit. None if the line has no loss."""


def parse_iteration(line: str) -> Iteration | None:
    """Read an iteration line of any release from 0.14 on. None for all other lines.

    Releases add and remove fields of the line, so the parser searches each field by name.
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
    """Memory of torch's allocator on one rank, from a memory line of Megatron. Megatron's MB has 2^20 bytes."""

    rank: int
    iteration: int
    allocated_bytes: int
    max_allocated_bytes: int
    reserved_bytes: int
    max_reserved_bytes: int


def parse_memory(line: str) -> MemoryLine | None:
    """Read a memory line of any release from 0.14 on. None for all other lines."""
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
    # oneDNN prints no cause when it cannot allocate the buffer of a new kernel.
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
    # torch's checkpoint writer prints no cause.
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
"""Kind, pattern and explanation of known failures, the most specific first. The pattern's group replaces `{what}`."""
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
OWN_WORDS = "the words that the script refuses are your own"


def exception_in(text: str) -> str:
    """Return type and message of the last exception that a worker printed, in one line, or an empty text."""
    found = EXCEPTION.findall(text)
    return str(found[-1]).strip() if found else ""


def explain_failure(text: str) -> Failure | None:
    """Return the cause of a worker's failure, from the worker's output. None if the output shows no known failure."""
    for kind, pattern, meaning in KNOWN_FAILURES:
        found = re.search(pattern, text, re.MULTILINE)
        if found:
            named = {name: value.strip() for name, value in found.groupdict().items()}
            what = named.get("what", "")
            flags: tuple[str, ...] = ()
            # argparse names flags in the form `--typo 3 --other` or `--seed/-s: invalid int value`.
            if kind == "unknown-flags":
                flags = tuple(word for word in what.split() if word.startswith("--"))
            elif kind == "refused-flag":
                flags = tuple(what.partition(":")[0].split("/"))
            return Failure(cause=meaning.format(**named), kind=kind, flags=flags)
    return None


def failure_of(cause: str) -> Failure:
    """Return the failure that one line of a worker describes. The line is the worker's exception or last output."""
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
    """Return the reason why a script, which failed before the first iteration, would fail under every plan.

    Empty if another plan may help.

    Args:
        failure: the latest failure.
        before: failures under other layouts.
        written: arguments of the script as the user wrote them.
        given: arguments that the script got. None if the script got the user's own arguments.

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
    """Return the words after each occurrence of a flag."""
    return [
        (joined,) if equals else tuple(takewhile(lambda word: not word.startswith("--"), words[index + 1 :]))
        for index, (name, equals, joined) in enumerate(word.partition("=") for word in words)
        if name == flag
    ]
