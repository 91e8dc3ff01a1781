"""A job whose first rank prints the place of each rank: host and LOCAL_RANK."""

import json
import os

import torch.distributed as dist

dist.init_process_group("gloo")
node = os.environ.get("PIPETTE_NODE") or os.environ.get("SLURMD_NODENAME") or os.uname().nodename
places = [None] * dist.get_world_size()
dist.all_gather_object(places, [node, int(os.environ["LOCAL_RANK"])])
if dist.get_rank() == 0:
    print("places", json.dumps(places), flush=True)
dist.destroy_process_group()
