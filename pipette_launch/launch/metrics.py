"""The state of a running job in files: a JSON document, and Prometheus text.

The deciding node writes the document `live-job` into the job's folder of the cache, and beside the Prometheus file that
the user named. `pipette watch` reads this document, and the Prometheus file has the same values for node_exporter's
textfile collector. Step times come from the output of the last rank. If another node runs the last rank, that node
writes its measurements into separate files. Two nodes with a common file system then never write the same file.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

from pipette_launch import __version__
from pipette_launch.errors import FileFormatError, UsageError
from pipette_launch.facts import Measurements, files
from pipette_launch.facts.health import Verdict
from pipette_launch.facts.messages import Decision, RunScript, Stop
from pipette_launch.facts.outcome import LiveJob
from pipette_launch.launch.cache import CLUSTER, PLAN, Cache, default_root, distrust
from pipette_launch.megatron.logs import Iteration
from pipette_launch.probe.progress import Sign

logger = logging.getLogger(__name__)

KEPT = "live.json"
"""Name of the document in the job's folder of the cache."""
REFRESH_S = 2.0
"""Shortest time (s) between two writes of the files. At a new phase of the job, the files are written at once."""
ALIVE_S = 10.0
"""Time (s) after which an unchanged document is written again, because its age shows whether the launcher runs."""
PHASES = {"warmup": "warmup", "trial": "trials", "train": "training"}
MEASURED = ("iteration", "iterations", "printed_s", "step_s", "tokens_per_s", "measured_memory_bytes")
"""Fields of the document that the node of the last rank reads from the output of the training."""
OF_ATTEMPT = (*MEASURED, "warmup_phase", "warmup_done", "warmup_total", "warmup_phase_s")
"""Fields of the document that are emptied at the start of each phase of the job."""
EMPTY = LiveJob(read_s=0.0, written_s=0.0)
ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class MetricsFile:
    """Writes the job's document and Prometheus file. The log reports a file error once, and the job goes on."""

    def __init__(
        self, path: Path | None, *, script: str = "", keeps: bool = True, now: Callable[[], float] = time.time
    ) -> None:
        """Begin; `path` is the Prometheus file that the user named, or None. `now` returns seconds since 1970.

        `keeps` is false for a job that only measures, because its document would replace a training's document.
        """
        self._path = path
        self._keeps = keeps
        self._kept: Path | None = None
        """Document in the job's folder of the cache."""
        self._now = now
        self._decides = False
        """True on the deciding node, after the first decision. Before it, no node writes a file."""
        self._broken: set[Path] = set()
        self._written: tuple[LiveJob | None, float] = (None, 0.0)
        self._lock = Lock()
        """Held while files are written, which may take long on a file system that hangs."""
        self._known_lock = Lock()
        """Held while `known` changes, and never during a write, so that no thread that notes a change waits."""
        self._is_over = Event()
        self._lost: set[str] = set()
        self._num_trainings = 0
        self.known = replace(EMPTY, script=script, began_s=now())

    def begin(self) -> None:
        """Start a thread that refreshes the files until the job has ended."""
        Thread(target=self._run, name="metrics", daemon=True).start()

    def _run(self) -> None:
        while not self._is_over.wait(REFRESH_S):
            self.refresh()

    def decided(self, decision: Decision, cache: Cache, *, decides: bool) -> None:
        """Note a decision. `cache` is the folder of the decision's plan, and `decides` is true on the deciding node."""
        before = self.known
        shown = decision.unrun if isinstance(decision, Stop) else decision
        plan = shown.plan if isinstance(shown, RunScript) else None
        phase = PHASES.get(decision.phase, before.phase) if decides else ""
        self._num_trainings += decision.phase == "train"
        changes: dict[str, Any] = {name: getattr(EMPTY, name) for name in OF_ATTEMPT}
        changes |= {
            "host": decision.hosts[0] if decision.hosts else "",
            "phase": phase,
            "phase_began_s": before.phase_began_s if phase == before.phase == "trials" else self._now(),
            "nodes": len(decision.hosts),
            "restarts": max(self._num_trainings - 1, 0),
        }
        if shown is not None and plan is not None:
            choice = shown.choice or plan.own
            rate, memory = choice.rate, choice.memory
            changes |= {
                "key": plan.provenance.key,
                "layout": choice.layout.words(),
                "schedule": choice.schedule,
                "predicted_step_s": choice.step_time_s,
                "own_predicted_step_s": None if plan.own_fault else plan.own.step_time_s,
                "predicted_tokens_per_s": rate.tokens_per_s if rate else None,
                "memory_need_bytes": max(memory.need_bytes),
                "memory_limit_bytes": memory.limit_bytes,
                "gap": plan.gap,
            }
        self.note(**changes)
        try:
            kept = cache.path(KEPT) if self._keeps else None
        except FileFormatError as error:
            logger.warning("%s", error)
            kept = None
        with self._lock:
            if self._kept is not None and kept != self._kept:
                self._own(self._kept).unlink(missing_ok=True)
            self._kept, self._decides = kept, decides
        self.refresh()

    def warming_up(self, sign: Sign | None) -> None:
        """Note the progress of a warm-up."""
        if sign is not None:
            ended = {one.phase: one.seconds for one in sign.ended}
            self.note(warmup_phase=sign.phase, warmup_done=sign.done, warmup_total=sign.total, warmup_phase_s=ended)

    def lost(self, hosts: Collection[str]) -> None:
        """Note lost hosts."""
        self._lost.update(hosts)
        self.note(lost_nodes=len(self._lost))

    def iterated(self, iteration: Iteration) -> None:
        """Note a step that the training printed on this node."""
        known, step_s = self.known, iteration.step_time_s
        predicted, tokens = known.predicted_tokens_per_s, None
        if predicted and known.predicted_step_s and step_s:
            tokens = predicted * known.predicted_step_s / step_s
        now_s = self._now()
        self.note(
            iteration=iteration.iteration,
            iterations=iteration.total,
            step_s=step_s,
            tokens_per_s=tokens,
            printed_s=now_s,
        )

    def note(self, **changes: Any) -> None:
        """Change fields of the job's document. The next refresh writes the files."""
        # The main thread, the reader of the workers' output and the writer of the files call this method.
        with self._known_lock:
            self.known = replace(self.known, **changes)

    def ended(self, *, failed: bool) -> None:
        """Note the end of the job."""
        self._is_over.set()
        phase = ("failed" if failed else "succeeded") if self._decides else ""
        self.note(phase=phase, phase_began_s=self._now())
        self.refresh()

    def _own(self, path: Path) -> Path:
        """Return the path that this node writes instead of `path`, so that nodes never share a file."""
        return path if self._decides else measured_beside(path)

    def refresh(self) -> None:
        """Write the files if the job's state changed, or the last write is `ALIVE_S` old."""
        with self._lock:
            job, now_s = self.known, self._now()
            if not self._decides:
                job = replace(EMPTY, **{name: getattr(job, name) for name in MEASURED})
                if job == EMPTY:
                    return
            if job == self._written[0] and now_s - self._written[1] < ALIVE_S:
                return
            document = files.dumps(replace(job, read_s=now_s, written_s=now_s), indent=1)
            contents = {self._kept: document}
            if self._path is not None:
                contents[self._path] = metrics_text(job, decides=self._decides)
                contents[document_of(self._path)] = document
            for path, text in contents.items():
                if path is None or path in self._broken:
                    continue
                try:
                    files.write_text(self._own(path), text, shared=path != self._kept)
                except OSError as error:
                    self._broken.update((path, document_of(path)))
                    logger.warning("no metrics are written: %s: %s", path, error.strerror or error)
            self._written = (job, now_s)


