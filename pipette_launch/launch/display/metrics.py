"""Figures of a job as a text file for Prometheus: node_exporter's textfile collector reads it.

The node that decides writes it. Where the last rank, whose output tells the step time, is on another node, that node
writes what was measured into a file of its own beside it, so that two nodes with one file system write two files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipette_launch import __version__
from pipette_launch.facts import Choice, Plan, files

if TYPE_CHECKING:
    from pipette_launch.facts.messages.round import Decision
    from pipette_launch.facts.results.outcome import Outcome

logger = logging.getLogger(__name__)

REFRESH_S = 10.0
"""Measured steps are written so often at most; a new phase at once."""
PHASES = {"warmup": "warmup", "trial": "trials", "train": "training"}
ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True, kw_only=True, slots=True)
class JobMetrics:
    """What a node knows of the job; None is not known, and not written."""

    phase: str = ""
    """`warmup`, `trials`, `training`, `succeeded` or `failed`; empty on a node that does not decide."""
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
    iteration: int | None = None
    step_s: float | None = None
    """As the training printed it last."""
    memory_bytes: int | None = None
    """Measured, of the fullest rank that was read."""


class Family(NamedTuple):
    """A metric: all its samples, each with its labels."""

    name: str
    kind: str
    about: str
    samples: Sequence[tuple[dict[str, str], float | None]]


class MetricsFile:
    """Keeps the file up to date; an error of the file system is logged once and costs the job nothing."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._written_s: float | None = None
        self._decides = True
        self._is_broken = path is None
        self.known = JobMetrics()

    def decided(self, decision: Decision, *, decides: bool) -> None:
        """Take note of a decision; `decides` is true on the one node that tells the user."""
        self._decides = decides
        plan, known = decision.plan or self.known.plan, self.known
        self.known = replace(
            known,
            phase=PHASES.get(decision.phase, known.phase) if decides else "",
            nodes=len(decision.hosts),
            plan=plan,
            choice=(decision.choice or decision.plan.own) if decision.plan else known.choice,
            trainings=known.trainings + (decision.phase == "train"),
            iteration=None,
            step_s=None,
        )
        self._write()

    def planned(self, *, warmup_s: float, search_s: float) -> None:
        """Take note of how long measuring and choosing took."""
        self.known = replace(self.known, warmup_s=warmup_s, search_s=search_s)

    def lost(self, hosts: Collection[str]) -> None:
        """Take note of hosts that are gone."""
        self.known = replace(self.known, lost=self.known.lost | frozenset(hosts))

    def iterated(self, iteration: int, step_s: float) -> None:
        """Take note of a step that the training printed on this node."""
        self.known = replace(self.known, iteration=iteration, step_s=step_s)
        if self._written_s is None or self._clock() - self._written_s >= REFRESH_S:
            self._write()

    def measured(self, outcome: Outcome) -> None:
        """Take note of what a training needed."""
        peak = outcome.fullest
        self.known = replace(self.known, memory_bytes=peak.measured_bytes if peak else None)
        self._write()

    def ended(self, *, failed: bool) -> None:
        """Take note of the end of the job."""
        self.known = replace(self.known, phase=("failed" if failed else "succeeded") if self._decides else "")
        self._write()

    def _write(self) -> None:
        if self._is_broken or self._path is None:
            return
        path = self._path if self._decides else self._path.with_suffix(f".measured{self._path.suffix}")
        text = metrics_text(self.known, decides=self._decides)
        if not text:
            return
        self._written_s = self._clock()
        try:
            files.write_text(path, text, shared=True)
        except OSError as error:
            self._is_broken = True
            logger.warning("no metrics are written: %s: %s", path, error.strerror or error)


def metrics_text(known: JobMetrics, *, decides: bool) -> str:
    """Write what is known in Prometheus' text format; a node that does not decide knows what it measured."""
    families = (*(_decided(known) if decides else ()), *_measured(known))
    return "".join(_family(one) for one in families)


def _decided(known: JobMetrics) -> Iterator[Family]:
    """What the deciding node knows: the plan, and what became of it."""
    phase, plan, choice = known.phase, known.plan, known.choice
    yield Family("pipette_phase_info", "gauge", "What the job does.", [({"phase": phase}, 1 if phase else None)])
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


def _measured(known: JobMetrics) -> Iterator[Family]:
    """What the node of the last rank reads in the output of the training."""
    rate, choice, step_s = known.choice.rate if known.choice else None, known.choice, known.step_s
    tokens = rate.tokens_per_s * choice.step_time_s / step_s if rate and choice and step_s else None
    yield _figure("pipette_iteration", "The last iteration that was printed.", known.iteration)
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
