"""Measure the links that plans would use, plan again, and so on: about 30 rounds, however many hosts there are. Pure.

Links that nobody measured are estimated (`estimate`). At first planners are shown them as good as they may well be, so
that a plan tries what looks promising, and what it tried is known afterwards. The last pass shows what is likely, so
that the plan that is made in the end rests on links that were measured.
"""

# H = hosts, row sends to column.

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from pipette_launch.facts import Links, files
from pipette_launch.probe.harness import Conductor, Line
from pipette_launch.probe.links.estimate import Estimate, estimate
from pipette_launch.probe.links.sampling import Pair, Place, Round, nested_groups, rounds_of
from pipette_launch.probe.links.switches import scouting_round
from pipette_launch.probe.options import FULL_HOSTS, LinkSamples

T = TypeVar("T")
Lines = Mapping[Pair, Line]
Measure = Callable[[Sequence[Round]], Lines]
"""Measures rounds of pairs of hosts; returns both ways of each pair that could be measured."""
Advise = Callable[[Links], Sequence[Pair]]
"""Plans with such links, and says which pairs of hosts the plans would use, most important first."""
MOST_ROUNDS = 30
"""Blind ones included."""
PASS_ROUNDS = 5
"""A ring and a path through every host are four links of it, which take so many rounds at most."""
LEAST_ROUNDS = 2
"""With fewer left no pass begins: one round is the proof's."""
SCOUTING = 0.8
"""Of the rounds of all passes, at most, where switches are not known."""
SCOUTS = 0.05
"""Scouting ends when fewer of the hosts than this have a pair that would tell anything."""
BLIND_SCOUTS = 4
"""As long as no tiers are seen, scouting goes so many rounds on blindly."""
CHANGED = 0.10
"""A cached link that is off by more than this has changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One turn of planning and measuring, or one round of scouting."""

    asked: int
    """Pairs that the plans would use, or that tell who is near to whom."""
    new: int
    """Of them measured now: the others were known, or did not fit into the rounds."""
    rounds: int
    is_scouting: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapted:
    """What is known of all links after the passes."""

    estimate: Estimate
    lines: Lines
    """All that was measured, now or before, both ways."""
    passes: tuple[Pass, ...]
    changed: tuple[Pair, ...]
    """Pairs from an earlier warm-up that are no longer what they were, most important first."""
    is_settled: bool
    """The plans use no link any more that was not measured in this warm-up."""

    @property
    def rounds(self) -> int:
        """Of all passes."""
        return sum(one.rounds for one in self.passes)


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
        known: what was measured before; not empty.
        measure: see `Measure`.
        advise: see `Advise`.
        most_rounds: together with those that `known` took, unless it is cached.
        places: the switches above each host; where they are not known, rounds go into finding out who is near to whom.
        is_cached: `known` is from an earlier warm-up. It is believed until measured again, and nothing is tried for
            the mere hope of it.
        allows: whether the budget has room for another pass.
        seed: of the choice among pairs that tell as much.

    """
    course, left = _Course(known, is_cached=is_cached), most_rounds
    if not is_cached:
        left -= _rounds_behind(known)
        if num_hosts > FULL_HOSTS and len(nested_groups(num_hosts, places)) == 1:
            left -= course.scout(num_hosts, measure, most=round(SCOUTING * left), allows=allows, seed=seed)
    found = estimate(num_hosts, course.lines, places)
    hopes, is_settled = not is_cached, False
    while left >= LEAST_ROUNDS and not is_settled and allows():
        # The last pass confirms, the others explore.
        hopes = hopes and left > PASS_ROUNDS
        asked = advise(found.hopeful if hopes else found.links)
        rounds = course.go(asked, measure, most=min(PASS_ROUNDS, left), hope=None if is_cached else found.hopeful)
        left -= rounds
        if rounds:
            found = estimate(num_hosts, course.lines, places)
        else:
            hopes, is_settled = False, not hopes
    return Adapted(
        estimate=found,
        lines=course.lines,
        passes=tuple(course.passes),
        changed=tuple(course.changed),
        is_settled=is_settled,
    )


class _Course:
    """What is known by now, and what was done for it."""

    def __init__(self, known: Lines, *, is_cached: bool) -> None:
        self.lines = dict(known)
        self.passes: list[Pass] = []
        self.changed: list[Pair] = []
        self._done: set[Pair] = set() if is_cached else {_ordered(pair) for pair in known}
        """Measured in this warm-up, or tried in vain: not to be asked for again."""

    def scout(self, num_hosts: int, measure: Measure, *, most: int, allows: Callable[[], bool], seed: int) -> int:
        """Find out who is near to whom, round by round, until few hosts can still learn; returns how many rounds."""
        rng = np.random.default_rng(seed)
        for taken in range(most):
            pairs = scouting_round(num_hosts, self.lines, rng)
            if not pairs and taken < BLIND_SCOUTS:
                pairs = self._blind(num_hosts, rng)
            if 2 * len(pairs) < SCOUTS * num_hosts or not allows():
                return taken
            is_sparse = 4 * len(pairs) < num_hosts
            hope = estimate(num_hosts, self.lines).hopeful if is_sparse else None
            self.go(pairs, measure, most=1, hope=hope, is_scouting=True)
        return most

    def _blind(self, num_hosts: int, rng: np.random.Generator) -> Round:
        """Any pairs that were not measured yet."""
        order = rng.permutation(num_hosts).tolist()
        pairs = (_ordered(pair) for pair in zip(order[::2], order[1::2], strict=False))
        return tuple(sorted(pair for pair in pairs if pair not in self._done))

    def go(
        self, asked: Sequence[Pair], measure: Measure, *, most: int, hope: Links | None, is_scouting: bool = False
    ) -> int:
        """Measure what is new among the pairs asked for; returns in how many rounds.

        Hosts that would be idle in a round measure the best that they may hope for, as it costs nothing.
        """
        pairs = list(dict.fromkeys(_ordered(pair) for pair in asked))
        rounds = rounds_of((pair for pair in pairs if pair not in self._done), most=most)
        self.passes.append(
            Pass(asked=len(pairs), new=sum(map(len, rounds)), rounds=len(rounds), is_scouting=is_scouting)
        )
        if rounds:
            rounds = rounds if hope is None else _filled(rounds, hope, self._done)
            measured = measure(rounds)
            now = {pair for one in rounds for pair in one}
            self.changed += [pair for pair in pairs if pair in now and self._is_changed(pair, measured)]
            self.lines.update(measured)
            self._done |= now
        return len(rounds)

    def _is_changed(self, pair: Pair, measured: Lines) -> bool:
        """Whether either way was known, and is another now."""
        return any(
            way in self.lines
            and way in measured
            and abs(self.lines[way].seconds_per_byte / measured[way].seconds_per_byte - 1) > CHANGED
            for way in (pair, pair[::-1])
        )


def _rounds_behind(known: Lines) -> int:
    """In how many rounds so much could be measured: as often as the busiest host was busy."""
    return max(Counter(host for pair in {_ordered(pair) for pair in known} for host in pair).values(), default=0)


def _filled(rounds: Sequence[Round], hope: Links, done: Collection[Pair]) -> tuple[Round, ...]:
    """Give idle hosts of each round the best partners that they have not been measured with, by their hopes."""
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
                more.append(_ordered((host, partner)))
                idle_H[[host, partner]] = False
                rates_HH[host, partner] = rates_HH[partner, host] = 0.0
        filled.append(tuple(sorted(more)))
    return tuple(filled)


def _ordered(pair: Pair) -> Pair:
    return (pair[0], pair[1]) if pair[0] < pair[1] else (pair[1], pair[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class InStep(Generic[T]):
    """What came of rounds that rank 0 chose and all ranks measured."""

    links: tuple[LinkSamples, ...]
    """What this rank sent."""
    found: T | None
    """What rank 0 made of it; None on the others."""


def in_step(
    conductor: Conductor,
    meter: Callable[[Sequence[Round]], Sequence[LinkSamples]],
    merge: Callable[[Sequence[LinkSamples]], Lines],
    course: Callable[[Measure], T],
    *,
    patience_s: float,
) -> InStep[T]:
    """Let rank 0 go a course whose rounds all ranks measure with it; every rank calls this.

    Args:
        conductor: keeps the ranks in step.
        meter: measures rounds of pairs of hosts on this rank, as all ranks do at the same time.
        merge: makes links between hosts of what all slots sent.
        course: rank 0 alone goes it: it may call the `Measure` that it gets as often as it likes.
        patience_s: the longest that rank 0 may take between two of these calls.

    """
    mine: list[LinkSamples] = []

    def take(rounds: Sequence[Round]) -> list[str] | None:
        taken = meter(rounds)
        mine.extend(taken)
        return conductor.gather(json.dumps([files.to_plain(link) for link in taken]), extra_s=patience_s)

    def measure(rounds: Sequence[Round]) -> Lines:
        conductor.tell(json.dumps(rounds))
        texts = take(rounds) or []
        return merge([link for rank, text in enumerate(texts) for link in _read(text, rank)])

    found = None
    if conductor.rank == 0:
        found = course(measure)
        conductor.tell("[]")
    else:
        while rounds := json.loads(conductor.tell("", extra_s=patience_s)):
            take([tuple((one, other) for one, other in pairs) for pairs in rounds])
    return InStep(links=tuple(mine), found=found)


def _read(text: str, rank: int) -> tuple[LinkSamples, ...]:
    links: tuple[LinkSamples, ...] = files.from_plain(
        tuple[LinkSamples, ...], json.loads(text), f"links of rank {rank}"
    )
    return links
