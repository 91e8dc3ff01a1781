"""One worker that measures links only: `python link_worker.py ORDER PORT RANK SILENT`, which tests start."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from pipette_launch.errors import ProbeError
from pipette_launch.facts import files
from pipette_launch.probe.links.pairs import LinkMeter, shared_bandwidth_HH
from pipette_launch.probe.links.selection import all_pairs
from pipette_launch.probe.lockstep import Lockstep
from pipette_launch.probe.messages import WarmupOrder

HANG_S = 60.0
DEADLINE_S = 3.0


def main(order: str, port: str, rank_text: str, silent: str) -> None:
    """Measure all pairs once, and again with one worker that goes silent during an exchange."""
    options, rank = files.read(Path(order), WarmupOrder), int(rank_text)
    store = dist.TCPStore("127.0.0.1", int(port), wait_for_workers=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.num_slots)
    lockstep = Lockstep(store=store, rank=rank, world_size=options.num_slots, timeout_s=HANG_S)
    meter = LinkMeter(options=options, lockstep=lockstep, bound_s=0.1)
    links = meter.measure(all_pairs(range(len(options.hosts))))
    rates_HH = shared_bandwidth_HH(options, rank, links)
    found = {"links": [files.to_plain(link) for link in links], "rates": rates_HH.tolist()}
    folder = Path(options.output).parent
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    meter = LinkMeter(options=replace(options, timeout_s=DEADLINE_S), lockstep=lockstep, bound_s=0.1)
    if rank == int(silent):
        meter._message = lambda *_, **__: time.sleep(HANG_S)  # type: ignore[method-assign]
    try:
        meter.measure([((1, 2),)], first=4, of=6)
    except ProbeError as failure:
        (folder / f"error-{rank}").write_text(str(failure))
    # Peers are gone, and destructors would wait for them.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
