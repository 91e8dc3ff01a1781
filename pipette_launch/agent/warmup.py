"""The warm-up of one node: watch the workers, and name the worker that made the warm-up fail.

One dead worker makes all other workers fail, and some fail before the agent of the dead worker notices. So the first
report of a failure may blame a wrong worker. When one agent raises the alarm, every agent publishes the state of its
workers in one key each, and the agent of RANK 0 tells causes from consequences. The agent inspects the workers before
torch does, because torch ends all workers at the first death, and their last output would be lost.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import ClassVar, Literal, NamedTuple

import psutil
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsSpecs, Std

from pipette_launch.agent import workers
from pipette_launch.agent.controller import Controller
from pipette_launch.agent.store import RoundOver, RoundStore, reports
from pipette_launch.errors import ClusterError
from pipette_launch.facts import files
from pipette_launch.facts.messages import Decision, exit_words
from pipette_launch.probe.messages import Sign

logger = logging.getLogger(__name__)

State = Literal["running", "done", "failed"]
SAMPLE_S = 1.0
BUSY_SHARE = 0.03
"""A worker that computes for more than this share of each second is slow but does not hang."""
AWAY_S = 5.0
"""If an agent did not look at its workers for this time (s), the agent itself was stopped, and cannot judge its
workers."""
SETTLE_S = 0.3
"""Seconds between alarm and reports, because a dying worker closes its connections before it ends."""
REPORT_S = 5.0
"""Seconds that an agent gets to answer an alarm. Agents look for alarms several times a second."""
VERDICT_S = REPORT_S + 5.0
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
"""Errors of a worker whose peer was missing, as printed by the probe, TCPStore, gloo and NCCL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """State of one warm-up worker, as the agent of the worker's node observes it."""

    slot: int
    name: str
    """Host and local device, such as `node17:3`."""
    pid: int
    exit_code: int | None
    """Exit code of the worker; None while the worker runs."""
    status: str
    """State of the process in psutil's words."""
    where: str
    """Phase of the warm-up, and step within this phase."""
    advance: int
    """Weighted number of finished steps and phases. A stuck worker has a lower number than the workers that wait for
    it."""
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
        """True if a signal ended the worker, and not torch, the end of the job, or NCCL's watchdog."""
        code = self.exit_code
        return code is not None and code < 0 and code != -signal.SIGTERM and not self.is_victim


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """The warm-up workers of one agent at the alarm."""

    KIND: ClassVar[str] = "warm-up-report"
    SCHEMA_VERSION: ClassVar[int] = 1

    workers: tuple[WorkerState, ...]
    output: str
    """Folder and host of the workers' output; empty if the workers printed nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupFailure:
    """Why a warm-up failed; the same on all nodes."""

    KIND: ClassVar[str] = "warm-up-failure"
    SCHEMA_VERSION: ClassVar[int] = 1

    words: str
    absent: tuple[str, ...] = ()
    """Hosts whose agents did not answer. Without these hosts this round cannot train either."""


# -- who is at fault ----------------------------------------------------------------------------------------------


def judge(reports: Sequence[NodeReport], absent: Sequence[str], *, waited_s: float) -> WarmupFailure:
    """Name the cause of a failed warm-up in one sentence.

    Args:
        reports: reports of all agents that answered.
        absent: hosts of the agents that did not answer.

    """
    states = sorted((state for report in reports for state in report.workers), key=lambda state: state.slot)
    killed = [state for state in states if state.was_killed]
    guilty = killed if killed or absent else _guilty(states)
    told = [_told(state, states) for state in guilty[:MOST_NAMED]]
    if len(guilty) > MOST_NAMED:
        told.append(f"the same with {len(guilty) - MOST_NAMED} more workers")
    if absent:
        told.append(f"the launcher on {_listed(absent)} does not answer: it or its node is gone")
    after = f"the warm-up failed after {waited_s:.1f} s"
    if not told:
        return WarmupFailure(words=f"{after}, its deadline: {_doing(states)}{_output(reports, states)}")
    named = {state.slot for state in guilty}
    waiting = sum(state.slot not in named and (state.is_victim or bool(state.waits_for)) for state in states)
    if waiting:
        told.append(f"{waiting} other worker{'s' if waiting > 1 else ''} waited in vain")
    return WarmupFailure(words=f"{after}: {'; '.join(told)}{_output(reports, guilty)}", absent=tuple(absent))


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
        # The workers for which most other workers waited.
        [state for state in states if most_votes and votes[state.slot] == most_votes],
        # Errors report a missing peer, but do not name the peer.
        _least_far([state for state in states if state.error]),
    )
    return next(filter(None, kinds), [])


def _least_far(states: Sequence[WorkerState]) -> list[WorkerState]:
    least = min((state.advance for state in states), default=0)
    return [state for state in states if state.advance == least]


def _told(state: WorkerState, states: Sequence[WorkerState]) -> str:
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


def _doing(states: Sequence[WorkerState]) -> str:
    least_far = sorted(states, key=lambda state: state.advance)[:MOST_NAMED]
    return "; ".join(
        f"{state.name} (pid {state.pid}) is in phase {state.where}, in state {state.status}" for state in least_far
    )


def _output(reports: Sequence[NodeReport], guilty: Sequence[WorkerState]) -> str:
    slots = {state.slot for state in guilty[:1]}
    places = [report.output for report in reports if slots & {state.slot for state in report.workers}]
    return f"; its output is in {places[0]}" if places and places[0] else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


# -- the workers of this node -------------------------------------------------------------------------------------


class _Pulse(NamedTuple):
    """Last known activity of a worker."""

    sign_at_s: float
    computed_s: float
    alive_s: float
    """Time (s) of the worker's last progress message or computation, by the monotonic clock."""


