"""Checks that collectives return shares in the order of ranks, on one host, before training.

The command `python -m pipette_launch.probe.order_check KIND TP RANK...` runs one worker. The worker runs in torchrun's
environment, with the devices in the order that training gives them. All workers of a host open one communicator, and
each tensor-parallel group opens a second communicator.

NCCL may return shares in the order of the devices instead, without an error (NVIDIA/nccl#1906: NVLS on one host with a
permuted CUDA_VISIBLE_DEVICES). Without this check, training would continue with wrong numbers.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from pipette_launch.errors import ProbeError
from pipette_launch.probe.lockstep import worker_place
from pipette_launch.probe.messages import wait_s
from pipette_launch.probe.run import BACKENDS, connect_store, run_as_worker
from pipette_launch.text import printable

SIZES_BYTES = tuple(1 << power for power in range(20, 27))
"""Sizes of the tested tensors, 1 to 64 MiB. NCCL chooses its algorithm by size; only some sizes use NVLS."""
ELEMENT_BYTES = 4
logger = logging.getLogger(__name__)


def check_order(
    device: str, *, sizes_bytes: Sequence[int] = SIZES_BYTES, group: dist.ProcessGroup | None = None
) -> str:
    """Run all-gather and reduce-scatter once at each size and compare all values, which encode rank and position.

    All members of the group call this function, and run all sizes even after a wrong value, so that no member waits for
    another. A size is the size of the full tensor, rounded down to a whole number of elements for each rank. Returns a
    sentence on the first wrong value in this rank's results; empty if all values were exact.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    wrong: list[str] = []
    for size_bytes in sizes_bytes:
        share = size_bytes // ELEMENT_BYTES // num_ranks
        # int32 is a type that NVLS reduces (`ncclNvlsSupported` in NCCL), and sums are exact up to 128 ranks of 64 MiB.
        full = torch.arange(share * num_ranks, dtype=torch.int32, device=device)
        mine = full[rank * share : (rank + 1) * share]
        gathered = torch.full_like(full, -1)
        dist.all_gather_into_tensor(gathered, mine.clone(), group=group)
        reduced = torch.full_like(mine, -1)
        dist.reduce_scatter_tensor(reduced, full + rank, group=group)
        summed = mine * num_ranks + sum(range(num_ranks))
        for name, expected, found in (("all_gather", full, gathered), ("reduce_scatter", summed, reduced)):
            differ = (expected != found).nonzero()
            if len(differ):
                at = int(differ[0])
                what = f"{name} of {full.nbytes >> 20} MiB returned {int(found[at])}"
                wrong.append(f"{what} instead of {int(expected[at])} at element {at}")
    return wrong[0] if wrong else ""


def main(arguments: Sequence[str]) -> int:
    """Check this host; returns the exit code, and prints one line on stderr if a collective is wrong or fails.

    Arguments: `cuda` or `cpu`, the size of tensor-parallel groups, and the RANKs of this host.
    """
    try:
        kind, tp, *ranks = arguments
        found = _found(kind, int(tp), sorted(map(int, ranks)))
    except Exception as error:
        # The agent needs only one line and an exit code, so the traceback goes to the debug log.
        logger.debug("the check failed", exc_info=True)
        text = " ".join(str(error).split())
        found = text if isinstance(error, ProbeError) else f"{type(error).__name__}: {text}"
    if found:
        sys.stderr.write(f"{printable(found)}\n")
    return 1 if found else 0


def _found(kind: str, tp: int, ranks: list[int]) -> str:
    place = worker_place(os.environ)
    if kind == "cuda":
        # Choose the device by LOCAL_RANK and not by RANK: with --numa-binding the worker with LOCAL_RANK i keeps device
        # i under any RANK. A worker under --virtual-local-rank has LOCAL_RANK 0 and sees one device.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if torch.cuda.device_count() > 1 else 0)
    timeout = timedelta(seconds=wait_s(place.world_size))
    store = dist.PrefixStore(f"pipette/order/{ranks[0]}", connect_store(place, timeout))
    # Like the groups of training, this group holds its ranks in rising order.
    dist.init_process_group(
        BACKENDS[kind], store=store, rank=ranks.index(place.rank), world_size=len(ranks), timeout=timeout
    )
    # gloo has one algorithm for all sizes, and takes seconds for large sizes, so one size is enough.
    sizes_bytes = SIZES_BYTES if kind == "cuda" else SIZES_BYTES[:1]
    wrong = check_order(kind, sizes_bytes=sizes_bytes)
    if 1 < tp < len(ranks):
        # NCCL chooses algorithms by the number of ranks. Every rank checks both the host's group and its
        # tensor-parallel group, even after a wrong value.
        groups = [dist.new_group(list(range(first, min(first + tp, len(ranks))))) for first in range(0, len(ranks), tp)]
        group = groups[dist.get_rank() // tp]
        assert isinstance(group, dist.ProcessGroup)
        inner = check_order(kind, sizes_bytes=sizes_bytes, group=group)
        wrong = wrong or inner
    # Wait for all ranks, because peers may still read from this process.
    dist.barrier()
    return f"{wrong} on rank {place.rank}" if wrong else ""


if __name__ == "__main__":
    run_as_worker(main)
