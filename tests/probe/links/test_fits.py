"""Tests of how timed messages become links."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe.test_phases import result
from probe.workers import tiny_options

from pipette_launch.facts import Samples
from pipette_launch.facts.measurements import UNSTABLE_SPREAD
from pipette_launch.facts.messages import Dimension
from pipette_launch.probe.links.fits import LinkFit, fit_link, found_links, group_times, host_fits
from pipette_launch.probe.links.pairs import ladder
from pipette_launch.probe.links.selection import Line
from pipette_launch.probe.messages import GroupSamples, LinkSamples, WorkerResult

SIZES = (8, 4096, 65536)
PAIRS = Dimension(name="pairs", kinds=("all_reduce",), groups=((0, 1), (2, 3)))


def link(source: int, target: int, rate: float, jitter: float = 0.0) -> LinkSamples:
    """Samples of a link with 1 ms latency."""
    samples = tuple(
        Samples(values_s=tuple((1e-3 + size / rate) * (1 + sign * jitter) for sign in (-1, 0, 1))) for size in SIZES
    )
    return LinkSamples(source=source, target=target, sizes_bytes=SIZES, samples=samples)


def rail(source: int, target: int, own: float, together: float) -> LinkSamples:
    """Return a rail that reaches `own` alone, and `together` until the last rail had finished."""
    return replace(link(source, target, own), together=link(source, target, together).samples)


def both_ways(a: int, b: int, rate: float) -> list[LinkSamples]:
    """Return a link with equal directions."""
    return [link(a, b, rate), link(b, a, rate)]


def again(samples: LinkSamples) -> LinkSamples:
    """Return the samples as those of a link that looked slow."""
    return replace(samples, is_again=True)


def sent(links: Sequence[LinkSamples], *, rounds: int, rounds_again: int = 0) -> list[WorkerResult]:
    """Return all samples as one worker's result; the sender does not matter."""
    again = (rounds_again,) if rounds_again else ()
    return [WorkerResult(slot=0, links=tuple(links), link_rounds=(rounds,), link_rounds_again=again)]


def test_two_hosts_of_two_by_hand(tmp_path: Path) -> None:
    """Rails of 4 and 2 MB/s one way, 3 and 3 the other, with 2 and 3 MB/s together; local links of 9 and 8."""
    options = tiny_options(tmp_path, hosts=2, devices=2)
    rails = [rail(0, 2, 4e6, 2e6), rail(1, 3, 2e6, 2e6), rail(2, 0, 3e6, 3e6), rail(3, 1, 3e6, 3e6)]
    found = found_links(options, sent([*rails, *both_ways(0, 1, 9e6), *both_ways(2, 3, 8e6)], rounds=1))
    assert found.survey

    assert np.allclose([[0, 2e6], [3e6, 0]], found.between.bandwidth_bytes_per_s)
    assert [9e6, 8e6] == [pytest.approx(local.bandwidth_bytes_per_s[0, 1]) for local in found.within]
    assert ("-m", "m-") == found.survey.origin_HH
    assert [(0, 1, (4e6, 2e6)), (1, 0, (3e6, 3e6))] == [
        (entry.source, entry.target, tuple(map(round, entry.bytes_per_s))) for entry in found.survey.rails
    ]
    assert (1, 0) == (found.survey.rounds, found.survey.rounds_again)
    assert 8 == len(found.sends)
    assert () == found.notes


def test_rails_on_one_wire_count_by_the_last(tmp_path: Path) -> None:
    """The first rail takes the whole wire and the second the rest: a device gets half, not three quarters."""
    options = tiny_options(tmp_path, hosts=2, devices=2)
    local = [*both_ways(0, 1, 9e6), *both_ways(2, 3, 9e6)]
    rails = [rail(a, b, own, 1e6) for a, b, own in ((0, 2, 2e6), (1, 3, 1e6), (2, 0, 1e6), (3, 1, 2e6))]
    found = found_links(options, sent([*rails, *local], rounds=1))

    assert np.allclose([[0, 1e6], [1e6, 0]], found.between.bandwidth_bytes_per_s)


@given(rates=st.lists(st.floats(1e3, 1e9), min_size=1, max_size=8))
def test_rails_that_were_not_measured_together_count_by_the_slowest(rates: list[float]) -> None:
    """In any order."""
    size = len(rates)
    fits = {(index, size + index): LinkFit(Line(0.0, 1 / rate), 0.0, SIZES) for index, rate in enumerate(rates)}

    assert pytest.approx(min(rates)) == host_fits(fits, size)[0, 1].bytes_per_s


def test_the_better_of_two_measurements_stands(tmp_path: Path) -> None:
    """Each direction was disturbed once; both measurements are kept for a verdict."""
    options = tiny_options(tmp_path, hosts=3, devices=1)
    healthy = [*both_ways(0, 2, 4e6), *both_ways(1, 2, 4e6)]
    found = found_links(
        options,
        sent(
            [*healthy, *(link(0, 1, 1e6), link(1, 0, 4e6)), *(again(link(0, 1, 4e6)), again(link(1, 0, 2e6)))],
            rounds=3,
            rounds_again=1,
        ),
    )
    assert found.survey

    assert np.allclose(np.full((3, 3), 4e6) - np.diag([4e6] * 3), found.between.bandwidth_bytes_per_s)
    assert ("-am", "a-m", "mm-") == found.survey.origin_HH
    assert (1e6, 4e6) == pytest.approx((found.first_HH[0, 1], found.again_HH[0, 1]))
    assert np.isnan(found.again_HH[0, 2])


