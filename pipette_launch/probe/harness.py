"""What all phases share: the budget, the straight line through timings, and how the workers stay in step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import accumulate, combinations
from typing import NamedTuple, NoReturn, Protocol

from pipette_launch.errors import ProbeError
from pipette_launch.probe.progress import START, Progress

__all__ = ["START", "Budget", "Conductor", "Line", "Progress", "Seat", "Store", "fit_line", "seat_of"]

Clock = Callable[[], float]
LATER_S = 5.0
"""How much longer than rank 0 the others wait: it gives up first, and tells them who is missing."""
PORTION = 64
MOST_NAMED = 4
ARRIVAL = "all workers to arrive"


class MissingError(ProbeError):
    """Others were waited for in vain."""

    def __init__(self, text: str, ranks: Sequence[int]) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


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

    def with_room(self, share: float, least: float) -> Budget:
        """The same budget, begun so much later that `least` of it is left until this share is spent."""
        return replace(self, started_s=self.started_s + max(least * self.budget_s - self.left_s(share), 0.0))

    def allows(self, share: float, needs_s: float = 0.0) -> bool:
        """Whether something that takes `needs_s` would still end within this share."""
        return self.left_s(share) > needs_s


class Store(Protocol):
    """The part of torch's Store that the workers use."""

    def set(self, key: str, value: str, /) -> None:
        """Publish a value."""

    def get(self, key: str, /) -> bytes:
        """Wait for a value."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Wait for several values."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return it."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there; never waits."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait for all keys, at most so long."""


@dataclass(kw_only=True)
class Conductor:
    """Keeps all workers in step through the store: rank 0 decides, the others follow; every wait has a deadline.

    A step costs every rank a fixed number of store operations, so the traffic grows linearly with ranks; only when a
    deadline has passed rank 0 looks for each rank, to name who is missing, and tells the others.
    """

    store: Store
    rank: int
    world_size: int
    timeout_s: float
    progress: Progress | None = None
    """Where this worker shows what it waits for."""
    name_of: Callable[[int], str] = "rank {}".format
    """A rank as people know it: `node17:3`."""
    _step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.progress is not None:
            self.progress.limit_s = self.timeout_s

    def step(self, done: int, total: int, words: str = "", *, peers: Iterable[int] = (), limit_s: float = 0.0) -> None:
        """Give a sign of life from within a phase; see `Progress.step`."""
        if self.progress is not None:
            self.progress.step(done, total, words, peers=peers, limit_s=limit_s)

    def agree(self, decide: Callable[[], bool]) -> bool:
        """Let rank 0 decide for all. Every rank must make the same calls in the same order."""
        self._step += 1
        key = f"decision/{self._step}"
        if self.rank == 0:
            answer = decide()
            self.store.set(key, "yes" if answer else "no")
            return answer
        return self._get(key, "decision", self.timeout_s) == b"yes"

    def tell(self, text: str, extra_s: float = 0.0) -> str:
        """Bring rank 0's text to all, whatever the others pass; `extra_s` is how much later rank 0 may rightly be."""
        self._step += 1
        key = f"told/{self._step}"
        if self.rank == 0:
            self.store.set(key, text)
            return text
        return self._get(key, "word", self.timeout_s + extra_s).decode()

    def meet(self, extra_s: float = 0.0) -> None:
        """Return once every rank has come here; `extra_s` is how much later than this one another may rightly be."""
        self._step += 1
        timeout_s, go = self.timeout_s + extra_s, f"go/{self._step}"
        # One key for each rank however many steps there are, and a counter for each step.
        self.store.set(f"at/{self.rank}", str(self._step))
        if self.store.add(f"here/{self._step}", 1) == self.world_size:
            self.store.set(go, "")
        if self.rank == 0:
            try:
                self._wait([go], ARRIVAL, timeout_s, missing=self._not_here)
            except MissingError as error:
                self.store.set(go, f"{timeout_s} {len(error.ranks)} {','.join(map(str, error.ranks[:MOST_NAMED]))}")
                raise
        else:
            # Rank 0 gives up first, and tells who is missing.
            self._wait([go], f"{self.name_of(0)}'s go", timeout_s + LATER_S, missing=self._rank_0)
        trouble = self.store.get(go).decode()
        if trouble:
            waited_s, count, ranks = trouble.split()
            self._blame([int(rank) for rank in ranks.split(",")], int(count), ARRIVAL, float(waited_s))

    def gather(self, text: str, extra_s: float) -> list[str] | None:
        """Bring every rank's text to rank 0, in rank order; the others get None."""
        self._step += 1
        self.store.set(f"gather/{self._step}/{self.rank}", text)
        if self.rank:
            return None
        keys = [f"gather/{self._step}/{rank}" for rank in range(self.world_size)]

        def missing() -> list[int]:
            return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

        self._wait(keys, "all workers' results", self.timeout_s + extra_s, missing=missing)
        # In portions: one answer of the store should not hold what ten thousand workers found.
        portions = [keys[first : first + PORTION] for first in range(0, len(keys), PORTION)]
        return [value.decode() for portion in portions for value in self.store.multi_get(portion)]

    def _not_here(self) -> list[int]:
        """Which ranks did not come to this step; called when it is too late."""
        there = [f"at/{rank}" for rank in range(self.world_size)]
        return [
            rank
            for rank, key in enumerate(there)
            if not self.store.check([key]) or int(self.store.get(key)) < self._step
        ]

    def _rank_0(self) -> list[int]:
        return [0]

    def _get(self, key: str, what: str, timeout_s: float) -> bytes:
        self._wait([key], f"{self.name_of(0)}'s {what}", timeout_s, missing=self._rank_0)
        return self.store.get(key)

    def _wait(self, keys: list[str], what: str, timeout_s: float, *, missing: Callable[[], list[int]]) -> None:
        """Wait for keys; `missing` says whose are not there when it is too late."""
        if self.progress is not None:
            self.progress.waits(what, limit_s=timeout_s + 2 * LATER_S)
        try:
            self.store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if "timeout" not in str(error).lower():
                first_line = str(error).splitlines()[0]
                raise ProbeError(
                    f"lost the store beside {self.name_of(0)} while waiting for {what}: {first_line}"
                ) from error
            ranks = missing()
            # Else the last of them came just now.
            if ranks:
                self._blame(ranks, len(ranks), what, timeout_s)
        if self.progress is not None:
            self.progress.goes_on()

    def _blame(self, ranks: Sequence[int], count: int, what: str, timeout_s: float) -> NoReturn:
        """Say who was waited for in vain: `count` ranks, of which the first are known."""
        if self.progress is not None:
            self.progress.waits(what, limit_s=timeout_s, peers=ranks[:MOST_NAMED])
        names = ", ".join(self.name_of(rank) for rank in ranks[:MOST_NAMED])
        more = f" and {count - MOST_NAMED} more" if count > MOST_NAMED else ""
        missing = "" if list(ranks) == [0] else f" (missing: {names}{more})"
        raise MissingError(f"waited {timeout_s:.0f} s in vain for {what}{missing}", ranks)


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
