"""What all phases share: the budget, the straight line through timings, and how the workers stay in step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import accumulate, combinations
from pathlib import Path
from typing import NamedTuple, Protocol

from pipette_launch.errors import ProbeError

Clock = Callable[[], float]
START = "start"
"""The phase before and between the others: imports, rendezvous, gathering."""


class Line(NamedTuple):
    """Seconds = latency_s + bytes * seconds_per_byte."""

    latency_s: float
    seconds_per_byte: float


def fit_line(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> Line:
    """Fit a line through (bytes, seconds) that one disturbed size does not bend (Theil and Sen's estimator).

    The slope is the median over all pairs of sizes, each weighted by how far it reaches; the latency is what the
    smallest message takes beyond its bytes. (Least squares of the relative error, tried first,
    made 755 Mbit/s of a 300 Mbit/s link whose middle size was disturbed.) Where time does not grow with size, the line
    is the pessimistic one: the smallest time as latency, and what the largest message took as its transfer time.
    """
    # A smaller message takes no longer than a larger one: what a disturbance says otherwise is put right first, or it
    # would pass for latency, and the link would look as fast as can be.
    steady = reversed(list(accumulate(reversed(seconds), min)))
    points = list(zip(sizes_bytes, (max(value, 1e-9) for value in steady), strict=True))
    slopes = sorted(((b_s - a_s) / (b - a), b - a) for (a, a_s), (b, b_s) in combinations(points, 2))
    seconds_per_byte = _weighted_median(slopes)
    if seconds_per_byte <= 0:
        size, value = points[-1]
        return Line(min(seconds), value / size)
    size, value = points[0]
    return Line(max(value - size * seconds_per_byte, 0.0), seconds_per_byte)


def _weighted_median(weighted: Sequence[tuple[float, float]]) -> float:
    """The value at which half of the weight is reached; values ascending."""
    half = sum(weight for _, weight in weighted) / 2
    reached = accumulate(weight for _, weight in weighted)
    return next(value for (value, _), total in zip(weighted, reached, strict=True) if total >= half)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When to stop taking new cases; time comes from outside."""

    started_s: float
    budget_s: float
    clock: Clock

    def left_s(self, share: float = 1.0) -> float:
        """Seconds until this share of the budget is spent; negative afterwards."""
        return self.started_s + share * self.budget_s - self.clock()

    def later(self, seconds: float) -> Budget:
        """The same budget, begun so much later."""
        return replace(self, started_s=self.started_s + seconds)

    def allows(self, share: float, needs_s: float = 0.0) -> bool:
        """Whether something that takes `needs_s` would still end within this share."""
        return self.left_s(share) > needs_s


class Store(Protocol):
    """The part of torch's Store that the workers use."""

    def set(self, key: str, value: str, /) -> None:
        """Publish a value."""

    def get(self, key: str, /) -> bytes:
        """Wait for a value."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait for all keys, at most so long."""


@dataclass(kw_only=True)
class Conductor:
    """Keeps all workers in step through the store: rank 0 decides, the others follow; every wait has a deadline."""

    store: Store
    rank: int
    world_size: int
    timeout_s: float
    _step: int = field(default=0, init=False)

    def agree(self, decide: Callable[[], bool]) -> bool:
        """Let rank 0 decide for all. Every rank must make the same calls in the same order."""
        self._step += 1
        key = f"decision/{self._step}"
        if self.rank == 0:
            answer = decide()
            self.store.set(key, "yes" if answer else "no")
            return answer
        return self._get(key, "rank 0's decision", self.timeout_s) == b"yes"

    def tell(self, text: str, extra_s: float = 0.0) -> str:
        """Bring rank 0's text to all, whatever the others pass; `extra_s` is how much later rank 0 may rightly be."""
        self._step += 1
        key = f"told/{self._step}"
        if self.rank == 0:
            self.store.set(key, text)
            return text
        return self._get(key, "rank 0's word", self.timeout_s + extra_s).decode()

    def meet(self, extra_s: float = 0.0) -> None:
        """Return once every rank has come here; `extra_s` is how much later than this one another may rightly be."""
        self._step += 1
        self.store.set(f"here/{self._step}/{self.rank}", "")
        if self.rank == 0:
            keys = [f"here/{self._step}/{rank}" for rank in range(self.world_size)]
            self._wait(keys, "all workers to arrive", self.timeout_s + extra_s)
            self.store.set(f"go/{self._step}", "")
        else:
            # Rank 0 gives up first, and its error is the one that says who is missing.
            self._wait([f"go/{self._step}"], "rank 0's go", self.timeout_s + extra_s + 5)

    def gather(self, text: str, extra_s: float) -> list[str] | None:
        """Bring every rank's text to rank 0, in rank order; the others get None."""
        self._step += 1
        self.store.set(f"gather/{self._step}/{self.rank}", text)
        if self.rank:
            return None
        keys = [f"gather/{self._step}/{rank}" for rank in range(self.world_size)]
        self._wait(keys, "all workers' results", self.timeout_s + extra_s)
        return [self.store.get(key).decode() for key in keys]

    def _get(self, key: str, what: str, timeout_s: float) -> bytes:
        self._wait([key], what, timeout_s)
        return self.store.get(key)

    def _wait(self, keys: list[str], what: str, timeout_s: float) -> None:
        try:
            self.store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise ProbeError(
                f"waited {timeout_s:.0f} s in vain for {what}; see the other workers' errors, or raise the timeout"
            ) from error


@dataclass(kw_only=True)
class Progress:
    """Says which phase this worker is in, to the agent by a file, and how long each took."""

    folder: Path
    local_rank: int
    clock: Clock = time.perf_counter
    phase: str = START
    phase_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Announce a phase and add its duration to `phase_s`; a phase within a phase takes its time from the outer."""
        outer = self.phase
        self.announce(phase)
        before = self.clock()
        yield
        elapsed_s = self.clock() - before
        self.phase_s[phase] = self.phase_s.get(phase, 0.0) + elapsed_s
        # Not on failure: then the phase at fault stays on display.
        self.announce(outer)
        if outer != START:
            self.phase_s[outer] = self.phase_s.get(outer, 0.0) - elapsed_s

    def announce(self, phase: str) -> None:
        """Write the phase's name where the agent looks for it."""
        self.phase = phase
        self._write(str(self.local_rank), phase)

    def fail(self, reason: str) -> None:
        """Leave the reason of a failure, one line."""
        self._write(f"{self.local_rank}.error", reason)

    def _write(self, name: str, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{name}.{os.getpid()}"
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(self.folder / name)


class Seat(NamedTuple):
    """Where this worker sits, in torchrun's words; its RANK is its slot, as the warm-up runs in host order."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    agent_hosts_store: bool


def seat_of(environ: Mapping[str, str]) -> Seat:
    """Read torchrun's environment; raises ProbeError naming the variable that is missing or bad."""

    def number(name: str) -> int:
        try:
            return int(environ[name])
        except (KeyError, ValueError) as error:
            raise ProbeError(
                f"{name}={environ.get(name)!r} in the environment is no number; start warm-up workers "
                f"through pipette-launch, which sets it"
            ) from error

    return Seat(
        rank=number("RANK"),
        world_size=number("WORLD_SIZE"),
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=number("MASTER_PORT"),
        agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
