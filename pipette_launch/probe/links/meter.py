"""Sends messages between pairs of slots and times them.

Both ends of a pair, and all pairs of a round, must agree on what is sent next. A round is a row of steps. Before each
step every sender says how many messages of which sizes it would like to send (`repeats.Tally`), and one small
all-reduce takes the largest wish of each pair's rails. So both ends know what follows, all begin together, and a round
ends when no sender wants more.

All rails of a pair of hosts are measured at the same time: every message begins on all of them at once, and the time of
the hosts is when the last rail has finished. Tensor-parallel ranks of one pipeline stage send to those of the next like
that. All messages use the communicator of all ranks: one for each pair would cost far more than the measurement.

On GPUs a message is timed by events in the stream (`device_clock`): the host queues several exchanges of small messages
and waits once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist

from pipette_launch.errors import ProbeError
from pipette_launch.facts import Samples
from pipette_launch.probe.device_clock import QueuedCalls, await_device
from pipette_launch.probe.harness import Clock, Lockstep
from pipette_launch.probe.links.repeats import Tally, condensed, in_step, ladder, num_exchanges
from pipette_launch.probe.links.sampling import Pair
from pipette_launch.probe.options import TINY_BYTES, LinkSamples, ProbeOptions

Group: TypeAlias = tuple[Pair, ...]
"""Pairs of slots that are measured together: the rails of a pair of hosts, or one pair of local devices."""
Mine: TypeAlias = tuple[int, Pair]
"""The index of the group that this rank is in, and its pair in it."""
PARTNER_SHARE = 0.8
"""Part of the deadline within which the own partner must answer: a rank that knows the name must fail first."""


def rail_groups(pairs: Sequence[Pair], devices_per_host: int) -> tuple[Group, ...]:
    """All rails of each pair of hosts: device i of one talks to device i of the other, for all i at once."""
    size = devices_per_host
    return tuple(tuple((a * size + rail, b * size + rail) for rail in range(size)) for a, b in pairs)


def local_groups(pairs: Sequence[Pair], num_hosts: int, devices_per_host: int) -> tuple[Group, ...]:
    """The same pairs of local devices in every host at once, each a group of its own."""
    bases = range(0, num_hosts * devices_per_host, devices_per_host)
    return tuple(((base + a, base + b),) for base in bases for a, b in pairs)


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


@dataclass(kw_only=True)
class LinkMeter:
    """Measures pairs of hosts, or of local devices; every rank calls the same methods in the same order.

    Each rank returns what it sent. The caller decides whether there is time for another round.
    """

    options: ProbeOptions
    lockstep: Lockstep
    """Where this worker reports its progress."""
    bound_s: float
    """Seconds that one direction of a pair may take."""
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
        """Measure pairs of hosts, all rails at once, or pairs of local devices, in every host at once.

        Args:
            rounds: in each, pairs of hosts or of local devices; none of them appears twice in a round.
            first: the number of the first round in error messages.
            of: the number of all rounds in error messages; 0 = as many as `rounds`.
            within: the pairs are of local devices.

        Raises:
            ProbeError: a partner did not answer by the deadline; the message names its slot and the round.

        """
        num_hosts, size = len(self.options.hosts), self.options.devices_per_host
        found = []
        for number, pairs in enumerate(rounds, start=first):
            groups = local_groups(pairs, num_hosts, size) if within else rail_groups(pairs, size)
            self._place = f"round {number} of {of or len(rounds)} {'within' if within else 'between'} hosts"
            peers = [slot for group in groups for pair in group if self._rank in pair for slot in pair]
            self.lockstep.progress.step(number - 1, of or len(rounds), self._place, peers=set(peers) - {self._rank})
            found.append(self._round(groups))
        return tuple(link for link in found if link is not None)

    def _round(self, groups: Sequence[Group]) -> LinkSamples | None:
        """Measure both directions of all pairs, low ends first; returns what this rank sent, if it had a partner."""
        mine = next(((index, pair) for index, group in enumerate(groups) for pair in group if self._rank in pair), None)
        with self._deadline("the others"):
            align(self.options.device_kind, self.options.wait_s(), self.clock)
        if mine is not None:
            # The first contact opens connections, which training does once; no timed message should pay for it.
            self._swap(self._ack, self._ack.clone(), mine[1], sends_first=self._rank == mine[1][0])
        found = None
        for end in (0, 1):
            tally = None
            if mine is not None and self._rank == mine[1][end]:
                options = self.options
                tally = Tally(
                    sizes=self.sizes,
                    repeats=options.repeats,
                    warmups=options.warmups,
                    bound_s=self.bound_s,
                    is_queued=self._queued is not None,
                )
            self._direction(groups, mine, tally)
            if tally is not None and mine is not None:
                sizes, own = tally.samples(own=True)
                _, together = tally.samples()
                has_rails = len(groups[mine[0]]) > 1
                found = LinkSamples(
                    source=self._rank,
                    target=mine[1][1 - end],
                    sizes_bytes=sizes,
                    samples=tuple(map(condensed, one_way(own))),
                    together=tuple(map(condensed, one_way(together))) if has_rails else (),
                )
        return found

    def _direction(self, groups: Sequence[Group], mine: Mine | None, tally: Tally | None) -> None:
        """Let all senders of one direction send, step by step, until none wants more; only a sender has a tally.

        Every message begins on all rails at once, and counts until the last of them has finished. Without that, rails
        that share a wire drift apart, and each finds the wire free while the others pause.
        """
        has_rails = any(len(group) > 1 for group in groups)
        while True:
            wishes = torch.zeros((len(groups), len(self.sizes) + 1), dtype=torch.float64)
            if mine is not None and tally is not None:
                wishes[mine[0], 1:] = torch.tensor(tally.wish(), dtype=torch.float64)
            if self._queued is not None:
                wishes[:, 0] = self._queued.wanted
            agreed = self._largest(wishes)
            if self._queued is not None:
                # Rails that share a wire must begin at the same time.
                self._queued.passes = int(agreed[0][0])
            orders = [in_step(list(map(int, wish))) for _, *wish in agreed]
            if not any(orders):
                return
            for step in range(max(map(len, orders))):
                times = torch.zeros((len(groups), 1), dtype=torch.float64)
                index = 0
                own_s: list[float] = []
                if mine is not None and step < len(orders[mine[0]]):
                    index, count = orders[mine[0]][step]
                    own_s = [self._message(index, mine[1], is_sender=tally is not None) for _ in range(count)]
                    times[mine[0]] = max(own_s) if tally is not None else 0.0
                slowest = self._largest(times) if has_rails else times.tolist()
                if mine is not None and tally is not None:
                    for seconds in own_s:
                        # A tiny message is all latency: it does not share the wire with other rails.
                        tally.add(index, seconds, slowest[mine[0]][0] if index else seconds)

    def _largest(self, wishes: torch.Tensor) -> list[list[float]]:
        """For each group the largest numbers of its rails; all ranks leave this call at the same time."""
        shared = wishes.to(self.options.device_kind)
        with self._deadline("the others"):
            self._finish([dist.all_reduce(shared, op=dist.ReduceOp.MAX, async_op=True)], self.options.wait_s())
        largest: list[list[float]] = shared.tolist()
        return largest

    def largest(self, number: float) -> float:
        """Return the largest of all ranks' numbers; every rank calls this."""
        return self._largest(torch.tensor([[number]], dtype=torch.float64))[0][0]

    def _message(self, index: int, pair: Pair, *, is_sender: bool) -> float:
        """Send or answer a message of this size; returns the seconds until the answer was there.

        Both ends of a pair queue the same number of exchanges on a GPU, as both know the size.
        """
        if self._queued is None:
            before_s = self.clock()
            self._swap(*self._ends(index, is_sender=is_sender), pair, sends_first=is_sender)
            return self.clock() - before_s
        peer = pair[0] + pair[1] - self._rank

        def exchange(index: int) -> None:
            for operation in _operations(*self._ends(index, is_sender=is_sender), peer, sends_first=is_sender):
                for work in dist.batch_isend_irecv([operation]):
                    # Only the stream waits.
                    work.wait()

        with self._deadline(self.options.slot_name(peer)):
            return self._queued.seconds(
                partial(exchange, index),
                num_exchanges(self.sizes[index]),
                timeout_s=PARTNER_SHARE * self.options.wait_s(),
                first=partial(exchange, 0),
            )

    def _ends(self, index: int, *, is_sender: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tensors that this rank sends and receives: message and acknowledgement, or the reverse."""
        message = self._buffer[: self.sizes[index]]
        return (message, self._ack) if is_sender else (self._ack, message)

    def _swap(self, outgoing: torch.Tensor, incoming: torch.Tensor, pair: Pair, *, sends_first: bool) -> None:
        """Send one message and receive one, in this order or the other, and wait until the device has done both."""
        peer = pair[0] + pair[1] - self._rank
        with self._deadline(self.options.slot_name(peer)):
            for operation in _operations(outgoing, incoming, peer, sends_first=sends_first):
                self._finish(dist.batch_isend_irecv([operation]), PARTNER_SHARE * self.options.wait_s())

    def _finish(self, works: Iterable[dist.Work | None], timeout_s: float) -> None:
        """Wait until transfers are done, on the device too; raises RuntimeError or TimeoutError at the deadline."""
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
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise ProbeError(f"links: no answer from {whom} in {self._place} ({said})") from error


def _operations(
    outgoing: torch.Tensor, incoming: torch.Tensor, peer: int, *, sends_first: bool
) -> tuple[dist.P2POp, dist.P2POp]:
    """Return a send and a receive, each for a `batch_isend_irecv` of its own, in the order in which they run.

    That function uses the world's communicator, where NCCL's plain send would open one for each pair.
    """
    send = dist.P2POp(dist.isend, outgoing, peer)
    receive = dist.P2POp(dist.irecv, incoming, peer)
    return (send, receive) if sends_first else (receive, send)


def align(device_kind: str, timeout_s: float, clock: Clock = time.perf_counter) -> None:
    """Wait until all ranks are here, by the smallest all-reduce; raises TimeoutError at a GPU's deadline."""
    slowest_of_all(0.0, device_kind, timeout_s, clock)


def slowest_of_all(seconds: float, device_kind: str, timeout_s: float, clock: Clock = time.perf_counter) -> float:
    """Return the largest of all ranks' numbers; all ranks leave this call at the same time."""
    largest = torch.tensor([seconds], dtype=torch.float64, device=device_kind)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if device_kind == "cuda":
        await_device(timeout_s, clock)
    return float(largest)
