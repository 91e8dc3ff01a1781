"""Tests of slot speeds: relative speeds, slow slots, and slots that are measured again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe.workers import REFERENCE, tiny_options

from pipette_launch.facts import ComputeTime, Samples
from pipette_launch.probe.compute.slot_speeds import SAME_SPEED, Speeds, factors, on_the_wall, slots_to_repeat, speeds
from pipette_launch.probe.messages import Pace, WarmupOrder, WorkerResult

NAN = math.nan


def hosts(number: int, devices: int = 1, *, cores: int = 2, names: Sequence[str] = ()) -> WarmupOrder:
    """Return an order with this number of hosts; `names` are their device types, host by host."""
    options = tiny_options(Path("/nowhere"), hosts=number, devices=devices)
    kinds = iter(names)
    return replace(
        options,
        hosts=tuple(
            replace(
                host,
                cores=cores,
                devices=tuple(replace(device, name=next(kinds, device.name)) for device in host.devices),
            )
            for host in options.hosts
        ),
    )


def paces(*turns: Sequence[float]) -> list[tuple[Pace, ...]]:
    """Return paces from the seconds of each slot, turn by turn; nan = not measured."""
    return [
        tuple(Pace(turn=turn, seconds=seconds) for turn, seconds in enumerate(mine) if not math.isnan(seconds))
        for mine in zip(*turns, strict=True)
    ]


def test_a_slot_that_is_slow_every_time_is_slow() -> None:
    """Half the speed in two turns, two thirds in the third: the median counts, and the slot is named."""
    turns = paces((1, 1, 1, 2, 1, 1), (1, 1, NAN, 2, NAN, 1), (1, 1, NAN, 1.5, NAN, 1))
    found = speeds(hosts(6), turns)

    assert pytest.approx((1, 1, 1, 1 / 2, 1, 1)) == found.speed_S
    assert ("slot node3:0 computes at 0.50 of its peers' speed",) == found.notes
    assert [(3, 1.0)] == [(slow.slot, slow.peers_seconds) for slow in found.slow]


def test_a_slot_that_was_slow_once_was_unlucky() -> None:
    """A slot that is slow in one turn and usual or fast in another counts as usual."""
    once = speeds(hosts(4), paces((1, 1, 1, 2), (1, 1, NAN, 1.1)))
    both = speeds(hosts(4), paces((1, 1, 1, 2), (1, 1, NAN, 0.5)))

    assert (1.0,) * 4 == once.speed_S == both.speed_S
    assert () == once.slow == once.notes == both.slow


def test_a_slot_that_is_fast_every_time_is_fast_and_no_news() -> None:
    """Its speed is known, and there is no note."""
    found = speeds(hosts(4), paces((1, 1, 1, 0.5), (1, 1, NAN, 0.5), (1, 1, NAN, 0.5)))

    assert (1.0, 1.0, 1.0, 2.0) == found.speed_S
    assert () == found.slow == found.notes


def test_less_company_makes_nobody_slow_or_fast() -> None:
    """Slots are compared only with slots of the same turn: beside three others all are twice as fast."""
    found = speeds(hosts(4), paces((4, 4, 4, 8), (2, 2, 2, 4), (2, 2, 2, 4)))

    assert (1.0, 1.0, 1.0, 0.5) == found.speed_S


def test_another_kind_of_device_is_not_sick() -> None:
    """Two A100 beside four H100 at half the speed are healthy; a slower one of them is named."""
    options = hosts(8, names=["H100"] * 4 + ["A100"] * 4)
    kinds = speeds(options, paces((1, 1, 1, 1, 2, 2, 2, 2)))
    sick = speeds(options, paces(*[(1, 1, 1, 1, 2, 2, 2, 6)] * 3))

    assert pytest.approx([2**0.5] * 4 + [0.5**0.5] * 4) == list(kinds.speed_S)
    assert () == kinds.slow
    assert [7] == [slow.slot for slow in sick.slow]
    assert pytest.approx(sick.speed_S[6] / 3) == sick.speed_S[7]


def test_of_two_slots_the_slower_one_is_named() -> None:
    """Speeds are relative to the middle of both, and the verdict compares with the other slot."""
    found = speeds(hosts(2), paces((1, 4), (1, 4), (1, 4)))

    assert pytest.approx((2.0, 0.5)) == found.speed_S
    assert [1] == [slow.slot for slow in found.slow]


def test_without_the_reference_speeds_are_assumed_and_said_to_be() -> None:
    """If no slot measured the reference, all count as equal with a note; a single such slot counts as usual."""
    assert (1.0, 1.0, 1.0) == speeds(hosts(3), paces((1, 1, NAN))).speed_S
    nobody = speeds(hosts(2), [(), ()])

    assert (1.0, 1.0) == nobody.speed_S
    assert ("slot speeds are assumed equal: no slot measured the reference case",) == nobody.notes


def test_healthy_slots_are_not_measured_again() -> None:
    """Differences that shared cores explain do not count."""
    assert () == slots_to_repeat(hosts(4), paces((1, 1.1, 0.9, 1.25)))
    assert () == slots_to_repeat(hosts(4), paces((1, 1, 1, 2), (NAN, 1, 1, 1.1)))


def test_a_few_others_work_beside_the_odd_one() -> None:
    """Three controls, on other hosts, with the most usual times."""
    assert (0, 1, 4, 5) == slots_to_repeat(hosts(6), paces((1, 1.01, 1.2, 0.8, 5, 1)))


def test_no_more_work_on_a_host_than_have_a_core() -> None:
    """A host of two cores has one control beside the slow slot; a host of one core has none."""
    seconds = (1, 1, 1, 1, 1, 1, 1, 3)

    assert (0, 7) == slots_to_repeat(hosts(1, 8, cores=2), paces(seconds))
    assert (7,) == slots_to_repeat(hosts(1, 8, cores=1), paces(seconds))


def test_controls_are_of_the_same_kind() -> None:
    """The controls of a slow A100 are A100."""
    options = hosts(8, names=["H100"] * 4 + ["A100"] * 4)

    assert (4, 5, 6, 7) == slots_to_repeat(options, paces((1, 1, 1, 1, 2, 2, 2, 6)))


@given(seconds=st.lists(st.floats(0.01, 100), min_size=1, max_size=8), scale=st.floats(0.01, 100))
def test_speeds_are_relative(seconds: list[float], scale: float) -> None:
    """Slower work on all slots changes nothing; one turn is enough to choose the slots to repeat."""
    options = hosts(len(seconds))
    near = any(
        abs(math.log(a / b)) > 0 and abs(abs(math.log(a / b)) - math.log(SAME_SPEED["cpu"])) < 1e-6
        for a in seconds
        for b in seconds
    )
    scaled = paces([scale * value for value in seconds])
    if not near and len(seconds) % 2:
        assert speeds(options, paces(seconds)).speed_S == pytest.approx(speeds(options, scaled).speed_S)
        assert slots_to_repeat(options, paces(seconds)) == slots_to_repeat(options, scaled)
    odd = {slot for slot, speed in enumerate(speeds(options, scaled).speed_S) if speed != 1}
    assert odd <= set(slots_to_repeat(options, scaled))


def result(slot: int, seconds: float, stretch: float) -> WorkerResult:
    """Return a worker's result whose reference layer takes this time, a third in each pass."""
    sample = Samples(values_s=(seconds / 3,))
    layer = ComputeTime(case=REFERENCE, part="layer", slot=slot, forward=sample, input_grad=sample, weight_grad=sample)
    return WorkerResult(slot=slot, compute=(layer,), stretch=stretch)


