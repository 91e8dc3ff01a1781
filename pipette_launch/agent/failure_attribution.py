"""Who is at fault when a warm-up fails: a worker that died, stopped or fell silent, and not those who waited for it.

One dead peer makes all others fail, some of them sooner than its own agent has noticed. So the first word counts for
nothing here: every agent says how its workers are, and then the causes are told from the consequences.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pipette_launch.facts.messages import exit_words

MOST_NAMED = 3
STOPPED = ("stopped", "tracing-stop")
STOPPED_S = 1.5
STUCK = "disk-sleep"
_WAITS = re.compile(
    r"waited \d+ s in vain|no answer from|lost the store|timed out|timeout"
    r"|connection (closed|reset|refused|was likely closed)|broken pipe|socket closed"
    r"|recvvalue failed|failed to recv|sendbytes failed|client socket has"
    r"|remote process exited|ncclremoteerror|communicator was aborted|watchdog caught",
    re.IGNORECASE,
)
"""What a worker says that failed because another was not there: the harness, TCPStore, gloo and NCCL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """One warm-up worker, as the agent of its node sees it."""

    slot: int
    name: str
    """The slot as people know it: `node17:3`."""
    pid: int
    exit_code: int | None
    """None while it lives."""
    status: str
    """Of the process, in psutil's words."""
    where: str
    """Phase and position."""
    advance: int
    """Steps and phases that it has behind it: who is stuck comes behind who waits for it."""
    silent_s: float
    """Since its last sign."""
    idle_s: float
    """Since it last gave a sign or computed."""
    is_overdue: bool
    """The next sign should have come, and it has hardly computed since the last."""
    waits_for: str
    """What it says that it waits for; empty while it works itself."""
    peers: tuple[int, ...]
    """Slots that it says it waits for, or exchanges messages with."""
    error: str
    """Why it failed, in its own words; empty where it left none."""

    def is_victim(self) -> bool:
        """Whether its failure says only that another was not there."""
        return bool(_WAITS.search(self.error))


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """What an agent knows of its warm-up workers at the alarm."""

    KIND: ClassVar[str] = "warm-up-report"
    SCHEMA_VERSION: ClassVar[int] = 1

    workers: tuple[WorkerState, ...]
    output: str
    """Where to read more: a folder on a host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupFailure:
    """Why a warm-up failed, for all nodes alike."""

    KIND: ClassVar[str] = "warm-up-failure"
    SCHEMA_VERSION: ClassVar[int] = 1

    words: str
    absent: tuple[str, ...] = ()
    """Hosts whose agents did not answer: without them this round cannot train either."""


def judge(reports: Sequence[NodeReport], absent: Sequence[str], *, waited_s: float) -> WarmupFailure:
    """Name whoever is at fault, in one sentence.

    Args:
        reports: of all agents that answered.
        absent: the hosts of those that did not.
        waited_s: how long the warm-up ran.

    """
    states = sorted((state for report in reports for state in report.workers), key=lambda state: state.slot)
    killed = [state for state in states if _was_killed(state)]
    gone = f"the launcher on {_listed(absent)} does not answer: it or its node is gone" if absent else ""
    looks = (_failed, _stopped, _stuck, _silent, _accused, _forsaken)
    guilty = killed if killed or absent else next(filter(None, (look(states) for look in looks)), [])
    told = [_told(state, states) for state in guilty[:MOST_NAMED]]
    if len(guilty) > MOST_NAMED:
        told.append(f"so with {len(guilty) - MOST_NAMED} more")
    told += [gone] if gone else []
    if not told:
        return WarmupFailure(words=f"{_after(waited_s)}, its deadline: {_doing(states)}{_output(reports, states)}")
    named = {state.slot for state in guilty}
    waiting = sum(state.slot not in named and (state.is_victim() or bool(state.waits_for)) for state in states)
    if waiting:
        told.append(f"{waiting} other worker{'s' if waiting > 1 else ''} waited in vain")
    return WarmupFailure(words=f"{_after(waited_s)}: {'; '.join(told)}{_output(reports, guilty)}", absent=tuple(absent))


def _after(waited_s: float) -> str:
    return f"the warm-up failed after {waited_s:.1f} s"


def _was_killed(state: WorkerState) -> bool:
    # torch's launcher and a job's end say SIGTERM, a watchdog of NCCL aborts a worker that waited in vain.
    return (
        state.exit_code is not None
        and state.exit_code < 0
        and state.exit_code != -signal.SIGTERM
        and not (state.is_victim())
    )


def _failed(states: Sequence[WorkerState]) -> list[WorkerState]:
    return [state for state in states if (state.exit_code or 0) > 0 or state.error if not state.is_victim()]


def _stopped(states: Sequence[WorkerState]) -> list[WorkerState]:
    # One that is stopped for a moment, again and again, is slow.
    return [state for state in states if state.status in STOPPED and state.idle_s > STOPPED_S]


def _stuck(states: Sequence[WorkerState]) -> list[WorkerState]:
    return [state for state in states if state.is_overdue and state.status == STUCK]


def _silent(states: Sequence[WorkerState]) -> list[WorkerState]:
    """Overdue without a word of whom they wait for; of several those who came least far."""
    found = [state for state in states if state.is_overdue and state.exit_code is None and not state.waits_for]
    slots = {state.slot for state in found}
    # Two who exchange messages are both silent when one hangs; whoever waits for one that is not silent is no cause.
    causes = [state for state in found if not state.peers or slots.issuperset(state.peers)]
    return _least_far(causes)


def _accused(states: Sequence[WorkerState]) -> list[WorkerState]:
    """Those whom most others waited for, among the others' errors and waits."""
    votes = Counter(slot for state in states if state.is_victim() or state.waits_for for slot in state.peers)
    most = max(votes.values(), default=0)
    return [state for state in states if votes[state.slot] == most] if most else []


