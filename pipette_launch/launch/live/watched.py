"""Which job is watched, and what has been seen of it so far."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch.errors import FileFormatError, UsageError
from pipette_launch.facts import Measurements, files
from pipette_launch.launch.cache.folder import distrust
from pipette_launch.launch.cache.plans import CLUSTER, PLAN, default_root
from pipette_launch.launch.display.metrics import KEPT
from pipette_launch.launch.live.figures import read_job
from pipette_launch.launch.page import PAGE

if TYPE_CHECKING:
    from pipette_launch.facts.health import Verdict
    from pipette_launch.facts.outcome import LiveJob

MOST_STEPS = 40


class Watched:
    """A job that is looked at again and again."""

    def __init__(self, where: Path | None) -> None:
        """Find it.

        Args:
            where: the folder of a job, a cache, a metrics file, or plan.json; None for the usual cache.

        Raises:
            UsageError: there is no job.

        """
        self._path = figures_at(where)
        self._job: LiveJob | None = None
        self._steps: deque[float] = deque(maxlen=MOST_STEPS)
        self._verdicts: tuple[Verdict, ...] = ()
        self._measured_s: float | None = None

    @property
    def steps_s(self) -> tuple[float, ...]:
        """The steps that were seen under the present plan, the newest last."""
        return (*self._steps,)

    @property
    def page(self) -> Path | None:
        """The report of its plan, if the job has a folder; it may not exist yet."""
        return self._path.with_name(PAGE) if self._path.name == KEPT else None

    def look(self, now_s: float) -> LiveJob:
        """Return what the job says now, at `now_s` seconds since 1970; raises FileFormatError where it never could.

        A file that cannot be read for a while leaves what was read before, which becomes stale.
        """
        before = self._job
        try:
            job = read_job(self._path, now_s)
        except FileFormatError:
            if before is None:
                raise
            if not self._path.exists():
                # Another plan is in force, and its folder has the file now.
                self._path = _newest(self._path.parent.parent) or self._path
            return replace(before, read_s=now_s)
        if before is not None and job.phase_began_s != before.phase_began_s and not job.is_over:
            self._steps.clear()
        if job.step_s is not None and (not self._steps or before is None or job.printed_s != before.printed_s):
            self._steps.append(job.step_s)
        self._job = replace(job, verdicts=self._found_amiss() if job.layout else ())
        return self._job

    def _found_amiss(self) -> tuple[Verdict, ...]:
        """Return the verdicts of the measurements beside the figures, read anew when they change."""
        path = self._path.with_name(CLUSTER)
        changed_s = _written_s(path) if self._path.name == KEPT else None
        if changed_s != self._measured_s:
            self._measured_s = changed_s
            self._verdicts = files.read(path, Measurements).verdicts if changed_s is not None else ()
        return self._verdicts


def figures_at(where: Path | None) -> Path:
    """Return the metrics file that is meant (see `Watched`); raises UsageError where there is none."""
    root = where or default_root()
    if root is None:
        raise UsageError("there is no home folder, so no cache; name the folder of a job")
    if root.is_dir():
        found = root / KEPT if (root / KEPT).exists() else _newest(root)
    else:
        found = root.with_name(KEPT) if root.name == PLAN else root
    if found is None or not found.is_file():
        raise UsageError(
            f"{root}: no job has written figures there; start one with pipette-launch and a cache, or name the folder "
            f"of its cache, its plan.json, or its metrics file"
        )
    trouble = distrust(found.parent) if found.name == KEPT else ""
    if trouble:
        raise UsageError(trouble)
    return found


def _newest(root: Path) -> Path | None:
    """Return the figures below a cache that were written last."""
    ages = {path: age for path in root.glob(f"*/{KEPT}") if (age := _written_s(path)) is not None}
    return max(ages, key=lambda path: ages[path], default=None)


def _written_s(path: Path) -> float | None:
    """Return when a file was written; None where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
