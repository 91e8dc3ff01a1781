"""The story of a job on one node: introduce it, let the chief decide, run what was decided, show what came of it."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pipette_launch import megatron, report
from pipette_launch.agent import start
from pipette_launch.errors import PipetteError
from pipette_launch.facts import files
from pipette_launch.facts.round import Decision, NodeRecord
from pipette_launch.launch import commands
from pipette_launch.launch.cache import OUTCOME, PLAN, Cache
from pipette_launch.launch.chief import Chief
from pipette_launch.launch.evidence import has_trained
from pipette_launch.launch.outcome import OutcomeTracker
from pipette_launch.probe import inventory
from pipette_launch.probe.options import ProbeOptions

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Collection, Sequence

    from pipette_launch.agent.conductor import Command, Node
    from pipette_launch.agent.meeting import Meeting
    from pipette_launch.facts import Host, Plan
    from pipette_launch.facts.round import Verdict
    from pipette_launch.launch.options import Options

WARMUP_GRACE_S = 60.0
"""Imports and set-up of the warm-up, which its budget does not bound."""


def launch(args: Namespace, options: Options) -> None:
    """Run a job; returns when it has succeeded, raises as torchrun does when it has not."""
    folder = Path(tempfile.mkdtemp(prefix="pipette_"))
    try:
        start.run(args, lambda meeting: Story(options, meeting, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Story:
    """The conductor of one agent (see `agent.conductor.Conductor`). The chief's decides, everybody's carries out."""

    def __init__(self, options: Options, meeting: Meeting, folder: Path) -> None:
        self._options = options
        self._meeting = meeting
        self._folder = folder
        self._token = uuid.uuid4().hex
        self._chief = Chief(options, folder)
        self._tracker: OutcomeTracker | None = None
        self._step_time_s = 0.0
        self._saved_before = ""
        self._shown: tuple[str, int] | None = None

    def begin(self, node: Node) -> str:
        """Take what torchrun knows of this node; return the token that names the agent."""
        self._node = node
        self._chief.interruption = node.interruption
        self._host: Host | None = None
        self._trouble = ""
        self._warnings: tuple[str, ...] = ()
        try:
            self._host = inventory.host(
                name=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
                address=node.address,
                num_devices=node.num_slots,
                device=self._options.device,
            )
            self._warnings = inventory.busy_devices(self._host)
        except PipetteError as error:
            self._trouble = str(error)
        return self._token

    def record(self, *, attempt: int, verdict: Verdict, failure: str, has_plan: bool) -> NodeRecord:
        """Introduce this node to the others."""
        return NodeRecord(
            token=self._token,
            host=self._host,
            trouble=self._trouble,
            warnings=self._warnings,
            num_slots=self._node.num_slots,
            node_rank=self._meeting.node_rank,
            script_digest=files.digest(self._options.script, self._options.script_arguments),
            versions=inventory.versions(),
            attempt=attempt,
            verdict=verdict,
            failure=failure,
            has_plan=has_plan,
        )

    def decide(self, records: Sequence[NodeRecord], held: Decision | None) -> Decision:
        """Decide for all nodes what a new round does."""
        return self._chief.decide(records, held)

    def after_warmup(self, decision: Decision, failure: str) -> Decision:
        """Turn what the warm-up measured into a plan."""
        return self._chief.after_warmup(decision, failure)

    def show(self, decision: Decision, *, speaks: bool) -> None:
        """Take note of what was decided; the chief tells the user."""
        choice = decision.choice
        runs = choice or (decision.plan.own if decision.plan else None)
        key = decision.plan.provenance.key if decision.plan else ""
        self._tracker = OutcomeTracker(key, runs) if runs and decision.phase == "train" else None
        self._step_time_s = runs.step_time_s if runs else 0.0
        self._saved_before = megatron.saved_iteration(self._options.script_arguments) if runs else ""
        if key and self._chief.cache.folder is None and self._options.cache:
            self._chief.cache = Cache(self._options.cache, key)
        if not speaks:
            return
        if decision.reason:
            _say(decision.reason)
        if decision.phase == "warmup":
            _say(
                f"measuring {len(decision.hosts)} host(s) x {decision.num_slots[0]} slot(s), "
                f"at most about {self._options.budget_s:.0f} s"
            )
        elif decision.plan is not None:
            self._show_plan(decision, decision.plan)

    def _show_plan(self, decision: Decision, plan: Plan) -> None:
        if decision.attempt > 0:
            choice = decision.choice
            what = (
                f"the next plan, {choice.layout.words()}" if choice else "your own configuration, in torchrun's order"
            )
            _say(f"that plan cannot start; going on with {what}")
        screen = ("plan", decision.attempt)
        if self._shown == screen:
            return
        self._shown = screen
        if decision.attempt == 0:
            sys.stderr.write(
                report.plan_screen(
                    plan,
                    self._chief.measurements,
                    arguments=self._options.script_arguments,
                    new_arguments=decision.script_arguments,
                    saved_to=self._chief.cache.path(PLAN),
                )
            )
            sys.stderr.flush()

    def command(self, decision: Decision) -> Command:
        """Return what this node's workers run under a decision."""
        if decision.phase != "warmup":
            return commands.training(decision, self._options, self._node.entrypoint, self._node.arguments)
        progress = self._folder / "progress"
        shutil.rmtree(progress, ignore_errors=True)
        progress.mkdir()
        orders = files.loads(ProbeOptions, decision.probe_options, "the warm-up's orders")
        path = self._folder / "probe-options.json"
        files.write(path, replace(orders, progress_dir=str(progress)))
        return commands.warmup(path)

    def saw_line(self, line: str) -> bool:
        """Read one line of the last rank's stdout; true when it is an iteration."""
        iteration = megatron.parse_iteration(line)
        if iteration is None:
            return False
        outcome = self._tracker.add(iteration) if self._tracker else None
        if outcome is not None:
            trouble = self._chief.cache.save(OUTCOME, outcome)
            _say(report.outcome_line(outcome, self._chief.cache.path(OUTCOME)))
            if trouble:
                _say(trouble)
        return True

    def trained(self, *, lived_s: float, exit_codes: Collection[int]) -> bool:
        """Whether workers that showed no iteration had trained all the same."""
        return has_trained(
            lived_s=lived_s,
            step_time_s=self._step_time_s,
            exit_codes=exit_codes,
            saved_before=self._saved_before,
            saved_now=megatron.saved_iteration(self._options.script_arguments),
        )

    def explain(self, text: str) -> str:
        """Say in one sentence why a worker died, from the end of its stderr; empty when the text does not tell."""
        return megatron.explain_failure(text) or ""

    @property
    def warmup_deadline_s(self) -> float:
        """After how long a warm-up counts as hung."""
        return self._options.budget_s + WARMUP_GRACE_S

    def warmup_report(self, processes: dict[int, int]) -> str:
        """Say what went wrong with local warm-up workers, or what they were doing."""
        name = self._host.name if self._host else "this node"
        progress = self._folder / "progress"
        parts = []
        for local_rank, pid in sorted(processes.items()):
            phase = _text(progress / str(local_rank)) or "start"
            error = _text(progress / f"{local_rank}.error")
            state = f"pid {pid}, {_process_state(pid)}"
            parts.append(f"{name}:{local_rank} ({error or f'in phase {phase}, {state}'})")
        return ", ".join(parts)


def _say(text: str) -> None:
    sys.stderr.write(f"pipette-launch: {text}\n")
    sys.stderr.flush()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _process_state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"
