"""Messages around a ring and an all-reduce of all ranks, which test whether a backend works on this device."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from pipette_launch.probe.run import BACKENDS

SIZE = 1 << 18


def main(device_kind: str) -> None:
    """Open the world's communicator, send around the ring, and reduce.

    Each rank prints one line of JSON. Raises ValueError if a message or a sum is wrong.
    """
    began_s = time.perf_counter()
    if device_kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKENDS[device_kind], timeout=timedelta(minutes=1))
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((SIZE,), float(rank), device=device_kind)
    got = torch.empty_like(mine)
    around = [dist.P2POp(dist.isend, mine, (rank + 1) % size), dist.P2POp(dist.irecv, got, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(around):
        work.wait()
    total = mine.clone()
    dist.all_reduce(total)
    found = (got[0].item(), total[-1].item())
    expected = (float((rank - 1) % size), size * (size - 1) / 2)
    if found != expected:
        raise ValueError(f"rank {rank} got {found} in place of {expected}")
    met_s = time.perf_counter() - began_s
    # One write for a line: ranks share the pipe, and an unbuffered `print` writes the end of the line by itself.
    sys.stdout.write(json.dumps({"rank": rank, "met_s": met_s}) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
