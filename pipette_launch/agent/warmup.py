"""The warm-up of one node: watch the workers, and name the worker that made the warm-up fail.

One dead worker makes all other workers fail, and some of these fail before the agent of the dead worker notices the
death. The first report of a failure may therefore blame a wrong worker. After an alarm, every agent publishes the
states of its workers under one key. The agent of RANK 0 then separates causes from consequences. The agent inspects the
workers before torch does, because torch ends all workers at the first death, and their last output would be lost.
"""

from __future__ import annotations

import logging
import re
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import ClassVar, NamedTuple

import psutil
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsSpecs, Std

from pipette_launch.agent import workers
from pipette_launch.agent.phases import PhaseBeforeTraining
from pipette_launch.agent.store import RoundOver, RoundStore, reports
from pipette_launch.defaults import ALARM_REPORT_S, PEER_WAIT_S, VERDICT_S
from pipette_launch.errors import ClusterError
from pipette_launch.facts import files
from pipette_launch.facts.co_location import DeviceBinding
from pipette_launch.facts.messages import Decision, RunWarmup, exit_words, read_decision
from pipette_launch.launch.node_controller import NodeController
from pipette_launch.text import counted, listed

logger = logging.getLogger(__name__)

SAMPLE_S = 1.0
BUSY_SHARE = 0.03
"""A worker that computes for more than this share of the time is slow but does not hang."""
AWAY_S = 5.0
"""An agent that did not look at its workers for this time (s) was stopped itself, and cannot judge its workers."""
SETTLE_S = 0.3
"""Seconds between an alarm and a look at the workers, because a dying worker closes its connections before it ends."""
MOST_NAMED = 3
STOPPED = ("stopped", "tracing-stop")
STOPPED_S = 1.5
_WAITS = re.compile(
    r"waited \d+ s in vain|no answer from|lost the store|timed out|timeout"
    r"|connection (closed|reset|refused|was likely closed)|broken pipe|socket closed"
    r"|recvvalue failed|failed to recv|sendbytes failed|client socket has"
    r"|remote process exited|ncclremoteerror|communicator was aborted|watchdog caught",
    re.IGNORECASE,
)
"""Pattern of errors of workers whose peer was missing, as printed by the probe, TCPStore, gloo and NCCL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """State of one warm-up worker, as observed by the agent of the worker's node."""

    slot: int
    name: str
    """Host and local device, such as `node17:3`."""
    pid: int
    exit_code: int | None
    """Exit code of the worker; None while the worker runs."""
    status: str
    """State of the worker's process, as psutil names the state."""
    where: str
    """Phase of the warm-up that the worker runs, and step within this phase."""
    advance: int
    """Progress of the worker: 1000 for each finished phase, plus 1 for each step of the present phase. A stuck worker
    has less progress than the workers that wait for it."""
    silent_s: float
    """Seconds since the worker's last progress message."""
    idle_s: float
    """Seconds since the worker's last progress message or computation."""
    is_overdue: bool
    """True if the next progress message is late and the worker has hardly computed since the last message."""
    waits_for: str
    """Name of the thing for which the worker waits, as the worker reports; empty while the worker works."""
    peers: tuple[int, ...]
    """Slots that the worker waits for or exchanges messages with."""
    error: str
    """Error that the worker reported; empty if the worker reported no error."""

    @property
    def is_victim(self) -> bool:
        """True if the error only says that another worker was missing."""
        return bool(_WAITS.search(self.error))

    @property
    def was_killed(self) -> bool:
        """True if a signal other than SIGTERM ended the worker, and its error does not blame a missing worker."""
        code = self.exit_code
        return code is not None and code < 0 and code != -signal.SIGTERM and not self.is_victim


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """States of the warm-up workers of one agent after an alarm."""

    KIND: ClassVar[str] = "warm-up-report"

    workers: tuple[WorkerState, ...]
    output: str
    """Folder and host of the workers' output; empty if the workers printed nothing."""


# -- who is at fault ----------------------------------------------------------------------------------------------