class WorkerHealth:
    """Activity of the warm-up workers of one node, by the monotonic clock that progress messages use too."""

    def __init__(
        self,
        processes: Mapping[int, Popen[bytes]],
        *,
        look_up: Callable[[int], tuple[Sign | None, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes = processes
        self._look_up = look_up
        self._clock = clock
        self._looked_s = clock()
        self._pulses = {local: _Pulse(0.0, 0.0, clock()) for local in processes}
        self._overdue: frozenset[int] = frozenset()
        self.is_hung = False
        """True if a worker is overdue and does not report that it waits for other workers."""

    def sample(self) -> None:
        """Look for progress messages and computation of all workers, at most once a second."""
        now_s = self._clock()
        since_s = now_s - self._looked_s
        if since_s < SAMPLE_S:
            return
        self._looked_s = now_s
        overdue, hung = set(), set()
        for local, process in self._processes.items():
            sign, _ = self._look_up(local)
            pulse = self._pulses[local] = self._feel(process, sign, self._pulses[local], now_s, since_s)
            # Before its first progress message a worker starts an interpreter, maybe from a slow disk. Only the
            # deadline limits this start.
            if sign is not None and process.poll() is None and now_s - pulse.alive_s > sign.limit_s:
                overdue.add(local)
                hung |= set() if sign.waits_for else {local}
        self._overdue, self.is_hung = frozenset(overdue), bool(hung)

    def _feel(self, process: Popen[bytes], sign: Sign | None, last: _Pulse, now_s: float, since_s: float) -> _Pulse:
        sign_at_s = sign.at_s if sign else 0.0
        computed_s = _computed_s(process.pid)
        alive = sign_at_s > last.sign_at_s or computed_s - last.computed_s > BUSY_SHARE * since_s
        alive_s = now_s if alive else last.alive_s + (since_s if since_s > AWAY_S else 0.0)
        return _Pulse(sign_at_s, computed_s, alive_s)

    def exit_codes(self) -> list[int | None]:
        """Return the exit codes of all workers; None for a worker that runs."""
        return [process.poll() for process in self._processes.values()]

    def states(self, *, host: str, first_slot: int) -> tuple[WorkerState, ...]:
        """Describe all workers, in the order of their slots."""
        return tuple(self._state(local, host, first_slot) for local in sorted(self._processes))

    def _state(self, local: int, host: str, first_slot: int) -> WorkerState:
        process = self._processes[local]
        sign, error = self._look_up(local)
        return WorkerState(
            slot=first_slot + local,
            name=f"{host}:{local}",
            pid=process.pid,
            exit_code=process.poll(),
            status=workers.status_of(process.pid),
            where=sign.where() if sign else "start",
            advance=1000 * len(sign.ended) + sign.done if sign else 0,
            silent_s=max(self._clock() - sign.at_s, 0.0) if sign else 0.0,
            idle_s=max(self._clock() - self._pulses[local].alive_s, 0.0),
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


class Warmup:
    """The warm-up on the node of one agent."""

    def __init__(self, controller: Controller, address: str) -> None:
        self._controller = controller
        self._address = address
        self._logs = ""
        self._began_s = self._started_s = 0.0
        self._health: WorkerHealth | None = None
        self._has_ended = False
        self._is_done = False
        self.failure = ""
        """Why the warm-up failed, the same on all nodes; empty unless it failed."""
        self.absent: tuple[str, ...] = ()
        """Hosts that have left the round."""

    def begin(self) -> LogsSpecs:
        """Forget an earlier warm-up; return the log settings of the new workers."""
        self.failure, self.absent, self._health = "", (), None
        self._has_ended = self._is_done = False
        self._began_s, self._started_s = time.monotonic(), time.time()
        self._logs = tempfile.mkdtemp(prefix="pipette_warmup_")
        return DefaultLogsSpecs(log_dir=self._logs, redirects=Std.ALL)

    def drop_logs(self) -> None:
        """Delete the workers' output, unless the warm-up failed and the workers printed something."""
        if self._logs and not (self.failure and self._has_output()):
            shutil.rmtree(self._logs, ignore_errors=True)
        self._logs = ""

    def _has_output(self) -> bool:
        return any(path.is_file() and path.stat().st_size for path in Path(self._logs).rglob("*"))

    def look(
        self, round_store: RoundStore, decision: Decision, token: str, processes: Mapping[int, Popen[bytes]]
    ) -> State:
        """Return the state of the warm-up; a failure or a hang ends the warm-up on every node.

        Args:
            processes: workers of this node, by local rank.

        Raises:
            RoundOver: another agent is lost.

        """
        if self._health is None:
            self._health = WorkerHealth(processes, look_up=self._controller.warmup_sign)
        self._health.sample()
        self._controller.warmup_goes_on(leads=token == decision.tokens[0])
        try:
            failure = self._judge(round_store, decision, token, self._health)
        except RoundOver:
            self._end(processes)
            raise
        if failure is None and not self._is_done:
            return "running"
        left = self._end(processes)
        if failure is None:
            if left:
                logger.warning("%s", left)
            return "done"
        self.failure, self.absent = "; ".join(filter(None, (failure.words, left))), failure.absent
        return "failed"

    def _judge(
        self, round_store: RoundStore, decision: Decision, token: str, watched: WorkerHealth
    ) -> WarmupFailure | None:
        """Return why the warm-up failed; None while the warm-up runs and when all nodes are done."""
        round_store.check_goes_on()
        codes = watched.exit_codes()
        waited_s = time.monotonic() - self._began_s
        is_late = waited_s > self._controller.warmup_deadline_s
        if any(codes) or watched.is_hung or is_late or round_store.has("warmup-alarm"):
            return self._find_out(round_store, decision, token, watched, waited_s)
        if all(code == 0 for code in codes):
            # A node that is done still answers alarms. The phase ends when all nodes are done.
            done = round_store.count("warmup-done", 0 if self._has_ended else 1)
            self._has_ended = True
            self._is_done = done == len(decision.tokens)
        return None

    def _end(self, processes: Mapping[int, Popen[bytes]]) -> str:
        """Kill the workers and all processes that they started; return a sentence about processes that do not end."""
        left = workers.end(processes, began_s=self._started_s, mark=self._logs)
        self._controller.workers_are_gone()
        return f"the kernel cannot end process {', '.join(map(str, left))} of the warm-up" if left else ""

    def _find_out(
        self, round_store: RoundStore, decision: Decision, token: str, watched: WorkerHealth, waited_s: float
    ) -> WarmupFailure:
        """Publish the state of this node's workers; return the verdict of the first agent."""
        round_store.put("warmup-alarm", "yes")
        time.sleep(SETTLE_S)
        states = watched.states(
            host=decision.hosts[decision.tokens.index(token)], first_slot=min(decision.ranks_of(token))
        )
        report = NodeReport(workers=states, output=f"{self._logs} on {self._address}" if self._has_output() else "")
        round_store.put(f"warmup-report/{token}", files.dumps(report))
        if token == decision.tokens[0]:
            found = reports(round_store, decision, NodeReport, prefix="warmup-report", patience_s=REPORT_S)
            failure = judge(*found, waited_s=waited_s)
            round_store.put("warmup-failed", failure.words)
            round_store.put("warmup-verdict", files.dumps(failure))
            return failure
        with contextlib.suppress(ClusterError):
            text = round_store.take("warmup-verdict", what="why the warm-up failed", deadline_s=VERDICT_S)
            return files.loads(WarmupFailure, text, "verdict of the first agent")
        return judge([report], decision.hosts[:1], waited_s=waited_s)
