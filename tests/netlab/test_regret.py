"""Where a choice stands among all that could be run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from benchmarks.netlab.suite import regret
from benchmarks.netlab.suite.contenders import Contender
from benchmarks.netlab.suite.regret import FIELDS, SKIP, Found, Meter, Tried
from benchmarks.netlab.system import LabError
from pipette_launch.facts import Layout


def contender(pp: int, placement: tuple[int, ...] = (0, 1)) -> Contender:
    """Make one of two ranks that nobody starts."""
    layout = Layout(pp=pp, dp=2 // pp)
    return Contender(names=("",), layout=layout, placement=placement, words=("train",), predicted_s=1.0)


def tried(*step_s: float) -> Tried:
    """Make one with these steps."""
    return Tried(contender(2), list(step_s))


@dataclass
class FakeCase:
    """Stands for a job on a measured cluster of two hosts."""

    asked: list[tuple[int, ...]] = field(default_factory=list)

    def contender(self, name: str, layout: Layout, placement: tuple[int, ...]) -> Contender:
        """Remember what is asked for."""
        self.asked.append(placement)
        return contender(layout.pp, placement)


def test_regret_is_against_the_quickest_that_ran() -> None:
    """A choice of 1.2 s beside one of 1 s and one of 2 s is second, with a regret of 20 %."""
    choice, best, slow = tried(1.3, 1.2, 1.1), tried(1.0), tried(2.0)
    found = Found(name="", of=9, tried=(best, choice, slow), failed=(), choice=choice, default=slow, stolen=0.0)

    assert (pytest.approx(0.2), 2) == (found.regret, found.rank)


def test_only_the_final_rounds_count() -> None:
    """The best is named by looks before them; one that was quick by luck, or that was not in them, does no harm."""
    lucky, choice, other = tried(0.5), tried(1.3), tried(0.4)
    lucky.final_s, choice.final_s = [1.2, 1.2], [1.0, 1.8, 1.5]
    found = Found(name="", of=9, tried=(other, choice, lucky), failed=(), choice=choice, default=lucky, stolen=0.0)

    assert (lucky, pytest.approx(0.25)) == (found.best, found.regret)


def test_orders_that_are_alike_run_once() -> None:
    """Two replicas may change places, two stages may not; warm-up iterations do not count; a repeat adds steps."""
    case = FakeCase()
    meter = Meter(case, 1, lambda words, placement: [9.0] * SKIP + [1.0, 2.0, 3.0])
    for layout in (Layout(dp=2), Layout(pp=2)):
        for order in ((0, 1), (1, 0), (0, 1)):
            one = meter.tried(layout, order)
    meter.again(one)
    meter.again(one, final=True)

    assert [(0, 1), (0, 1), (1, 0)] == case.asked
    assert [1.0, 2.0, 3.0] * 2 == one.step_s
    assert [1.0, 2.0, 3.0] == one.final_s
    assert 2.0 == one.measured_s


def test_what_fails_is_kept_apart() -> None:
    """A layout that cannot be run has no time, and keeps the reason."""

    def fail(words: object, placement: object) -> list[float]:
        raise LabError("out of memory")

    meter = Meter(FakeCase(), 1, fail)
    meter.tried(Layout(pp=2), (0, 1))

    assert ([], ["out of memory"]) == (meter.done(), [one.failure for one in meter.all()])


def test_slots_share_their_hosts_fence() -> None:
    """Two slots of a host have together what its one slot had."""
    cores = {(made := one.made()).hosts[0].slots * (made.cores_per_slot or 0.0) for one in FIELDS}

    assert len(cores) == 1
    assert next(iter(cores)) > 0


def test_the_most_promising_run_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Best predictions first, then the others as chance has them; what has no prediction is one of those."""

    @dataclass
    class Priced:
        """Predicts by the order of hosts."""

        def contender(self, name: str, layout: Layout, placement: tuple[int, ...]) -> Contender:
            """Nothing for the first order of all."""
            seconds = None if placement == (0, 1) else float(sum(placement))
            return replace(contender(layout.pp, placement), predicted_s=seconds)

    monkeypatch.setattr(regret, "PROMISING", 2)
    runs = [(Layout(pp=2), placement) for placement in ((0, 1), (5, 4), (2, 1), (1, 0), (3, 2))]

    assert [(1, 0), (2, 1), (0, 1), (5, 4), (3, 2)] == [
        placement for _, placement in regret.promising_first(runs, Priced())
    ]
