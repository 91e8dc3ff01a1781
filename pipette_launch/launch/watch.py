"""Reads a job's metrics, which `launch.display.metrics` writes."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pipette_launch.errors import FileFormatError, UsageError
from pipette_launch.facts import Measurements, files
from pipette_launch.facts.health import Verdict
from pipette_launch.facts.outcome import LiveJob
from pipette_launch.launch.cache import CLUSTER, PLAN, default_root, distrust
from pipette_launch.launch.metrics import KEPT, measured_beside
from pipette_launch.launch.plan_reports import PAGE

MOST_BYTES = 1 << 20
SAMPLE = re.compile(r"(pipette_[a-z_]{1,80})(?:\{(.*)\})? ([-+.0-9e]{1,40})", re.ASCII)
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')
ESCAPE = re.compile(r"\\(.)")

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Of each metric its labels and values."""


def read_job(path: Path, now_s: float) -> LiveJob:
    """Read what a job says now.

    Args:
        path: of the deciding node; what another node measured may lie beside it.
        now_s: seconds since 1970.

    Raises:
        FileFormatError: the file is not there, or not one of ours.

    """
    found, written_s = _read(path)
    beside = measured_beside(path)
    if beside.exists():
        measured, measured_s = _read(beside)
        # One of an earlier attempt, or of an earlier job in this folder, says nothing of this one.
        began = found.get("phase_started_timestamp_seconds")
        if began is None or measured_s >= began[0][1]:
            found = {**measured, **found}
    return _job(found, read_s=now_s, written_s=written_s)


def samples_of(text: str, source: str) -> Samples:
    """Read metrics of ours; comments are left out, and metrics of other versions are kept.

    Raises:
        FileFormatError: a line is none; `source` names the file.

    """
    found: Samples = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line or line.startswith("#"):
            continue
        sample = SAMPLE.fullmatch(line)
        try:
            value = float(sample[3]) if sample else files.LARGEST * 2
        except ValueError:
            value = files.LARGEST * 2
        if sample is None or not abs(value) <= files.LARGEST:
            raise FileFormatError(f"{source}: line {number} is no metric of pipette-launch: {line[:80]!r}")
        labels = {name: ESCAPE.sub(_unescaped, text) for name, text in LABEL.findall(sample[2] or "")}
        found.setdefault(sample[1].removeprefix("pipette_"), []).append((labels, value))
    return found


def _read(path: Path) -> tuple[Samples, float]:
    """Return the samples of a file, and when it was written."""
    data = files.read_bytes(path)
    if len(data) > MOST_BYTES:
        raise FileFormatError(f"{path}: {len(data)} bytes, and no metrics of ours have more than {MOST_BYTES}")
    try:
        return samples_of(data.decode("utf-8"), str(path)), path.stat().st_mtime
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}: cannot be read ({error})") from error


def _job(found: Samples, *, read_s: float, written_s: float) -> LiveJob:
    doing, done = found.get("warmup_steps", []), found.get("warmup_steps_done", [])
    plan, about = _labels(found, "plan_info"), _labels(found, "job_info")

    def figure(name: str) -> float | None:
        return found[name][0][1] if name in found else None

    def count(name: str) -> int | None:
        return int(found[name][0][1]) if name in found else None

    return LiveJob(
        read_s=read_s,
        written_s=written_s,
        script=about.get("script", ""),
        host=about.get("host", ""),
        phase=_labels(found, "phase_info").get("phase", ""),
        warmup_phase=doing[0][0].get("phase", "") if doing else "",
        warmup_total=int(doing[0][1]) if doing else 0,
        warmup_done=int(done[0][1]) if done else 0,
        warmup_phase_s={labels.get("phase", ""): took for labels, took in found.get("warmup_phase_seconds", [])},
        key=plan.get("key", ""),
        layout=plan.get("layout", ""),
        schedule=plan.get("schedule", ""),
        began_s=figure("started_timestamp_seconds"),
        phase_began_s=figure("phase_started_timestamp_seconds"),
        nodes=count("nodes") or 0,
        restarts=count("restarts_total") or 0,
        lost_nodes=count("lost_nodes_total") or 0,
        predicted_step_s=figure("predicted_step_seconds"),
        own_predicted_step_s=figure("own_predicted_step_seconds"),
        step_s=figure("measured_step_seconds"),
        predicted_tokens_per_s=figure("predicted_tokens_per_second"),
        tokens_per_s=figure("measured_tokens_per_second"),
        iteration=count("iteration"),
        iterations=count("iterations"),
        printed_s=figure("iteration_timestamp_seconds"),
        memory_need_bytes=count("memory_need_bytes"),
        memory_limit_bytes=count("memory_limit_bytes"),
        measured_memory_bytes=count("measured_memory_bytes"),
    )


def _labels(found: Samples, name: str) -> Mapping[str, str]:
    return found[name][0][0] if name in found else {}


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


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
