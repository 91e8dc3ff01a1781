"""Figures of a job as text for Prometheus: in the file that the user names, and in the job's folder of the cache.

node_exporter's textfile collector reads the one, `pipette watch` the other. The node that decides writes them. Where
the last rank, whose output tells the step time, is on another node, that node writes what was measured into a file of
its own beside it, so that two nodes with one file system write two files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

from pipette_launch import __version__
from pipette_launch.errors import FileFormatError
from pipette_launch.facts import Choice, Plan, files
from pipette_launch.facts.messages import Decision
from pipette_launch.facts.outcome import Outcome
from pipette_launch.launch.cache import Cache
from pipette_launch.megatron.logs import Iteration
from pipette_launch.probe.messages import Sign

logger = logging.getLogger(__name__)

KEPT = "metrics.prom"
"""In the job's folder of the cache."""
REFRESH_S = 2.0
"""What changes from step to step is written so often at most; a new phase at once."""
ALIVE_S = 10.0
"""What has not changed is written again after so long: the time of the file says that the launcher is there."""
PHASES = {"warmup": "warmup", "trial": "trials", "train": "training"}
ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True, kw_only=True, slots=True)
class JobMetrics:
    """What a node knows of the job; None is not known, and not written."""

    script: str = ""
    host: str = ""
    """The first of those that run ranks."""
    phase: str = ""
    """`warmup`, `trials`, `training`, `succeeded` or `failed`; empty on a node that does not decide."""
    began_s: float | None = None
    """When the job began; this and what follows as seconds since 1970."""
    phase_began_s: float | None = None
    nodes: int = 0
    plan: Plan | None = None
    choice: Choice | None = None
    """What runs, or ran last."""
    trainings: int = 0
    """How often the training was started."""
    lost: frozenset[str] = frozenset()
    """Hosts that were lost."""
    warmup_s: float | None = None
    search_s: float | None = None
    sign: Sign | None = None
    """How far the warm-up is."""
    iteration: Iteration | None = None
    """As the training printed it last."""
    printed_s: float | None = None
    """When it did, as seconds since 1970."""
    memory_bytes: int | None = None
    """Measured, of the fullest rank that was read."""


class Family(NamedTuple):
    """A metric: all its samples, each with its labels."""

    name: str
    kind: str
    about: str
    samples: Sequence[tuple[dict[str, str], float | None]]


class MetricsFile:
    """Keeps the files up to date; an error of the file system is logged once and costs the job nothing."""

    def __init__(
        self, path: Path | None, *, script: str = "", keeps: bool = True, now: Callable[[], float] = time.time
    ) -> None:
        """Begin.

        Args:
            path: the file that the user named; None for none.
            script: what is trained.
            keeps: whether the job's folder in the cache gets them too; a job that trains nothing would replace those of
                one that does.
            now: seconds since 1970.

        """
        self._path = path
        self._keeps = keeps
        self._kept: Path | None = None
        """Of the job's folder in the cache."""
        self._now = now
        self._decides = True
        self._broken: set[Path] = set()
        self._written: tuple[str, float] = ("", 0.0)
        self._lock = Lock()
        self._is_over = Event()
        self.known = JobMetrics(script=script, began_s=now())

    def begin(self) -> None:
        """Refresh the files from a thread of its own until the job has ended."""
        Thread(target=self._run, name="metrics", daemon=True).start()

    def _run(self) -> None:
        while not self._is_over.wait(REFRESH_S):
            self.refresh()

    def decided(self, decision: Decision, cache: Cache, *, decides: bool) -> None:
        """Take note of a decision.

        Args:
            decision: for all nodes.
            cache: the folder of what it decides.
            decides: true on the one node that tells the user.

        """
        self._decides = decides
        plan, known = decision.plan or self.known.plan, self.known
        phase = PHASES.get(decision.phase, known.phase) if decides else ""
        self.known = replace(
            known,
            host=decision.hosts[0] if decision.hosts else "",
            phase=phase,
            phase_began_s=known.phase_began_s if phase == known.phase == "trials" else self._now(),
            nodes=len(decision.hosts),
            plan=plan,
            choice=(decision.choice or decision.plan.own) if decision.plan else known.choice,
            trainings=known.trainings + (decision.phase == "train"),
            sign=None,
            iteration=None,
            printed_s=None,
        )
        self._keep_in(cache)
        self.refresh()

    def warming_up(self, sign: Sign | None) -> None:
        """Take note of how far a warm-up is."""
        self.known = replace(self.known, sign=sign or self.known.sign)

    def planned(self, *, warmup_s: float, search_s: float) -> None:
        """Take note of how long measuring and choosing took."""
        self.known = replace(self.known, warmup_s=warmup_s, search_s=search_s)

    def lost(self, hosts: Collection[str]) -> None:
        """Take note of hosts that are gone."""
        self.known = replace(self.known, lost=self.known.lost | frozenset(hosts))

    def iterated(self, iteration: Iteration) -> None:
        """Take note of a step that the training printed on this node."""
        self.known = replace(self.known, iteration=iteration, printed_s=self._now())

    def measured(self, outcome: Outcome) -> None:
        """Take note of what a training needed."""
        peak = outcome.fullest
        self.known = replace(self.known, memory_bytes=peak.measured_bytes if peak else None)

    def ended(self, *, failed: bool) -> None:
        """Take note of the end of the job."""
        self._is_over.set()
        phase = ("failed" if failed else "succeeded") if self._decides else ""
        self.known = replace(self.known, phase=phase, phase_began_s=self._now())
        self.refresh()

    def _keep_in(self, cache: Cache) -> None:
        """Turn to the folder of another plan; nothing is left in that of the one before."""
        try:
            kept = cache.path(KEPT) if self._keeps else None
        except FileFormatError as error:
            logger.warning("%s", error)
            kept = None
        with self._lock:
            if self._kept is not None and kept != self._kept:
                self._own(self._kept).unlink(missing_ok=True)
            self._kept = kept

    def _own(self, path: Path) -> Path:
        """Return the name of this node's file."""
        return path if self._decides else measured_beside(path)

    def refresh(self) -> None:
        """Write what is known, where that is news or was written long ago."""
        with self._lock:
            text, (before, written_s) = metrics_text(self.known, decides=self._decides), self._written
            if not text or (text == before and self._now() - written_s < ALIVE_S):
                return
            for path in filter(None, (self._path, self._kept)):
                if path in self._broken:
                    continue
                try:
                    files.write_text(self._own(path), text, shared=path == self._path)
                except OSError as error:
                    self._broken.add(path)
                    logger.warning("no metrics are written: %s: %s", path, error.strerror or error)
            self._written = (text, self._now())