def document_of(path: Path) -> Path:
    """Return the JSON document beside a Prometheus file: `pipette.json` beside `pipette.prom`."""
    return path.with_suffix(".json")


def measured_beside(path: Path) -> Path:
    """Return the path of the file that the last rank's node writes beside the deciding node's file `path`."""
    return path.with_suffix(f".measured{path.suffix}")


# -- Prometheus ---------------------------------------------------------------------------------------------------


class Family(NamedTuple):
    """A Prometheus metric with one value, or with samples that have labels. A value of None is not written."""

    name: str
    about: str
    value: float | None = None
    samples: Sequence[tuple[dict[str, str], float | None]] = ()


def metrics_text(job: LiveJob, *, decides: bool) -> str:
    """Return a job's state in Prometheus' text format. A node that does not decide writes only its measurements."""
    text = ""
    for name, about, value, labelled in (*(_decided(job) if decides else ()), *_measured(job)):
        samples = [(labels, number) for labels, number in labelled or [({}, value)] if number is not None]
        if samples:
            kind = "counter" if name.endswith("_total") else "gauge"
            text += f"# HELP pipette_{name} {about}\n# TYPE pipette_{name} {kind}\n"
        for labels, number in samples:
            inner = ",".join(f'{label}="{word.translate(ESCAPES)}"' for label, word in labels.items())
            text += f"pipette_{name}{f'{{{inner}}}' if inner else ''} {number!r}\n"
    return text


