"""Tests of how fast slots are and who is slow."""

from pathlib import Path

from probe.workers import REFERENCE, tiny_options

from pipette_launch.facts import ComputeTime, Samples
from pipette_launch.probe.options import ProbeOptions
from pipette_launch.probe.speeds import slot_speeds


def layer(slot: int, seconds: float, jitter: float = 0.0) -> ComputeTime:
    """A layer's times, a third each."""
    sample = Samples(values_s=tuple(seconds / 3 * (1 + sign * jitter) for sign in (-1, 0, 1)))
    return ComputeTime(case=REFERENCE, part="layer", slot=slot, forward=sample, input_grad=sample, weight_grad=sample)


def three_hosts(tmp_path: Path) -> ProbeOptions:
    """Three hosts with a device each."""
    return tiny_options(tmp_path, hosts=3, devices=1)


def test_slow_slots_are_found_and_named(tmp_path: Path) -> None:
    """Twice the time is half the speed; 2 % more is noise."""
    times = [layer(0, 1.0), layer(1, 1.02), layer(2, 2.0)]
    speeds, notes = slot_speeds(three_hosts(tmp_path), times)

    assert (1.0, 1.0, 0.51) == speeds
    assert ("slot node2:0 computes at 0.51 of the median slot's speed",) == notes


def test_a_difference_within_the_scatter_is_none(tmp_path: Path) -> None:
    """A slot that scatters by 20 % is not called slow for being 40 % off."""
    speeds, notes = slot_speeds(three_hosts(tmp_path), [layer(0, 1.0), layer(1, 1.0), layer(2, 1.4, jitter=0.2)])

    assert ((1.0, 1.0, 1.0), ()) == (speeds, notes)


def test_a_slot_without_the_reference_counts_as_usual(tmp_path: Path) -> None:
    """It ran out of memory, say: its own note tells why."""
    speeds, _ = slot_speeds(three_hosts(tmp_path), [layer(0, 1.0), layer(1, 1.0)])

    assert (1.0, 1.0, 1.0) == speeds