def measured_beside(path: Path) -> Path:
    """Return the file of the node of the last rank, where another one decides and writes `path`."""
    return path.with_suffix(f".measured{path.suffix}")


def metrics_text(known: JobMetrics, *, decides: bool) -> str:
    """Write what is known in Prometheus' text format; a node that does not decide knows what it measured."""
    families = (*(_decided(known) if decides else ()), *_measured(known))
    return "".join(_family(one) for one in families)


def _decided(known: JobMetrics) -> Iterator[Family]:
    """What the deciding node knows: the plan, and what became of it."""
    phase, plan, choice = known.phase, known.plan, known.choice
    about = {"script": known.script, "host": known.host}
    yield Family("pipette_job_info", "gauge", "What is trained, and the first host.", [(about, 1)])
    yield _figure("pipette_started_timestamp_seconds", "When the job began.", known.began_s)
    yield Family("pipette_phase_info", "gauge", "What the job does.", [({"phase": phase}, 1 if phase else None)])
    yield _figure("pipette_phase_started_timestamp_seconds", "When that began.", known.phase_began_s)
    if known.sign is not None:
        yield from _warmup(known.sign)
    yield Family("pipette_nodes", "gauge", "Nodes that run ranks.", [({}, known.nodes)])
    yield _figure("pipette_restarts_total", "Trainings that were started after the first.", max(known.trainings - 1, 0))
    yield _figure("pipette_lost_nodes_total", "Nodes that were lost.", len(known.lost))
    yield _figure("pipette_warmup_seconds", "What measuring took before the plan.", known.warmup_s)
    yield _figure("pipette_search_seconds", "What choosing the plan took.", known.search_s)
    if plan is None or choice is None:
        return
    about = {"layout": choice.layout.words(), "schedule": choice.schedule, "version": __version__}
    yield Family("pipette_plan_info", "gauge", "What runs.", [({**about, "key": plan.provenance.key}, 1)])
    rate, shown = choice.rate, choice.memory_shown
    yield _figure("pipette_predicted_step_seconds", "Predicted time of a step.", choice.step_time_s)
    own_s = None if plan.own_fault else plan.own.step_time_s
    yield _figure("pipette_own_predicted_step_seconds", "The same of the user's own configuration.", own_s)
    tokens = rate.tokens_per_s if rate else None
    yield _figure("pipette_predicted_tokens_per_second", "Predicted tokens a second, of all ranks.", tokens)
    yield _figure("pipette_memory_need_bytes", "Predicted peak of the fullest device.", max(shown.need_bytes))
    yield _figure("pipette_memory_limit_bytes", "What a device may hold.", shown.limit_bytes)
    yield _figure("pipette_gap_ratio", "By how much no other plan could be faster, at most.", plan.gap)


