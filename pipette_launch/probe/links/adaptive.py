"""Measure the links that plans would use, plan again, and so on: about 30 rounds, however many hosts there are.

Links that were not measured are estimated (`estimate`). The first passes show the planner hopeful estimates, so that a
plan tries links that may be fast, and they are known afterwards. The last pass shows likely estimates, so that the
final plan rests on links that were measured.
"""

# H = hosts, row sends to column.

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pipette_launch.facts import Links, files
from pipette_launch.probe.harness import Line, Lockstep
from pipette_launch.probe.links.estimate import Estimate, estimate
from pipette_launch.probe.links.fits import LinkBook, host_fits
from pipette_launch.probe.links.sampling import Pair, Place, Round, nested_groups, ordered, rounds_of
from pipette_launch.probe.links.switches import scouting_round
from pipette_launch.probe.options import FULL_HOSTS, LinkSamples, ProbeOptions
from pipette_launch.text import plural

T = TypeVar("T")
Lines = Mapping[Pair, Line]
Measure = Callable[[Sequence[Round]], Lines]
"""Measures rounds of pairs of hosts; returns both directions of each pair that could be measured."""
Advise = Callable[[Links], Sequence[Pair]]
"""Plans with such links, and returns the pairs of hosts that the plans would use, most important first."""
MOST_ROUNDS = 30
"""Of all passes together with the blind rounds before them."""
PASS_ROUNDS = 5
"""A ring and a path through every host are four links of each host, which take so many rounds at most."""
LEAST_ROUNDS = 2
"""With fewer rounds left no pass begins, as `rounds_of` may need one more than a host has pairs."""
SCOUTING_SHARE = 0.8
"""Largest part of the rounds that may go into finding out which hosts are near, where switches are not known."""
LEAST_SCOUTS = 0.05
"""Scouting ends when a smaller part of the hosts than this has a pair that would tell anything."""
BLIND_SCOUTING_ROUNDS = 4
"""So many scouting rounds measure random pairs while no groups of hosts are seen."""
CHANGED = 0.10
"""A cached link whose time for a byte is off by more than this has changed."""
STALE = 0.25
"""If more than this part of the cached links that were measured again have changed, none of them is believed."""
STALE_LEAST = 2
"""A single changed link says nothing of the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One pass of planning and measuring, or one round of scouting."""

    asked: int
    """Number of pairs that the plans would use, or that tell which hosts are near to each other."""
    new: int
    """Number of those that were measured now; the others were known, or did not fit into the rounds."""
    rounds: int
    is_scouting: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapted:
    """What is known of all links after the passes."""

    estimate: Estimate
    lines: Lines
    """All that was measured, now or before, in both directions."""
    passes: tuple[Pass, ...]
    changed: tuple[Pair, ...]
    """Pairs from an earlier warm-up whose links have changed, most important first."""
    is_settled: bool
    """The plans use only links that were measured in this warm-up."""

    @property
    def rounds(self) -> int:
        """Number of rounds of all passes."""
        return sum(one.rounds for one in self.passes)

    def is_stale(self, *, are_few: bool) -> bool:
        """Whether all cached links ought to be measured anew.

        The links of few hosts are quickly measured, and only all of them together show which one is slower than its
        peers. So among few hosts one changed link is enough, and also if nothing could be checked.
        """
        changed, measured = len(self.changed), sum(one.new for one in self.passes)
        if are_few:
            return changed > 0 or measured == 0
        return changed >= STALE_LEAST and changed > STALE * measured

    def words(self) -> str:
        """Describe the passes in a sentence."""
        passes = [one for one in self.passes if not one.is_scouting]
        measured, rounds = sum(one.new for one in passes), sum(one.rounds for one in passes)
        scouting = self.rounds - rounds
        before = f", after {scouting} to find out which hosts are near to each other" if scouting else ""
        end = "" if self.is_settled else "; the rounds were spent before the plans stopped asking for more"
        changed = f", {len(self.changed)} of them changed since" if self.changed else ""
        return (
            f"links: {measured} {plural('pair', measured)} of hosts that plans would use, measured in "
            f"{rounds} {plural('round', rounds)}"
            f"{before}{changed}{end}"
        )


def adapt(
    num_hosts: int,
    known: Lines,
    *,
    measure: Measure,
    advise: Advise,
    most_rounds: int,
    places: Sequence[Place] = (),
    is_cached: bool = False,
    allows: Callable[[], bool] = lambda: True,
    seed: int = 0,
) -> Adapted:
    """Measure what plans would use until they ask for nothing new, or until the rounds or the budget are spent.

    Args:
        num_hosts: H.
        known: links that were measured before, in both directions; not empty.
        measure: see `Measure`.
        advise: see `Advise`.
        most_rounds: the largest number of rounds, together with those that `known` took, unless it is cached.
        places: the switches above each host; where they are not known, rounds go into finding out who is near to whom.
        is_cached: `known` is from an earlier warm-up. It is believed until measured again, and links are not shown
            as hopeful.
        allows: whether the budget has room for another pass.
        seed: of the random choice among pairs that tell as much.

    """
    survey, left = _Survey(known, is_cached=is_cached), most_rounds
    if not is_cached:
        # As many rounds as the busiest host has pairs.
        left -= max(Counter(host for pair in {ordered(pair) for pair in known} for host in pair).values(), default=0)
        if num_hosts > FULL_HOSTS and len(nested_groups(num_hosts, places)) == 1:
            left -= survey.scout(num_hosts, measure, most=round(SCOUTING_SHARE * left), allows=allows, seed=seed)
    found = estimate(num_hosts, survey.lines, places)
    hopes, is_settled = not is_cached, False
    while left >= LEAST_ROUNDS and not is_settled and allows():
        # The last pass confirms links that the plan uses, the others explore.
        hopes = hopes and left > PASS_ROUNDS
        asked = advise(found.hopeful if hopes else found.links)
        rounds = survey.go(asked, measure, most=min(PASS_ROUNDS, left), hope=None if is_cached else found.hopeful)
        left -= rounds
        if rounds:
            found = estimate(num_hosts, survey.lines, places)
        else:
            hopes, is_settled = False, not hopes
    return Adapted(
        estimate=found,
        lines=survey.lines,
        passes=tuple(survey.passes),
        changed=tuple(survey.changed),
        is_settled=is_settled,
    )


