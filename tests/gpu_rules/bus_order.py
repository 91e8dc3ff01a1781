"""Collectives of one host whose ranks are threads, as NCCL's NVLS runs them under a permuted CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

T = TypeVar("T")
LIMIT_S = 30.0


class BusOrder:
    """One communicator of a host; rank r holds device `device_R[r]`, and slices are laid out in the order of devices.

    NCCL, src/device/all_gather.h, `RunWorkColl<ncclFuncAllGather, ..., NCCL_ALGO_NVLS>`, branches `oneNode` and not
    `regUsed`: `prims.gather(offset, nHeads * count, nelem, count, -1, 0)` writes the slice of head i to the place i
    of the result. src/device/reduce_scatter.h is its mirror: `prims.scatter` sends place i of the input to head i.
    Heads are in the order of the bus, and no table maps them to ranks (NVIDIA/nccl#1906, and pull request 2377).
    With devices in the order of ranks the head i is the rank i, and the result is right.
    """

    def __init__(self, device_R: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self._rank_of_head = sorted(range(len(device_R)), key=lambda rank: device_R[rank])
        self._sent: dict[int, torch.Tensor] = {}
        self._barrier = Barrier(len(device_R), timeout=LIMIT_S)
        self._here = local()
        for name in ("get_rank", "get_world_size", "all_gather_into_tensor", "reduce_scatter_tensor"):
            monkeypatch.setattr(dist, name, getattr(self, name))

    def run(self, work: Callable[[], T]) -> list[T]:
        """Run the work on every rank, and return what each found."""

        def on(rank: int) -> T:
            self._here.rank = rank
            return work()

        with ThreadPoolExecutor(len(self._rank_of_head)) as pool:
            return list(pool.map(on, range(len(self._rank_of_head))))

    def get_rank(self, group: object = None) -> int:
        """Return the rank of this thread."""
        return int(self._here.rank)

    def get_world_size(self, group: object = None) -> int:
        """Return the number of threads."""
        return len(self._rank_of_head)

    def all_gather_into_tensor(self, full: torch.Tensor, share: torch.Tensor, group: object = None) -> None:
        """Write the share of each head to the place of the head."""
        sent = self._exchanged(share)
        full.copy_(torch.cat([sent[rank] for rank in self._rank_of_head]))

    def reduce_scatter_tensor(self, share: torch.Tensor, full: torch.Tensor, group: object = None) -> None:
        """Give each head the sum of the slices at its place."""
        sent = self._exchanged(full)
        place = self._rank_of_head.index(self.get_rank())
        total = torch.stack([sent[rank] for rank in self._rank_of_head]).sum(0, dtype=full.dtype)
        share.copy_(total.chunk(self.get_world_size())[place])

    def _exchanged(self, tensor: torch.Tensor) -> dict[int, torch.Tensor]:
        self._barrier.wait()
        self._sent[self.get_rank()] = tensor.clone()
        self._barrier.wait()
        return dict(self._sent)
