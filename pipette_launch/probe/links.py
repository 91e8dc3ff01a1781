"""Who talks how fast to whom: latency and bandwidth of every pair of hosts, and of local devices, both ways.

One clean measurement occupies both ends, so pairs are measured in rounds of disjoint pairs (perfect matchings): N-1
rounds for even N, N for odd, which is the fewest possible. All traffic runs over the one world communicator; a
communicator for each pair would cost far more than the measurement.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist

from pipette_launch.facts import Samples
from pipette_launch.probe.harness import Budget, Conductor
from pipette_launch.probe.options import LinkSamples, ProbeOptions

Pair = tuple[int, int]
LINKS_SHARE = 0.75
"""Of the budget, most of which compute has had before; what is left belongs to collectives."""
ACK_BYTES = 8
TINY_REPEATS = 4
MAX_DECISIONS = 32
"""Rounds share decisions when there are many: each decision costs a store access of every rank."""


def matching_rounds(count: int) -> tuple[tuple[Pair, ...], ...]:
    """Split all pairs of `count` places into rounds of disjoint pairs, by the circle method.

    One place stands still and the others turn; with an odd count the still one is a ghost, whose partner rests.
    """
    if count < 2:
        return ()
    places = list(range(count)) + ([] if count % 2 == 0 else [-1])
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        couples = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append(tuple(sorted((min(a, b), max(a, b)) for a, b in couples if -1 not in (a, b))))
        places = [places[0], places[-1], *places[1:-1]]
    return tuple(rounds)


def slot_rounds(num_hosts: int, devices_per_host: int) -> tuple[tuple[Pair, ...], ...]:
    """All rounds in slots: pairs of hosts by their first devices, and local pairs of every host at once, in turns.

    In turns, so that a budget that runs out cuts both kinds and leaves neither without a measurement.
    """
    within = tuple(
        tuple(
            (host * devices_per_host + a, host * devices_per_host + b) for host in range(num_hosts) for a, b in couples
        )
        for couples in matching_rounds(devices_per_host)
    )
    between = tuple(
        tuple((a * devices_per_host, b * devices_per_host) for a, b in couples)
        for couples in matching_rounds(num_hosts)
    )
    return tuple(pairs for turn in zip_longest(between, within) for pairs in turn if pairs is not None)


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


@dataclass(frozen=True, kw_only=True)
class LinkResult:
    """What one worker measured as a sender, and what nobody measured."""

    links: tuple[LinkSamples, ...]
    notes: tuple[str, ...]


def measure(options: ProbeOptions, *, rank: int, conductor: Conductor, budget: Budget) -> LinkResult:
    """Time all rounds; every rank calls this, each round begins for all at once."""
    rounds = slot_rounds(len(options.hosts), options.devices_per_host)
    chunk = -(-len(rounds) // MAX_DECISIONS)
    needed = (len(options.hosts) > 1) + (options.devices_per_host > 1)
    found: list[LinkSamples] = []
    for index, pairs in enumerate(rounds):
        if index >= needed and index % chunk == 0 and not conductor.agree(lambda: budget.allows(LINKS_SHARE)):
            note = f"links: {len(rounds) - index} of {len(rounds)} rounds were skipped, the budget was spent"
            return LinkResult(links=tuple(found), notes=(note,))
        align(options.device_kind)
        mine = next((pair for pair in pairs if rank in pair), None)
        if mine is not None:
            found.append(_time_pair(options, mine, rank))
    return LinkResult(links=tuple(found), notes=())


def align(device_kind: str) -> None:
    """Wait until all ranks are here, by the smallest all-reduce."""
    dist.all_reduce(torch.zeros(1, device=device_kind))
    if device_kind == "cuda":
        torch.cuda.synchronize()


def _time_pair(options: ProbeOptions, pair: Pair, rank: int) -> LinkSamples:
    """Measure both directions of a pair; the low end sends first. Returns this end's sending times."""
    first, second = pair
    peer = second if rank == first else first
    device = options.device_kind
    ack = torch.zeros(ACK_BYTES, dtype=torch.uint8, device=device)
    # First contact opens connections, which training pays once and no message pays again.
    _exchange(ack, ack.clone(), peer, sends_first=rank == first)
    found: LinkSamples | None = None
    for sender in pair:
        if rank == sender:
            found = _send_all(options, peer, ack, rank)
        else:
            _answer_all(options, peer, ack)
    assert found is not None
    return found


def _runs(options: ProbeOptions, size: int) -> int:
    """How often one size is sent: a tiny message costs little and tells the latency, so it goes more often."""
    return options.warmups + options.repeats * (TINY_REPEATS if size == ACK_BYTES else 1)


def _sizes(options: ProbeOptions) -> tuple[int, ...]:
    return tuple(dict.fromkeys((ACK_BYTES, *options.sizes_bytes())))


def _send_all(options: ProbeOptions, peer: int, ack: torch.Tensor, rank: int) -> LinkSamples:
    round_trips = []
    for size in _sizes(options):
        message = torch.zeros(size, dtype=torch.uint8, device=options.device_kind)
        times = [_timed_exchange(message, ack, peer) for _ in range(_runs(options, size))]
        round_trips.append(
            Samples(values_s=tuple(times[options.warmups :]), warmup_s=tuple(times[: options.warmups])),
        )
    return LinkSamples(source=rank, target=peer, sizes_bytes=_sizes(options), samples=one_way(round_trips))


def _answer_all(options: ProbeOptions, peer: int, ack: torch.Tensor) -> None:
    for size in _sizes(options):
        message = torch.zeros(size, dtype=torch.uint8, device=options.device_kind)
        for _ in range(_runs(options, size)):
            _exchange(ack, message, peer, sends_first=False)


def _timed_exchange(message: torch.Tensor, ack: torch.Tensor, peer: int) -> float:
    before = time.perf_counter()
    _exchange(message, ack, peer, sends_first=True)
    return time.perf_counter() - before


def _exchange(outgoing: torch.Tensor, incoming: torch.Tensor, peer: int, *, sends_first: bool) -> None:
    """Send one message and receive one, in this order or the other, and wait until the device has done both."""
    send = dist.P2POp(dist.isend, outgoing, peer)
    receive = dist.P2POp(dist.irecv, incoming, peer)
    # batch_isend_irecv uses the world communicator; NCCL's plain send would open one for each pair.
    for operation in (send, receive) if sends_first else (receive, send):
        for work in dist.batch_isend_irecv([operation]):
            work.wait()
    if outgoing.is_cuda:
        torch.cuda.synchronize()
