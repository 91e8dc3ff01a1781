"""HTML report and trace of a plan, written with the plan or later from the files in the plan's folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch import megatron
from pipette_launch.errors import ClusterError, PipetteError
from pipette_launch.facts import Job, Measurements, Plan, files
from pipette_launch.facts.outcome import Outcome
from pipette_launch.launch.cache import CLUSTER, OUTCOME, PLAN

if TYPE_CHECKING:
    from pipette_launch.planning.picture import Picture

# Functions of this module import the report package, because a start with a cached plan draws no report.

PAGE = "report.html"
TRACE = "trace.json"


# -- the report ---------------------------------------------------------------------------------------------------


def page_path(plan: Path) -> Path:
    """Return the path of a plan's report: `report.html` beside `plan.json`, else the plan file's name with `.html`."""
    return plan.with_name(PAGE) if plan.name == PLAN else plan.with_suffix(".html")


def existing_page(plan: Path | None, *, is_due: bool = False) -> Path | None:
    """Return the path of a plan's report; None if the report neither exists nor is being written (`is_due`)."""
    path = None if plan is None else page_path(plan)
    return path if path is not None and (is_due or path.exists()) else None


def draw_again(plan: Path | None) -> str:
    """Draw a plan's report again, with the outcome beside the plan; return the error, or an empty text."""
    page = existing_page(plan)
    if plan is None or page is None:
        return ""
    try:
        files.write_text(page, page_of(found_files(plan, None)))
    except (OSError, PipetteError) as error:
        return f"{page} does not show the outcome: {error}"
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
    """Return the report as HTML."""
    from pipette_launch.report.page.page import plan_page

    return plan_page(found.plan, found.measurements, found.picture, found.outcome)


def trace_of(found: PlanDocuments) -> str:
    """Return the trace as JSON."""
    from pipette_launch.report.trace import trace_text

    return trace_text(found.plan, found.measurements, found.picture, found.outcome)


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
    from pipette_launch.planning.picture import picture_of

    return picture_of(plan, job_of(plan, measured), measured)
