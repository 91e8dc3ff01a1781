"""Watches a running job by reading the documents that the launcher writes, and writes nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

from pipette_launch.errors import FileFormatError, UsageError
from pipette_launch.facts import Measurements, files
from pipette_launch.facts.health import Verdict
from pipette_launch.facts.outcome import LiveJob
from pipette_launch.launch.cache import CLUSTER, PLAN, default_root, distrust
from pipette_launch.launch.metrics import KEPT, MEASURED, document_of, measured_beside

MOST_STEPS = 40


def read_job(path: Path, now_s: float) -> LiveJob:
    """Read the state of a job from the deciding node's document and the measurements beside the document."""
    job = replace(files.read(path, LiveJob), read_s=now_s, written_s=_written_s(path) or now_s)
    beside = measured_beside(path)
    measured_s = _written_s(beside)
    # A measurements file older than the decision belongs to an earlier attempt or an earlier job in this folder.
    if measured_s is None or measured_s < (job.phase_began_s or 0.0):
        return job
    measured = files.read(beside, LiveJob)
    return replace(job, **{name: getattr(measured, name) for name in MEASURED if getattr(job, name) is None})


class Watched:
    """A running job, whose documents are read at each `look`."""

    def __init__(self, where: Path | None) -> None:
        """Find the job: `where` as in `document_at`; raises UsageError if there is no job."""
        self._path = document_at(where)
        self._job: LiveJob | None = None
        self._steps: deque[float] = deque(maxlen=MOST_STEPS)
        self._verdicts: tuple[Verdict, ...] = ()
        self._measured_s: float | None = None

    @property
    def steps_s(self) -> tuple[float, ...]:
        """Step times that were seen under the present plan, newest last."""
        return (*self._steps,)

    def look(self, now_s: float) -> LiveJob:
        """Return the state at `now_s` seconds since 1970; raises FileFormatError if no document could be read.

        While the file cannot be read, `look` returns the last state, whose age grows.
        """
        before = self._job
        try:
            job = read_job(self._path, now_s)
        except FileFormatError:
            if before is None:
                raise
            if not self._path.exists():
                # The job runs another plan now, so the document is in the other plan's folder.
                self._path = _newest(self._path.parent.parent) or self._path
            return replace(before, read_s=now_s)
        if before is not None and job.phase_began_s != before.phase_began_s and not job.is_over:
            self._steps.clear()
        if job.step_s is not None and (not self._steps or before is None or job.printed_s != before.printed_s):
            self._steps.append(job.step_s)
        self._job = replace(job, verdicts=self._read_verdicts() if job.layout else ())
        return self._job

    def _read_verdicts(self) -> tuple[Verdict, ...]:
        """Return the verdicts of the measurements beside the document. A changed file is read again."""
        path = self._path.with_name(CLUSTER)
        changed_s = _written_s(path) if self._path.name == KEPT else None
        if changed_s != self._measured_s:
            self._measured_s = changed_s
            self._verdicts = files.read(path, Measurements).verdicts if changed_s is not None else ()
        return self._verdicts


def document_at(where: Path | None) -> Path:
    """Return the document of a job; raises UsageError if there is none, or other users may write to its folder.

    `where` is the folder of a job, a cache, a plan.json, or a Prometheus file; None is the usual cache.
    """
    root = where or default_root()
    if root is None:
        raise UsageError("there is no home folder, so no cache; name the folder of a job")
    if root.is_dir():
        found = root / KEPT if (root / KEPT).exists() else _newest(root)
    else:
        found = root.with_name(KEPT) if root.name == PLAN else document_of(root)
    if found is None or not found.is_file():
        raise UsageError(
            f"{root}: no running job has left its state there; start one with pipette-launch and a cache, or name the "
            f"folder of its cache, its plan.json, or its metrics file"
        )
    trouble = distrust(found.parent) if found.name == KEPT else ""
    if trouble:
        raise UsageError(trouble)
    return found


def _newest(root: Path) -> Path | None:
    """Return the most recently written job document below a cache."""
    ages = {path: age for path in root.glob(f"*/{KEPT}") if (age := _written_s(path)) is not None}
    return max(ages, key=lambda path: ages[path], default=None)


def _written_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
