"""What each node does for a job: it introduces itself, runs what was decided, and shows what came of it."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipette_launch import megatron, report
from pipette_launch.agent import start
from pipette_launch.facts import files
from pipette_launch.facts.messages import Decision, NodeRecord
from pipette_launch.launch import commands
from pipette_launch.launch.cache import CLUSTER, OUTCOME, Cache
from pipette_launch.launch.coordinator import Coordinator
from pipette_launch.launch.metrics import MetricsFile, Spans, phase_attributes
from pipette_launch.launch.nodes import described
from pipette_launch.launch.plan_reports import add_outcome, existing_page
from pipette_launch.launch.terminal import Kept, Terminal, parts_words
from pipette_launch.launch.training import OutcomeTracker, Recovery, Slowdown, device_peaks, has_trained
from pipette_launch.launch.trials import TrialWatch
from pipette_launch.probe.health import inventory
from pipette_launch.probe.health.inventory import await_memory
from pipette_launch.probe.messages import START_S, last_error, last_sign, wait_s

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Collection, Mapping, Sequence

    from pipette_launch.agent.controller import Node, WorkerCommand
    from pipette_launch.agent.sync.rendezvous import RendezvousSettings
    from pipette_launch.facts import Choice
    from pipette_launch.facts.messages import AttemptEnd, Failure, TrialReport
    from pipette_launch.facts.outcome import Outcome, PeakReading
    from pipette_launch.launch.options import Options
    from pipette_launch.probe.messages import Sign

PROGRESS = "progress"

logger = logging.getLogger(__name__)


def launch(args: Namespace, options: Options, *, advice: str = "") -> None:
    """Run a job; returns when it has succeeded, raises as torchrun does when it has not (`advice`: see `start.run`)."""
    # Made when it is needed: nothing is left of a launcher that a signal ends while it waits for the other nodes.
    folder = Path(tempfile.gettempdir()) / f"pipette_{uuid.uuid4().hex}"
    metrics = MetricsFile(options.metrics_file, script=options.script, keeps=not options.only_looks)
    spans = Spans(os.environ)
    has_failed = True
    metrics.begin()
    try:
        start.run(
            args,
            lambda settings: NodeController(options, settings, folder, metrics=metrics, spans=spans),
            advice=advice,
        )
        has_failed = False
    finally:
        metrics.ended(failed=has_failed)
        spans.end()
        shutil.rmtree(folder, ignore_errors=True)


class NodeController:
    """The controller of one agent (see `agent.controller`): its coordinator decides, and it carries out."""

    def __init__(
        self,
        options: Options,
        rendezvous_settings: RendezvousSettings,
        folder: Path,
        *,
        metrics: MetricsFile,
        spans: Spans,
    ) -> None:
        self._options = options
        self._metrics, self._spans = metrics, spans
        self._rendezvous_settings = rendezvous_settings
        self._folder = folder
        self._token = uuid.uuid4().hex
        self._cache = Cache(None, "")
        """Where the plan in force and its outcome lie."""
        self._tracker: OutcomeTracker | None = None
        self._running: tuple[Choice, tuple[int, ...]] | None = None
        self._step_time_s = 0.0
        self._saved_before = ""
        self._trial, self._recovery = TrialWatch(), Recovery()
        self._slowdown: Slowdown | None = None
        self._terminal = Terminal(options)
        self._leads, self._measured_from_s, self._num_ranks = False, 0.0, 0
        self.is_training = False

    def begin(self, node: Node) -> str:
        """Take what torchrun knows of this node; return the token that names the agent."""
        self._node = node
        self._coordinator = Coordinator(
            self._options,
            self._folder,
            interruption=node.interruption,
            least_nodes=self._rendezvous_settings.least_nodes,
            is_static=self._rendezvous_settings.node_rank >= 0,
        )
        self._machine = described(node, self._options.device)
        self._host = self._machine.host
        return self._token

    def record(self, *, attempt: int, verdict: AttemptEnd, failure: Failure | None) -> NodeRecord:
        """Introduce this node to the others."""
        self._recovery.ended()
        return NodeRecord(
            token=self._token,
            host=self._host,
            trouble=self._machine.trouble,
            is_misuse=self._machine.is_misuse,
            conditions=self._machine.conditions,
            notes=self._machine.notes,
            num_slots=self._node.num_slots,
            node_rank=self._rendezvous_settings.node_rank,
            script_digest=files.digest(self._options.script, self._options.script_arguments),
            versions=self._machine.versions,
            attempt=attempt,
            verdict=verdict,
            failure=failure,
            iteration=self._recovery.iteration,
            slowed=self.slowed,
            max_restarts=self._options.max_restarts,
        )

    @property
    def slowed(self) -> str:
        """How the steps have slowed down, where all machines are to be measured again for it; else empty."""
        return self._slowdown.wants_restart if self._slowdown else ""

    def decide(
        self, records: Sequence[NodeRecord], held: Decision | None, lost: Mapping[str, str] | None = None
    ) -> Decision:
        """Decide for all nodes what a new round does; `lost` says of hosts that are gone why they are believed lost."""
        self._metrics.lost(lost or ())
        return self._coordinator.decide(records, held, lost)

    def after_warmup(self, decision: Decision, failure: str) -> Decision:
        """Turn what the warm-up measured into a plan."""
        began_s = time.monotonic()
        self._terminal.begin("choosing a plan, {:.0f} s".format)
        try:
            following = self._coordinator.after_warmup(decision, failure)
        finally:
            self._terminal.end()
        measured, now_s = self._coordinator.measurements, time.monotonic()
        if measured is not None and not failure:
            total_s = now_s - self._measured_from_s
            self._metrics.planned(warmup_s=began_s - self._measured_from_s, search_s=now_s - began_s)
            self._terminal.say(parts_words(measured.phase_s, plan_s=now_s - began_s, total_s=total_s))
        return following

    def after_trial(self, decision: Decision, report: TrialReport) -> Decision:
        """Turn what came of a trial into the next one, or into the training."""
        return self._coordinator.after_trial(decision, report)

    def measured(self) -> str:
        """Return what the warm-up left on this node; empty where it left nothing."""
        path = self._folder / CLUSTER
        return path.read_text() if path.exists() else ""

    def receive(self, measured: str) -> None:
        """Take what the warm-up left on another node."""
        files.write_text(self._folder / CLUSTER, measured)

    def show(self, decision: Decision, *, speaks: bool) -> None:
        """Take note of what was decided; the coordinator tells the user."""
        self._terminal.end()
        self._begin_attempt(decision)
        self._metrics.decided(decision, self._coordinator.cache if speaks else self._cache, decides=speaks)
        if not speaks:
            return
        self._spans.begin(decision.key, phase_attributes(decision))
        try:
            self._tell(decision)
        except self._node.interruption:
            raise
        except Exception:
            logger.exception("the plan could not be shown; the job goes on")

    def _begin_attempt(self, decision: Decision) -> None:
        """Start to count: no outcome may mix two attempts."""
        self._tracker, self._running, self._step_time_s, self._saved_before = None, None, 0.0, ""
        self._trial.begin(decision)
        self._recovery.decided(decision)
        self._slowdown = None
        if decision.phase == "train" and self._options.watch != "off":
            restarts = self._options.watch == "restart" and self._options.plan is None
            self._slowdown = Slowdown(self._options.watch_limit, restarts=restarts)
        self.is_training = decision.phase == "train"
        if decision.phase == "warmup":
            self._measured_from_s, self._num_ranks = time.monotonic(), sum(decision.num_slots)
        plan = decision.plan
        if plan is None or decision.phase != "train":
            return
        runs = decision.choice or plan.own
        self._tracker = OutcomeTracker(plan.provenance.key, runs)
        self._running = runs, decision.ranks_of(self._token) if self._token in decision.tokens else ()
        self._step_time_s = runs.step_time_s
        self._saved_before = megatron.saved_iteration(self._options.script_arguments)
        decided_here = self._coordinator.cache.key == plan.provenance.key
        self._cache = self._coordinator.cache if decided_here else Cache(self._options.cache, plan.provenance.key)

    def _tell(self, decision: Decision) -> None:
        path = self._cache.plan_path
        page = None if self._options.plan else existing_page(path)
        kept = Kept(plan=path, page=page, unsaved=self._cache.trouble)
        self._terminal.tell(decision, self._coordinator.measurements, kept)
        if decision.phase == "trial":
            self._terminal.begin(lambda elapsed_s: self._trial.words(decision, elapsed_s, asked=self._options.trials))

    def command(self, decision: Decision) -> WorkerCommand:
        """Return what this node's workers run under a decision."""
        plan, choice = decision.plan, decision.choice
        if decision.checks_order and plan is not None and choice is not None:
            return commands.order_check(plan.device_kind, choice.layout.tp, decision.ranks_of(self._token))
        if decision.phase != "warmup":
            node = self._node
            return commands.training(decision, self._options, node.entrypoint, node.arguments, folder=self._folder)
        from pipette_launch.launch.commands import read

        progress = self._folder / PROGRESS
        shutil.rmtree(progress, ignore_errors=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        progress.mkdir()
        path = self._folder / "probe-options.json"
        files.write(path, replace(read(decision), progress_dir=str(progress), output=str(self._folder / CLUSTER)))
        return commands.warmup(path)

    def saw_line(self, line: str) -> bool:
        """Read one line of the last rank's stdout; true when it is an iteration."""
        iteration = megatron.parse_iteration(line)
        if iteration is None:
            memory = megatron.parse_memory(line)
            if memory is not None and self._tracker is not None:
                self._tracker.add_memory(memory)
            return False
        self._trial.add(iteration.step_time_s)
        slower = self._slowdown.add(iteration.step_time_s, iteration.iteration) if self._slowdown else ""
        for words in filter(None, (self._recovery.sees(iteration.iteration), slower)):
            self._terminal.warn(words)
        self._metrics.iterated(iteration)
        outcome = self._tracker.add(iteration) if self._tracker else None
        if outcome is not None:
            self._keep_outcome(replace(outcome, peaks=(*outcome.peaks, *self._device_peaks())))
        return True

    def _keep_outcome(self, outcome: Outcome) -> None:
        self._metrics.measured(outcome)
        cache = self._cache
        trouble = cache.keep_outcome(outcome, self._host) if self._host else cache.save(OUTCOME, outcome)
        self._terminal.say(report.outcome_line(outcome))
        if trouble := trouble or add_outcome(existing_page(cache.plan_path), outcome):
            self._terminal.warn(trouble)

    def _device_peaks(self) -> tuple[PeakReading, ...]:
        """What this node's GPUs hold for the job."""
        if self._running is None or self._host is None or self._host.devices[0].kind != "cuda":
            return ()
        choice, ranks = self._running
        try:
            used = {
                rank: inventory.device_used_bytes(device.uuid) - device.memory_total_bytes + device.memory_free_bytes
                for rank, device in zip(ranks, self._host.devices, strict=True)
            }
        except Exception:
            # What a driver says of a running job is worth no job.
            logger.exception("the memory in use cannot be read")
            return ()
        return device_peaks(choice, used)

    def trained(self, *, lived_s: float, exit_codes: Collection[int]) -> bool:
        """Whether workers that showed no iteration had trained all the same."""
        return has_trained(
            lived_s=lived_s,
            step_time_s=self._step_time_s,
            exit_codes=exit_codes,
            saved_before=self._saved_before,
            saved_now=megatron.saved_iteration(self._options.script_arguments),
        )

    @property
    def warmup_deadline_s(self) -> float:
        """After how long a warm-up counts as hung: a late start is waited for, and phases may end after the budget."""
        return wait_s(self._num_ranks, START_S) + wait_s(self._num_ranks, self._options.budget_s)

    def warmup_sign(self, local_rank: int) -> tuple[Sign | None, str]:
        """Return what a local warm-up worker last said of itself, and why it failed if it said so."""
        folder = self._folder / PROGRESS
        return last_sign(folder, local_rank), last_error(folder, local_rank)

    def warmup_goes_on(self, *, leads: bool) -> None:
        """Show how far the warm-up is."""
        self._leads = leads
        if leads:
            # RANK 0 is the first of this node.
            sign = self.warmup_sign(0)[0]
            self._terminal.warmup_goes_on(sign)
            self._metrics.warming_up(sign)

    def warmup_is_over(self) -> None:
        """Wait until the devices are free again: training needs every byte."""
        self._terminal.warmup_is_over(self.warmup_sign(0)[0] if self._leads else None)
        self._await_devices()

    def trial_is_over(self) -> tuple[float, ...]:
        """Wait until the devices are free again; returns the step times that a trial printed here."""
        self._terminal.end()
        self._await_devices()
        return self._trial.steps_s

    @property
    def trial_patience_s(self) -> tuple[float, float]:
        """After how long without the first iteration, and without each later one, a trial counts as hung."""
        return self._trial.patience_s

    def _await_devices(self) -> None:
        if self._host is None:
            return
        try:
            for trouble in await_memory(self._host):
                self._terminal.warn(trouble)
        except self._node.interruption:
            raise
        except Exception:
            logger.exception("whether the workers' memory is free again cannot be told; the job goes on")
