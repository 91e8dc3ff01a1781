"""All workers measure the links that plans would use, in passes: where hosts are many, or to check cached links."""

# H = hosts.

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipette_launch.facts import Links, files
from pipette_launch.facts.messages.measuring_advice import Advice
from pipette_launch.probe.harness import Budget, Line, Lockstep
from pipette_launch.probe.links.adaptive import MOST_ROUNDS, Adapted, Lines, Measure, adapt
from pipette_launch.probe.links.fits import LinkBook, host_fits
from pipette_launch.probe.links.meter import LinkMeter
from pipette_launch.probe.links.pairs import LINKS_SHARE, direction_s
from pipette_launch.probe.links.sampling import Pair, Round
from pipette_launch.probe.options import LinkSamples, ProbeOptions, WorkerResult

T = TypeVar("T")
STALE = 0.25
"""If more than this part of the cached links that were measured again have changed, none of them is believed."""
STALE_LEAST = 2
"""A single changed link says nothing of the others."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """The result of the passes."""

    linked: WorkerResult
    """What this rank measured as a sender."""
    adapted: Adapted | None
    """What rank 0 knows of all links; None on the others."""
    advice: Advice | None
    """The last advice of the planner, on rank 0; None on the others."""

    def is_stale(self, *, are_few: bool) -> bool:
        """Whether all cached links ought to be measured anew; asked on rank 0.

        The links of few hosts are quickly measured, and only all of them together show which one is slower than its
        peers. So among few hosts one changed link is enough, and also if nothing could be checked.
        """
        if self.adapted is None:
            return False
        changed, measured = len(self.adapted.changed), sum(one.new for one in self.adapted.passes)
        if are_few:
            return changed > 0 or measured == 0
        return changed >= STALE_LEAST and changed > STALE * measured


def go(
    options: ProbeOptions,
    *,
    rank: int,
    lockstep: Lockstep,
    budget: Budget,
    known: Lines,
    is_cached: bool,
    advise: Callable[[Links], Advice],
    patience_s: float,
) -> Passed:
    """Go through the passes; every rank calls this.

    Args:
        options: the order of the warm-up.
        rank: the rank of this worker.
        lockstep: keeps the ranks in step.
        budget: no pass begins when the share of links is spent.
        known: links between hosts so far, on rank 0; the others need none.
        is_cached: `known` is from an earlier warm-up.
        advise: asks, on rank 0, what plans would use.
        patience_s: the longest that an answer may take.

    """
    meter = LinkMeter(
        options=options,
        rank=rank,
        lockstep=lockstep,
        bound_s=direction_s(budget.left_s(LINKS_SHARE), MOST_ROUNDS, options.device_kind),
    )
    heard: list[Advice] = []

    def wanted(links: Links) -> list[Pair]:
        heard.append(advise(links))
        return [(one, other) for one, other in heard[-1].host_pairs]

    def decide(measure: Measure) -> Adapted:
        return adapt(
            len(options.hosts),
            known,
            measure=measure,
            advise=wanted,
            most_rounds=MOST_ROUNDS,
            places=[host.place for host in options.hosts],
            is_cached=is_cached,
            # Cached links are checked once, however little time is left.
            allows=lambda: not heard or budget.allows(LINKS_SHARE),
        )

    sent, adapted = in_step(
        lockstep, meter.measure, lambda links: lines_of(links, options), decide, patience_s=patience_s
    )
    linked = WorkerResult(slot=rank, links=sent, link_rounds=(meter.num_rounds,), notes=notes_of(adapted))
    return Passed(linked=linked, adapted=adapted, advice=heard[-1] if heard else None)


def in_step(
    lockstep: Lockstep,
    meter: Callable[[Sequence[Round]], Sequence[LinkSamples]],
    merge: Callable[[Sequence[LinkSamples]], Lines],
    decide: Callable[[Measure], T],
    *,
    patience_s: float,
) -> tuple[tuple[LinkSamples, ...], T | None]:
    """Let rank 0 choose rounds that all ranks measure; every rank calls this.

    Args:
        lockstep: keeps the ranks in step.
        meter: measures rounds of pairs of hosts on this rank, as all ranks do at the same time.
        merge: turns what all slots sent into links between hosts.
        decide: runs on rank 0 alone, and may call the `Measure` that it gets as often as it likes.
        patience_s: the longest that rank 0 may take between two of these calls.

    Returns:
        What this rank sent, and on rank 0 what `decide` returned.

    """
    mine: list[LinkSamples] = []

    def take(rounds: Sequence[Round]) -> list[str]:
        taken = meter(rounds)
        mine.extend(taken)
        return lockstep.gather(json.dumps([files.to_plain(link) for link in taken]), extra_s=patience_s) or []

    def measure(rounds: Sequence[Round]) -> Lines:
        lockstep.broadcast(json.dumps(rounds))
        links: list[LinkSamples] = []
        for rank, text in enumerate(take(rounds)):
            links += files.from_plain(tuple[LinkSamples, ...], json.loads(text), f"links of rank {rank}")
        return merge(links)

    if lockstep.rank == 0:
        found = decide(measure)
        lockstep.broadcast("[]")
        return tuple(mine), found
    while rounds := json.loads(lockstep.broadcast("", extra_s=patience_s)):
        take([tuple((one, other) for one, other in pairs) for pairs in rounds])
    return tuple(mine), None


def lines_of(links: Sequence[LinkSamples], options: ProbeOptions) -> dict[Pair, Line]:
    """The line of each pair of hosts, by the samples of all slots."""
    fits = host_fits(LinkBook.of(links).best(), options.devices_per_host)
    return {pair: fit.line for pair, fit in fits.items()}


def notes_of(adapted: Adapted | None) -> tuple[str, ...]:
    """Describe the passes in a sentence; empty where there were none."""
    if adapted is None or not adapted.passes:
        return ()
    passes = [one for one in adapted.passes if not one.is_scouting]
    measured, rounds = (sum(getattr(one, what) for one in passes) for what in ("new", "rounds"))
    scouting = adapted.rounds - rounds
    before = f", after {scouting} to find out which hosts are near to each other" if scouting else ""
    end = "" if adapted.is_settled else "; the rounds were spent before the plans stopped asking for more"
    changed = f", {len(adapted.changed)} of them not as they were" if adapted.changed else ""
    note = (
        f"links: {measured} pairs of hosts that plans would use were measured in {rounds} rounds{before}{changed}{end}"
    )
    return (note,)
