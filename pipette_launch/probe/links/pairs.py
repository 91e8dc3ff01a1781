"""Latency and bandwidth of every pair of hosts, or of a sample of them, and of local devices, both ways.

Pairs are measured in rounds of disjoint pairs (`sampling`). What looks slow is measured a second time.
"""

# H = hosts, D = devices of one host, S = slots.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pipette_launch.probe.harness import Budget, Lockstep
from pipette_launch.probe.health.suspects import suspect_links
from pipette_launch.probe.links.fits import fit_link
from pipette_launch.probe.links.meter import LinkMeter
from pipette_launch.probe.links.sampling import Round, all_pairs, rounds_of
from pipette_launch.probe.options import LinkSamples, ProbeOptions, WorkerResult

LINKS_SHARE = 0.7
"""Links may use the budget up to this part of it; the rest belongs to collectives."""
MAX_DECISIONS = 32
"""Rank 0 decides at most so often whether there is time left: each decision is a store access of every rank."""
LEAST_DIRECTION_S = {"cpu": 0.1, "cuda": 0.02}
MOST_DIRECTION_S = 1.0
AGREE = 1.25
"""Two measurements agree if the later is faster by no more than this factor."""
MAX_MEASUREMENTS = 4
"""The first links inside hosts are measured so often at most."""


def direction_s(left_s: float, num_rounds: int, device_kind: str) -> float:
    """Seconds that one direction of a pair may take, if so many rounds are to fit into what is left."""
    fair_s = left_s / (2 * max(num_rounds, 1))
    return min(max(fair_s, LEAST_DIRECTION_S[device_kind]), MOST_DIRECTION_S)


def measure(
    options: ProbeOptions,
    *,
    lockstep: Lockstep,
    budget: Budget,
    between: Sequence[Round] | None = None,
) -> WorkerResult:
    """Time pairs of local devices and pairs of hosts, and what looks slow once more; every rank calls this.

    The result has what this rank measured as a sender, and notes on what could not be measured.

    Args:
        options: the order of the warm-up.
        lockstep: keeps the ranks in step.
        budget: at least one round of each kind is measured, and no further one once the share of links is spent.
        between: the rounds between hosts; None = all pairs of hosts.

    """
    between = all_pairs(range(len(options.hosts))) if between is None else between
    within = all_pairs(range(options.devices_per_host))
    total = len(between) + len(within)
    meter = LinkMeter(
        options=options,
        lockstep=lockstep,
        bound_s=direction_s(budget.left_s(LINKS_SHARE), total, options.device_kind),
    )
    rank = lockstep.rank
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
            notes = (f"links: {total - done} of {total} rounds were skipped, the budget was spent",)
            break
        if is_between:
            found += meter.measure([pairs], first=number, of=len(between))
            rounds += 1
        elif number == 1 and options.device_kind == "cpu":
            found += settled(partial(meter.measure, [pairs], of=len(within), within=True), meter.largest, has_time)
        else:
            found += meter.measure([pairs], first=number, of=len(within), within=True)
    else:
        again = suspect_rounds(options, rank, found)
        if again and not has_time():
            pairs_left = sum(map(len, again))
            notes = (f"links: {pairs_left} suspect pairs of hosts were not measured again, the budget was spent",)
            again = ()
    found += meter.measure(again)
    return WorkerResult(
        slot=rank, links=tuple(found), link_rounds=(rounds,), link_rounds_again=(len(again),), notes=notes
    )


def in_turns(between: Sequence[Round], within: Sequence[Round]) -> Iterator[tuple[bool, int, Round]]:
    """Alternate rounds between hosts and within them: (whether between, its number from 1, its pairs).

    A budget that runs out cuts both kinds, and leaves neither without a measurement.
    """
    for number, (outer, inner) in enumerate(zip_longest(between, within), start=1):
        if outer is not None:
            yield True, number, outer
        if inner is not None:
            yield False, number, inner


def settled(
    measure: Callable[[], tuple[LinkSamples, ...]],
    largest: Callable[[float], float],
    has_time: Callable[[], bool],
) -> tuple[LinkSamples, ...]:
    """Measure links until two measurements agree, as the first may be slow.

    On a virtual machine that had been idle for a minute the first large messages inside hosts took two to four times as
    long as a few seconds later, all of a round (5 MB: 39 to 113 MB/s, later 140 to 330). The reason is not known.

    Args:
        measure: measures the same links each time.
        largest: returns the largest of all ranks' numbers; all ranks call it at the same time.
        has_time: whether to measure again; the same answer on every rank.

    Returns:
        The fastest measurement of each link: a disturbance only slows a link down, so the last need not be the best.

    """

    def seconds_per_byte(link: LinkSamples) -> float:
        # Of the largest message, whose size depends on the time that there was.
        return link.samples[-1].median_s / link.sizes_bytes[-1]

    found = [measure()]
    while len(found) < MAX_MEASUREMENTS and has_time():
        found.append(measure())
        pairs = zip(found[-2], found[-1], strict=True)
        if largest(max([1.0, *(seconds_per_byte(one) / seconds_per_byte(two) for one, two in pairs)])) <= AGREE:
            break
    return tuple(min(links, key=seconds_per_byte) for links in zip(*found, strict=True))


def suspect_rounds(options: ProbeOptions, rank: int, links: Sequence[LinkSamples]) -> tuple[Round, ...]:
    """Pairs of hosts that look slower than the other links explain, in rounds; the same answer on every rank."""
    if len(options.hosts) < 2:
        return ()
    return rounds_of(suspect_links(shared_bandwidth_HH(options, rank, links)))


def shared_bandwidth_HH(options: ProbeOptions, rank: int, links: Sequence[LinkSamples]) -> NDArray[np.float64]:
    """Bytes/s between all hosts, as all ranks measured them; nan = not measured. The same numbers on every rank."""
    num_hosts, size = len(options.hosts), options.devices_per_host
    everyone = torch.zeros((options.num_slots, num_hosts), dtype=torch.float64)
    for link in links:
        if link.target // size != rank // size:
            everyone[rank, link.target // size] = fit_link(link).hosts.bytes_per_s
    # Each rank fills its own row, and the others have zeros there, so the sum gathers all rows.
    shared = everyone.to(options.device_kind)
    dist.all_reduce(shared)
    # Rails of a pair that were measured together have the same rate.
    rates_HDH = shared.cpu().numpy().reshape(num_hosts, size, num_hosts)
    rates_HH: NDArray[np.float64] = rates_HDH.max(axis=1)
    rates_HH[rates_HH == 0] = np.nan
    return rates_HH
