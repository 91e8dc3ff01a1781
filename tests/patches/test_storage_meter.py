"""Bytes of abstract tensors: live, freed, and shared storages."""

from itertools import product

import pytest
import torch

from pipette_patches.storage_meter import (
    POINTWISE,
    StorageMeter,
    _pointwise,
    allocated,
    as_one_kernel,
    current,
    metered,
    under,
)

KIB = 1 << 10


def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An abstract tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


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


def test_a_kernel_holds_no_intermediates() -> None:
    """Within one kernel only the result counts; written by index, it is copied first, as inductor does."""
    with metered() as meter:
        given = make(KIB)
        out = as_one_kernel(lambda one: ((one * 2) * 3) * 4)(given)
        assert (8 * KIB, 8 * KIB) == (meter.total, meter.peak)
        index = make(2, dtype=torch.int64)
        del out

        def write(one: torch.Tensor) -> torch.Tensor:
            one[index] = 1.0
            return one * 2

        kept = as_one_kernel(write)(given)

        assert (8 * KIB + 512, 12 * KIB + 512) == (meter.total, meter.peak)
        assert given.shape == kept.shape


def test_a_kernel_within_a_kernel_holds_none_either() -> None:
    """The outputs of an inner kernel are intermediates of the outer kernel."""
    with metered() as meter:
        given = make(KIB)
        inner = as_one_kernel(lambda one: one * 2)
        out = as_one_kernel(lambda one: inner(one) * inner(one))(given)

        assert (8 * KIB, 8 * KIB) == (meter.total, meter.peak)
        assert given.shape == out.shape


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


FLOATS = [torch.float32, torch.bfloat16]
SHAPES = [((4, 6), (4, 6)), ((4, 6), (6,)), ((4, 1), (1, 6)), ((2, 3, 4), (3, 4))]


def shown(tensor: torch.Tensor) -> tuple[object, ...]:
    """Everything about a tensor that has no data; the stride of a single row means nothing."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.shape, tensor.dtype, strides, tensor.device.type


@pytest.mark.parametrize("name", sorted(map(str, POINTWISE)))
def test_quick_shapes_are_torchs_own(name: str) -> None:
    """The quick function gives the same shape, type and strides as torch."""
    func = next(func for func in POINTWISE if str(func) == name)
    answered = 0
    for args in cases(name.rpartition(".")[2]):
        quick = _pointwise(args, {})
        if quick is not None:
            answered += 1
            assert shown(func(*args)) == shown(quick)
    assert answered


def cases(overload: str) -> list[tuple[object, ...]]:
    """Arguments that an operation can be given: contiguous, sliced, permuted, broadcast, of two types."""
    found: list[tuple[object, ...]] = []
    for dtype, (left, right) in product(FLOATS, SHAPES):
        plain, other = make(*left, dtype=dtype), make(*right, dtype=dtype)
        sliced = make(*left[:-1], left[-1] * 2, dtype=dtype)[..., : left[-1]]
        general = {"default": (), "Scalar": (2.0,)}.get(overload, (other,))
        firsts = (plain, sliced) if overload == "Tensor" else (plain, sliced, plain.transpose(0, 1))
        found += [(first, *general) for first in firsts]
    return found
