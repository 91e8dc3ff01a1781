"""Device order inside hosts: on each host the ranks in rising order sit on the devices in rising order.

NCCL and rails expect it. Links between hosts are measured between devices of equal index, and NCCL may return the
slices of single-host collectives in the order of devices instead of ranks (NVIDIA/nccl#1906).
"""

# K = placements, W = slots, H = hosts, D = devices of one host. A placement gives the RANK of each slot.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]


def in_device_order(placement_KW: ArrayLike, devices: int, order_D: Sequence[int] | None = None) -> Ints:
    """Rearrange the ranks inside every host of one placement or of several; each host keeps its ranks.

    Args:
        placement_KW: one placement, or one in each row.
        devices: D.
        order_D: devices that the ranks of a host take, lowest rank first; None = in device order.

    """
    ranks = np.asarray(placement_KW, dtype=np.int64)
    sorted_KHD = np.sort(ranks.reshape(*ranks.shape[:-1], -1, devices), axis=-1)
    if order_D is not None:
        sorted_KHD[..., list(order_D)] = sorted_KHD.copy()
    return sorted_KHD.reshape(ranks.shape)


def shared_order(placement: ArrayLike, devices: int) -> tuple[int, ...] | None:
    """Return the devices that the ranks of a host take, lowest rank first; None where two hosts differ."""
    order_HD = np.argsort(np.asarray(placement).reshape(-1, devices), axis=1)
    return tuple(order_HD[0].tolist()) if (order_HD == order_HD[0]).all() else None


def is_in_device_order(placement: ArrayLike, devices: int) -> bool:
    """Return true if the ranks of every host rise with its devices."""
    return shared_order(placement, devices) == tuple(range(devices))
