"""A worker for agent tests: joins gloo, sums ranks, writes what it saw, and fails when told to."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

out = Path(sys.argv[1])
orders = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
rank = int(os.environ["RANK"])
attempt = os.environ.get("ATTEMPT", "0")
starts = len(list(out.glob(f"train-{rank}-*")))
begun = len(list(out.glob(f"started-{rank}-*")))
(out / f"started-{rank}-{begun}").touch()
names = "RANK LOCAL_RANK WORLD_SIZE GROUP_RANK ATTEMPT CUDA_VISIBLE_DEVICES"
seen = {name: os.environ.get(name) for name in names.split()}
if attempt in orders.get("refuse", []) and rank == 0:
    sys.exit("REFUSED: no such layout")
if begun == orders.get("refuse_start") and rank == 0:
    sys.exit("REFUSED: this device is broken")
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
total = torch.tensor([rank])
dist.all_reduce(total)
seen["sum"] = int(total)
seen["node"] = os.environ.get("NODE", "")
(out / f"train-{rank}-{starts}").write_text(json.dumps(seen))
for iteration in range(orders.get("iterations", 3)):
    if rank == dist.get_world_size() - 1:
        print(f"iteration {iteration}")
    if starts == 0 and iteration == 2 and orders.get("die_once") == rank:
        time.sleep(0.5)
        os.kill(os.getpid(), 9)
    dist.all_reduce(total)
dist.destroy_process_group()
