"""Who talks how fast to whom: latency and bandwidth of every pair of hosts, and of local devices, both ways.

Pairs are measured in rounds of disjoint pairs (`rounds`), all rails of a pair of hosts at the same time: every message
begins on all of them at once, and what counts for the hosts is when the last was through. That is how tensor-parallel
ranks of one pipeline stage talk to those of the next. All traffic runs over the
one world communicator; a communicator for each pair would cost far more than the measurement.

A round is a row of steps. Before each step every sender says how many messages of which sizes it would like to send
(`repeats.Tally`), and one small all-reduce takes the largest wish of each pair's rails. So both ends know what follows,
rails stay in step, everyone begins together, and a round ends when nobody wants more.
"""

# H = hosts, D = devices of one host, S = slots.

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pipette_launch.errors import ProbeError
from pipette_launch.facts import Samples
from pipette_launch.probe.harness import Budget, Clock, Conductor
from pipette_launch.probe.health.suspects import suspect_links
from pipette_launch.probe.links.fits import fit_link
from pipette_launch.probe.links.repeats import TINY_BYTES, Tally, condensed, in_passes, in_step, ladder
from pipette_launch.probe.links.rounds import Group, in_turns, local_groups, matching_rounds, rail_groups
from pipette_launch.probe.links.sampling import Pair, Round, rounds_of
from pipette_launch.probe.links.settle import settled
from pipette_launch.probe.options import LinkSamples, ProbeOptions

LINKS_SHARE = 0.7
"""Of the budget, most of which compute has had before; what is left belongs to collectives."""
MAX_DECISIONS = 32
"""Rounds share decisions when there are many: each decision costs a store access of every rank."""
LEAST_DIRECTION_S = {"cpu": 0.1, "cuda": 0.02}
MOST_DIRECTION_S = 1.0
PARTNER_SHARE = 0.8
"""Of the deadline, for an answer of one's own partner: whoever knows a name must be the first to speak."""


def one_way(round_trips: Sequence[Samples]) -> tuple[Samples, ...]:
    """Turn times of message plus tiny acknowledgement into one-way times.

    The first entry is the tiny message itself, so half of its median is what the acknowledgement took.
    """
    back_s = round_trips[0].median_s / 2
    return tuple(
        Samples(
            values_s=tuple(max(value - back_s, min(value, back_s)) for value in samples.values_s),
            warmup_s=samples.warmup_s,
        )
        for samples in round_trips
    )


def direction_s(left_s: float, num_rounds: int, device_kind: str) -> float:
    """Seconds that one direction of a pair may take, if so many rounds are to fit into what is left."""
    fair_s = left_s / (2 * max(num_rounds, 1))
    return min(max(fair_s, LEAST_DIRECTION_S[device_kind]), MOST_DIRECTION_S)


