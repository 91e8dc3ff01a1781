"""Times messages between pairs of slots: between hosts, and between the devices of one host, in both directions.

Pairs are measured in rounds of disjoint pairs. Links that look slow are measured again.

All ranks must agree on the next messages. So all ranks run a round as the same sequence of steps. Before each step
every sender computes how many messages of each size the sender still wants (`Tally`). A small all-reduce then takes the
largest number of wanted messages over the rails of a pair. A round ends when no sender wants more messages.

All rails (pairs of equal device index) of a pair of hosts are measured together. Every message begins on all rails at
once, and the time of the hosts ends when the last rail has finished. Tensor-parallel ranks of a pipeline stage send to
the next stage in the same way. All messages use the communicator of all ranks, because a communicator for each pair
would cost far more than the measurement.

Links with a rate limit let a burst pass at line speed before they limit the rate (for example 128 kB by tc's token
bucket). So every size begins with untimed messages, and messages follow each other without a pause. The slope of a line
comes from messages that are much larger than a burst.
"""

# H = hosts, D = devices of one host, S = slots.

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pipette_launch.errors import ProbeError
from pipette_launch.facts import Samples, files
from pipette_launch.facts.layout import Ints
from pipette_launch.probe.health.verdicts import suspect_links
from pipette_launch.probe.instruments import QueuedCalls, await_device
from pipette_launch.probe.links.fits import LinkBook, fit_link, host_fits
from pipette_launch.probe.links.selection import (
    CHECK_ROUNDS,
    SCOUTED_ROUNDS,
    TREE_ROUNDS,
    Line,
    Lines,
    Pair,
    Round,
    all_pairs,
    blind_rounds,
    rounds_of,
    scout,
    switch_groups,
)
from pipette_launch.probe.lockstep import Budget, Clock, Lockstep
from pipette_launch.probe.messages import MIN_SIZES, TINY_BYTES, LinkSamples, WarmupOrder, WorkerResult

Group: TypeAlias = tuple[Pair, ...]
"""Pairs of slots that are measured together: all rails of a pair of hosts, or one pair of devices in the same host."""
FIRST_BYTES = 64 << 10
"""Larger messages are sent only after a message of this size was timed."""
EXCHANGES, EXCHANGED_BYTES = 8, 1 << 20
"""One timed value on a GPU is the mean of up to 8 exchanges, with at most 1 MiB of messages together."""
LEAD_S = 2e-3
"""Seconds for which a GPU is kept busy before each value, while the host queues the exchanges."""
GROWTH = 16
"""A message size is sent only after a size at least 1/16 as large was timed."""
TINY_REPEATS = 4
"""Factor by which tiny messages are sent more often than other sizes, because their times scatter most."""
WARM_BYTES = 256 << 10
MAX_WARMUPS = 4
MIN_VALUES, MAX_VALUES = 3, 24
TARGET_SPREAD = 0.04
"""If the relative spread of the values is smaller, no more values are measured. Even if three of five values are
disturbed, the result is then at most 9 % too slow."""
PARTNER_SHARE = 0.8
"""Share of the deadline in which a partner must answer. So the rank that waits for a silent partner fails first."""
LINKS_SHARE = 0.7
"""Links may be timed until this share of the budget is spent; collectives get the rest."""
LINKS_LEAST = 0.25
"""Smallest share of the budget that links get, even after a long compute phase or a long first sample."""
MAX_DECISIONS = 32
"""Rank 0 checks the time left at most 32 times, because each check makes every rank read the store."""
LEAST_DIRECTION_S = {"cpu": 0.1, "cuda": 0.02}
MOST_DIRECTION_S = 1.0
AGREE = 1.25
"""Two measurements of a link agree if the later one is faster by at most this factor."""
MAX_MEASUREMENTS = 4
"""Largest number of times that the first links inside hosts are measured."""


