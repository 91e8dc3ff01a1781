"""Tests of the order of devices inside hosts."""

from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.facts.machines.device_order import in_device_order, is_in_device_order, shared_order


def test_ranks_rise_with_devices() -> None:
    """Each host keeps its ranks; they take its devices in order, or in another order that all hosts share."""
    scrambled = (6, 1, 4, 3, 5, 0, 7, 2)

    assert [1, 3, 4, 6, 0, 2, 5, 7] == in_device_order(scrambled, 4).tolist()
    assert [1, 4, 3, 6, 0, 5, 2, 7] == in_device_order(scrambled, 4, (0, 2, 1, 3)).tolist()
    assert [[0, 1], [2, 3]] == in_device_order([[1, 0], [3, 2]], 2).tolist()


def test_hosts_share_an_order_or_none() -> None:
    """The order of the lowest rank's device, the next one's and so on; two hosts that differ have none in common."""
    assert (0, 2, 1, 3) == shared_order((1, 4, 3, 6, 0, 5, 2, 7), 4)
    assert shared_order((1, 0, 2, 3), 2) is None
    assert (True, False) == (is_in_device_order((2, 3, 0, 1), 2), is_in_device_order((3, 2, 1, 0), 2))


@given(st.permutations(range(12)), st.permutations(range(4)))
def test_an_order_is_read_as_it_was_written(placement: list[int], order_D: list[int]) -> None:
    """Whatever the placement and the order."""
    assert tuple(order_D) == shared_order(in_device_order(placement, 4, order_D), 4)
