"""Progress messages of a warm-up worker: it writes a small file, and the agent of its node reads it.

A message says what the worker does, since when, for which ranks it waits, and when the next message is due. So the
agent finds a hung worker by the age of its message, long before the whole warm-up is overdue, and does not blame a
worker that only waits for another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from pipette_launch.errors import PipetteError
from pipette_launch.facts import files

START = "start"
"""The phase before and between the others: imports, rendezvous, gathering."""
SIGN_S = 60.0
"""A worker writes a message at least so often while no phase has set another limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseEnd:
    """A phase that has ended."""

    phase: str
    seconds: float
    words: str
    """Its summary, for example `8 hosts in 7 rounds`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """The last progress message of a worker."""

    KIND: ClassVar[str] = "sign"
    SCHEMA_VERSION: ClassVar[int] = 1

    phase: str
    at_s: float
    """By this machine's monotonic clock, which its processes share."""
    limit_s: float
    """The next message is due after so many seconds."""
    done: int = 0
    total: int = 0
    """Number of steps of the phase; 0 where they are not counted."""
    words: str = ""
    waits_for: str = ""
    """What the worker waits for, in words; empty while it works."""
    peers: tuple[int, ...] = ()
    """Slots that it waits for, or exchanges messages with."""
    ended: tuple[PhaseEnd, ...] = ()
    """The phases that have ended, in order."""

    def where(self) -> str:
        """Phase and position: `links, 3 of 7`."""
        counted = f", {self.done} of {self.total}" if self.total else ""
        return f"{self.phase}{counted}" + (f", {self.words}" if self.words else "")


@dataclass(kw_only=True)
class Progress:
    """Writes for the agent which phase this worker is in and how far, and measures how long each phase takes."""

    folder: Path | None = None
    """None = nothing is written."""
    local_rank: int = 0
    clock: Callable[[], float] = time.perf_counter
    phase: str = START
    limit_s: float = SIGN_S
    phase_s: dict[str, float] = field(default_factory=dict)
    _summary: str = field(default="", init=False)
    _sign: Sign = field(default=Sign(phase=START, at_s=0.0, limit_s=SIGN_S), init=False)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Announce a phase and add its duration to `phase_s`; an inner phase does not count in the outer."""
        outer = self.phase
        self.announce(phase)
        before = self.clock()
        yield
        elapsed_s = self.clock() - before
        self.phase_s[phase] = self.phase_s.get(phase, 0.0) + elapsed_s
        if outer == START:
            first = PhaseEnd(phase=START, seconds=self.phase_s.get(START, 0.0), words="")
            ended = PhaseEnd(phase=phase, seconds=elapsed_s, words=self._summary)
            self._sign = replace(self._sign, ended=(*(self._sign.ended or (first,)), ended), words="")
            self._summary = ""
        else:
            self.phase_s[outer] = self.phase_s.get(outer, 0.0) - elapsed_s
        # Not after a failure: the message must keep the phase that failed.
        self.announce(outer)

    def announce(self, phase: str) -> None:
        """Write which phase begins, or continues."""
        self.phase = phase
        # A phase within a phase keeps the count of the outer one.
        kept = self._sign if phase != START else Sign(phase=phase, at_s=0.0, limit_s=0.0, ended=self._sign.ended)
        self._show(replace(kept, phase=phase, limit_s=self.limit_s, waits_for="", peers=()))

    def step(self, done: int, total: int, words: str = "", *, peers: Iterable[int] = (), limit_s: float = 0.0) -> None:
        """Write a progress message.

        Args:
            done: number of steps of the phase that have ended.
            total: number of all its steps.
            words: what is being done.
            peers: slots without which this step cannot end.
            limit_s: longest time of this step, in seconds, if it is more than the usual limit.

        """
        self._show(
            replace(
                self._sign,
                done=done,
                total=total,
                words=words,
                waits_for="",
                peers=tuple(peers),
                limit_s=max(limit_s, self.limit_s),
            )
        )

    def sum_up(self, words: str) -> None:
        """Set the summary of the phase, for the log."""
        self._summary = words

    def waits(self, what: str, *, limit_s: float, peers: Iterable[int] = ()) -> None:
        """Write that the worker waits: for what, at most how many seconds, and for which slots."""
        self._show(replace(self._sign, waits_for=what, peers=tuple(peers), limit_s=limit_s))

    def goes_on(self) -> None:
        """Write that a wait has ended."""
        self._show(replace(self._sign, waits_for="", peers=(), limit_s=self.limit_s))

    def fail(self, reason: str) -> None:
        """Write the reason of a failure, one line."""
        self._write(f"{self.local_rank}.error", reason)

    def _show(self, sign: Sign) -> None:
        self._sign = replace(sign, at_s=time.monotonic())
        self._write(f"{self.local_rank}.sign", files.dumps(self._sign))

    def _write(self, name: str, text: str) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{name}.{os.getpid()}"
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(self.folder / name)


def last_sign(folder: Path, local_rank: int) -> Sign | None:
    """Read the last progress message of a worker of this node; None while there is none."""
    try:
        return files.read(folder / f"{local_rank}.sign", Sign)
    except PipetteError:
        return None


def last_error(folder: Path, local_rank: int) -> str:
    """Read the reason that a failed worker wrote; empty where it wrote none."""
    try:
        return (folder / f"{local_rank}.error").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