class _Survey:
    """The links that are known so far, and the passes that measured them."""

    def __init__(self, known: Lines, *, is_cached: bool) -> None:
        self.lines = dict(known)
        self.passes: list[Pass] = []
        self.changed: list[Pair] = []
        self._done: set[Pair] = set() if is_cached else {ordered(pair) for pair in known}
        """Pairs that were measured in this warm-up, or could not be: they are not measured again."""

    def scout(self, num_hosts: int, measure: Measure, *, most: int, allows: Callable[[], bool], seed: int) -> int:
        """Find out which hosts are near to each other, in at most so many rounds, until few pairs would tell more.

        Returns the number of rounds; `allows` tells whether the budget has room for another one.
        """
        rng = np.random.default_rng(seed)
        for taken in range(most):
            pairs = scouting_round(num_hosts, self.lines, rng)
            if not pairs and taken < BLIND_SCOUTING_ROUNDS:
                order = rng.permutation(num_hosts).tolist()
                drawn = (ordered(pair) for pair in zip(order[::2], order[1::2], strict=False))
                pairs = tuple(sorted(pair for pair in drawn if pair not in self._done))
            if 2 * len(pairs) < LEAST_SCOUTS * num_hosts or not allows():
                return taken
            is_sparse = 4 * len(pairs) < num_hosts
            hope = estimate(num_hosts, self.lines).hopeful if is_sparse else None
            self.go(pairs, measure, most=1, hope=hope, is_scouting=True)
        return most

    def go(
        self, asked: Sequence[Pair], measure: Measure, *, most: int, hope: Links | None, is_scouting: bool = False
    ) -> int:
        """Measure what is new among the pairs asked for, the most important first; returns the number of rounds.

        Hosts that would be idle in a round measure the partner that may be the fastest by the links `hope`, as that
        costs nothing; None = they stay idle.
        """
        pairs = list(dict.fromkeys(ordered(pair) for pair in asked))
        rounds = rounds_of((pair for pair in pairs if pair not in self._done), most=most)
        self.passes.append(
            Pass(asked=len(pairs), new=sum(map(len, rounds)), rounds=len(rounds), is_scouting=is_scouting)
        )
        if rounds:
            rounds = rounds if hope is None else _filled(rounds, hope, self._done)
            measured = measure(rounds)
            now = {pair for one in rounds for pair in one}
            # The time of either direction was known and differs now.
            self.changed += [
                pair
                for pair in pairs
                if pair in now
                and any(
                    abs(self.lines[way].seconds_per_byte / measured[way].seconds_per_byte - 1) > CHANGED
                    for way in (pair, pair[::-1])
                    if way in self.lines and way in measured
                )
            ]
            self.lines.update(measured)
            self._done |= now
        return len(rounds)


def _filled(rounds: Sequence[Round], hope: Links, done: Collection[Pair]) -> tuple[Round, ...]:
    """Give idle hosts of each round the fastest partners, by `hope`, that they have not been measured with."""
    rates_HH = np.minimum(hope.bandwidth_bytes_per_s, hope.bandwidth_bytes_per_s.T)
    taken = [*done, *(pair for one in rounds for pair in one)]
    if taken:
        one_P, other_P = np.array(taken, dtype=np.int64).T
        rates_HH[one_P, other_P] = rates_HH[other_P, one_P] = 0.0
    filled = []
    for pairs in rounds:
        more = list(pairs)
        idle_H = np.ones(len(rates_HH), dtype=bool)
        idle_H[[host for pair in pairs for host in pair]] = False
        for host in np.flatnonzero(idle_H).tolist():
            rates_H = np.where(idle_H, rates_HH[host], 0.0)
            partner = int(rates_H.argmax())
            if idle_H[host] and rates_H[partner] > 0:
                more.append(ordered((host, partner)))
                idle_H[[host, partner]] = False
                rates_HH[host, partner] = rates_HH[partner, host] = 0.0
        filled.append(tuple(sorted(more)))
    return tuple(filled)


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
        return lockstep.gather(json.dumps([files.to_plain(link) for link in taken]), left_s=patience_s) or []

    def measure(rounds: Sequence[Round]) -> Lines:
        lockstep.broadcast(json.dumps(rounds))
        links: list[LinkSamples] = []
        for rank, text in enumerate(take(rounds)):
            source = f"links of rank {rank}"
            links += files.from_plain(tuple[LinkSamples, ...], files.parse(text, source), source)
        return merge(links)

    if lockstep.rank == 0:
        found = decide(measure)
        lockstep.broadcast("[]")
        return tuple(mine), found
    while rounds := json.loads(lockstep.broadcast("", left_s=patience_s)):
        take([tuple((one, other) for one, other in pairs) for pairs in rounds])
    return tuple(mine), None


def lines_of(links: Sequence[LinkSamples], options: ProbeOptions) -> dict[Pair, Line]:
    """The line of each pair of hosts, by the samples of all slots."""
    fits = host_fits(LinkBook.of(links).best(), options.devices_per_host)
    return {pair: fit.line for pair, fit in fits.items()}
