"""Bytes of abstract tensors in fused kernels, and the quick results of pointwise operations."""

from itertools import product

import pytest
import torch
from oracle.meter import POINTWISE, AbstractMeter, as_one_kernel, pointwise

from pipette_patches.storage_meter import metered

KIB = 1 << 10


def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An abstract tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_kernel_holds_no_intermediates() -> None:
    """Within one kernel only the result counts; written by index, it is copied first, as inductor does."""
    with metered(AbstractMeter()) as meter:
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
    with metered(AbstractMeter()) as meter:
        given = make(KIB)
        inner = as_one_kernel(lambda one: one * 2)
        out = as_one_kernel(lambda one: inner(one) * inner(one))(given)

        assert (8 * KIB, 8 * KIB) == (meter.total, meter.peak)
        assert given.shape == out.shape


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
        quick = pointwise(args, {})
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
