"""What Megatron's `--profile --use-pytorch-profiler` leaves of each rank: when its forwards and backwards ran.

Megatron lets torch's profiler record Python's calls (`with_stack`), and every pass is one call of `forward_step` or
`backward_step` in its schedules. That call is the host's. On a GPU a pass lasts from the first to the last kernel that
was launched in it; that rests on the format of torch's traces, and has not been seen on a GPU.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipette_launch.errors import FileFormatError, MegatronError
from pipette_launch.facts.outcome import ProfiledRank

PASS = re.compile(r"megatron/core/pipeline_parallel/schedules\.py\(\d+\): (forward|backward)_step$", re.ASCII)
LAUNCHES = ("cuda_runtime", "cuda_driver")
MOST_BYTES = 2 << 30
MOST_RANKS = 64
_MOST_US = 1e18


def read_profile(folder: Path) -> tuple[ProfiledRank, ...]:
    """Read all traces in a folder, in the order of ranks; where a rank has several the newest counts.

    Raises:
        MegatronError: there is none, or too many.
        FileFormatError: one cannot be read, or holds no passes.

    """
    paths = sorted(folder.glob("*.pt.trace.json"), key=lambda path: path.stat().st_mtime)
    if not 0 < len(paths) <= MOST_RANKS:
        raise MegatronError(
            f"{folder}: {len(paths)} files *.pt.trace.json, and 1 to {MOST_RANKS} are needed; name the "
            f"--tensorboard-dir of a job that ran with --profile --use-pytorch-profiler"
        )
    found = {made.rank: made for made in map(_read, paths)}
    return tuple(found[rank] for rank in sorted(found))


def _read(path: Path) -> ProfiledRank:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise FileFormatError(f"{path}: larger than {MOST_BYTES >> 30} GiB; profile fewer steps")
        whole = json.loads(path.read_bytes())
        return profiled_rank(whole)
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: cannot be read as a trace of torch's profiler ({error})") from error


def profiled_rank(whole: Any) -> ProfiledRank:
    """Take the passes out of a trace; raises ValueError where it is none, or holds none."""
    about = whole.get("distributedInfo") if isinstance(whole, Mapping) else None
    if not isinstance(about, Mapping) or not all(type(about.get(name)) is int for name in ("rank", "world_size")):
        raise ValueError("it does not say of which rank it is")
    events = whole.get("traceEvents")
    lasting = [event for event in events if _lasts(event)] if isinstance(events, list) else []
    calls = sorted(
        (event["ts"], event["ts"] + event["dur"], found[1][0].upper())
        for event in lasting
        if (found := PASS.search(event["name"]))
    )
    if not calls:
        raise ValueError("no forward_step or backward_step of Megatron's schedules is in it")
    spans = _on_device(lasting, [start for start, _, _ in calls], [end for _, end, _ in calls])
    return ProfiledRank(
        rank=about["rank"],
        world_size=about["world_size"],
        kind_A=tuple(kind for _, _, kind in calls),
        start_s_A=tuple(start / 1e6 for start, _ in spans),
        end_s_A=tuple(end / 1e6 for _, end in spans),
    )


def _lasts(event: Any) -> bool:
    """Whether it is a complete event with a time that can be one."""
    if not isinstance(event, Mapping) or event.get("ph") != "X" or not isinstance(event.get("name"), str):
        return False
    times = event.get("ts"), event.get("dur")
    return all(isinstance(time, (int, float)) and 0 <= time < _MOST_US for time in times)


def _on_device(
    events: Sequence[Mapping[str, Any]], starts: Sequence[float], ends: Sequence[float]
) -> list[tuple[float, float]]:
    """From the first to the last kernel that each call launched, never into the next one; the calls without a GPU."""
    call_of = {}
    for event in events:
        at = bisect_right(starts, event["ts"]) - 1
        if event.get("cat") in LAUNCHES and at >= 0 and event["ts"] < ends[at]:
            call_of[_correlation(event)] = at
    first, last = [float("inf")] * len(starts), [0.0] * len(starts)
    for event in events:
        at = call_of.get(_correlation(event), -1) if event.get("cat") == "kernel" else -1
        if at >= 0:
            first[at] = min(first[at], event["ts"])
            last[at] = max(last[at], event["ts"] + event["dur"])
    if not any(last):
        return [*zip(starts, ends, strict=True)]
    begins = [start if kernel == float("inf") else kernel for start, kernel in zip(starts, first, strict=True)]
    following = (*begins[1:], float("inf"))
    return [(begin, max(min(end, after), begin)) for begin, end, after in zip(begins, last, following, strict=True)]


def _correlation(event: Mapping[str, Any]) -> Any:
    about = event.get("args")
    found = about.get("correlation") if isinstance(about, Mapping) else None
    return found if isinstance(found, int) else None
