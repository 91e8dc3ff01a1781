"""HTML report and trace of a plan, written with the plan or later from the files in the plan's folder."""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipette_launch import megatron
from pipette_launch.errors import ClusterError, FileFormatError, MegatronError, PipetteError, PlanError
from pipette_launch.facts import Job, Measurements, Plan, files
from pipette_launch.facts.outcome import Outcome, ProfiledRank
from pipette_launch.launch.cache import CLUSTER, OUTCOME, PLAN

if TYPE_CHECKING:
    from pipette_launch.planning.picture import Picture

# Functions of this module import the report package, because a start with a cached plan draws no report.

PAGE = "report.html"
TRACE = "trace.json"
PASS = re.compile(r"megatron/core/pipeline_parallel/schedules\.py\(\d+\): (forward|backward)_step$", re.ASCII)
LAUNCHES = ("cuda_runtime", "cuda_driver")
MOST_BYTES = 2 << 30
MOST_RANKS = 64
_MOST_US = 1e18


# -- the report ---------------------------------------------------------------------------------------------------


def page_path(plan: Path) -> Path:
    """Return the path of a plan's report: `report.html` beside `plan.json`, else the plan file's name with `.html`."""
    return plan.with_name(PAGE) if plan.name == PLAN else plan.with_suffix(".html")


def existing_page(plan: Path | None, *, is_due: bool = False) -> Path | None:
    """Return the path of a plan's report; None if the report neither exists nor is being written (`is_due`)."""
    path = None if plan is None else page_path(plan)
    return path if path is not None and (is_due or path.exists()) else None


def add_outcome(path: Path | None, outcome: Outcome) -> str:
    """Write the outcome of a run into the report of its plan; return the error, or an empty text.

    Only the outcome's part of the page changes, which takes milliseconds. A report of another plan stays unchanged.
    """
    from pipette_launch.report.page.page import with_outcome

    if path is None:
        return ""
    try:
        before = path.read_text(encoding="utf-8")
        after = with_outcome(before, outcome)
        if after != before:
            files.write_text(path, after)
    except (OSError, UnicodeDecodeError, PipetteError) as error:
        return f"{path} does not show the outcome: {error}"
    return ""


