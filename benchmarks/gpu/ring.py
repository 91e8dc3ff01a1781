"""A few messages of each kind among all ranks: whether a backend works here at all."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

SIZE = 1 << 18


def main(device_kind: str) -> None:
    """Open the world's communicator, send around the ring, reduce and gather; raises where a value is wrong."""
    began_s = time.perf_counter()
    dist.init_process_group("nccl" if device_kind == "cuda" else "gloo", timeout=timedelta(seconds=30))
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((SIZE,), float(rank), device=device_kind)
    got = torch.empty_like(mine)
    around = [dist.P2POp(dist.isend, mine, (rank + 1) % size), dist.P2POp(dist.irecv, got, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(around):
        work.wait()
    total = mine.clone()
    dist.all_reduce(total)
    every = torch.empty(size * SIZE, device=device_kind)
    dist.all_gather_into_tensor(every, mine)
    found = (got[0].item(), total[-1].item(), every[-1].item())
    expected = (float((rank - 1) % size), size * (size - 1) / 2, size - 1.0)
    if found != expected:
        raise ValueError(f"rank {rank} got {found} in place of {expected}")
    print(f"ring of {size}: rank {rank} is done after {time.perf_counter() - began_s:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
