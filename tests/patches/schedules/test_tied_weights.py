"""Gradients of an embedding and a head that are tied, both on one rank of a folded pipeline."""

from types import SimpleNamespace

import torch

from pipette_patches.schedules.executor import _add_up
from pipette_patches.storage_meter import metered


def test_tied_gradients_are_added_up_in_place() -> None:
    """Both ends hold the sum to the last bit, and nothing as large as a table is made beside them."""
    generator = torch.Generator().manual_seed(0)
    ends = tuple(SimpleNamespace(main_grad=torch.randn(64, 8, generator=generator)) for _ in range(2))
    expected = ends[0].main_grad + ends[1].main_grad
    tables = [end.main_grad.data_ptr() for end in ends]
    with metered() as meter:
        _add_up(ends)

    assert meter.peak == sum(end.main_grad.nbytes for end in ends)
    assert tables == [end.main_grad.data_ptr() for end in ends]
    assert all(torch.equal(expected, end.main_grad) for end in ends)
