"""One worker of the check of a device order: `python -m pipette_launch.probe.order_check KIND TP RANK...`.

It runs in torchrun's environment, on the devices in the order that training gets them. All workers of a host open one
communicator, and each tensor-parallel group opens another one.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pipette_launch.errors import ProbeError
from pipette_launch.probe.lockstep import end_with_parent, worker_place
from pipette_launch.probe.messages import wait_s
from pipette_launch.probe.run import BACKENDS, connect_store
from pipette_launch.text import printable

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


logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Check this host; returns the exit code, and writes one line to stderr where a collective is wrong or fails.

    Args:
        arguments: `cuda` or `cpu`, the size of tensor-parallel groups, and the RANKs of this host.

    """
    try:
        kind, tp, *ranks = arguments
        found = _found(kind, int(tp), sorted(map(int, ranks)))
    except Exception as error:
        # The agent needs one line and an exit code.
        logger.debug("the check failed", exc_info=True)
        text = " ".join(str(error).split())
        found = text if isinstance(error, ProbeError) else f"{type(error).__name__}: {text}"
    if found:
        sys.stderr.write(f"{printable(found)}\n")
    return 1 if found else 0


def _found(kind: str, tp: int, ranks: list[int]) -> str:
    """Return the first wrong value in words; empty where all are right."""
    place = worker_place(os.environ)
    if kind == "cuda":
        # Not by RANK: with --numa-binding the worker with LOCAL_RANK i keeps device i under any RANK. A worker under
        # --virtual-local-rank has LOCAL_RANK 0 and sees one device.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if torch.cuda.device_count() > 1 else 0)
    timeout = timedelta(seconds=wait_s(place.world_size))
    store = dist.PrefixStore(f"pipette/order/{ranks[0]}", connect_store(place, timeout))
    # Groups of training hold their ranks in rising order, and so does this one.
    dist.init_process_group(
        BACKENDS[kind], store=store, rank=ranks.index(place.rank), world_size=len(ranks), timeout=timeout
    )
    # gloo has no sizes of its own, and takes seconds for the large ones.
    sizes_bytes = SIZES_BYTES if kind == "cuda" else SIZES_BYTES[:1]
    mismatch = check_order(kind, sizes_bytes=sizes_bytes)
    if 1 < tp < len(ranks):
        # NCCL chooses algorithms by the number of ranks. Every rank runs both checks, also after a mismatch.
        inner = check_order(kind, sizes_bytes=sizes_bytes, group=_tensor_group(tp, len(ranks)))
        mismatch = mismatch or inner
    # Peers may still read from this process.
    dist.barrier()
    return f"{mismatch.words()} on rank {place.rank}" if mismatch else ""


def _tensor_group(tp: int, size: int) -> dist.ProcessGroup:
    """Open all tensor-parallel groups of this host, each of `tp` ranks in a row, and return the group of this rank."""
    groups = [dist.new_group(list(range(first, min(first + tp, size)))) for first in range(0, size, tp)]
    group = groups[dist.get_rank() // tp]
    assert isinstance(group, dist.ProcessGroup)
    return group


if __name__ == "__main__":
    end_with_parent()
    warnings.simplefilter("ignore")
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # After a failure, destructors of communicators would wait for peers that are gone.
    os._exit(code)
