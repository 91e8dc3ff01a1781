"""One worker of a warm-up's link phase: `python link_worker.py ORDER FOUND`, on a host of a laboratory."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from pipette_launch.facts import files
from pipette_launch.probe.links import pairs
from pipette_launch.probe.links.fits import fit_link
from pipette_launch.probe.lockstep import Budget, Lockstep
from pipette_launch.probe.messages import WarmupOrder

LIMIT_S = 60.0


def meet(world_size: int) -> tuple[dist.TCPStore, int]:
    """Join the workers of the other hosts over gloo; the store, and which of them this is."""
    rank = int(os.environ["NETLAB_INDEX"])
    store = dist.TCPStore(
        os.environ["NETLAB_HEAD"],
        int(os.environ["NETLAB_PORT"]),
        is_master=rank == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=LIMIT_S),
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return store, rank


def main(order: str, found: str) -> None:
    """Measure all links together with the other hosts' workers; leave Mbit/s by sender and receiver."""
    options = files.read(Path(order), WarmupOrder)
    store, rank = meet(options.num_slots)
    lockstep = Lockstep(store=store, rank=rank, world_size=options.num_slots, timeout_s=LIMIT_S)
    budget = Budget(started_s=time.perf_counter(), budget_s=options.budget_s, clock=time.perf_counter)
    measured = pairs.measure(options, lockstep=lockstep, budget=budget)
    rates = [(link.source, link.target, fit_link(link).bytes_per_s * 8e-6) for link in measured.links]
    Path(found, str(rank)).write_text(json.dumps({"rates": rates, "rounds": sum(measured.link_rounds)}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
