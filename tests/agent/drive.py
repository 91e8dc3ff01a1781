"""A driver for agent tests: runs the real agent with a controller that follows a script of its own.

`python drive.py PLAN.json [torchrun flags] worker.py`: PLAN.json says what to decide.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from facts_for_tests import memory_need
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.run import get_args_parser

from pipette_launch.agent import job, trial
from pipette_launch.agent.rendezvous import RendezvousSettings
from pipette_launch.agent.signals import end_at_once
from pipette_launch.facts import Choice, Layout, Plan, Provenance
from pipette_launch.facts.messages import (
    Decision,
    Node,
    NodeRecord,
    RunTraining,
    RunTrial,
    RunWarmup,
    Stop,
    TrialReport,
)
from pipette_launch.launch.commands import WorkerCommand
from pipette_launch.launch.hosts import unique_names
from pipette_launch.planning import replan
from pipette_launch.probe.progress import Sign, last_error, last_sign


class SignalledWhileDeleted:
    """Python drops the exception of the signal's handler."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


class ScriptedController:
    """Decides by a small table: warm-up command, placements to try, what counts as an iteration."""

    def __init__(self, table: dict[str, Any], settings: RendezvousSettings, max_restarts: int) -> None:
        self.table = table
        self.node_rank = settings.node_rank
        self.least_nodes = settings.least_nodes
        self.max_restarts = max_restarts
        self.folder, self.host = Path(os.environ["OUT"]), os.environ["NODE"]
        self.warmup_deadline_s = table.get("deadline_s", 60.0)
        self.names: dict[str, str] = {}
        trial.patience_s = lambda _decision: tuple(table.get("patience_s", (60.0, 60.0)))
        self.measured_path.write_text(f"measured by {self.host}")

    @property
    def progress_folder(self) -> Path:
        return self.folder / self.host

    @property
    def measured_path(self) -> Path:
        return self.folder / f"measured-{self.host}"

    def describe(self, script: WorkerCommand, *, num_slots: int, **_: Any) -> str:
        self.entrypoint, self.arguments, self.num_slots = script.entrypoint, script.arguments, num_slots
        self.token = uuid.uuid4().hex
        return self.token

    def record(self, **state: Any) -> NodeRecord:
        return NodeRecord(
            token=self.token,
            host=None,
            trouble="",
            num_slots=self.num_slots,
            node_rank=self.node_rank,
            # The name by which the table knows this node.
            script_digest=os.environ.get("NODE", ""),
            versions={},
            max_restarts=self.max_restarts,
            **state,
        )

    def decide(self, records: Any, held: Decision | None, lost: Any) -> Decision:
        self.names = {record.token: record.script_digest for record in records}
        hosts = unique_names(records)
        step = replan.decide(records, [*hosts], held, lost=lost, least_nodes=self.least_nodes)
        if isinstance(held, RunTraining) and isinstance(step, replan.Keep):
            return replace(held, reason=step.reason, proven=step.proven, restarts_left=step.restarts_left)
        if isinstance(held, RunTraining) and isinstance(step, replan.TryNext):
            return replace(held, attempt=step.attempt, proven=False, reason=step.reason)
        if held is not None and isinstance(step, replan.GiveUp | replan.Finish):
            return Stop.of(held, failed=isinstance(step, replan.GiveUp), reason=step.reason)
        whole = Decision(
            nodes=tuple(
                Node(token=record.token, host=host, num_slots=record.num_slots)
                for record, host in zip(records, hosts, strict=True)
            ),
            restarts_left=records[0].max_restarts,
            reason=getattr(step, "reason", ""),
        )
        some = self.without(whole, "standby")
        if "warmup" in self.table:
            return RunWarmup.of(some, order="")
        plan = None if "standby_later" in self.table else self.plan(some.hosts)
        return RunTraining.of(some, plan=plan, environment={"PLANNED": "yes"})

    def without(self, decision: Decision, entry: str) -> Decision:
        """Leave out the nodes that the table names there, as far as there are enough others."""
        out = [node.host for node in decision.nodes if self.names[node.token] in self.table.get(entry, [])]
        return decision.leaving_out(out if len(out) < len(decision.nodes) else ())

    def plan(self, hosts: Any) -> Plan | None:
        if not self.table.get("placements"):
            return None
        slots = self.num_slots * len(hosts)

        def choice(placement: Any) -> Choice:
            return Choice(
                layout=Layout(dp=slots),
                placement=tuple(placement),
                schedule="1f1b",
                step_time_s=1.0,
                breakdown_s={},
                memory=memory_need((1,), 2),
                bound_s=1.0,
            )

        chosen, *others = [choice(placement) for placement in self.table["placements"]]
        return Plan(
            hosts=tuple(hosts),
            devices_per_host=self.num_slots,
            device_kind="cpu",
            chosen=chosen,
            alternatives=tuple(others),
            own=choice(range(slots)),
            keeps_own=False,
            reasons=(),
            notes=(),
            num_layouts=1,
            dropped={},
            solve_s=0.0,
            provenance=Provenance(key="k", made_at="", versions={}, source="measured"),
        )

    def after_warmup(self, decision: Decision, failure: str) -> Decision:
        smaller = replace(self.without(decision, "standby_later"), reason=failure or self.received())
        if self.table.get("dry_run"):
            return Stop.of(smaller)
        plan = None if failure else self.plan(smaller.hosts)
        if plan and "trials" in self.table:
            return RunTrial.of(smaller, plan=plan, trial=0, iterations=3)
        return RunTraining.of(smaller, plan=plan, environment={"PLANNED": "yes"})

    def after_trial(self, decision: RunTrial, report: TrialReport) -> Decision:
        num_steps = min(len(report.step_s), decision.iterations)
        end = report.failure.sentence if report.failure else "well"
        reason = f"{decision.reason}trial {decision.trial}: {num_steps} steps, {end}; "
        if decision.trial < self.table["trials"]:
            return replace(decision, trial=decision.trial + 1, reason=reason)
        return RunTraining.of(decision, plan=decision.plan, reason=reason)

    def received(self) -> str:
        """Return the measurements of another node."""
        text = self.measured_path.read_text()
        return "" if text == f"measured by {self.host}" else text

    @property
    def slowed(self) -> str:
        """Asked at each look at the workers; a node that loses a signal gets it while an object is deleted."""
        if self.host in self.table.pop("loses_signal", ()):
            SignalledWhileDeleted()
        return ""

    def warmup_goes_on(self, **_: Any) -> None:
        pass

    def workers_are_gone(self) -> None:
        pass

    def warmup_sign(self, local_rank: int) -> tuple[Sign | None, str]:
        return last_sign(self.progress_folder, local_rank), last_error(self.progress_folder, local_rank)

    def show(self, decision: Decision, *, speaks: bool) -> None:
        if speaks:
            (self.folder / f"leads-{self.host}").touch()
            attempt = decision.attempt if isinstance(decision, RunTraining) and decision.plan else "own"
            sys.stderr.write(f"SHOW {decision.phase} attempt={attempt} reason={decision.reason}\n")

    def command(self, decision: Decision) -> WorkerCommand:
        if decision.phase == "warmup":
            return WorkerCommand(
                entrypoint=sys.executable, arguments=("-u", "-c", self.table["warmup"]), environment={"PHASE": "warmup"}
            )
        return WorkerCommand(
            entrypoint=self.entrypoint,
            arguments=self.arguments,
            environment={"PHASE": decision.key, "ATTEMPT": str(getattr(decision, "attempt", 0))},
        )

    def saw_line(self, line: str) -> float | None:
        return 0.1 if line.startswith("iteration") else None

    def trained(self, *, lived_s: float, exit_codes: Any) -> bool:
        return lived_s > self.table.get("trained_after_s", 60.0) or 16 in exit_codes


def signal_at_start(ready: Path) -> None:
    """Signal this process between torch's start of a worker and torch's note of it, once the worker has made a file."""
    stock = multiprocessing.get_subprocess_handler

    def start(*args: Any, **kwargs: Any) -> Any:
        handler = stock(*args, **kwargs)
        while not ready.exists():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)
        return handler

    multiprocessing.get_subprocess_handler = start


def main() -> None:
    """Run one agent; it ends as the launcher does."""
    # Then a test can ask a process that hangs for its stacks.
    faulthandler.enable()
    table = json.loads(Path(sys.argv[1]).read_text())
    if "signal_when" in table:
        signal_at_start(Path(table["signal_when"]))
    args = get_args_parser().parse_args(sys.argv[2:])
    try:
        # The folder of the test stands for the home folder that all nodes have in common.
        folder = Path(os.environ["OUT"])
        job.run(args, lambda settings: ScriptedController(table, settings, args.max_restarts), secret_folder=folder)
    finally:
        end_at_once()


if __name__ == "__main__":
    main()