def trace_path(plan: Path) -> Path:
    """Return the path of a plan's trace: `trace.json` beside `plan.json`, else the plan's name with `.trace.json`."""
    return plan.with_name(TRACE) if plan.name == PLAN else plan.with_suffix(f".{TRACE}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDocuments:
    """A plan, and the documents that its report and trace show."""

    plan: Plan
    measurements: Measurements | None
    picture: Picture | None
    """Timeline of the plan's training steps as the report draws it; None if the timeline cannot be computed."""
    outcome: Outcome | None = None
    missing: str = ""
    """Sentence about the parts that the report lacks; empty if the report is complete."""


def measurements_of(plan: Plan, path: Path, cluster: Path | None) -> Measurements | None:
    """Read the measurements in `cluster`, or else in `cluster.json` beside a plan's file; None without a file.

    Raises ClusterError if `cluster` holds measurements of other hosts.
    """
    measured_at = cluster or path.with_name(CLUSTER)
    measured = files.read(measured_at, Measurements) if cluster or measured_at.exists() else None
    if measured is not None and tuple(host.name for host in measured.cluster.hosts) != plan.hosts:
        if cluster:
            raise ClusterError(f"--cluster {cluster}: its hosts are not those of {path}, in the same order")
        return None
    return measured


def found_files(path: Path, cluster: Path | None) -> PlanDocuments:
    """Read a plan file, and `cluster.json` and `outcome.json` beside it; raises FileFormatError for an unusable file.

    `cluster` names the file of measurements; None takes `cluster.json` beside the plan, if this file exists. Raises
    ClusterError if `cluster` holds measurements of other hosts.
    """
    plan = files.read(path, Plan)
    measured = measurements_of(plan, path, cluster)
    picture = None
    missing = "no cluster.json with its hosts lies beside the plan, so links, timeline and kinds of memory are left out"
    if measured is not None:
        try:
            picture, missing = _picture(plan, measured), ""
        except PipetteError as error:
            missing = f"the timeline is left out: {error}"
    ran_at = path.with_name(OUTCOME)
    outcome = files.read(ran_at, Outcome) if ran_at.exists() else None
    if outcome is not None and outcome.key != plan.provenance.key:
        outcome = None
    return PlanDocuments(plan=plan, measurements=measured, picture=picture, outcome=outcome, missing=missing)


def page_of(found: PlanDocuments) -> str:
    """Return the report as HTML; raises PipetteError if jinja2 is not installed."""
    from pipette_launch.report.page.page import plan_page

    return plan_page(found.plan, found.measurements, found.picture, found.outcome)


def trace_of(found: PlanDocuments, profile: Path | None = None) -> str:
    """Return the trace as JSON; `profile` is the folder of torch's profiler traces, or None for no measured passes.

    Raises PipetteError if the profile cannot be read or is of another configuration, or the plan has no timeline.
    """
    from pipette_launch.report.trace import trace_text

    if profile is not None and found.picture is None:
        raise PlanError(f"there is no predicted timeline to compare the measured passes with: {found.missing}")
    profiled = () if profile is None else read_profile(profile)
    return trace_text(found.plan, found.measurements, found.picture, found.outcome, profiled)


def job_of(plan: Plan, measured: Measurements | None) -> Job:
    """Read the job of a plan again, from the flags in the plan file and the versions in its measurements."""
    setting = plan.setting
    if setting is None:
        raise PipetteError("the plan's file does not name the job's flags")
    version = (measured.versions if measured else plan.provenance.versions).get("megatron-core")
    return megatron.read_job(
        setting.megatron_flags or setting.arguments,
        is_translated=bool(setting.megatron_flags),
        world_size=plan.chosen.layout.world_size,
        megatron_version=version or megatron.version_or_newest(None, setting.script, os.environ)[0],
        device_kind=plan.device_kind,
        script=setting.script,
        without_probes=version is None,
        for_planning=True,
        environment=os.environ,
        device_name=setting.device_name,
    )


def _picture(plan: Plan, measured: Measurements) -> Picture:
    """Compute the drawn steps of the plan."""
    from pipette_launch.planning.picture import picture_of

    return picture_of(plan, job_of(plan, measured), measured)


# -- traces of torch's profiler -----------------------------------------------------------------------------------
#
# Megatron's `--profile --use-pytorch-profiler` records Python's calls (`with_stack`). Every pass is one call of
# `forward_step` or `backward_step` in Megatron's schedules, timed on the CPU. On a GPU, a pass lasts from the first to
# the last kernel that the call launched. The code for GPUs follows the format of torch's traces and is not tested.


def read_profile(folder: Path) -> tuple[ProfiledRank, ...]:
    """Read the newest trace of each rank in a folder, in the order of ranks.

    Raises MegatronError for no or too many traces, and FileFormatError for a trace that has no passes or is damaged.
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
        return profiled_rank(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: cannot be read as a trace of torch's profiler ({error})") from error


def profiled_rank(whole: Any) -> ProfiledRank:
    """Return the passes in a trace; raises ValueError if the document is not a trace or has no passes."""
    about = whole.get("distributedInfo") if isinstance(whole, Mapping) else None
    if not isinstance(about, Mapping) or not all(type(about.get(name)) is int for name in ("rank", "world_size")):
        raise ValueError("it does not name its rank")
    events = whole.get("traceEvents")
    lasting = [event for event in events if _lasts(event)] if isinstance(events, list) else []
    calls = sorted(
        (event["ts"], event["ts"] + event["dur"], found[1][0].upper())
        for event in lasting
        if (found := PASS.search(event["name"]))
    )
    if not calls:
        raise ValueError("it has no forward_step or backward_step of Megatron's schedules")
    spans = _on_device(lasting, [start for start, _, _ in calls], [end for _, end, _ in calls])
    return ProfiledRank(
        rank=about["rank"],
        world_size=about["world_size"],
        kind_A=tuple(kind for _, _, kind in calls),
        start_s_A=tuple(start / 1e6 for start, _ in spans),
        end_s_A=tuple(end / 1e6 for _, end in spans),
    )


def _lasts(event: Any) -> bool:
    """Return whether an event of a trace is complete (`ph` is `X`) and has valid times."""
    if not isinstance(event, Mapping) or event.get("ph") != "X" or not isinstance(event.get("name"), str):
        return False
    times = event.get("ts"), event.get("dur")
    return all(isinstance(time, (int, float)) and 0 <= time < _MOST_US for time in times)


def _on_device(
    events: Sequence[Mapping[str, Any]], starts: Sequence[float], ends: Sequence[float]
) -> list[tuple[float, float]]:
    """Return start and end of each call's kernels on the GPU, or of the call itself if the trace has no kernels."""
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


def _correlation(event: Mapping[str, Any]) -> int | None:
    about = event.get("args")
    found = about.get("correlation") if isinstance(about, Mapping) else None
    return found if isinstance(found, int) else None