def _forsaken(states: Sequence[WorkerState]) -> list[WorkerState]:
    """Those whose failure says only that another was not there, where nothing says who; of them who came least far."""
    return _least_far([state for state in states if state.error])


def _least_far(states: Sequence[WorkerState]) -> list[WorkerState]:
    least = min((state.advance for state in states), default=0)
    return [state for state in states if state.advance == least]


def _told(state: WorkerState, states: Sequence[WorkerState]) -> str:
    who, where = f"{state.name} (pid {state.pid})", f"in phase {state.where}"
    if _was_killed(state):
        return f"{who} was killed by {exit_words(state.exit_code or 0)} {where}"
    if state.exit_code is not None and not state.is_victim():
        return f"{who} died with {exit_words(state.exit_code)} {where}" + (f": {state.error}" if state.error else "")
    errors = [other.error for other in states if state.slot in other.peers and other.error]
    if state.error and not (state.is_victim() and errors):
        return f"{who} {'lost its peers' if state.is_victim() else 'failed'} {where}: {state.error}"
    silent = f"no sign of it for {state.silent_s:.0f} s"
    if state.status in STOPPED:
        return f"{who} is stopped, as by SIGSTOP or a debugger, {where}; {silent}"
    if state.is_overdue:
        return f"{who} hangs {where}; {silent}, its process is in state {state.status}"
    return f"{who} was waited for in vain, {where}, in state {state.status}; {silent}" + (
        f" ({errors[0]})" if errors else ""
    )


def _doing(states: Sequence[WorkerState]) -> str:
    """What the ones that came least far are doing."""
    least = sorted(states, key=lambda state: state.advance)[:MOST_NAMED]
    return "; ".join(
        f"{state.name} (pid {state.pid}) is in phase {state.where}, in state {state.status}" for state in least
    )


def _output(reports: Sequence[NodeReport], guilty: Sequence[WorkerState]) -> str:
    slots = {state.slot for state in guilty[:1]}
    places = [report.output for report in reports if slots & {state.slot for state in report.workers}]
    return f"; its output is in {places[0]}" if places and places[0] else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
