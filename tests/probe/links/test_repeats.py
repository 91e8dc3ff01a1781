"""Tests of how often messages are sent."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.facts import Samples
from pipette_launch.probe.harness import fit_line
from pipette_launch.probe.links.repeats import (
    MAX_VALUES,
    MIN_VALUES,
    Tally,
    condensed,
    in_passes,
    in_step,
    ladder,
    num_exchanges,
    quartile_spread,
    undisturbed,
)

SIZES = (8, 65536, 1 << 19, 1 << 21)


def sent(tally: Tally, rate: float, noise: list[float] | None = None, latency_s: float = 1e-4) -> list[tuple[int, ...]]:
    """Send what a tally wishes over a link of so many bytes/s until it wishes nothing; returns the wishes."""
    factors = iter(noise or [])
    wishes = []
    while any(wish := tally.wish()):
        wishes.append(wish)
        for index in in_passes(wish):
            tally.add(index, (latency_s + tally.sizes[index] / rate) * next(factors, 1.0))
        assert len(wishes) < 100, "a tally must come to an end"
    return wishes


def tally(bound_s: float = 1.0, sizes: tuple[int, ...] = SIZES) -> Tally:
    """A fresh one."""
    return Tally(sizes=sizes, repeats=5, warmups=1, bound_s=bound_s)


def test_a_quiet_link_takes_few_messages() -> None:
    """Warm-ups from small to large, then five values of each size, tiny ones four times as often; nothing more."""
    wishes = sent(tally(), 1e9)

    assert [(4, 4, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (20, 5, 5, 5)] == wishes


def test_a_noisy_link_takes_more_until_its_spread_is_known_or_its_time_is_up() -> None:
    """With every other value 30 % off, the count goes up to the cap, and warm-ups are no values."""
    noisy = tally(bound_s=10.0)
    sent(noisy, 1e9, noise=[1.0, 1.3] * 500)
    sizes, samples = noisy.samples()

    assert SIZES == sizes
    assert [4 * MAX_VALUES, MAX_VALUES, MAX_VALUES, MAX_VALUES] == [len(values) for values in noisy.values_s]
    assert all(found.spread > 0.1 for found in samples[1:])
    assert [4, 4, 1, 1] == [len(found.warmup_s) for found in samples]


def test_two_disturbed_values_of_five_leave_doubt() -> None:
    """The median absolute deviation of these is 0."""
    assert 0 == quartile_spread([1, 1, 1, 1, 2])
    assert 0.5 == quartile_spread([1, 1, 1, 2, 2])


def test_a_disturbance_that_passes_is_outvoted() -> None:
    """After two disturbed values of five, more are taken of the sizes that still scatter."""
    disturbed = tally()
    sent(disturbed, 1e9, noise=[*[1.0] * 10, *[1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0], *[2.0] * 14])
    _, samples = disturbed.samples()

    assert all(found.spread <= 0.04 for found in samples)


def test_a_slow_link_keeps_to_its_time() -> None:
    """At 1 MB/s half a second holds the three smallest sizes, three values each, and no 2 MiB."""
    slow = tally(bound_s=0.5)
    sent(slow, 1e6)
    sizes, samples = slow.samples()

    assert SIZES[:3] == sizes
    assert all(len(found.values_s) >= MIN_VALUES for found in samples)


@given(
    rate=st.floats(1e5, 1e11),
    latency_s=st.floats(1e-6, 1e-2),
    bound_s=st.floats(0.01, 2.0),
    noise=st.lists(st.floats(0.5, 5.0), max_size=300),
)
def test_the_least_is_always_measured(rate: float, latency_s: float, bound_s: float, noise: list[float]) -> None:
    """Whatever the link, at least three values of at least three sizes, and never more than the cap."""
    any_link = tally(bound_s=bound_s)
    sent(any_link, rate, noise=noise, latency_s=latency_s)
    sizes, samples = any_link.samples()

    assert SIZES[:3] == sizes[:3]
    assert all(MIN_VALUES <= len(found.values_s) <= 4 * MAX_VALUES for found in samples)


@given(begin_s=st.floats(0.0, 1.0), factor=st.floats(1.0, 8.0))
def test_a_passing_disturbance_does_not_bend_the_fit(begin_s: float, factor: float) -> None:
    """For a tenth of a second all is up to eight times as slow, whenever that is: the rate stays within a tenth.

    Sent size by size instead of pass by pass, all values of the largest size would be too slow.
    """
    shaken, now_s = tally(), 0.0
    while any(wish := shaken.wish()):
        for index in in_passes(wish):
            slowed = begin_s <= now_s < begin_s + 0.1
            seconds = (1e-4 + SIZES[index] / 1e8) * (factor if slowed else 1.0)
            now_s += seconds
            shaken.add(index, seconds)
    sizes, samples = shaken.samples()
    line = fit_line(sizes, [each.median_s for each in samples])

    assert pytest.approx(1e-8, rel=0.1) == line.seconds_per_byte


@given(rate=st.floats(1e6, 1e11), bound_s=st.floats(0.01, 2.0))
def test_beyond_the_least_the_time_is_kept(rate: float, bound_s: float) -> None:
    """What was spent is within the bound, or no more than the least of what was sent."""
    steady = tally(bound_s=bound_s)
    sent(steady, rate, latency_s=0)
    spent_s = sum(map(sum, (*steady.warm_s, *steady.values_s)))
    sizes, _ = steady.samples()
    least_s = sum((4 if size <= 65536 else 1) * size + 3 * size * (4 if size == 8 else 1) for size in sizes) / rate

    assert spent_s <= max(bound_s, least_s) * (1 + 1e-9)


@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_passes_hold_what_was_asked_for(counts: list[int]) -> None:
    """Every message of every size appears as often as wished."""
    assert {index: count for index, count in enumerate(counts) if count} == Counter(in_passes(counts))


def test_passes_go_over_all_sizes() -> None:
    """Largest first, and the tiny ones in equal parts."""
    assert [2, 1, 0, 0, 2, 1, 0, 0] == list(in_passes((4, 2, 2)))


def test_rails_go_message_by_message() -> None:
    """Only tiny ones follow each other without a pause."""
    assert [(2, 1), (1, 1), (0, 4), (2, 1), (1, 1), (0, 4)] == in_step((8, 2, 2))


@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_rails_go_the_same_way(counts: list[int]) -> None:
    """Spelt out, it is the order of the passes."""
    assert list(in_passes(counts)) == [index for index, count in in_step(counts) for _ in range(count)]


def test_what_all_rails_took_decides_and_what_one_took_is_kept() -> None:
    """Tiny messages have no rails to wait for."""
    rails = tally(sizes=(8, 4096))
    for _ in range(6):
        rails.add(1, 1.0, 2.0)
    for _ in range(5):
        rails.add(0, 0.5)
    _, together = rails.samples()
    _, own = rails.samples(own=True)

    assert ((0.5,), (2.0, 2.0)) == tuple(samples.values_s for samples in together)
    assert ((0.5,), (1.0, 1.0)) == tuple(samples.values_s for samples in own)


def test_the_ladder_begins_low() -> None:
    """A tiny message for the latency, and a first step before sizes that might take long."""
    assert (8, 65536, 1 << 24, 1 << 26) == ladder((1 << 24, 1 << 26))
    assert (8, 100, 1000) == ladder((8, 100, 1000))


def test_the_latency_is_that_of_undisturbed_messages() -> None:
    """A tiny message that waits for a processor says nothing of the link; of large ones all values count."""
    assert [1.0, 2.0] == undisturbed([9.0, 2.0, 8.0, 7.0, 1.0, 6.0, 5.0, 4.0])
    busy = tally(sizes=(8, 4096))
    for index, seconds in ((0, 9.0), (0, 1.0), (0, 8.0), (1, 3.0), (1, 4.0), (1, 5.0)):
        busy.values_s[index].append(seconds)

    assert ((1.0,), (3.0, 4.0, 5.0)) == tuple(samples.values_s for samples in busy.samples()[1])


@given(values=st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=30))
def test_few_values_say_as_much_as_many(values: list[float]) -> None:
    """Their median is the lower quartile of all, the spread stays, both to five digits, and no value falls below 0."""
    samples = Samples(values_s=tuple(values), warmup_s=(3.0, 2.0))
    few = condensed(samples)

    assert np.quantile(values, 0.25) == pytest.approx(few.median_s, rel=1e-5)
    assert samples.spread == pytest.approx(few.spread, rel=1e-4, abs=1e-5)
    assert (3, (2.0,)) == (len(few.values_s), few.warmup_s)


def test_a_gpus_value_is_the_mean_of_a_few_small_messages() -> None:
    """Eight exchanges of a small message, and no more than 1 MiB in a row."""
    assert [8, 8, 4, 1, 1] == [num_exchanges(size) for size in (8, 128 << 10, 256 << 10, 1 << 20, 1 << 26)]


def test_what_a_value_takes_on_a_gpu_counts() -> None:
    """Exchanges in a row and the time before them are in the bound: within 40 ms they leave fewer values."""
    plain, queued = (
        Tally(sizes=SIZES, repeats=5, warmups=1, bound_s=0.04, is_queued=is_queued) for is_queued in (False, True)
    )
    sent(plain, 1e9)
    sent(queued, 1e9)

    assert [20, 5, 5, 5] == [len(values) for values in plain.values_s]
    assert [12, 3, 3, 3] == [len(values) for values in queued.values_s]
