"""A worker for agent tests: joins gloo, sums ranks, writes what it saw, and fails when told to.

Told to be `alone` it joins nobody, which spares it torch: a job whose test is about restarts and words alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

out = Path(sys.argv[1])
orders = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
attempt = os.environ.get("ATTEMPT", "0")
starts = len(list(out.glob(f"train-{rank}-*")))
begun = len(list(out.glob(f"started-{rank}-*")))
(out / f"started-{rank}-{begun}").touch()
names = "RANK LOCAL_RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ATTEMPT CUDA_VISIBLE_DEVICES"
seen: dict[str, object] = {name: os.environ.get(name) for name in names.split()}
is_refused = attempt in orders.get("refuse", [])
is_broken = begun == orders.get("refuse_start")
if is_refused:
    if rank == 0:
        sys.exit("REFUSED: no such layout")
    # For rank 0, which never comes; gloo would wait as long, and cost every rank an import of torch.
    time.sleep(600)
if is_broken and rank == 0:
    sys.exit("REFUSED: this device is broken")
dies = starts == 0 and "die_once" in orders


def meet() -> int:
    """Sum the ranks with all others; alone, take a moment, and wait for ever for one that is dead."""
    if orders.get("alone"):
        waits = dies and iteration >= 2 and orders["die_once"] != rank
        time.sleep(600 if waits or is_broken else 0.05)
        return 0
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return int(total)


iteration = -1
if not orders.get("alone"):
    # As a script does, after its first words: a rank that is refused before costs no more than that.
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
seen["sum"] = meet()
seen["node"] = os.environ.get("NODE", "")
(out / f"train-{rank}-{starts}").write_text(json.dumps(seen))
for iteration in range(orders.get("iterations", 3)):
    if rank == world_size - 1:
        print(f"iteration {iteration}")
    if iteration == 2 and dies and orders["die_once"] == rank:
        time.sleep(0.5)
        os.kill(os.getpid(), 9)
    meet()
if not orders.get("alone"):
    dist.destroy_process_group()
