"""All workers measure the links that plans would use, in passes: where hosts are many, or to check cached links."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from pipette_launch.facts import files
from pipette_launch.probe.harness import Line, Lockstep
from pipette_launch.probe.links.adaptive import Adapted, Lines, Measure
from pipette_launch.probe.links.fits import LinkBook, host_fits
from pipette_launch.probe.links.sampling import Pair, Round
from pipette_launch.probe.options import LinkSamples, ProbeOptions

T = TypeVar("T")
STALE = 0.25
"""If more than this part of the cached links that were measured again have changed, none of them is believed."""
STALE_LEAST = 2
"""A single changed link says nothing of the others."""


def is_stale(adapted: Adapted | None, *, are_few: bool) -> bool:
    """Whether all cached links ought to be measured anew, by the passes that rank 0 went through.

    The links of few hosts are quickly measured, and only all of them together show which one is slower than its peers.
    So among few hosts one changed link is enough, and also if nothing could be checked.
    """
    if adapted is None:
        return False
    changed, measured = len(adapted.changed), sum(one.new for one in adapted.passes)
    if are_few:
        return changed > 0 or measured == 0
    return changed >= STALE_LEAST and changed > STALE * measured


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