def _warmup(sign: Sign) -> Iterator[Family]:
    """How far a warm-up is: where it stands in which phase, and what the phases took that have ended."""
    counted = {"phase": sign.phase}
    done, total, seconds = "pipette_warmup_steps_done", "pipette_warmup_steps", "pipette_warmup_phase_seconds"
    yield Family(done, "gauge", "Steps of this phase that have ended.", [(counted, sign.done)])
    yield Family(total, "gauge", "All its steps; 0 where they are not counted.", [(counted, sign.total)])
    ended = {one.phase: one.seconds for one in sign.ended}
    yield Family(seconds, "gauge", "What a phase took.", [({"phase": name}, took) for name, took in ended.items()])


def _measured(known: JobMetrics) -> Iterator[Family]:
    """What the node of the last rank reads in the output of the training."""
    choice, line = known.choice, known.iteration
    rate, step_s = choice.rate if choice else None, line.step_time_s if line else None
    tokens = rate.tokens_per_s * choice.step_time_s / step_s if rate and choice and step_s else None
    yield _figure("pipette_iteration", "The last iteration that was printed.", line.iteration if line else None)
    yield _figure("pipette_iterations", "How many there are to be.", line.total if line else None)
    yield _figure("pipette_iteration_timestamp_seconds", "When it was printed.", known.printed_s)
    yield _figure("pipette_measured_step_seconds", "Time of a step, as it was printed last.", step_s)
    yield _figure("pipette_measured_tokens_per_second", "Tokens a second at that time, of all ranks.", tokens)
    yield _figure("pipette_measured_memory_bytes", "Peak of the fullest rank that was read.", known.memory_bytes)


def _figure(name: str, about: str, value: float | None) -> Family:
    return Family(name, "counter" if name.endswith("_total") else "gauge", about, [({}, value)])


def _family(one: Family) -> str:
    """Write a metric; one without a known value is left out."""
    lines = [f"{one.name}{_labels(labels)} {value!r}" for labels, value in one.samples if value is not None]
    if not lines:
        return ""
    head = [f"# HELP {one.name} {one.about}", f"# TYPE {one.name} {one.kind}"]
    return "".join(f"{line}\n" for line in (*head, *lines))


def _labels(labels: dict[str, str]) -> str:
    inner = ",".join(f'{name}="{value.translate(ESCAPES)}"' for name, value in labels.items())
    return f"{{{inner}}}" if inner else ""


ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
NEEDED = "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
FLUSH_MS = 5000
"""How long the end of a job may wait for a collector."""


class Spans:
    """Begins and ends spans; does nothing without an endpoint."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._is_wanted = any(environ.get(name) for name in ENDPOINTS)
        self._provider: Any = None
        self._span: Any = None

    def begin(self, phase: str, about: Mapping[str, str | int | float]) -> None:
        """End the span of the phase before, and begin that of this one, with these attributes."""
        if self._span is not None:
            self._span.end()
            self._span = None
        if self._is_wanted and (self._provider is not None or self._connect()):
            attributes = {f"pipette.{name}": value for name, value in about.items()}
            self._span = self._provider.get_tracer("pipette_launch").start_span(phase, attributes=attributes)

    def end(self) -> None:
        """End the last span, and send what is left."""
        if self._span is not None:
            self._span.end()
            self._span = None
        if self._provider is not None:
            self._provider.force_flush(FLUSH_MS)

    def _connect(self) -> bool:
        """Make a provider of our own, so that no other code of this process gets one; false where that cannot be."""
        try:
            exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
            sdk, export = import_module("opentelemetry.sdk.trace"), import_module("opentelemetry.sdk.trace.export")
            resource = import_module("opentelemetry.sdk.resources").Resource.create({"service.name": "pipette-launch"})
        except ImportError:
            self._is_wanted = False
            logger.warning("an OTLP endpoint is set, but no spans are sent: install %s", NEEDED)
            return False
        self._provider = sdk.TracerProvider(resource=resource)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        return True


def phase_attributes(decision: Decision) -> dict[str, str | int | float]:
    """What a span says of its phase."""
    runs = decision.choice or (decision.plan.own if decision.plan else None)
    if runs is None:
        return {"nodes": len(decision.hosts)}
    layout, seconds = runs.layout.words(), runs.step_time_s
    return {"nodes": len(decision.hosts), "layout": layout, "predicted_step_s": seconds}