def judge(reports: Sequence[NodeReport], absent: Sequence[str], *, waited_s: float) -> str:
    """Name the cause of a failed warm-up in one sentence; `absent` has the hosts of the agents that did not answer."""
    states = sorted((state for report in reports for state in report.workers), key=lambda state: state.slot)
    killed = [state for state in states if state.was_killed]
    guilty = killed if killed or absent else _guilty(states)
    causes = [_cause(state, states) for state in guilty[:MOST_NAMED]]
    if len(guilty) > MOST_NAMED:
        causes.append(f"the same with {counted(len(guilty) - MOST_NAMED, 'more worker')}")
    if absent:
        causes.append(f"the launcher on {listed(absent, MOST_NAMED)} does not answer: it or its node is gone")
    after = f"the warm-up failed after {waited_s:.1f} s"
    if not causes:
        slowest = sorted(states, key=lambda state: state.advance)[:MOST_NAMED]
        doing = "; ".join(
            f"{state.name} (pid {state.pid}) is in phase {state.where}, in state {state.status}" for state in slowest
        )
        return f"{after}, its deadline: {doing}{_output(reports, states)}"
    named = {state.slot for state in guilty}
    waiting = sum(state.slot not in named and (state.is_victim or bool(state.waits_for)) for state in states)
    if waiting:
        causes.append(f"{waiting} other worker{'s' if waiting > 1 else ''} waited in vain")
    return f"{after}: {'; '.join(causes)}{_output(reports, guilty)}"


def _guilty(states: Sequence[WorkerState]) -> list[WorkerState]:
    """Return the workers that caused the failure according to the strongest evidence."""
    overdue = [state for state in states if state.is_overdue]
    silent = [state for state in overdue if state.exit_code is None and not state.waits_for]
    silent_slots = {state.slot for state in silent}
    votes = Counter(slot for state in states if state.is_victim or state.waits_for for slot in state.peers)
    most_votes = max(votes.values(), default=0)
    kinds = (
        [state for state in states if (state.exit_code or 0) > 0 or state.error if not state.is_victim],
        # A worker that is stopped for a moment, again and again, is only slow.
        [state for state in states if state.status in STOPPED and state.idle_s > STOPPED_S],
        [state for state in overdue if state.status == workers.UNINTERRUPTIBLE],
        # If two workers exchange messages and one hangs, both go silent. A worker whose peers still report is no cause.
        _least_far([one for one in silent if not one.peers or silent_slots.issuperset(one.peers)]),
        # Blame the workers for which most other workers waited.
        [state for state in states if most_votes and votes[state.slot] == most_votes],
        # Errors report a missing peer, but do not name the peer.
        _least_far([state for state in states if state.error]),
    )
    return next(filter(None, kinds), [])


def _least_far(states: Sequence[WorkerState]) -> list[WorkerState]:
    least = min((state.advance for state in states), default=0)
    return [state for state in states if state.advance == least]


def _cause(state: WorkerState, states: Sequence[WorkerState]) -> str:
    """Describe what happened to a worker that caused the failure."""
    who, where = f"{state.name} (pid {state.pid})", f"in phase {state.where}"
    if state.was_killed:
        return f"{who} was killed by {exit_words(state.exit_code or 0)} {where}"
    if state.exit_code is not None and not state.is_victim:
        return f"{who} died with {exit_words(state.exit_code)} {where}" + (f": {state.error}" if state.error else "")
    errors = [other.error for other in states if state.slot in other.peers and other.error]
    if state.error and not (state.is_victim and errors):
        return f"{who} {'lost its peers' if state.is_victim else 'failed'} {where}: {state.error}"
    silent = f"no sign of it for {state.silent_s:.0f} s"
    if state.status in STOPPED:
        return f"{who} is stopped, as by SIGSTOP or a debugger, {where}; {silent}"
    if state.is_overdue:
        return f"{who} hangs {where}; {silent}, its process is in state {state.status}"
    reason = f" ({errors[0]})" if errors else ""
    return f"{who} was waited for in vain, {where}, in state {state.status}; {silent}{reason}"


def _output(reports: Sequence[NodeReport], guilty: Sequence[WorkerState]) -> str:
    slots = {state.slot for state in guilty[:1]}
    places = [report.output for report in reports if slots & {state.slot for state in report.workers}]
    return f"; its output is in {places[0]}" if places and places[0] else ""


# -- the workers of this node -------------------------------------------------------------------------------------


