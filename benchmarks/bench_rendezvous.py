"""Cost of torch's own rendezvous by the number of nodes.

`python -m benchmarks.bench_rendezvous [--nodes 64,128,...] [--record]` lets N of torch's c10d handlers meet: first as
torchrun uses the handlers, then as pipette-launch does. The handlers are threads of four processes, and their store is
in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from benchmarks.bench_scale import PLAYERS, look_up_names_in_files
from benchmarks.telling import processor, shown
from pipette_launch.agent.membership import RENEWERS
from pipette_launch.agent.rendezvous import CROWD, KEEP_ALIVE_S, RendezvousSettings
from pipette_launch.agent.rendezvous_handler import AgentStoreHandler

MOST_OF_TORCH = 128
"""Largest meeting as torchrun's handlers meet. Larger ones take minutes on two busy cores."""
WATCH_S, PATIENCE_S = 10.0, 200.0
"""Seconds after the meeting in which messages are counted, and seconds until a meeting is given up."""
HEADER = (
    "| nodes | as | numbered after | CPU | CPU of the store | messages | writes | lost races | MB | MB/s afterwards |\n"
    "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)
RESULT = Path(__file__).parent / "results" / "rendezvous.md"


class CountedStore(TCPStore):
    """A client of the store that counts messages, bytes, conditional writes, and the lost races among these."""

    counts: Counter[str]

    def _count(self, name: str, *args: Any) -> Any:
        answer = getattr(super(), name)(*args)
        sent = sum(len(one) for one in args if isinstance(one, str | bytes))
        self.counts.update(messages=1, bytes=sent + (len(answer) if isinstance(answer, bytes) else 8))
        return answer

    def compare_set(self, *args: Any) -> bytes:
        """Write torch's list."""
        found: bytes = self._count("compare_set", *args)
        self.counts["writes" if found.decode() == args[2] else "lost"] += 1
        return found


for each in ("append", "check", "get", "set"):
    setattr(CountedStore, each, lambda self, *args, name=each: self._count(name, *args))


def play(size: int, number: int, is_ours: bool, port: Any, barrier: Any, results: Any) -> None:
    """Let a share of the nodes meet, and count what they send."""
    threading.stack_size(1 << 19)
    counts: Counter[str] = Counter()
    handlers: list[tuple[Any, int]] = []
    indices = range(number, size, PLAYERS)
    connected = threading.Barrier(len(indices) + 1)
    start = threading.Event()

    def join(index: int) -> None:
        endpoint = f"127.0.0.1:{port.value}"
        store = CountedStore("127.0.0.1", port.value, is_master=False, wait_for_workers=False)
        store.counts = counts
        interval_s = max(KEEP_ALIVE_S, size**2 // CROWD) if is_ours else KEEP_ALIVE_S
        parameters = RendezvousParameters(
            "c10d", endpoint, "job", size, size, local_addr=f"gpu{index:05d}.cluster.local",
            keep_alive_interval=interval_s,
        )  # fmt: skip
        handler: Any = create_handler(store, C10dRendezvousBackend(store, "job"), parameters)
        if is_ours:
            settings = RendezvousSettings(
                endpoint=endpoint, node_rank=-1, may_host_store=not index, least_nodes=size, most_nodes=size
            )
            handler = AgentStoreHandler(handler, settings, is_round_over=lambda: False)
        connected.wait()
        start.wait()
        handlers.append((handler, handler.next_rendezvous().rank))

    barrier.wait()
    threads = [threading.Thread(target=join, args=(index,), daemon=True) for index in indices]
    for thread in threads:
        thread.start()
    connected.wait()
    barrier.wait()
    counts.clear()
    before, began_s = os.times(), time.monotonic()
    start.set()
    for thread in threads:
        thread.join()
    assert len(handlers) == len(indices), "a node failed"
    after = os.times()
    found = dict(counts, took_s=time.monotonic() - began_s, cpu_s=sum(after[:2]) - sum(before[:2]))
    barrier.wait()
    for handler, rank in handlers if is_ours else ():
        handler.renew(range(size) if rank < RENEWERS else ())
    barrier.wait()
    counts.clear()
    time.sleep(WATCH_S)
    results.put({**found, "later": counts["bytes"], "ranks": [rank for _, rank in handlers]})
    barrier.wait()


def meet(size: int, is_ours: bool, told: Any) -> None:
    """Hold the store, and let the nodes meet. This process forks before the store starts threads."""
    context = multiprocessing.get_context("fork")
    port, barrier, results = context.Value("i", 0), context.Barrier(PLAYERS + 1), context.Queue()
    players = [
        context.Process(target=play, args=(size, number, is_ours, port, barrier, results), daemon=True)
        for number in range(PLAYERS)
    ]
    for one in players:
        one.start()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port.value = store.port
    barrier.wait()
    barrier.wait()
    before = os.times()
    try:
        barrier.wait(PATIENCE_S)
        cpu_s = sum(os.times()[:2]) - sum(before[:2])
        barrier.wait()
        found = [results.get(timeout=PATIENCE_S) for _ in players]
        ranks = sorted(rank for one in found for rank in one.pop("ranks"))
        assert ranks == list(range(size)), f"{size} nodes have ranks {ranks}"
        told.put((max(one.pop("took_s") for one in found), cpu_s, sum(map(Counter, found), Counter())))
    except (threading.BrokenBarrierError, Empty):
        told.put(None)
    for one in players:
        one.kill()


def rows(sizes: list[int]) -> Iterator[str]:
    """Run each meeting, and yield a row of the table."""
    context = multiprocessing.get_context("fork")
    for size, is_ours in itertools.product(sizes, (False, True)):
        if size > MOST_OF_TORCH and not is_ours:
            continue
        told = context.Queue()
        process = context.Process(target=meet, args=(size, is_ours, told))
        process.start()
        found = told.get()
        process.join()
        kind = "pipette-launch" if is_ours else "torchrun"
        if found is None:
            yield f"| {size:,} | {kind} | not within {PATIENCE_S:.0f} s | | | | | | | |"
            continue
        took_s, store_s, sums = found
        yield (
            f"| {size:,} | {kind} | {took_s:.1f} s | {sums['cpu_s']:.1f} s | {store_s:.1f} s | {sums['messages']:,} "
            f"| {sums['writes']:,} | {sums['lost']:,} | {sums['bytes'] / 1e6:,.1f} "
            f"| {sums['later'] / 1e6 / WATCH_S:.2f} |"
        )


def report(sizes: list[int]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield "# torch's rendezvous by the number of nodes"
    yield ""
    machine = f"{processor()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}"
    yield (
        f"`python -m benchmarks.bench_rendezvous --record`, {time.strftime('%Y-%m-%d')}: {machine}. The nodes are "
        f"threads of {PLAYERS} processes. Connected nodes join at the same time. CPU sums all nodes. Afterwards, the "
        f"nodes renew the list for {WATCH_S:.0f} s, as during a training. Writes and lost races count each conditional "
        f"write. Larger meetings than of {MOST_OF_TORCH} nodes were not run as torchrun's."
    )
    yield ""
    yield HEADER
    yield from rows(sizes)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", default="64,128,256,512,1024", help="sizes, comma-separated")
    parser.add_argument("--record", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args()
    # torch opens one more store for each rendezvous on the first node, unless this variable is set.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    look_up_names_in_files()
    text = shown(report([int(size) for size in args.nodes.split(",")]))
    if args.record:
        RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