@dataclass(kw_only=True)
class LinkMeter:
    """Measures pairs of hosts, or of local devices; every rank calls the same methods in the same order.

    What was measured is what this rank sent. Nothing here asks the clock whether a round is still to begin: that is for
    whoever has the rounds.
    """

    options: ProbeOptions
    rank: int
    bound_s: float
    """Seconds that one direction of a pair may take; see `direction_s`."""
    conductor: Conductor | None = None
    """Where this worker gives signs of life."""
    clock: Clock = time.perf_counter
    num_rounds: int = field(default=0, init=False)
    """How many rounds have been measured."""

    def __post_init__(self) -> None:
        self.sizes = ladder(self.options.sizes_bytes())
        self._buffer = torch.zeros(self.sizes[-1], dtype=torch.uint8, device=self.options.device_kind)
        self._ack = torch.zeros(TINY_BYTES, dtype=torch.uint8, device=self.options.device_kind)
        self._place = ""

    def measure(self, rounds: Sequence[Sequence[Pair]], *, first: int = 1, of: int = 0) -> tuple[LinkSamples, ...]:
        """Measure pairs of hosts, all rails at once.

        Args:
            rounds: in each, pairs of hosts of which none appears twice.
            first: the number of the first round, as errors shall name it.
            of: how many rounds there are in all, for the same; 0 = these.

        Raises:
            ProbeError: a partner did not answer by the deadline; the message names its slot and the round.

        """
        size = self.options.devices_per_host
        groups = [rail_groups(pairs, size) for pairs in rounds]
        return self._measure(groups, "between hosts", first=first, of=of)

    def measure_within(
        self, rounds: Sequence[Sequence[Pair]], *, first: int = 1, of: int = 0
    ) -> tuple[LinkSamples, ...]:
        """Measure pairs of local devices, in every host at once; arguments and errors as `measure`."""
        num_hosts, size = len(self.options.hosts), self.options.devices_per_host
        groups = [local_groups(pairs, num_hosts, size) for pairs in rounds]
        return self._measure(groups, "within hosts", first=first, of=of)

    def _measure(
        self, rounds: Sequence[Sequence[Group]], where: str, *, first: int, of: int
    ) -> tuple[LinkSamples, ...]:
        found = []
        for number, groups in enumerate(rounds, start=first):
            self._place = f"round {number} of {of or len(rounds)} {where}"
            if self.conductor is not None:
                peers = [slot for group in groups for pair in group if self.rank in pair for slot in pair]
                self.conductor.step(number - 1, of or len(rounds), self._place, peers=set(peers) - {self.rank})
            found.append(self._round(groups))
            self.num_rounds += 1
        return tuple(link for link in found if link is not None)

    def _round(self, groups: Sequence[Group]) -> LinkSamples | None:
        """Measure both directions of all pairs, low ends first; returns what this rank sent, if it had a partner."""
        seat = next(((index, pair) for index, group in enumerate(groups) for pair in group if self.rank in pair), None)
        with self._deadline("the others"):
            align(self.options.device_kind)
        if seat is not None:
            # First contact opens connections, which training pays once and no message pays again.
            self._swap(self._ack, self._ack.clone(), seat[1], sends_first=self.rank == seat[1][0])
        found = None
        for end in (0, 1):
            tally = self._tally() if seat is not None and self.rank == seat[1][end] else None
            self._direction(groups, seat, tally)
            if tally is not None and seat is not None:
                found = self._sent(tally, seat[1][1 - end], has_rails=len(groups[seat[0]]) > 1)
        return found

    def _sent(self, tally: Tally, peer: int, *, has_rails: bool) -> LinkSamples:
        sizes, own = tally.samples(own=True)
        _, together = tally.samples()
        return LinkSamples(
            source=self.rank,
            target=peer,
            sizes_bytes=sizes,
            samples=tuple(map(condensed, one_way(own))),
            together=tuple(map(condensed, one_way(together))) if has_rails else (),
        )

    def _tally(self) -> Tally:
        return Tally(sizes=self.sizes, repeats=self.options.repeats, warmups=self.options.warmups, bound_s=self.bound_s)

    def _direction(self, groups: Sequence[Group], seat: tuple[int, Pair] | None, tally: Tally | None) -> None:
        """Let all senders of one direction send, step by step, until none wants more."""
        while True:
            wishes = torch.zeros((len(groups), len(self.sizes)), dtype=torch.float64)
            if seat is not None and tally is not None:
                wishes[seat[0]] = torch.tensor(tally.wish(), dtype=torch.float64)
            counts = [list(map(int, wish)) for wish in self._largest(wishes)]
            if not any(map(any, counts)):
                return
            if any(len(group) > 1 for group in groups):
                self._together(counts, seat, tally)
            elif seat is not None:
                for index in in_passes(counts[seat[0]]):
                    seconds = self._message(index, seat[1], is_sender=tally is not None)
                    if tally is not None:
                        tally.add(index, seconds)

    def _together(self, counts: Sequence[Sequence[int]], seat: tuple[int, Pair] | None, tally: Tally | None) -> None:
        """Begin every message on all rails at once, and book when the last of them was through.

        Without that, rails that share a wire drift apart, and each finds it free while the others pause.
        """
        courses = [in_step(each) for each in counts]
        for step in range(max(map(len, courses))):
            times = torch.zeros((len(courses), 1), dtype=torch.float64)
            own: list[float] = []
            index = 0
            if seat is not None and step < len(courses[seat[0]]):
                index, count = courses[seat[0]][step]
                own = [self._message(index, seat[1], is_sender=tally is not None) for _ in range(count)]
                times[seat[0]] = max(own) if tally is not None else 0.0
            slowest = self._largest(times)
            if seat is not None and tally is not None:
                for seconds in own:
                    # A tiny message shares nothing: it is all latency.
                    tally.add(index, seconds, slowest[seat[0]][0] if index else seconds)

    def _largest(self, wishes: torch.Tensor) -> list[list[float]]:
        """For each group the largest numbers of its rails; what follows begins for everyone at once."""
        shared = wishes.to(self.options.device_kind)
        with self._deadline("the others"):
            self._finish([dist.all_reduce(shared, op=dist.ReduceOp.MAX, async_op=True)], self.options.timeout_s)
        largest: list[list[float]] = shared.tolist()
        return largest

    def largest(self, number: float) -> float:
        """Bring the largest of all ranks' numbers; every rank calls it."""
        return self._largest(torch.tensor([[number]], dtype=torch.float64))[0][0]

    def _message(self, index: int, pair: Pair, *, is_sender: bool) -> float:
        """Send or answer one message of this size; returns the seconds until the answer was there."""
        message = self._buffer[: self.sizes[index]]
        before_s = self.clock()
        if is_sender:
            self._swap(message, self._ack, pair, sends_first=True)
        else:
            self._swap(self._ack, message, pair, sends_first=False)
        return self.clock() - before_s

    def _swap(self, outgoing: torch.Tensor, incoming: torch.Tensor, pair: Pair, *, sends_first: bool) -> None:
        """Send one message and receive one, in this order or the other, and wait until the device has done both."""
        peer = pair[0] + pair[1] - self.rank
        send = dist.P2POp(dist.isend, outgoing, peer)
        receive = dist.P2POp(dist.irecv, incoming, peer)
        with self._deadline(self.options.slot_name(peer)):
            # batch_isend_irecv uses the world communicator; NCCL's plain send would open one for each pair.
            for operation in (send, receive) if sends_first else (receive, send):
                self._finish(dist.batch_isend_irecv([operation]), PARTNER_SHARE * self.options.timeout_s)

    def _finish(self, works: Iterable[dist.Work | None], timeout_s: float) -> None:
        """Wait until transfers are done, on the device too; raises RuntimeError or TimeoutError at the deadline."""
        for work in works:
            assert work is not None, "every rank is in the world's communicator"
            # NCCL's wait only puts the work in line on the device, and takes no deadline for that.
            work.wait() if self._is_cuda else work.wait(timedelta(seconds=timeout_s))
        if self._is_cuda:
            await_device(timeout_s, self.clock)

    @property
    def _is_cuda(self) -> bool:
        return self.options.device_kind == "cuda"

    @contextmanager
    def _deadline(self, whom: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise ProbeError(f"links: no answer from {whom} in {self._place} ({said})") from error


@dataclass(frozen=True, kw_only=True)
class LinkResult:
    """What one worker measured as a sender, and what nobody measured."""

    links: tuple[LinkSamples, ...]
    """First measurements before second ones."""
    rounds: int
    """Rounds between hosts."""
    rounds_again: int
    """Rounds in which suspects were measured a second time."""
    notes: tuple[str, ...]


def measure(
    options: ProbeOptions,
    *,
    rank: int,
    conductor: Conductor,
    budget: Budget,
    between: Sequence[Round] | None = None,
) -> LinkResult:
    """Time all pairs of local devices, these pairs of hosts or all, and what looks slow once more; all ranks call."""
    between = matching_rounds(len(options.hosts)) if between is None else between
    within = matching_rounds(options.devices_per_host)
    total = len(between) + len(within)
    meter = LinkMeter(
        options=options,
        rank=rank,
        conductor=conductor,
        bound_s=direction_s(budget.left_s(LINKS_SHARE), total, options.device_kind),
    )
    chunk = -(-total // MAX_DECISIONS)
    needed = bool(between) + bool(within)
    found: list[LinkSamples] = []
    rounds = 0

    def has_time() -> bool:
        return conductor.agree(lambda: budget.allows(LINKS_SHARE))

    for done, (is_between, number, pairs) in enumerate(in_turns(between, within)):
        if done >= needed and done % chunk == 0 and not has_time():
            note = f"links: {total - done} of {total} rounds were skipped, the budget was spent"
            return LinkResult(links=tuple(found), rounds=rounds, rounds_again=0, notes=(note,))
        if is_between:
            found += meter.measure([pairs], first=number, of=len(between))
            rounds += 1
        elif number == 1 and options.device_kind == "cpu":
            found += settled(partial(meter.measure_within, [pairs], of=len(within)), meter.largest, has_time)
        else:
            found += meter.measure_within([pairs], first=number, of=len(within))
    again = suspect_rounds(options, rank, found)
    if again and not has_time():
        note = f"links: {sum(map(len, again))} suspect pairs of hosts were not measured again, the budget was spent"
        return LinkResult(links=tuple(found), rounds=rounds, rounds_again=0, notes=(note,))
    found += meter.measure(again)
    return LinkResult(links=tuple(found), rounds=rounds, rounds_again=len(again), notes=())


def suspect_rounds(options: ProbeOptions, rank: int, links: Sequence[LinkSamples]) -> tuple[Round, ...]:
    """Pairs of hosts that look slower than their peers explain, in rounds; the same answer on every rank."""
    if len(options.hosts) < 2:
        return ()
    return rounds_of(suspect_links(shared_bandwidth_HH(options, rank, links)))


def shared_bandwidth_HH(options: ProbeOptions, rank: int, links: Sequence[LinkSamples]) -> NDArray[np.float64]:
    """Everyone's bytes/s between hosts; nan = not measured. The same numbers on every rank."""
    num_hosts, size = len(options.hosts), options.devices_per_host
    everyone = torch.zeros((options.num_slots, num_hosts), dtype=torch.float64)
    for link in links:
        if link.target // size != rank // size:
            everyone[rank, link.target // size] = fit_link(link).hosts.bytes_per_s
    # Each rank fills its own row of zeros: an all-gather by the one collective that every torch has alike.
    shared = everyone.to(options.device_kind)
    dist.all_reduce(shared)
    # Rails of a pair that were measured together say the same.
    rates_HDH = shared.cpu().numpy().reshape(num_hosts, size, num_hosts)
    rates_HH: NDArray[np.float64] = rates_HDH.max(axis=1)
    rates_HH[rates_HH == 0] = np.nan
    return rates_HH


def align(device_kind: str) -> None:
    """Wait until all ranks are here, by the smallest all-reduce."""
    dist.all_reduce(torch.zeros(1, device=device_kind))
    if device_kind == "cuda":
        torch.cuda.synchronize()


def await_device(timeout_s: float, clock: Clock) -> None:
    """Wait for all that was launched on this device; raises TimeoutError, where synchronize would wait for ever."""
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    deadline_s = clock() + timeout_s
    while not done.query():  # type: ignore[no-untyped-call]
        if clock() > deadline_s:
            raise TimeoutError(f"waited {timeout_s:.0f} s for the device")
