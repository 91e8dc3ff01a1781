"""What a warm-up worker tells of itself while it works: a sign of life in a file, which the agent of its node reads.

A sign says what the worker does, since when, on whom it waits, and by when the next sign is due. So a hung worker is
found by its age, long before the whole warm-up is overdue, and one that only waits for another is not taken for it.
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
"""How long a worker may be silent while it knows no limit of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseEnd:
    """A phase that is over."""

    phase: str
    seconds: float
    words: str
    """What it says of itself in the end, as `8 hosts in 7 rounds`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """What a worker was doing when it last said so."""

    KIND: ClassVar[str] = "sign"
    SCHEMA_VERSION: ClassVar[int] = 1

    phase: str
    at_s: float
    """By this machine's monotonic clock, which its processes share."""
    limit_s: float
    """The next sign is due after so long."""
    done: int = 0
    total: int = 0
    """Steps of the phase; 0 where they are not counted."""
    words: str = ""
    waits_for: str = ""
    """What it waits for, in words; empty while it works itself."""
    peers: tuple[int, ...] = ()
    """Slots that it waits for, or exchanges messages with."""
    ended: tuple[PhaseEnd, ...] = ()
    """The phases that are over, in order."""

    def where(self) -> str:
        """Phase and position: `links, 3 of 7`."""
        counted = f", {self.done} of {self.total}" if self.total else ""
        return f"{self.phase}{counted}" + (f", {self.words}" if self.words else "")


@dataclass(kw_only=True)
class Progress:
    """Says which phase this worker is in and how far, to the agent by files, and how long each phase took."""

    folder: Path
    local_rank: int
    clock: Callable[[], float] = time.perf_counter
    phase: str = START
    limit_s: float = SIGN_S
    phase_s: dict[str, float] = field(default_factory=dict)
    _summary: str = field(default="", init=False)
    _sign: Sign = field(default=Sign(phase=START, at_s=0.0, limit_s=SIGN_S), init=False)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Announce a phase and add its duration to `phase_s`; a phase within a phase takes its time from the outer."""
        outer = self.phase
        self.announce(phase)
        before = self.clock()
        yield
        elapsed_s = self.clock() - before
        self.phase_s[phase] = self.phase_s.get(phase, 0.0) + elapsed_s
        if outer == START:
            self._end(phase, elapsed_s)
        else:
            self.phase_s[outer] = self.phase_s.get(outer, 0.0) - elapsed_s
        # Not on failure: then the phase at fault stays on display.
        self.announce(outer)

    def announce(self, phase: str) -> None:
        """Say which phase begins, or goes on."""
        self.phase = phase
        self._write(str(self.local_rank), phase)
        # A phase within a phase keeps the count of the outer one.
        kept = self._sign if phase != START else Sign(phase=phase, at_s=0.0, limit_s=0.0, ended=self._sign.ended)
        self._show(replace(kept, phase=phase, limit_s=self.limit_s, waits_for="", peers=()))

    def step(self, done: int, total: int, words: str = "", *, peers: Iterable[int] = (), limit_s: float = 0.0) -> None:
        """Give a sign of life.

        Args:
            done: steps of the phase that are over.
            total: of so many.
            words: what is being done.
            peers: slots without which this step cannot end.
            limit_s: how long this step may rightly take without another sign; at least the usual time is granted.

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
        """Say what came of the phase, for the log."""
        self._summary = words

    def waits(self, what: str, *, limit_s: float, peers: Iterable[int] = ()) -> None:
        """Say that all that is left to do is to wait, for what, and how long at most."""
        self._show(replace(self._sign, waits_for=what, peers=tuple(peers), limit_s=limit_s))

    def goes_on(self) -> None:
        """Say that a wait is over."""
        self._show(replace(self._sign, waits_for="", peers=(), limit_s=self.limit_s))

    def fail(self, reason: str) -> None:
        """Leave the reason of a failure, one line."""
        self._write(f"{self.local_rank}.error", reason)

    def _end(self, phase: str, seconds: float) -> None:
        first = () if self._sign.ended else (PhaseEnd(phase=START, seconds=self.phase_s.get(START, 0.0), words=""),)
        ended = PhaseEnd(phase=phase, seconds=seconds, words=self._summary)
        self._sign, self._summary = replace(self._sign, ended=(*self._sign.ended, *first, ended), words=""), ""

    def _show(self, sign: Sign) -> None:
        self._sign = replace(sign, at_s=time.monotonic())
        self._write(f"{self.local_rank}.sign", files.dumps(self._sign))

    def _write(self, name: str, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{name}.{os.getpid()}"
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(self.folder / name)


def last_sign(folder: Path, local_rank: int) -> Sign | None:
    """Read what a worker of this node last said of itself; None while it has said nothing."""
    try:
        return files.read(folder / f"{local_rank}.sign", Sign)
    except PipetteError:
        return None


def last_error(folder: Path, local_rank: int) -> str:
    """Read why a worker failed, by its own words; empty where it left none."""
    try:
        return (folder / f"{local_rank}.error").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
