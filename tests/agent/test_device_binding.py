"""Which worker of a node sits on which device."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.agent.device_binding import DeviceBinding, bindings, visible_devices


def bound(devices: list[int]) -> list[DeviceBinding]:
    """Workers with these devices, in the order of LOCAL_RANK."""
    return [DeviceBinding(rank=rank, device=device) for rank, device in enumerate(devices)]


def test_local_rank_follows_rank_where_it_can() -> None:
    """The worker with LOCAL_RANK i has a RANK congruent to i, on the device that the plan gave that RANK."""
    assert [DeviceBinding(rank=4, device=1), DeviceBinding(rank=7, device=0)] == list(bindings([7, 4]))


def test_physical_order_where_residues_meet() -> None:
    """Two ranks with one residue cannot both have it as LOCAL_RANK."""
    assert [DeviceBinding(rank=2, device=0), DeviceBinding(rank=4, device=1)] == list(bindings([2, 4]))


@given(st.permutations(range(8)))
def test_every_rank_keeps_its_device(ranks: list[int]) -> None:
    """Seating moves workers, never a RANK away from the device of the plan."""
    assert {(binding.rank, binding.device) for binding in bindings(ranks)} == {
        (rank, i) for i, rank in enumerate(ranks)
    }


@pytest.mark.parametrize(
    ("inherited", "order", "expected"),
    [
        (None, [1, 0], "1,0"),
        ("4,5", [1, 0], "5,4"),
        ("GPU-aa, GPU-bb,GPU-cc", [2, 0, 1], "GPU-cc,GPU-aa,GPU-bb"),
        ("0,1,2,3", [1, 0], "1,0,2,3"),
    ],
)
def test_devices_keep_their_names(inherited: str | None, order: list[int], expected: str) -> None:
    """Indices and UUIDs that the job was given are reordered, and those it does not use come last."""
    assert {"CUDA_VISIBLE_DEVICES": expected} == visible_devices(inherited, bound(order))


def test_a_list_that_names_too_few_devices_is_left_alone() -> None:
    """On CPU the slots are no devices: GPUs that the user hid stay hidden."""
    assert {} == visible_devices("", bound([1, 0]))
    assert {} == visible_devices("3", bound([1, 0]))


def test_a_binding_by_local_rank_keeps_its_devices() -> None:
    """The worker with LOCAL_RANK i then sits on device i whatever its rank."""
    assert [(3, 0), (2, 1)] == [tuple(binding) for binding in bindings([3, 2], keep_devices=True)]
