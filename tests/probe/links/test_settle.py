"""Tests of how often the first links inside hosts are measured."""

import pytest

from pipette_launch.facts import Samples
from pipette_launch.probe.links.settle import MOST_LOOKS, settled
from pipette_launch.probe.options import LinkSamples

SIZES = (8, 5 << 20)


def look(rate: float) -> tuple[LinkSamples]:
    """One link whose large message goes at so many bytes/s."""
    samples = tuple(Samples(values_s=(size / rate,)) for size in SIZES)
    return (LinkSamples(source=0, target=1, sizes_bytes=SIZES, samples=samples),)


@pytest.mark.parametrize(
    ("rates", "looks", "best"),
    [
        ([300e6, 310e6, 1.0], 2, 310e6),
        ([39e6, 290e6, 310e6, 1.0], 3, 310e6),
        ([300e6, 150e6, 1.0], 2, 300e6),
        ([1e6 * 2**power for power in range(9)], MOST_LOOKS, 1e6 * 2 ** (MOST_LOOKS - 1)),
    ],
    ids=["steady", "slow-at-first", "disturbed-later", "ever-faster"],
)
def test_a_transfer_that_is_slow_at_first_is_repeated_until_two_agree(
    rates: list[float], looks: int, best: float
) -> None:
    """A steady link is measured twice, one that was cold until two looks agree, and none without end."""
    left = iter(rates)
    (found,) = settled(lambda: look(next(left)), lambda own: own, lambda: True)

    assert pytest.approx(best) == SIZES[-1] / found.samples[-1].median_s
    assert looks == len(rates) - len(list(left))


def test_what_another_rank_saw_counts() -> None:
    """The link of one rank is steady; as long as another rank's became faster, all measure again."""
    left, others = iter([3e8] * 9), iter([3.0, 1.0])
    settled(lambda: look(next(left)), lambda own: max(own, next(others)), lambda: True)

    assert 6 == len(list(left))


def test_without_time_one_look_must_do() -> None:
    """The budget is spent."""
    left = iter([3e8] * 9)
    settled(lambda: look(next(left)), lambda own: own, lambda: False)

    assert 8 == len(list(left))


def test_a_slot_without_a_partner_has_nothing_to_tell() -> None:
    """Of three slots one sits out each round."""
    assert () == settled(lambda: (), lambda own: own, lambda: True)
