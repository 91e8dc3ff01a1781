"""Writes a plan's report, an HTML file, beside the plan: of a plan just made, or from the files of an earlier one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipette_launch import megatron
from pipette_launch.errors import ClusterError, PipetteError
from pipette_launch.facts import Measurements, Plan, files
from pipette_launch.facts.outcome import Outcome
from pipette_launch.launch.cache.plans import CLUSTER, OUTCOME, PLAN

if TYPE_CHECKING:
    from pathlib import Path

    from pipette_launch.forecast.picture import Picture

PAGE = "report.html"


def page_path(plan: Path) -> Path:
    """Return where the report of a plan file lies: `report.html` beside `plan.json`, else its own name with `.html`."""
    return plan.with_name(PAGE) if plan.name == PLAN else plan.with_suffix(".html")


def write_page(
    path: Path, plan: Plan, measurements: Measurements | None, picture: Picture | None, *, shared: bool = False
) -> None:
    """Write the report of a plan that was made from these measurements, with its picture.

    Raises:
        OSError: the file cannot be written.
        PipetteError: jinja2 is not installed.

    """
    from pipette_launch.report.page import plan_page

    files.write_text(path, plan_page(plan, measurements, picture), shared=shared)


def existing_page(plan: Path | None) -> Path | None:
    """Return where the report of a plan file lies, if there is one."""
    path = None if plan is None else page_path(plan)
    return path if path is not None and path.exists() else None


def add_outcome(path: Path | None, outcome: Outcome) -> str:
    """Write what a run came to into the report of its plan, if there is one; returns why not, or nothing.

    Nothing of the page is worked out again, so this takes milliseconds. A page of another plan is left as it is.
    """
    from pipette_launch.report.page import with_outcome

    if path is None:
        return ""
    try:
        before = path.read_text(encoding="utf-8")
        after = with_outcome(before, outcome)
        if after != before:
            files.write_text(path, after)
    except (OSError, UnicodeDecodeError, PipetteError) as error:
        return f"{path} does not tell the outcome: {error}"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFiles:
    """A plan and what lies beside its file, as far as it fits."""

    plan: Plan
    measurements: Measurements | None
    picture: Picture | None
    outcome: Outcome | None
    missing: str
    """What a report of it lacks; empty for nothing."""


def found_files(path: Path, cluster: Path | None) -> FoundFiles:
    """Read a plan file, with what lies beside it: `cluster.json` and `outcome.json`.

    Args:
        path: of the plan.
        cluster: what the plan rests on; None for the file beside the plan, if there is one.

    Raises:
        FileFormatError: a file that was named or is there cannot be read.
        ClusterError: `cluster` is of other hosts.

    """
    plan = files.read(path, Plan)
    measured_at = cluster or path.with_name(CLUSTER)
    measured = files.read(measured_at, Measurements) if cluster or measured_at.exists() else None
    if measured is not None and tuple(host.name for host in measured.cluster.hosts) != plan.hosts:
        if cluster:
            raise ClusterError(f"--cluster {cluster}: its hosts are not those of {path}, in the same order")
        measured = None
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
    return FoundFiles(plan=plan, measurements=measured, picture=picture, outcome=outcome, missing=missing)


def page_of(found: FoundFiles) -> str:
    """Return the report of what was found, HTML; raises PipetteError where jinja2 is not installed."""
    from pipette_launch.report.page import plan_page

    return plan_page(found.plan, found.measurements, found.picture, found.outcome)


def _picture(plan: Plan, measured: Measurements) -> Picture:
    """Read the job anew from what the plan's file says of it."""
    from pipette_launch.forecast.picture import picture_of

    setting = plan.setting
    if setting is None:
        raise PipetteError("the plan's file does not name the job's flags")
    version = measured.versions.get("megatron-core")
    job = megatron.read_job(
        setting.arguments,
        world_size=plan.chosen.layout.world_size,
        megatron_version=version or megatron.version_or_newest(None, setting.script, os.environ)[0],
        device_kind=plan.device_kind,
        without_probes=True,
        for_planning=True,
        environment=os.environ,
        device_name=setting.device_name,
    )
    return picture_of(plan, job, measured)