def ladder(sizes_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes to send, ascending: the wanted sizes, TINY_BYTES, and FIRST_BYTES if all wanted are larger."""
    first = (FIRST_BYTES,) if max(sizes_bytes) > FIRST_BYTES else ()
    return tuple(sorted({TINY_BYTES, *first, *sizes_bytes}))


def num_exchanges(size_bytes: int) -> int:
    """Return the number of exchanges of a message that a GPU times as one value."""
    return max(1, min(EXCHANGES, EXCHANGED_BYTES // size_bytes))


def sending_order(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (index of a size, messages in a row) for several passes over all sizes, each pass from large to small.

    With passes, a disturbance of a second affects one or two values of every size, instead of all values of one size.
    Only tiny messages (index 0) follow each other in a row.
    """
    passes = max(counts[1:], default=0) or 1
    found: list[tuple[int, int]] = []
    for turn in range(passes):
        for index, wanted in reversed([*enumerate(counts)]):
            count = wanted * (turn + 1) // passes - wanted * turn // passes
            found += [(index, 1)] * count if index or not count else [(index, count)]
    return found


def quartile_spread(values: Sequence[float]) -> float:
    """Return half the distance between the quartiles, divided by the median, of at least two values.

    The quartile spread is stricter than the median absolute deviation, which is 0 for (1, 1, 1, 2, 2).
    """
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / (2 * middle) if middle else 0.0


def undisturbed(values: Sequence[float]) -> list[float]:
    """Return the fastest quarter of the times of a tiny message.

    The median contains waits for a processor. A large message waits less, because its bytes travel meanwhile. So large
    messages minus the median made links look up to a fifth too fast.
    """
    return sorted(values)[: max(1, len(values) // 4)]


def condensed(samples: Samples) -> Samples:
    """Return three values around the lower quartile, with the spread of all values, and the last warm-up.

    A disturbance only slows a message down, but the fastest value is too fast if a queue was empty. With 64 hosts of 8
    devices, all values of all links would be 50 MB of text on rank 0.
    """
    quartile = float(np.quantile(samples.values_s, 0.25))
    away = quartile * samples.spread
    kept = (max(quartile - away, 0.0), quartile, quartile + away), samples.warmup_s[-1:]
    values_s, warmup_s = (tuple(float(f"{seconds:.6g}") for seconds in one) for one in kept)
    return Samples(values_s=values_s, warmup_s=warmup_s)


def one_way(round_trips: Sequence[Samples]) -> tuple[Samples, ...]:
    """Subtract the acknowledgement's time: half of the first entry, which is the round trip of the tiny message."""
    back_s = round_trips[0].median_s / 2
    return tuple(
        replace(samples, values_s=tuple(max(value - back_s, min(value, back_s)) for value in samples.values_s))
        for samples in round_trips
    )


@dataclass(kw_only=True)
class Tally:
    """Times that the sender of one direction has measured, and the number of messages that the sender still wants."""

    sizes: tuple[int, ...]
    """Message sizes in bytes, from `ladder`."""
    repeats: int
    """Number of values of each size before their spread is computed."""
    warmups: int
    bound_s: float
    """Time limit of this direction in seconds. MIN_VALUES messages of a size are timed even beyond this limit."""
    is_queued: bool = False
    """True if each value is a mean of `num_exchanges` exchanges, as on GPUs."""
    warm_s: list[list[float]] = field(init=False)
    values_s: list[list[float]] = field(init=False)
    own_s: list[list[float]] = field(init=False)
    """Times of the messages in `values_s` on this rail alone."""

    def __post_init__(self) -> None:
        self.warm_s = [[] for _ in self.sizes]
        self.values_s = [[] for _ in self.sizes]
        self.own_s = [[] for _ in self.sizes]

    def add(self, index: int, own_s: float, all_s: float | None = None) -> None:
        """Record the time of one message of size number `index`; the first messages of each size are warm-ups.

        `own_s` is the time of this rail. `all_s` is the time until all rails had finished; None = one rail.
        """
        seconds = own_s if all_s is None else all_s
        if len(self.warm_s[index]) < self._num_warmups(index):
            self.warm_s[index].append(seconds)
        else:
            self.values_s[index].append(seconds)
            self.own_s[index].append(own_s)

    def wish(self) -> tuple[int, ...]:
        """Return the number of messages of each size that should follow; all 0 = no more messages are needed.

        Warm-ups come first, from small to large, up to the first size for which no time is left. After the warm-ups, up
        to `repeats` timed messages of each size follow if they fit into the time. The number of timed messages doubles
        while their times still scatter.
        """
        return self._next_warmups() or self._next_values() or (0,) * len(self.sizes)

    def samples(self, *, own: bool = False) -> tuple[tuple[int, ...], tuple[Samples, ...]]:
        """Return sizes, and times until all rails had finished; with `own`, the times of this rail alone."""
        timed = zip(self.sizes, self.own_s if own else self.values_s, self.warm_s, strict=True)
        kept = {
            size: Samples(
                values_s=tuple(undisturbed(values_s) if size == TINY_BYTES else values_s), warmup_s=tuple(warm_s)
            )
            for size, values_s, warm_s in timed
            if values_s
        }
        return tuple(kept), tuple(kept.values())

    def _num_warmups(self, index: int) -> int:
        return max(1, self.warmups, min(MAX_WARMUPS, WARM_BYTES // self.sizes[index]))

    def _next_warmups(self) -> tuple[int, ...] | None:
        tried = sum(map(bool, self.warm_s))
        reach = max(FIRST_BYTES, GROWTH * self.sizes[tried - 1] if tried else 0)
        counts = [0] * len(self.sizes)
        for index in range(tried, len(self.sizes)):
            known = self.sizes[index] <= reach or index == tried
            if not known or (tried and index >= MIN_SIZES and not self._affords(index, tried - 1)):
                break
            counts[index] = self._num_warmups(index)
        return tuple(counts) if any(counts) else None

    def _affords(self, index: int, tried: int) -> bool:
        """Return whether the least number of messages of a size fits into the time, judged by a smaller size's time."""
        seconds = self.warm_s[tried][-1] * self.sizes[index] / self.sizes[tried]
        return self._took_s(index, seconds) * (self._num_warmups(index) + MIN_VALUES) <= self.bound_s

    def _next_values(self) -> tuple[int, ...] | None:
        kept = [index for index, warm in enumerate(self.warm_s) if warm]
        lacking = [index for index in kept if len(self.values_s[index]) < MIN_VALUES]
        if lacking:
            return self._more(lacking, max(MIN_VALUES, self._affordable(lacking, self.repeats)))
        unsure = [index for index in kept if quartile_spread(self.values_s[index]) > TARGET_SPREAD]
        if any(self.sizes[index] != TINY_BYTES for index in unsure):
            # Repeat all sizes, because a disturbance may have slowed all values of a size equally, without scatter.
            unsure = kept
        had = max((len(self.values_s[index]) // self._factor(index) for index in unsure), default=MAX_VALUES)
        count = self._affordable(unsure, min(had, MAX_VALUES - had))
        return self._more(unsure, count) if count > 0 else None

    def _factor(self, index: int) -> int:
        return TINY_REPEATS if self.sizes[index] == TINY_BYTES else 1

    def _took_s(self, index: int, value_s: float) -> float:
        return LEAD_S + num_exchanges(self.sizes[index]) * value_s if self.is_queued else value_s

    def _affordable(self, indices: Sequence[int], wanted: int) -> int:
        """Return the number of passes over these message sizes that the time limit allows, at most `wanted`."""
        pass_s = sum(
            self._took_s(index, (self.values_s[index] or self.warm_s[index])[-1]) * self._factor(index)
            for index in indices
        )
        spent_s = sum(
            self._took_s(index, value)
            for one_s in (self.warm_s, self.values_s)
            for index, values in enumerate(one_s)
            for value in values
        )
        return min(wanted, int((self.bound_s - spent_s) / max(pass_s, 1e-9)))

    def _more(self, indices: Sequence[int], count: int) -> tuple[int, ...]:
        return tuple(count * self._factor(index) if index in indices else 0 for index in range(len(self.sizes)))


def rail_groups(pairs: Sequence[Pair], devices_per_host: int) -> tuple[Group, ...]:
    """Return all rails of each pair of hosts. A rail joins device i of one host with device i of the other host."""
    size = devices_per_host
    return tuple(tuple((a * size + rail, b * size + rail) for rail in range(size)) for a, b in pairs)


def local_groups(pairs: Sequence[Pair], num_hosts: int, devices_per_host: int) -> tuple[Group, ...]:
    """Return the pairs of local devices in every host, each pair as a separate group."""
    bases = range(0, num_hosts * devices_per_host, devices_per_host)
    return tuple(((base + a, base + b),) for base in bases for a, b in pairs)


@dataclass(kw_only=True)
class LinkMeter:
    """Measures pairs of hosts, or of devices in a host; every rank calls the same methods in the same order.

    Each rank returns its samples as a sender. The caller of `measure` decides whether there is time for another round.
    """

    options: WarmupOrder
    lockstep: Lockstep
    bound_s: float
    """Time limit for measuring one direction of a pair, in seconds."""
    clock: Clock = time.perf_counter

    def __post_init__(self) -> None:
        self.sizes = ladder(self.options.message_sizes_bytes)
        self._buffer = torch.zeros(self.sizes[-1], dtype=torch.uint8, device=self.options.device_kind)
        self._ack = torch.zeros(TINY_BYTES, dtype=torch.uint8, device=self.options.device_kind)
        self._place = ""
        self._rank = self.lockstep.rank
        self._queued = QueuedCalls(self.clock) if self.options.device_kind == "cuda" else None

    def measure(
        self, rounds: Sequence[Sequence[Pair]], *, first: int = 1, of: int = 0, within: bool = False
    ) -> tuple[LinkSamples, ...]:
        """Measure pairs of hosts on all rails at once, or, with `within`, pairs of local devices in all hosts at once.

        Each of `rounds` has disjoint pairs. Progress and error messages show round number `first` of `of` rounds; 0 =
        the length of `rounds`. Raises ProbeError with slot and round if a partner does not answer in time.
        """
        num_hosts, size = len(self.options.hosts), self.options.devices_per_host
        found: list[LinkSamples] = []
        for number, pairs in enumerate(rounds, start=first):
            groups = local_groups(pairs, num_hosts, size) if within else rail_groups(pairs, size)
            self._place = f"round {number} of {of or len(rounds)} {'within' if within else 'between'} hosts"
            peers = {slot for group in groups for pair in group if self._rank in pair for slot in pair}
            self.lockstep.progress.step(number - 1, of or len(rounds), self._place, peers=peers - {self._rank})
            found += self._round(groups)
        return tuple(found)

    def _round(self, groups: Sequence[Group]) -> list[LinkSamples]:
        """Measure both directions of all pairs; the lower slots send first. Returns this rank's samples as a sender."""
        mine = next(((index, pair) for index, group in enumerate(groups) for pair in group if self._rank in pair), None)
        # All ranks return from `largest` together, and so begin the round together.
        self.largest(0.0)
        tally = Tally(
            sizes=self.sizes,
            repeats=self.options.repeats,
            warmups=self.options.warmups,
            bound_s=self.bound_s,
            is_queued=self._queued is not None,
        )
        if mine is None:
            self._direction(groups, None, None)
            self._direction(groups, None, None)
            return []
        index, pair = mine
        # The first message opens connections, which training does only once, so this message is not timed.
        self._exchange(0, pair, is_sender=self._rank == pair[0])
        for sender in pair:
            self._direction(groups, mine, tally if self._rank == sender else None)
        sizes, own = tally.samples(own=True)
        together = tally.samples()[1] if len(groups[index]) > 1 else ()
        return [
            LinkSamples(
                source=self._rank,
                target=sum(pair) - self._rank,
                sizes_bytes=sizes,
                samples=tuple(map(condensed, one_way(own))),
                together=tuple(map(condensed, one_way(together))) if together else (),
            )
        ]

    def _direction(self, groups: Sequence[Group], mine: tuple[int, Pair] | None, tally: Tally | None) -> None:
        """Let all senders of one direction send, step by step, until no sender wants more.

        Without common steps, rails that share a wire drift apart, and each rail finds the wire free while others pause.

        `mine` is the index of this rank's group, and this rank's pair in the group. Receivers pass no `tally`.
        """
        has_rails = any(len(group) > 1 for group in groups)
        index, pair = mine or (0, (0, 0))
        while True:
            wishes = torch.zeros((len(groups), len(self.sizes) + 1), dtype=torch.float64)
            if tally is not None:
                wishes[index, 1:] = torch.tensor(tally.wish(), dtype=torch.float64)
            if self._queued is not None:
                wishes[:, 0] = self._queued.wanted
            agreed = self._largest(wishes)
            if self._queued is not None:
                # Rails that share a wire must begin at the same time.
                self._queued.passes = int(agreed[0][0])
            orders = [sending_order(list(map(int, wish))) for _, *wish in agreed]
            if not any(orders):
                return
            order = orders[index] if mine else []
            idle = max(map(len, orders)) - len(order)
            for size, count in [*order, *[(0, 0)] * idle]:
                own_s = [self._message(size, pair, is_sender=tally is not None) for _ in range(count)]
                times = torch.zeros((len(groups), 1), dtype=torch.float64)
                if tally is not None:
                    times[index] = max(own_s, default=0.0)
                slowest = self._largest(times) if has_rails else times.tolist()
                if tally is not None:
                    for seconds in own_s:
                        # A shared wire does not slow a tiny message, because its time is all latency.
                        tally.add(size, seconds, slowest[index][0] if size else seconds)

    def _largest(self, wishes: torch.Tensor) -> list[list[float]]:
        """Return for each group the largest message counts of its rails; all ranks return from this call together."""
        shared = wishes.to(self.options.device_kind)
        with self._deadline("the others"):
            self._finish([dist.all_reduce(shared, op=dist.ReduceOp.MAX, async_op=True)], self.options.wait_s())
        largest: list[list[float]] = shared.tolist()
        return largest

    def largest(self, number: float) -> float:
        """Return the largest of all ranks' numbers; every rank must make this call."""
        return self._largest(torch.tensor([[number]], dtype=torch.float64))[0][0]

    def _message(self, index: int, pair: Pair, *, is_sender: bool) -> float:
        """Send or answer a message of size number `index`; returns the seconds until the answer came."""
        if self._queued is None:
            before_s = self.clock()
            self._exchange(index, pair, is_sender=is_sender)
            return self.clock() - before_s

        def exchange(index: int) -> None:
            for operation in self._operations(index, pair, is_sender=is_sender):
                for work in dist.batch_isend_irecv([operation]):
                    # On CUDA this wait blocks the stream, not the host.
                    work.wait()

        with self._deadline(self.options.slot_name(sum(pair) - self._rank)):
            return self._queued.seconds(
                partial(exchange, index),
                num_exchanges(self.sizes[index]),
                timeout_s=PARTNER_SHARE * self.options.wait_s(),
                first=partial(exchange, 0),
            )

    def _exchange(self, index: int, pair: Pair, *, is_sender: bool) -> None:
        """Exchange a message and its acknowledgement, and wait until the device has done both."""
        with self._deadline(self.options.slot_name(sum(pair) - self._rank)):
            for operation in self._operations(index, pair, is_sender=is_sender):
                self._finish(dist.batch_isend_irecv([operation]), PARTNER_SHARE * self.options.wait_s())

    def _operations(self, index: int, pair: Pair, *, is_sender: bool) -> list[dist.P2POp]:
        """Return a send and a receive in the order of execution, each for a separate `batch_isend_irecv`.

        `batch_isend_irecv` uses the world's communicator, but NCCL's plain send would open one for each pair.
        """
        peer, message = sum(pair) - self._rank, self._buffer[: self.sizes[index]]
        sent, received = (message, self._ack) if is_sender else (self._ack, message)
        both = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        return both if is_sender else both[::-1]

    def _finish(self, works: Iterable[dist.Work | None], timeout_s: float) -> None:
        """Wait for transfers, also on the device; raises RuntimeError or TimeoutError at the deadline."""
        for work in works:
            assert work is not None, "every rank is in the world's communicator"
            # NCCL's wait only queues the work on the device, and its deadline does not reach the device.
            work.wait() if self._ack.is_cuda else work.wait(timedelta(seconds=timeout_s))
        if self._ack.is_cuda:
            await_device(timeout_s, self.clock)

    @contextmanager
    def _deadline(self, whom: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ProbeError(f"links: no answer from {whom} in {self._place} ({reason})") from error


def direction_s(left_s: float, num_rounds: int, device_kind: str) -> float:
    """Return the seconds for one direction of a pair, so that `num_rounds` rounds fit into `left_s`."""
    fair_s = left_s / (2 * max(num_rounds, 1))
    return min(max(fair_s, LEAST_DIRECTION_S[device_kind]), MOST_DIRECTION_S)


def sample(options: WarmupOrder) -> Sequence[Round] | None:
    """Return rounds of some pairs of many hosts; None for few hosts, of which all pairs are measured."""
    if len(options.hosts) <= options.full_hosts:
        return None
    groups = _switches(options)
    count = TREE_ROUNDS if groups else options.blind_rounds
    return blind_rounds(len(options.hosts), groups, count, np.random.default_rng(0))


def _switches(options: WarmupOrder) -> tuple[Ints, ...]:
    return switch_groups(len(options.hosts), [host.place for host in options.hosts])


def measure(
    options: WarmupOrder, *, lockstep: Lockstep, budget: Budget, between: Sequence[Round] | None = None
) -> WorkerResult:
    """Time links between local devices and between hosts, and slow links between hosts again; every rank calls this.

    The result has this rank's samples as a sender, and notes on rounds that were skipped.

    At least one round between hosts and one round within hosts is measured. No further round begins after the links'
    share of the budget is spent. `between` has the rounds between hosts; None = all pairs.
    """
    between = all_pairs(range(len(options.hosts))) if between is None else between
    within = all_pairs(range(options.devices_per_host))
    total = len(between) + len(within)
    bound_s = direction_s(budget.left_s(LINKS_SHARE), total, options.device_kind)
    meter = LinkMeter(options=options, lockstep=lockstep, bound_s=bound_s)
    chunk = -(-total // MAX_DECISIONS)
    needed = bool(between) + bool(within)
    found: list[LinkSamples] = []
    again: tuple[Round, ...] = ()
    notes: tuple[str, ...] = ()
    rounds = 0

    def has_time() -> bool:
        return lockstep.agree(lambda: budget.allows(LINKS_SHARE))

    for done, (is_between, number, pairs) in enumerate(in_turns(between, within)):
        if done >= needed and done % chunk == 0 and not has_time():
            notes = (f"links: skipped {total - done} of {total} rounds, because the budget was spent",)
            break
        if is_between:
            found += meter.measure([pairs], first=number, of=len(between))
            rounds += 1
        elif number == 1 and options.device_kind == "cpu":
            found += settled(partial(meter.measure, [pairs], of=len(within), within=True), meter.largest, has_time)
        else:
            found += meter.measure([pairs], first=number, of=len(within), within=True)
    else:
        if len(options.hosts) > 1:
            again = rounds_of(suspect_links(shared_bandwidth_HH(options, lockstep.rank, found)))
        if again and not has_time():
            left = sum(map(len, again))
            notes = (f"links: {left} suspect pairs of hosts were not measured again, because the budget was spent",)
            again = ()
    found += [replace(link, is_again=True) for link in meter.measure(again)]
    return WorkerResult(
        slot=lockstep.rank, links=tuple(found), link_rounds=(rounds,), link_rounds_again=(len(again),), notes=notes
    )


def check(options: WarmupOrder, *, lockstep: Lockstep, budget: Budget) -> WorkerResult:
    """Time a few random pairs of hosts, whose links an earlier warm-up has measured; every rank calls this."""
    rounds = blind_rounds(len(options.hosts), _switches(options), CHECK_ROUNDS, np.random.default_rng(0))
    bound_s = direction_s(budget.left_s(LINKS_SHARE), len(rounds), options.device_kind)
    meter = LinkMeter(options=options, lockstep=lockstep, bound_s=bound_s)
    return WorkerResult(slot=lockstep.rank, links=meter.measure(rounds), link_rounds=(len(rounds),))


def explore(options: WarmupOrder, known: Callable[[], Lines], *, lockstep: Lockstep, budget: Budget) -> WorkerResult:
    """Measure more pairs of many hosts below unknown switches, in rounds that rank 0 chooses; every rank calls this.

    `known` returns the links that all ranks have measured before, and is called on rank 0 only. Returns this rank's
    samples, and on rank 0 a note on the rounds.
    """
    if _switches(options):
        return WorkerResult(slot=lockstep.rank)
    bound_s = direction_s(budget.left_s(LINKS_SHARE), SCOUTED_ROUNDS, options.device_kind)
    meter = LinkMeter(options=options, lockstep=lockstep, bound_s=bound_s)
    if lockstep.rank:
        return _follow(meter, budget)
    return _lead(meter, known(), budget)


def _lead(meter: LinkMeter, known: Lines, budget: Budget) -> WorkerResult:
    """Choose rounds on rank 0, send them to all ranks, measure them, and gather the samples of all ranks."""
    options, lockstep = meter.options, meter.lockstep
    mine: list[LinkSamples] = []

    def measured(rounds: Sequence[Round]) -> Lines:
        lockstep.broadcast(json.dumps(rounds))
        links: list[LinkSamples] = []
        for rank, text in enumerate(_taken(meter, rounds, mine, budget)):
            source = f"links of rank {rank}"
            links += files.from_plain(tuple[LinkSamples, ...], files.parse(text, source), source)
        return lines_of(links, options)

    found = scout(len(options.hosts), known, measure=measured, allows=lambda: budget.allows(LINKS_SHARE))
    lockstep.broadcast("[]")
    rounds = found.scouting + found.random
    return WorkerResult(slot=0, links=tuple(mine), link_rounds=(rounds,), notes=(found.words(),) if rounds else ())


def _follow(meter: LinkMeter, budget: Budget) -> WorkerResult:
    """Measure the rounds that rank 0 sends, until rank 0 sends an empty list."""
    mine: list[LinkSamples] = []
    while rounds := json.loads(meter.lockstep.broadcast("", left_s=budget.left_s())):
        _taken(meter, [tuple((one, other) for one, other in pairs) for pairs in rounds], mine, budget)
    return WorkerResult(slot=meter.lockstep.rank, links=tuple(mine))


def _taken(meter: LinkMeter, rounds: Sequence[Round], mine: list[LinkSamples], budget: Budget) -> list[str]:
    """Measure rounds and add this rank's samples to `mine`; returns the samples of all ranks on rank 0, as texts."""
    taken = meter.measure(rounds)
    mine.extend(taken)
    text = json.dumps([files.to_plain(link) for link in taken])
    return meter.lockstep.gather(text, left_s=budget.left_s()) or []


def lines_of(links: Sequence[LinkSamples], options: WarmupOrder) -> dict[Pair, Line]:
    """Return the line of each measured pair of hosts."""
    fits = host_fits(LinkBook.of(links).best(), options.devices_per_host)
    return {pair: fit.line for pair, fit in fits.items()}


def in_turns(between: Sequence[Round], within: Sequence[Round]) -> list[tuple[bool, int, Round]]:
    """Return rounds between hosts and within hosts in turns, as (true if between hosts, number from 1, pairs).

    If the time budget runs out early, both kinds of rounds then have some measurements.
    """
    kinds = ((True, between), (False, within))
    turns = [(is_between, number, pairs) for is_between, rounds in kinds for number, pairs in enumerate(rounds, 1)]
    return sorted(turns, key=lambda turn: turn[1])


def settled(
    measure: Callable[[], tuple[LinkSamples, ...]], largest: Callable[[float], float], has_time: Callable[[], bool]
) -> tuple[LinkSamples, ...]:
    """Measure links until two measurements in a row agree; returns the fastest measurement of each link.

    The first measurement may be several times too slow, as on a virtual machine that had been idle for a minute.

    `largest` returns the largest of all ranks' numbers. `has_time` returns the same answer on every rank.
    """

    def seconds_per_byte(link: LinkSamples) -> float:
        # Compare seconds per byte, because pairs have different largest messages.
        return link.samples[-1].median_s / link.sizes_bytes[-1]

    found = [measure()]
    while len(found) < MAX_MEASUREMENTS and has_time():
        found.append(measure())
        pairs = zip(found[-2], found[-1], strict=True)
        if largest(max([1.0, *(seconds_per_byte(one) / seconds_per_byte(two) for one, two in pairs)])) <= AGREE:
            break
    return tuple(min(links, key=seconds_per_byte) for links in zip(*found, strict=True))


def shared_bandwidth_HH(options: WarmupOrder, rank: int, links: Sequence[LinkSamples]) -> NDArray[np.float64]:
    """Return the measured bytes/s between all hosts on every rank; nan = not measured."""
    num_hosts, size = len(options.hosts), options.devices_per_host
    everyone = torch.zeros((options.num_slots, num_hosts), dtype=torch.float64)
    for link in links:
        if link.target // size != rank // size:
            everyone[rank, link.target // size] = fit_link(link).hosts.bytes_per_s
    # Each rank fills its own row, and other ranks have zeros in this row, so the sum gathers all rows.
    shared = everyone.to(options.device_kind)
    dist.all_reduce(shared)
    # Rails of a pair that were measured together have the same rate.
    rates_HDH = shared.cpu().numpy().reshape(num_hosts, size, num_hosts)
    rates_HH: NDArray[np.float64] = rates_HDH.max(axis=1)
    rates_HH[rates_HH == 0] = np.nan
    return rates_HH
