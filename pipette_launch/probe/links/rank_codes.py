"""Checks that all-gather and reduce-scatter return shares in the order of ranks, by values coded by rank and position.

NCCL may return them in the order of the devices instead, without an error (NVIDIA/nccl#1906: NVLS on one host under a
permuted CUDA_VISIBLE_DEVICES). Training would go on with wrong numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

SIZES_BYTES = tuple(1 << power for power in range(20, 27))
"""1 to 64 MB. NCCL chooses its algorithm by size, and NVLS wins only between two sizes."""
ELEMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """First wrong value of a collective on one rank."""

    collective: str
    size_bytes: int
    """Size of the full tensor."""
    position: int
    """Element of the rank's result."""
    expected: int
    found: int

    def words(self) -> str:
        """Describe the mismatch on one line."""
        return (
            f"{self.collective} of {self.size_bytes >> 20} MiB returned {self.found} instead of {self.expected}"
            f" at element {self.position}"
        )


def check_order(
    device: str, *, sizes_bytes: Sequence[int] = SIZES_BYTES, group: dist.ProcessGroup | None = None
) -> Mismatch | None:
    """Run both collectives once at each size and compare every value; all members of the group call this.

    Every rank runs all sizes, also after a mismatch, so that no member waits for another. A rank reports its own
    results only: a caller combines the answers of all ranks.

    Args:
        device: torch device of the tensors, such as `cuda` or `cpu`.
        sizes_bytes: size of the full tensor; rounded down to a whole number of elements for each rank.
        group: None = the default group.

    Returns:
        First mismatch on this rank, or None if all values were exact.

    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    found: list[Mismatch] = []
    for size_bytes in sizes_bytes:
        share = size_bytes // ELEMENT_BYTES // num_ranks
        # int32 is a type that NVLS reduces (`ncclNvlsSupported` in NCCL), and sums are exact up to 128 ranks of 64 MB.
        full = torch.arange(share * num_ranks, dtype=torch.int32, device=device)
        mine = full[rank * share : (rank + 1) * share]
        gathered = torch.full_like(full, -1)
        dist.all_gather_into_tensor(gathered, mine.clone(), group=group)
        found += _compared("all_gather", full.nbytes, full, gathered)
        reduced = torch.full_like(mine, -1)
        dist.reduce_scatter_tensor(reduced, full + rank, group=group)
        summed = mine * num_ranks + sum(range(num_ranks))
        found += _compared("reduce_scatter", full.nbytes, summed, reduced)
    return found[0] if found else None


def _compared(collective: str, size_bytes: int, expected: torch.Tensor, found: torch.Tensor) -> list[Mismatch]:
    """Return the first wrong value as a list, or nothing."""
    wrong = (expected != found).nonzero()
    if not len(wrong):
        return []
    position = int(wrong[0])
    return [
        Mismatch(
            collective=collective,
            size_bytes=size_bytes,
            position=position,
            expected=int(expected[position]),
            found=int(found[position]),
        )
    ]