def test_links_measured_after_stale_cached_links_count_as_measured_once(tmp_path: Path) -> None:
    """A check of cached links, then all links: letter `m`, the faster result, no second measurement."""
    options = tiny_options(tmp_path, hosts=3, devices=1)
    check, whole = both_ways(0, 1, 4e6), [*both_ways(0, 1, 3e6), *both_ways(0, 2, 4e6), *both_ways(1, 2, 4e6)]
    found = found_links(options, sent([*check, *whole], rounds=4))
    assert found.survey

    assert ("-mm", "m-m", "mm-") == found.survey.origin_HH
    assert 0 == found.survey.rounds_again
    assert pytest.approx(4e6) == found.between.bandwidth_bytes_per_s[0, 1]
    assert np.isnan(found.again_HH).all()


def test_a_third_measurement_leaves_the_second(tmp_path: Path) -> None:
    """A check of cached links, all links, and suspects again: the last is the second measurement of the verdict."""
    options = tiny_options(tmp_path, hosts=2, devices=1)
    links = [*both_ways(0, 1, 2e6), *both_ways(0, 1, 1e6), *map(again, both_ways(0, 1, 3e6))]
    found = found_links(options, sent(links, rounds=2, rounds_again=1))

    assert (2e6, 3e6) == pytest.approx((found.first_HH[0, 1], found.again_HH[0, 1]))


def test_links_that_scatter_are_marked(tmp_path: Path) -> None:
    """One direction of the pair scatters by 30 %."""
    options = tiny_options(tmp_path, hosts=2, devices=1)
    found = found_links(options, sent([link(0, 1, 1e6, jitter=0.3), link(1, 0, 1e6)], rounds=1))
    assert found.survey

    assert [[0, 1]] == np.argwhere(found.survey.spread_HH > UNSTABLE_SPREAD).tolist()
    assert pytest.approx(0.3) == found.survey.spread_HH[0, 1]


def test_one_host_has_no_survey(tmp_path: Path) -> None:
    """There are no links between hosts."""
    found = found_links(tiny_options(tmp_path, hosts=1, devices=1), sent([], rounds=0))

    assert found.survey is None
    assert 1 == found.between.size


LADDER = ladder((8, 64 << 10, 512 << 10, 2 << 20))


def timed(times: Sequence[float]) -> LinkSamples:
    """Return a link with these constant times for its sizes."""
    samples = tuple(Samples(values_s=(seconds,) * 3) for seconds in times)
    return LinkSamples(source=0, target=1, sizes_bytes=LADDER, samples=samples)


@pytest.mark.parametrize("disturbed", range(3))
def test_one_disturbed_size_leaves_the_rate(disturbed: int) -> None:
    """Any size except the largest may take five times as long: the rate stays within 10 %."""
    times = [1e-4 + size / 1e8 for size in LADDER]
    times[disturbed] *= 5

    assert pytest.approx(1e8, rel=0.1) == fit_link(timed(times)).bytes_per_s


@pytest.mark.parametrize(("cores", "expected"), [(3, 3e6), (2, 2e6)])
def test_pairs_of_slots_that_take_turns_on_cores_are_alike(tmp_path: Path, cores: int, expected: float) -> None:
    """Three slots on three cores keep 3, 1 and 2 MB/s; on two cores all pairs have the median of 2."""
    options = tiny_options(tmp_path, hosts=1, devices=3)
    options = replace(options, hosts=tuple(replace(host, cores=cores) for host in options.hosts))
    measured = [*both_ways(0, 1, 3e6), *both_ways(0, 2, 1e6), *both_ways(1, 2, 2e6)]
    (within,) = found_links(options, sent(measured, rounds=0)).within

    assert pytest.approx(expected) == within.bandwidth_bytes_per_s[0, 1]
    assert (cores == 2) == bool(np.ptp(within.bandwidth_bytes_per_s[~np.eye(3, dtype=bool)]) < 1)


def collective(bandwidth: float) -> tuple[GroupSamples, ...]:
    """Return a member's samples of an all-reduce with 1 ms latency."""
    samples = tuple(Samples(values_s=(1e-3 + size / bandwidth,)) for size in SIZES)
    return (GroupSamples(kind="all_reduce", dimension=0, sizes_bytes=SIZES, samples=samples),)


def test_a_collective_is_done_when_its_last_member_is() -> None:
    """The median group stands for the dimension, and its slower member counts."""
    results = [result(slot, collectives=collective(bandwidth)) for slot, bandwidth in enumerate((4e6, 3e6, 9e5, 1e6))]
    (found,) = group_times((PAIRS,), results)

    assert (0, 1) == found.slots
    assert pytest.approx(1 / 3e6) == found.seconds_per_byte


def test_a_group_that_lacks_a_member_does_not_count() -> None:
    """A group that only one of two members timed has no time."""
    results = [result(slot, collectives=collective(1e6) if slot != 1 else ()) for slot in range(4)]
    (found,) = group_times((PAIRS,), results)

    assert (2, 3) == found.slots
