"""Cost of torch's own rendezvous by the number of nodes.

`python -m benchmarks.bench_rendezvous [--nodes 32,64,...]` lets N of torch's c10d handlers meet, as threads of four
processes, and prints the seconds until all have met, and the bytes that they exchange in the next ten seconds: first as
torchrun uses the handlers, then as pipette-launch does.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from benchmarks.bench_scale import PLAYERS, Counted, look_up_names_in_files
from benchmarks.telling import processor
from pipette_launch.agent.membership import RENEWERS
from pipette_launch.agent.rendezvous import RendezvousSettings
from pipette_launch.agent.rendezvous_handler import AgentStoreHandler

WATCH_S = 10.0


def player(size: int, number: int, port: int, is_ours: bool, barrier: Any, results: Any) -> None:
    """Let a share of the nodes meet, and count what they send."""
    threading.stack_size(1 << 19)
    counts: Counter[str] = Counter()

    def join(index: int) -> None:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        parameters = RendezvousParameters(
            "c10d", f"127.0.0.1:{port}", "job", size, size, local_addr=f"127.0.{index // 250}.{index % 250 + 1}"
        )
        backend = C10dRendezvousBackend(store, "job")
        backend._store = Counted(store, counts)  # noqa: SLF001
        handler: Any = create_handler(store, backend, parameters)
        if is_ours:
            settings = RendezvousSettings(
                endpoint=f"127.0.0.1:{port}", node_rank=-1, may_host_store=True, least_nodes=size, most_nodes=size
            )
            handler = AgentStoreHandler(handler, settings, is_round_over=lambda: False)
        handlers.append((handler, handler.next_rendezvous().rank))

    handlers: list[tuple[Any, int]] = []
    threads = [threading.Thread(target=join, args=(index,), daemon=True) for index in range(number, size, PLAYERS)]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s, joined = time.monotonic() - began_s, counts.copy()
    barrier.wait()
    for handler, rank in handlers if is_ours else ():
        handler.renew(range(size) if rank < RENEWERS else ())
    barrier.wait()
    counts.clear()
    time.sleep(WATCH_S)
    results.put((took_s, joined["messages"], joined["bytes"], counts["messages"], counts["bytes"]))
    barrier.wait()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", default="32,64,128,256", help="sizes, comma-separated")
    args = parser.parse_args()
    # torch opens one more store for each rendezvous on the first node, unless this variable is set.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    look_up_names_in_files()
    cores = len(os.sched_getaffinity(0))
    sys.stdout.write(f"{processor()}, {cores} cores, {PLAYERS} processes, torch {torch.__version__}\n\n")
    sys.stdout.write("| nodes | as | met after | messages | MB | MB/s afterwards |\n|--:|---|--:|--:|--:|--:|\n")
    context = multiprocessing.get_context("fork")
    for size, is_ours in itertools.product(map(int, args.nodes.split(",")), (False, True)):
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        barrier, results = context.Barrier(PLAYERS), context.Queue()
        players = [
            context.Process(target=player, args=(size, number, store.port, is_ours, barrier, results), daemon=True)
            for number in range(PLAYERS)
        ]
        for one in players:
            one.start()
        told = [results.get(timeout=170) for _ in players]
        for one in players:
            one.kill()
        times_s, messages, sent, _, later = zip(*told, strict=True)
        kind = "pipette-launch" if is_ours else "torchrun"
        sys.stdout.write(
            f"| {size} | {kind} | {max(times_s):.1f} s | {sum(messages):,} | {sum(sent) / 1e6:.1f} "
            f"| {sum(later) / 1e6 / WATCH_S:.2f} |\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