class _Pulse(NamedTuple):
    """Last known activity of a worker."""

    sign_at_s: float
    """Time of the last progress message, by the monotonic clock that progress messages use too."""
    computed_s: float
    alive_s: float
    """Time (s) of the worker's last progress message or computation, by the monotonic clock."""


class Warmup(PhaseBeforeTraining):
    """The warm-up, as one agent runs it on its node."""

    def __init__(self, controller: NodeController, round_store: RoundStore, decision: RunWarmup, token: str) -> None:
        super().__init__(controller, round_store, decision, token)
        self._ordered = decision
        self._sampled_s = self._began_s
        self._pulses: dict[int, _Pulse] = defaultdict(lambda: _Pulse(0.0, 0.0, time.monotonic()))
        self._overdue: set[int] = set()
        """Local ranks of the workers whose next progress message is late and that hardly compute."""
        self._is_hung = False
        """True if an overdue worker does not report that it waits for other workers."""
        self.failure = ""
        """Reason why the warm-up failed, equal on all nodes; empty if the warm-up did not fail."""

    def open_logs(self) -> tuple[None, LogsSpecs]:
        """Return the log settings of the workers, whose output no thread reads."""
        self._logs = tempfile.mkdtemp(prefix="pipette_warmup_")
        return None, DefaultLogsSpecs(log_dir=self._logs, redirects=Std.ALL)

    def drop_logs(self) -> None:
        """Delete the workers' output, unless the warm-up failed and the workers printed something."""
        if not (self.failure and self._has_output()):
            super().drop_logs()

    def _has_output(self) -> bool:
        return bool(self._logs) and any(path.is_file() and path.stat().st_size for path in Path(self._logs).rglob("*"))

    def look(self, processes: Mapping[int, Popen[bytes]], bindings: Sequence[DeviceBinding]) -> bool:  # noqa: ARG002
        """Return whether the warm-up is over on all nodes."""
        self._sample(processes)
        self._controller.warmup_goes_on(leads=self._token == self._decision.tokens[0])
        try:
            is_over = self._is_over(processes)
        except RoundOver:
            self._end(processes)
            raise
        if is_over:
            left = self._end(processes)
            if self.failure:
                self.failure = "; ".join(filter(None, (self.failure, left)))
            elif left:
                logger.warning("%s", left)
        return is_over

    def following(self) -> Decision:
        """Return the plan of the deciding node, which needs the measurements of the node of RANK 0.

        Raises ClusterError if the plan did not come in time. Raises RoundOver if an agent called a meeting.
        """
        store = self._round_store
        # The deciding node holds the store of the rendezvous. It need not come first in torchrun's order.
        is_first = self._token == self._decision.tokens[0]
        if is_first and not store.is_coordinator:
            self._hand_over()
        if store.is_coordinator:
            failure = self.failure
            if not is_first:
                failure = failure or store.peek("warmup-failed") or self._take_over()
            store.put("plan", files.dumps(self._controller.after_warmup(self._ordered, failure)))
        deadline_s = PEER_WAIT_S + self._controller.warmup_deadline_s
        text = store.take("plan", what="the plan of the first node", deadline_s=deadline_s, reader=store.reader)
        return read_decision(text, "plan of the first node")

    def _hand_over(self) -> None:
        """Publish the measurements of this node, which runs RANK 0, for the deciding node."""
        path = self._controller.measured_path
        self._round_store.put("measured", path.read_text() if path.exists() else "")

    def _take_over(self) -> str:
        """Fetch the measurements from the store; return why the transfer failed, or an empty text."""
        try:
            what = "the measurements of the warm-up"
            text = self._round_store.take("measured", what=what, deadline_s=PEER_WAIT_S)
        except ClusterError as error:
            return str(error)
        if not text:
            return "the first worker of the warm-up left no measurements"
        files.write_text(self._controller.measured_path, text)
        return ""

    # -- the workers of this node ---------------------------------------------------------------------------------

    def _sample(self, processes: Mapping[int, Popen[bytes]]) -> None:
        """Look for progress messages and computation of all workers, at most once a second."""
        now_s = time.monotonic()
        since_s = now_s - self._sampled_s
        if since_s < SAMPLE_S:
            return
        self._sampled_s = now_s
        self._overdue, self._is_hung = set(), False
        for local, process in processes.items():
            sign, _ = self._controller.warmup_sign(local)
            last = self._pulses[local]
            sign_at_s, computed_s = sign.at_s if sign else 0.0, _computed_s(process.pid)
            is_alive = sign_at_s > last.sign_at_s or computed_s - last.computed_s > BUSY_SHARE * since_s
            alive_s = now_s if is_alive else last.alive_s + (since_s if since_s > AWAY_S else 0.0)
            self._pulses[local] = _Pulse(sign_at_s, computed_s, alive_s)
            # Before its first message a worker starts an interpreter, maybe from a slow disk, until the deadline.
            if sign is not None and process.poll() is None and now_s - alive_s > sign.limit_s:
                self._overdue.add(local)
                self._is_hung |= not sign.waits_for

    def _is_over(self, processes: Mapping[int, Popen[bytes]]) -> bool:
        """Return whether all nodes are done, or the warm-up failed for the reason in `failure`."""
        store = self._round_store
        store.check_goes_on()
        codes = [process.poll() for process in processes.values()]
        waited_s = time.monotonic() - self._began_s
        is_late = waited_s > self._controller.warmup_deadline_s
        if any(codes) or self._is_hung or is_late or store.glance("warmup-alarm"):
            self._find_out(processes, waited_s)
            return True
        if any(code is None for code in codes):
            return False
        # A node whose workers are done still answers alarms. The phase ends when all nodes are done.
        if not self._has_ended:
            self._has_ended = True
            if store.count("warmup-done") == len(self._decision.tokens):
                store.put("warmup-over", "yes")
        return store.glance("warmup-over")

    def _end(self, processes: Mapping[int, Popen[bytes]]) -> str:
        """Kill the workers and all processes that they started; return a sentence about processes that do not end."""
        left = self._kill(processes)
        self._controller.workers_are_gone()
        return f"the kernel cannot end process {', '.join(map(str, left))} of the warm-up" if left else ""

    def _find_out(self, processes: Mapping[int, Popen[bytes]], waited_s: float) -> None:
        """Publish the state of this node's workers; set `failure` and `absent` by the verdict of the first agent."""
        store, decision, token = self._round_store, self._decision, self._token
        store.put("warmup-alarm", "yes")
        time.sleep(SETTLE_S)
        host, num_ranks = decision.hosts[decision.tokens.index(token)], decision.num_ranks
        first_slot = min(decision.ranks_of(token))
        report = NodeReport(
            workers=tuple(self._state(local, processes[local], host, first_slot) for local in sorted(processes)),
            output=f"{self._logs} on {host}" if self._has_output() else "",
        )
        store.put(f"warmup-report/{token}", files.dumps(report))
        try:
            if token == decision.tokens[0]:
                patience_s = ALARM_REPORT_S.of(num_ranks)
                found, absent = reports(store, decision, NodeReport, prefix="warmup-report", patience_s=patience_s)
                store.put("warmup-absent", " ".join(absent))
                store.put("warmup-failed", judge(found, absent, waited_s=waited_s))
            verdict_s = VERDICT_S.of(num_ranks)
            self.failure = store.take("warmup-failed", what="why the warm-up failed", deadline_s=verdict_s)
            self.absent = tuple((store.peek("warmup-absent") or "").split())
        except ClusterError:
            self.absent = decision.hosts[:1]
            self.failure = judge([report], self.absent, waited_s=waited_s)

    def _state(self, local: int, process: Popen[bytes], host: str, first_slot: int) -> WorkerState:
        sign, error = self._controller.warmup_sign(local)
        now_s = time.monotonic()
        return WorkerState(
            slot=first_slot + local,
            name=f"{host}:{local}",
            pid=process.pid,
            exit_code=process.poll(),
            status=workers.status_of(process.pid),
            where=sign.where() if sign else "start",
            advance=1000 * len(sign.ended) + sign.done if sign else 0,
            silent_s=max(now_s - sign.at_s, 0.0) if sign else 0.0,
            idle_s=max(now_s - self._pulses[local].alive_s, 0.0),
            is_overdue=local in self._overdue,
            waits_for=sign.waits_for if sign else "",
            peers=sign.peers if sign else (),
            error=error,
        )


def _computed_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
