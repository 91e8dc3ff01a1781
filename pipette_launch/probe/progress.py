"""Progress of warm-up workers: the files by which a worker reports to its launcher, and asks for advice.

This module imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from pipette_launch.defaults import SIGN_S
from pipette_launch.errors import PipetteError
from pipette_launch.facts import files

QUESTION, ANSWER = "question-{}.json", "advice-{}.json"
"""Names of the files by which rank 0 asks its launcher for advice, with the process and number of the question."""
START = "start"
"""Name of the phase before and between measurements: imports, rendezvous, gathering."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseEnd:
    """Record of a phase that has ended."""

    phase: str
    seconds: float
    words: str
    """Summary, such as `8 hosts in 7 rounds`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """The last progress message of a worker, which the agent of the worker's node reads.

    The age of the message shows a hung worker long before the warm-up is overdue. The peers in the message show whether
    a worker only waits for another worker.
    """

    KIND: ClassVar[str] = "sign"

    phase: str
    at_s: float
    """Time (s) of the message, by this machine's monotonic clock, which all its processes share."""
    limit_s: float
    """Seconds within which the next message is due."""
    done: int = 0
    total: int = 0
    """Number of steps of the phase; 0 = not counted."""
    words: str = ""
    waits_for: str = ""
    """Name of the awaited thing; empty while the worker works."""
    peers: tuple[int, ...] = ()
    """Slots for which the worker waits, or with which the worker exchanges messages."""
    ended: tuple[PhaseEnd, ...] = ()

    def where(self) -> str:
        """Return phase and position: `links, 3 of 7`."""
        counted = f", {self.done} of {self.total}" if self.total else ""
        return f"{self.phase}{counted}" + (f", {self.words}" if self.words else "")


@dataclass(kw_only=True)
class Progress:
    """Writes progress messages of this worker, and measures how long each phase takes."""

    folder: Path | None = None
    """Folder for the progress messages; None = no messages are written."""
    local_rank: int = 0
    clock: Callable[[], float] = time.perf_counter
    phase: str = START
    limit_s: float = SIGN_S
    phase_s: dict[str, float] = field(default_factory=dict)
    _summary: str = field(default="", init=False)
    _sign: Sign = field(default=Sign(phase=START, at_s=0.0, limit_s=SIGN_S), init=False)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Announce a phase and add its duration to `phase_s`; an inner phase does not count in the outer phase."""
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
        # Skip this call after a failure, because the message must keep the phase that failed.
        self.announce(outer)

    def announce(self, phase: str) -> None:
        """Write that a phase begins, or continues."""
        self.phase = phase
        # An inner phase keeps the count of the outer phase.
        kept = self._sign if phase != START else Sign(phase=phase, at_s=0.0, limit_s=0.0, ended=self._sign.ended)
        self._show(replace(kept, phase=phase, limit_s=self.limit_s, waits_for="", peers=()))

    def step(self, done: int, total: int, words: str = "", *, peers: Iterable[int] = ()) -> None:
        """Write that `done` of `total` steps of the phase have ended, and which slots the next step needs."""
        now = replace(self._sign, done=done, total=total, words=words, waits_for="", limit_s=self.limit_s)
        self._show(replace(now, peers=tuple(peers)))

    def sum_up(self, words: str) -> None:
        """Set the summary of the phase, for the log."""
        self._summary = words

    def waits(self, what: str, *, limit_s: float, peers: Iterable[int] = ()) -> None:
        """Write that the worker waits for `what` at most `limit_s` seconds, and for which slots."""
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


def open_question(folder: Path) -> tuple[Path, Path] | None:
    """Return the files of a question without an answer and of its answer; None if every question has an answer."""
    for question in sorted(folder.glob(QUESTION.format("*"))):
        answer = folder / ANSWER.format(question.stem.partition("-")[2])
        if not answer.exists():
            return question, answer
    return None


def last_sign(folder: Path, local_rank: int) -> Sign | None:
    """Read the last progress message of a worker of this node; None if the worker has not written any."""
    try:
        return files.read(folder / f"{local_rank}.sign", Sign)
    except PipetteError:
        return None


def last_error(folder: Path, local_rank: int) -> str:
    """Read the reason that a failed worker wrote; empty if the worker wrote no reason."""
    try:
        return (folder / f"{local_rank}.error").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
