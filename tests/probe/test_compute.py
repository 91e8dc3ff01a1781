"""Tests of how cases are dealt out and how times become samples."""

from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.facts import ComputeCase, Samples
from pipette_launch.probe.compute import HABITS, MAX_VALUES, MIN_VALUES, cases_of, difference, num_values

CASES = tuple(ComputeCase(tp=1, cp=1, micro_batch_size=size) for size in (1, 2, 3, 4))


def test_two_slots_share_four_cases_by_hand() -> None:
    """Both measure the reference; the others are dealt out in order."""
    assert (CASES[0], CASES[1], CASES[3]) == cases_of(CASES, 0, 2)
    assert (CASES[0], CASES[2]) == cases_of(CASES, 1, 2)


@given(num_cases=st.integers(1, 20), slots=st.integers(1, 8))
def test_every_case_is_dealt_once(num_cases: int, slots: int) -> None:
    """The reference goes to all slots, every other case to exactly one."""
    cases = tuple(ComputeCase(tp=1, cp=1, micro_batch_size=size + 1) for size in range(num_cases))
    hands = [cases_of(cases, slot, slots) for slot in range(slots)]

    assert all(hand[0] == cases[0] for hand in hands)
    assert sorted(cases[1:]) == sorted(case for hand in hands for case in hand[1:])


def test_weight_gradients_are_what_the_input_gradient_leaves() -> None:
    """The whole backward minus the usual input part; noise does not make it negative."""
    whole = Samples(values_s=(5.0, 2.0), warmup_s=(9.0,))

    assert Samples(values_s=(2.0, 0.0), warmup_s=(6.0,)) == difference(whole, Samples(values_s=(1.0, 3.0, 4.0)))


@given(seconds=st.floats(0, 100))
def test_the_number_of_values_is_bounded(seconds: float) -> None:
    """Long runs are few but not one, short runs many but not endless."""
    assert MIN_VALUES <= num_values(seconds, HABITS["cpu"]) <= MAX_VALUES