def told(speed_S: tuple[float, ...]) -> Speeds:
    """Return speeds without stragglers."""
    return Speeds(speed_S=speed_S, straggle=1.0, slow=(), notes=())


def test_what_others_took_is_the_same_for_all() -> None:
    """Stretches of 1.9, 2 and 2.1 are chance: all times are doubled."""
    results = [result(slot, 3.0, 1.9 + slot / 10) for slot in range(3)]

    assert (2.0, 2.0, 2.0) == factors(hosts(3), results, told((1.0, 1.0, 1.0)))


def test_steps_wait_for_the_slowest_of_equal_slots() -> None:
    """All equal slots have the price of the slowest; a really slow slot has only its own."""
    found = speeds(hosts(5), paces((1, 1.1, 1, 1.2, 3), (NAN, 1, 1, 1, 3), (NAN, 1, 1, 1, 3)))
    peers_s, slow_s = 1.1, 3
    results = [result(slot, 3.0, 1.0) for slot in range(4)] + [result(4, 3.0 * slow_s / peers_s, 1.0)]
    times_S = [3.0 * found.straggle / speed for speed in found.speed_S]

    assert pytest.approx(1.2 / 1.1) == found.straggle == on_the_wall(results, found)
    assert pytest.approx([3.0 * 1.2 / 1.1] * 4 + [3.0 * 3]) == times_S
    assert pytest.approx([1.2 / 1.1] * 4 + [1.1]) == factors(hosts(5), results, found)


def test_of_slots_that_share_cores_their_host_straggles() -> None:
    """Slots that share cores are slow in turns, so the work of the host counts."""
    by_turns = (0.9, 1.125, 1.125, 0.9)
    assert pytest.approx(1.0) == speeds(hosts(2, 2, cores=1), paces(by_turns)).straggle
    assert pytest.approx(1.2) == speeds(hosts(3, 2, cores=1), paces((*by_turns, 1.08, 1.35))).straggle
    assert 1.0 == speeds(hosts(2, 2, cores=1), paces((NAN, NAN, 1, 1.25))).straggle
    assert 1.2 == speeds(hosts(2, 2, cores=2), paces((1, 1, 1, 1.2))).straggle


def test_a_slow_slots_times_agree_by_its_speed() -> None:
    """Slow computing and a core for half of the time both give half the speed."""
    computes = [result(0, 3.0, 1.0), result(1, 3.0, 1.0), result(2, 6.0, 1.0)]
    is_stopped = [result(0, 3.0, 1.0), result(1, 3.0, 1.0), result(2, 3.0, 2.0)]

    assert pytest.approx((1.0, 1.0, 1.0)) == factors(hosts(3), computes, told((1.0, 1.0, 0.5)))
    assert pytest.approx((1.0, 1.0, 2.0)) == factors(hosts(3), is_stopped, told((1.0, 1.0, 0.5)))
