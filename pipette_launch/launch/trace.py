"""Writes a plan's trace beside the plan: of a plan just made, or from the files of an earlier one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipette_launch.errors import PlanError
from pipette_launch.facts import files
from pipette_launch.launch.cache.plans import PLAN

if TYPE_CHECKING:
    from pathlib import Path

    from pipette_launch.facts import Measurements, Plan
    from pipette_launch.forecast.picture import Picture
    from pipette_launch.launch.page import FoundFiles

TRACE = "trace.json"


def trace_path(plan: Path) -> Path:
    """Return where the trace of a plan file lies: `trace.json` beside `plan.json`, else its name with `.trace.json`."""
    return plan.with_name(TRACE) if plan.name == PLAN else plan.with_suffix(f".{TRACE}")


def write_trace(
    path: Path, plan: Plan, measurements: Measurements | None, picture: Picture | None, *, shared: bool = False
) -> None:
    """Write the trace of a plan that was made from these measurements, with its picture; raises OSError."""
    from pipette_launch.report.trace import trace_text

    files.write_text(path, trace_text(plan, measurements, picture), shared=shared)


def trace_of(found: FoundFiles, profile: Path | None = None) -> str:
    """Return the trace of what was found beside a plan file, JSON.

    Args:
        found: the plan, and what lies beside it.
        profile: a folder with the traces that torch's profiler left of the plan's training.

    Raises:
        PipetteError: the profile cannot be read, is of another configuration, or there is nothing to set it beside.

    """
    from pipette_launch.launch.training.profile import read_profile
    from pipette_launch.report.trace import trace_text

    if profile is not None and found.picture is None:
        raise PlanError(f"measured passes have nothing to stand beside: {found.missing}")
    profiled = () if profile is None else read_profile(profile)
    return trace_text(found.plan, found.measurements, found.picture, found.outcome, profiled)
