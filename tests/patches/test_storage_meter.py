"""Bytes of tensors: live, freed, and shared storages."""

import torch

from pipette_patches.storage_meter import StorageMeter, allocated, current, metered, under

KIB = 1 << 10


def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor on the CPU."""
    return torch.empty(shape, dtype=dtype)


def test_sizes_are_rounded_as_the_allocator_does() -> None:
    """One byte takes 512."""
    assert [0, 512, 512, 1024] == [allocated(size) for size in (0, 1, 512, 513)]


def test_a_storage_counts_once_from_birth_to_death() -> None:
    """Views are free, the last of them holds the storage, and the peak stays."""
    with metered() as meter:
        whole = make(256, 4)
        view = whole.view(-1)[:2]
        assert 4 * KIB == meter.total
        del whole
        assert 4 * KIB == meter.total
        del view

        assert (0, 4 * KIB) == (meter.total, meter.peak)


def test_what_autograd_keeps_lives_until_backward() -> None:
    """A product keeps both factors; after its backward only leaf and gradient are left."""
    with metered() as meter:
        leaf = make(KIB).requires_grad_()
        loss = ((leaf * 2) * (leaf * 3)).sum()
        kept = meter.total
        loss.backward()  # type: ignore[no-untyped-call]
        del loss

        assert (3 * 4 * KIB + 512, 2 * 4 * KIB) == (kept, meter.total)


def test_labels_split_the_peak() -> None:
    """Storages that a function makes count under its label, also at the peak; a tensor can change its label."""
    with metered() as meter:
        first = under("embedding", make)(KIB)
        second = make(KIB)
        del first
        meter.recount(second.untyped_storage(), "optimizer")

        assert {"embedding": 4 * KIB, "activations": 4 * KIB} == meter.at_peak
        assert {"embedding": 0, "activations": 0, "optimizer": 4 * KIB} == meter.by_label
        assert current() is meter
    assert current() is None


def test_a_resized_storage_counts_as_it_is() -> None:
    """A storage that is given up in place frees its bytes."""
    meter = StorageMeter()
    with meter:
        tensor = make(KIB)
        tensor.untyped_storage().resize_(0)
        meter.recount(tensor.untyped_storage())

    assert (0, 4 * KIB) == (meter.total, meter.peak)