def _decided(job: LiveJob) -> Iterator[Family]:
    about = {"script": job.script, "host": job.host}
    yield Family("job_info", "Training script, and first host.", samples=[(about, 1)])
    yield Family("started_timestamp_seconds", "Start of the job.", job.began_s)
    yield Family("phase_info", "Phase of the job.", samples=[({"phase": job.phase}, 1 if job.phase else None)])
    yield Family("phase_started_timestamp_seconds", "Start of the phase.", job.phase_began_s)
    if job.warmup_phase:
        part = {"phase": job.warmup_phase}
        yield Family("warmup_steps_done", "Steps done in this part of the warm-up.", samples=[(part, job.warmup_done)])
        unknown = "Number of steps of this part of the warm-up; 0 if not counted."
        yield Family("warmup_steps", unknown, samples=[(part, job.warmup_total)])
        seconds = [({"phase": name}, took) for name, took in job.warmup_phase_s.items()]
        yield Family("warmup_phase_seconds", "Duration of a part of the warm-up.", samples=seconds)
    yield Family("nodes", "Nodes that run ranks.", job.nodes)
    yield Family("restarts_total", "Number of restarts of the training.", job.restarts)
    yield Family("lost_nodes_total", "Nodes that were lost.", job.lost_nodes)
    yield Family("warmup_seconds", "Duration of the measurements before the plan.", job.warmup_s)
    yield Family("search_seconds", "Duration of the search for the plan.", job.search_s)
    if not job.layout:
        return
    about = {"layout": job.layout, "schedule": job.schedule, "version": __version__, "key": job.key}
    yield Family("plan_info", "Configuration that runs.", samples=[(about, 1)])
    yield Family("predicted_step_seconds", "Predicted time of a step.", job.predicted_step_s)
    own = "Predicted time of a step under the user's own configuration."
    yield Family("own_predicted_step_seconds", own, job.own_predicted_step_s)
    yield Family("predicted_tokens_per_second", "Predicted tokens per second, all ranks.", job.predicted_tokens_per_s)
    yield Family("memory_need_bytes", "Predicted peak of the fullest device.", job.memory_need_bytes)
    yield Family("memory_limit_bytes", "Memory that a plan may use on a device.", job.memory_limit_bytes)
    yield Family("gap_ratio", "Largest possible gain of any other plan.", job.gap)


def _measured(job: LiveJob) -> Iterator[Family]:
    yield Family("iteration", "Last printed iteration.", job.iteration)
    yield Family("iterations", "Planned number of iterations.", job.iterations)
    yield Family("iteration_timestamp_seconds", "Time at which the last iteration was printed.", job.printed_s)
    yield Family("measured_step_seconds", "Last printed time of a step.", job.step_s)
    yield Family("measured_tokens_per_second", "Tokens per second of all ranks in the last step.", job.tokens_per_s)
    yield Family(
        "measured_memory_bytes", "Highest memory peak among the ranks that were read.", job.measured_memory_bytes
    )


MOST_STEPS = 40


def read_job(path: Path, now_s: float) -> LiveJob:
    """Read a job's state from the deciding node's document and from the last rank's measurements beside it."""
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
        """Step times (s) since the last change of the job's phase, newest last; at most `MOST_STEPS`."""
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
                # The job now runs another plan, so the job's document is in that plan's folder.
                self._path = _newest(self._path.parent.parent) or self._path
            return replace(before, read_s=now_s)
        if before is not None and job.phase_began_s != before.phase_began_s and not job.is_over:
            self._steps.clear()
        if job.step_s is not None and (not self._steps or before is None or job.printed_s != before.printed_s):
            self._steps.append(job.step_s)
        self._job = replace(job, verdicts=self._read_verdicts() if job.layout else ())
        return self._job

    def _read_verdicts(self) -> tuple[Verdict, ...]:
        """Return the verdicts of the measurements beside the document. A changed file of measurements is read again."""
        path = self._path.with_name(CLUSTER)
        changed_s = _written_s(path) if self._path.name == KEPT else None
        if changed_s != self._measured_s:
            self._measured_s = changed_s
            self._verdicts = files.read(path, Measurements).verdicts if changed_s is not None else ()
        return self._verdicts


def document_at(where: Path | None) -> Path:
    """Return the document of a job; raises UsageError if no job left a document or others may write to its folder.

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
    ages = {path: age for path in root.glob(f"*/{KEPT}") if (age := _written_s(path)) is not None}
    return max(ages, key=lambda path: ages[path], default=None)


def _written_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
