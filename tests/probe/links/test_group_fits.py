"""Tests of how members' timings become one line for each collective."""

import pytest
from probe.test_assemble import result

from pipette_launch.facts import Samples
from pipette_launch.facts.messages.measuring_advice import Dimension
from pipette_launch.probe.links.group_fits import group_times
from pipette_launch.probe.options import GroupSamples

SIZES = (8, 4096, 65536)
PAIRS = Dimension(name="pairs", kinds=("all_reduce",), groups=((0, 1), (2, 3)))


def timed(bandwidth: float) -> tuple[GroupSamples, ...]:
    """What a member saw of an all-reduce with 1 ms latency."""
    samples = tuple(Samples(values_s=(1e-3 + size / bandwidth,)) for size in SIZES)
    return (GroupSamples(kind="all_reduce", dimension=0, sizes_bytes=SIZES, samples=samples),)


def test_a_collective_is_done_when_its_last_member_is() -> None:
    """Of two groups the middle one by time stands for the dimension; in it the slower member counts."""
    results = [result(slot, collectives=timed(bandwidth)) for slot, bandwidth in enumerate((4e6, 3e6, 9e5, 1e6))]
    (found,) = group_times((PAIRS,), results)

    assert (0, 1) == found.slots
    assert pytest.approx(1 / 3e6) == found.seconds_per_byte


def test_a_group_that_lacks_a_member_does_not_count() -> None:
    """What only one of two members timed is no time of the group."""
    results = [result(slot, collectives=timed(1e6) if slot != 1 else ()) for slot in range(4)]
    (found,) = group_times((PAIRS,), results)

    assert (2, 3) == found.slots
