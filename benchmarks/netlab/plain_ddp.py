"""A plain torch.distributed training: DDP of one layer over gloo, with the lines that `netlab compare` reads.

python -m benchmarks.netlab compare benchmarks/netlab/wrong_order.toml -- benchmarks/netlab/plain_ddp.py
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(iterations: int) -> None:
    """Train on batches that depend only on the iteration, so that the order of the ranks changes no loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(1024, 1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for iteration in range(1, iterations + 1):
        began_s = time.perf_counter()
        optimizer.zero_grad()
        loss = model(torch.randn(4, 1024)).square().mean()
        loss.backward()
        optimizer.step()
        took_ms = 1000 * (time.perf_counter() - began_s)
        if dist.get_rank() == dist.get_world_size() - 1:
            print(
                f" iteration {iteration:8d}/{iterations:8d} | elapsed time per iteration (ms): {took_ms:.1f} | "
                f"lm loss: {loss.item():.6E} |",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
