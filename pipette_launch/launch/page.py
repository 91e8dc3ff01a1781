"""Writes a plan's report, an HTML file, beside the plan: of a plan just made, or from the files of an earlier one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch import megatron
from pipette_launch.errors import ClusterError, PipetteError
from pipette_launch.facts import Measurements, Plan, files
from pipette_launch.facts.results.outcome import Outcome
from pipette_launch.launch.cache.plans import CLUSTER, OUTCOME

if TYPE_CHECKING:
    from pipette_launch.facts import Job
    from pipette_launch.forecast.picture import Picture

PAGE = "report.html"


def page_path(plan: Path) -> Path:
    """Return where the report of a plan file lies: `report.html` beside `plan.json`, else its own name with `.html`."""
    return plan.with_name(PAGE) if plan.name == "plan.json" else plan.with_suffix(".html")


def write_page(path: Path, plan: Plan, job: Job, measurements: Measurements, *, shared: bool = False) -> None:
    """Write the report of a plan that was made for this job from these measurements; raises OSError."""
    from pipette_launch.forecast.picture import picture_of
    from pipette_launch.report.page import plan_page

    files.write_text(path, plan_page(plan, measurements, picture_of(plan, job, measurements)), shared=shared)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundPage:
    """A report made from files, and what it lacks because a file is missing or does not fit."""

    html: str
    missing: tuple[str, ...]


def page_of_files(path: Path, cluster: Path | None) -> FoundPage:
    """Make the report of a plan file, with what lies beside it: `cluster.json` and `outcome.json`.

    Args:
        path: of the plan.
        cluster: what the plan rests on; None for the file beside the plan, if there is one.

    Raises:
        FileFormatError: a file that was named or is there cannot be read.
        ClusterError: `cluster` is of other hosts.

    """
    from pipette_launch.report.page import plan_page

    plan = files.read(path, Plan)
    measured_at = cluster or path.with_name(CLUSTER)
    measured = files.read(measured_at, Measurements) if cluster or measured_at.exists() else None
    if measured is not None and tuple(host.name for host in measured.cluster.hosts) != plan.hosts:
        if cluster:
            raise ClusterError(f"--cluster {cluster}: its hosts are not those of {path}, in the same order")
        measured = None
    missing = [] if measured else [f"no {CLUSTER} with its hosts lies beside the plan: links and timeline are left out"]
    picture = None
    if measured is not None:
        try:
            picture = _picture(plan, measured)
        except PipetteError as error:
            missing.append(f"the timeline is left out: {error}")
    ran_at = path.with_name(OUTCOME)
    outcome = files.read(ran_at, Outcome) if ran_at.exists() else None
    if outcome is not None and outcome.key != plan.provenance.key:
        outcome = None
    return FoundPage(html=plan_page(plan, measured, picture, outcome), missing=tuple(missing))


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
