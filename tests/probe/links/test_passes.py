"""Tests of when earlier links are no longer believed, and of what is said of the passes."""

from collections.abc import Sequence

import pytest
from facts_for_tests import tiny_cluster

from pipette_launch.probe.harness import Line
from pipette_launch.probe.links.adaptive import Adapted, Pass
from pipette_launch.probe.links.estimate import estimate
from pipette_launch.probe.links.pairs import LinkResult
from pipette_launch.probe.links.passes import Passed, notes_of
from pipette_launch.probe.links.sampling import Pair

NOTHING = LinkResult(links=(), rounds=0, rounds_again=0, notes=())


def adapted(new: int, changed: Sequence[Pair], *, is_settled: bool = True) -> Adapted:
    """Passes in which so many links were measured again."""
    lines = {(0, 1): Line(0.0, 1e-9)}
    return Adapted(
        estimate=estimate(len(tiny_cluster(2, 1).hosts), lines),
        lines=lines,
        passes=(Pass(asked=new, new=new, rounds=2),),
        changed=tuple(changed),
        is_settled=is_settled,
    )


@pytest.mark.parametrize(
    ("new", "changed", "among_many", "among_few"),
    [
        (8, [], False, False),
        (2, [(0, 1)], False, True),
        (8, [(0, 1), (1, 2)], False, True),
        (7, [(0, 1), (1, 2)], True, True),
        (0, [], False, True),
    ],
)
def test_earlier_links_are_stale_if_many_have_changed(
    new: int, changed: list[Pair], among_many: bool, among_few: bool
) -> None:
    """More than a quarter of those that were measured again, and more than one; of few hosts a single one."""
    passed = Passed(linked=NOTHING, adapted=adapted(new, changed), advice=None)

    assert among_many == passed.is_stale(are_few=False)
    assert among_few == passed.is_stale(are_few=True)
    assert not Passed(linked=NOTHING, adapted=None, advice=None).is_stale(are_few=True)


def test_what_the_passes_did_is_said() -> None:
    """How much was measured in how many rounds, what had changed, and whether the plans wanted more."""
    whole = "links: 8 pairs of hosts that plans would use were measured in 2 rounds"

    assert (whole,) == notes_of(adapted(8, []))
    assert (
        f"{whole}, 1 of them not as they were; the rounds were spent before the plans stopped asking for more",
    ) == notes_of(adapted(8, [(0, 1)], is_settled=False))
    assert () == notes_of(None)
