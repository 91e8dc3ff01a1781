"""Which worker of a node sits on which device, so that every library finds the right one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class DeviceBinding(NamedTuple):
    """The worker with LOCAL_RANK i (the i-th binding) has this RANK and this device of the node."""

    rank: int
    device: int


def bindings(ranks: Sequence[int], *, keep_devices: bool = False) -> tuple[DeviceBinding, ...]:
    """Bind the ranks of a node's devices (in device order) to its workers.

    Parts of Megatron, Transformer Engine and DeepEP take `RANK % devices` for the device. Where the node's ranks are
    distinct modulo their number, LOCAL_RANK is made equal to that, and the devices are reordered underneath; elsewhere
    the worker with LOCAL_RANK i keeps device i, as it always does with `keep_devices`.
    """
    size = len(ranks)
    if keep_devices or len({rank % size for rank in ranks}) < size:
        return tuple(DeviceBinding(rank=rank, device=device) for device, rank in enumerate(ranks))
    by_residue = {rank % size: DeviceBinding(rank=rank, device=device) for device, rank in enumerate(ranks)}
    return tuple(by_residue[residue] for residue in range(size))


def visible_devices(inherited: str | None, bound: Sequence[DeviceBinding]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by which the worker with LOCAL_RANK i finds its device at i; none where it needs no change.

    The inherited list gives the devices their names. One that is too short (on CPU the slots are no devices) is left as
    it is.
    """
    order = [one.device for one in bound]
    if order == list(range(len(order))):
        return {}
    names = [str(index) for index in range(max(order) + 1)] if inherited is None else inherited.split(",")
    if len(names) <= max(order):
        return {}
    others = [name for index, name in enumerate(names) if index not in order]
    return {"CUDA_VISIBLE_DEVICES": ",".join(name.strip() for name in [*(names[index] for index in order), *others])}
