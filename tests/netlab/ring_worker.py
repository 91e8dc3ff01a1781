"""Times gloo's rings: `python ring_worker.py FOUND`, on a host of a laboratory."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from link_worker import meet

ELEMENTS = 3 << 17
"""1.5 MiB in fp32, in three parts."""


def main(found: str) -> None:
    """Leave the best of three seconds of each kind."""
    size = 3
    # The first rank holds the store as long as this name does.
    _store, rank = meet(size)
    full, part = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS // size)
    kinds: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(full),
        "all_gather": lambda: dist.all_gather_into_tensor(full, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full),
    }
    seconds = {}
    for kind, action in kinds.items():
        looks_s = []
        for _ in range(3):
            dist.barrier()
            began_s = time.perf_counter()
            action()
            looks_s.append(time.perf_counter() - began_s)
        seconds[kind] = min(looks_s)
    Path(found, str(rank)).write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
