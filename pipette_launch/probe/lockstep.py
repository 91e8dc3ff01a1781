"""Keeps warm-up workers in step, without torch: rank 0 decides for all ranks, and every wait has a deadline."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from pipette_launch.errors import ProbeError
from pipette_launch.probe.messages import wait_s
from pipette_launch.probe.progress import Progress

if TYPE_CHECKING:
    from torch.distributed import Store

Clock = Callable[[], float]
LATER_S = 5.0
"""Ranks above 0 wait longer, so that rank 0 gives up first and can report missing ranks."""
KEYS_PER_READ = 64
"""Number of results that rank 0 reads in one request, which limits the size of the store's answer."""
MOST_NAMED = 4
ARRIVAL = "all workers to arrive"
PR_SET_PDEATHSIG = 1


class MissingError(ProbeError):
    """Error: some ranks did not reach a common step before the deadline."""

    def __init__(self, text: str, ranks: Sequence[int]) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Seconds in which phases of the warm-up may begin new measurements."""

    started_s: float
    budget_s: float
    clock: Clock

    def left_s(self, share: float = 1.0) -> float:
        """Return the seconds until `share` of the budget is spent; negative afterwards."""
        return self.started_s + share * self.budget_s - self.clock()

    def with_room(self, share: float, least: float) -> Budget:
        """Return a budget that starts later if needed, so that the share `least` is left before `share` is spent."""
        return replace(self, started_s=self.started_s + max(least * self.budget_s - self.left_s(share), 0.0))

    def allows(self, share: float, needs_s: float = 0.0) -> bool:
        """Return whether work of `needs_s` seconds would end before `share` of the budget is spent."""
        return self.left_s(share) > needs_s


@dataclass(kw_only=True)
class Lockstep:
    """Keeps all workers in step through the store; all ranks must make the same calls in the same order.

    A step costs each rank a fixed number of store operations. Only after a deadline, rank 0 reads the state of each
    rank from the store, to name the missing ranks.
    """

    store: Store
    rank: int
    world_size: int
    timeout_s: float
    """Longest wait of a small job, in seconds. The function `wait_s` adds time for many ranks and for the phase."""
    progress: Progress = field(default_factory=Progress)
    name_of: Callable[[int], str] = "rank {}".format
    """Returns the name of a rank for messages, such as `node17:3`."""
    _step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.progress.limit_s = self._deadline_s()

    def _deadline_s(self, left_s: float = 0.0) -> float:
        return wait_s(self.world_size, left_s, least_s=self.timeout_s)

    def agree(self, decide: Callable[[], bool]) -> bool:
        """Evaluate a condition on rank 0, and return the result on every rank."""
        return self.broadcast(str(decide()) if self.rank == 0 else "") == str(True)

    def broadcast(self, text: str, left_s: float = 0.0) -> str:
        """Return rank 0's text on every rank; rank 0 may need `left_s` seconds more to end its phase."""
        self._step += 1
        key = f"text/{self._step}"
        if self.rank == 0:
            self.store.set(key, text)
            return text
        self._wait([key], f"{self.name_of(0)}'s decision", self._deadline_s(left_s), missing=lambda: [0])
        return self.store.get(key).decode()

    def barrier(self, left_s: float = 0.0) -> None:
        """Return once every rank has made this call; a rank may need `left_s` seconds more to end its phase."""
        self._step += 1
        timeout_s, go = self._deadline_s(left_s), f"go/{self._step}"
        # Write one key for each rank, which all steps reuse, and one counter for each step.
        self.store.set(f"at/{self.rank}", str(self._step))
        if self.store.add(f"here/{self._step}", 1) == self.world_size:
            self.store.set(go, "")
        if self.rank == 0:
            try:
                self._wait([go], ARRIVAL, timeout_s, missing=self._absent)
            except MissingError as error:
                self.store.set(go, f"{timeout_s} {len(error.ranks)} {','.join(map(str, error.ranks[:MOST_NAMED]))}")
                raise
        else:
            # Rank 0 gives up first, and publishes which ranks are missing.
            self._wait([go], f"{self.name_of(0)}'s go", timeout_s + LATER_S, missing=lambda: [0])
        failure = self.store.get(go).decode()
        if failure:
            waited_s, count, ranks = failure.split()
            self._raise_missing([int(rank) for rank in ranks.split(",")], int(count), ARRIVAL, float(waited_s))

    def gather(self, text: str, left_s: float) -> list[str] | None:
        """Return every rank's text on rank 0, in rank order, and None on other ranks.

        A rank may need `left_s` seconds more to end its phase.
        """
        self._step += 1
        self.store.set(f"gather/{self._step}/{self.rank}", text)
        if self.rank:
            return None
        keys = [f"gather/{self._step}/{rank}" for rank in range(self.world_size)]
        self._wait(
            keys,
            "all workers' results",
            self._deadline_s(left_s),
            missing=lambda: [rank for rank, key in enumerate(keys) if not self.store.check([key])],
        )
        portions = [keys[first : first + KEYS_PER_READ] for first in range(0, len(keys), KEYS_PER_READ)]
        return [value.decode() for portion in portions for value in self.store.multi_get(portion)]

    def _absent(self) -> list[int]:
        return [
            rank
            for rank in range(self.world_size)
            if not self.store.check([f"at/{rank}"]) or int(self.store.get(f"at/{rank}")) < self._step
        ]

    def _wait(self, keys: list[str], what: str, timeout_s: float, *, missing: Callable[[], list[int]]) -> None:
        """Wait until the store has all keys; raises MissingError at the deadline, ProbeError if the store is gone."""
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
            # No rank is missing if the last rank came just now.
            if ranks:
                self._raise_missing(ranks, len(ranks), what, timeout_s)
        self.progress.goes_on()

    def _raise_missing(self, ranks: Sequence[int], count: int, what: str, timeout_s: float) -> NoReturn:
        """Raise the error that names missing ranks; `ranks` has the first of `count` missing ranks."""
        self.progress.waits(what, limit_s=timeout_s, peers=ranks[:MOST_NAMED])
        names = ", ".join(self.name_of(rank) for rank in ranks[:MOST_NAMED])
        more = f" and {count - MOST_NAMED} more" if count > MOST_NAMED else ""
        missing = "" if list(ranks) == [0] else f" (missing: {names}{more})"
        raise MissingError(f"waited {timeout_s:.0f} s in vain for {what}{missing}", ranks)


class WorkerPlace(NamedTuple):
    """RANK and store of this worker, from torchrun's environment. RANK is also the worker's slot, in host order."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    agent_hosts_store: bool


def worker_place(environ: Mapping[str, str]) -> WorkerPlace:
    """Read torchrun's environment; raises ProbeError with the variable that is missing or bad."""

    def number(name: str) -> int:
        try:
            return int(environ[name])
        except (KeyError, ValueError) as error:
            raise ProbeError(
                f"{name}={environ.get(name)!r} in the environment is not a number; start warm-up workers "
                f"through pipette-launch, which sets it"
            ) from error

    return WorkerPlace(
        rank=number("RANK"),
        world_size=number("WORLD_SIZE"),
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=number("MASTER_PORT"),
        agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def end_with_parent() -> None:
    """Let the kernel end this process when its parent dies; does nothing if the system is not Linux.

    A launcher that was killed by SIGKILL cannot end its workers, which would keep devices, ports and memory.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent died before `prctl` was called, so the kernel will send no signal.
        os.kill(os.getpid(), signal.SIGKILL)
