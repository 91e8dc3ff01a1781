"""Links that plans would use, measured in passes by all workers together: of many hosts, and to check earlier ones."""

# H = hosts.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipette_launch.facts import Links
from pipette_launch.facts.messages.measuring_advice import Advice
from pipette_launch.probe.harness import Budget, Conductor, Line
from pipette_launch.probe.links.adaptive import MOST_ROUNDS, Adapted, Lines, Measure, adapt, in_step
from pipette_launch.probe.links.fits import LinkBook, host_fits
from pipette_launch.probe.links.pairs import LINKS_SHARE, LinkMeter, LinkResult, direction_s
from pipette_launch.probe.links.sampling import Pair
from pipette_launch.probe.options import LinkSamples, ProbeOptions

STALE = 0.25
"""If more than this part of the earlier links that were measured again have changed, none of them is believed."""
STALE_LEAST = 2
"""A single changed link is one link's matter."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """What came of the passes."""

    linked: LinkResult
    """What this rank measured as a sender."""
    adapted: Adapted | None
    """What rank 0 knows of all links; None on the others."""
    advice: Advice | None
    """The last that rank 0 heard; None on the others."""

    def is_stale(self, *, are_few: bool) -> bool:
        """Whether earlier links had better be measured anew, all of them; asked on rank 0.

        Of few hosts all links are quickly measured, and only then a slow one can be told from its peers: there a single
        changed link is enough, and so is that nothing could be checked.
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
    conductor: Conductor,
    budget: Budget,
    known: Lines,
    is_cached: bool,
    advise: Callable[[Links], Advice],
    patience_s: float,
) -> Passed:
    """Go through the passes; every rank calls this.

    Args:
        options: the warm-up's orders.
        rank: this one.
        conductor: keeps the ranks in step.
        budget: no pass begins when the links' share of it is spent.
        known: links between hosts so far, on rank 0; the others need none.
        is_cached: they are from an earlier warm-up.
        advise: asks, on rank 0, what plans would use.
        patience_s: the longest that an answer may take.

    """
    meter = LinkMeter(
        options=options,
        rank=rank,
        conductor=conductor,
        bound_s=direction_s(budget.left_s(LINKS_SHARE), MOST_ROUNDS, options.device_kind),
    )
    heard: list[Advice] = []

    def wanted(links: Links) -> list[Pair]:
        heard.append(advise(links))
        return [(one, other) for one, other in heard[-1].host_pairs]

    def course(measure: Measure) -> Adapted:
        return adapt(
            len(options.hosts),
            known,
            measure=measure,
            advise=wanted,
            most_rounds=MOST_ROUNDS,
            places=[host.place for host in options.hosts],
            is_cached=is_cached,
            # What is believed is looked at once, however late it is.
            allows=lambda: not heard or budget.allows(LINKS_SHARE),
        )

    stepped = in_step(conductor, meter.measure, lambda links: lines_of(links, options), course, patience_s=patience_s)
    linked = LinkResult(links=stepped.links, rounds=meter.num_rounds, rounds_again=0, notes=notes_of(stepped.found))
    return Passed(linked=linked, adapted=stepped.found, advice=heard[-1] if heard else None)


def lines_of(links: Sequence[LinkSamples], options: ProbeOptions) -> dict[Pair, Line]:
    """What everyone's samples say of the pairs of hosts."""
    fits = host_fits(LinkBook.of(links).best(), options.devices_per_host)
    return {pair: fit.line for pair, fit in fits.items()}


def notes_of(adapted: Adapted | None) -> tuple[str, ...]:
    """What the passes did, in a sentence; nothing where there were none."""
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
