"""Driver answers, accuracy of clocks and events, and the cost of copies and of one rank of the backend."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.jobs import DeviceKind
from benchmarks.gpu.notebook import Notebook, Record, of_kind
from benchmarks.gpu.shapes import Shape, has_transformer_engine, job_of, layer_of
from pipette_launch.facts import ComputeCase, Host, Layout
from pipette_launch.probe.compute.timing import HABITS, run_part, time_calls
from pipette_launch.probe.health import inventory, nvml
from pipette_launch.probe.instruments import MemoryMeter, Stopwatch, meter, stopwatch_for
from pipette_launch.probe.run import BACKENDS
from pipette_launch.text import MIB, seconds_text
from pipette_patches import workload
from pipette_patches.workload import Part

LAYER: dict[DeviceKind, Shape] = {
    "cuda": Shape(layers=1, hidden=4096, ffn=11008, heads=32, groups=32),
    "cpu": Shape(layers=1, hidden=64, ffn=176, heads=8, groups=8, seq_length=32, vocab=512),
}
IDLE_S, BUSY_S = {"cuda": 3.0, "cpu": 0.3}, {"cuda": 4.0, "cpu": 0.5}
BUCKETS = 8
RUNS = 10
COPY_BYTES: dict[DeviceKind, tuple[int, ...]] = {"cuda": (1 << 20, 1 << 26, 1 << 28), "cpu": (1 << 20,)}
MESSAGE_BYTES = (8, 1 << 20, 1 << 26)


def measure(book: Notebook) -> None:
    """Ask the driver while the device is idle, then work on it."""
    # Before this process touches the device, as in a warm-up.
    reads = meter(book.kind, book.device.uuid)
    book.attempt("the driver's answers", partial(_conditions, book, "idle"))
    workload.load(book.kind)
    watch = stopwatch_for(book.kind)
    book.attempt("one rank of the backend", partial(_one_rank, book, reads, watch), needs_s=5.0)
    book.attempt("copies", partial(_copies, book, watch))
    job = job_of(LAYER[book.kind], Layout(), has_te=has_transformer_engine(book.kind))
    with workload.workload(job, ComputeCase(tp=1, cp=1, micro_batch_size=1), device_kind=book.kind) as work:
        layer = layer_of(work)
        with layer.accumulating():
            for _ in range(HABITS[book.kind].warmups):
                run_part(layer, layer.forward, 1, watch)
            book.attempt("stopwatch beside profiler", partial(_profiled, book, layer, watch))
            needed_s = IDLE_S[book.kind] + BUSY_S[book.kind]
            book.attempt("clocks from idle to load", partial(_clocks, book, layer, watch), needs_s=needed_s)
            book.attempt("the driver's answers under load", partial(_conditions, book, "just worked"))


def _conditions(book: Notebook, when: str) -> None:
    (told,) = inventory.conditions(Host(name="here", address="", cores=1, devices=(book.device,)))
    book.add("condition", when=when, **asdict(told))


def _one_rank(book: Notebook, reads: MemoryMeter, watch: Stopwatch) -> None:
    """Measure the time and memory of a communicator of one rank: no message leaves the device."""
    torch.zeros(1, device=book.kind)
    alone_bytes = reads.overhead_bytes()
    before_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group(BACKENDS[book.kind], store=store, rank=0, world_size=1)
        try:
            dist.all_reduce(torch.zeros(1, device=book.kind))
            watch.settle()
            opened_s = time.perf_counter() - before_s
            book.add(
                "communicator",
                backend=BACKENDS[book.kind],
                opened_s=opened_s,
                alone_bytes=alone_bytes,
                open_bytes=reads.overhead_bytes(),
            )
            for size in MESSAGE_BYTES[: 3 if book.kind == "cuda" else 2]:
                span = torch.zeros(size // 4, device=book.kind)
                samples = time_calls(partial(dist.all_reduce, span), stopwatch=watch, habits=HABITS[book.kind])  # type: ignore[arg-type]
                book.add("all-reduce", bytes=size, seconds=samples.median_s, spread=samples.spread)
        finally:
            dist.destroy_process_group()


def _copies(book: Notebook, watch: Stopwatch) -> None:
    """Between host and device, pinned and not, and within the device; both ways."""
    for size in COPY_BYTES[book.kind]:
        there, other = (torch.empty(size, dtype=torch.uint8, device=book.kind) for _ in range(2))
        plain = torch.zeros(size, dtype=torch.uint8)
        ways = [("host to device", there, plain), ("device to host", plain, there), ("within the device", other, there)]
        if book.kind == "cuda":
            pinned = plain.pin_memory()
            ways += [("pinned host to device", there, pinned), ("device to pinned host", pinned, there)]
        for name, target, source in ways:
            copy = partial(target.copy_, source, non_blocking=True)
            samples = time_calls(copy, stopwatch=watch, habits=HABITS[book.kind])  # type: ignore[arg-type]
            book.add("copy", name=name, bytes=size, seconds=samples.median_s)


def _profiled(book: Notebook, layer: Part, watch: Stopwatch) -> None:
    """Passes by the warm-up's stopwatch, by the host's clock, and the device's own work by torch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if book.kind == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    watched_s = [sum(run_part(layer, layer.forward, 1, watch)) for _ in range(RUNS)]
    watch.settle()
    before_s = time.perf_counter()
    for _ in range(RUNS):
        layer.backward(layer.forward(1))
    watch.settle()
    wall_s = (time.perf_counter() - before_s) / RUNS
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(RUNS):
            layer.backward(layer.forward(1))
        watch.settle()
    events = [event for event in profile.events() or [] if _is_work(event, book.kind)]
    book.add(
        "stopwatch",
        watched_s=statistics.median(watched_s),
        wall_s=wall_s,
        profiled_s=sum(_own_us(event, book.kind) for event in events) / RUNS / 1e6,
        kernels=len(events) / RUNS,
    )


def _is_work(event: Any, kind: DeviceKind) -> bool:
    """A kernel or a copy on CUDA; an operator of torch on a CPU."""
    on_device = event.device_type == torch.autograd.DeviceType.CUDA
    return bool(on_device if kind == "cuda" else not on_device)


def _own_us(event: Any, kind: DeviceKind) -> float:
    return float(event.time_range.elapsed_us() if kind == "cuda" else event.self_cpu_time_total)


def _clocks(book: Notebook, layer: Part, watch: Stopwatch) -> None:
    """Leave the device idle, then work without a pause, and see how long each stretch of it takes."""
    watch.settle()
    time.sleep(IDLE_S[book.kind])
    before_s, taken_s = time.perf_counter(), []
    samples = [_sample(book)]
    next_s = BUSY_S[book.kind] / BUCKETS
    while (now_s := time.perf_counter() - before_s) < BUSY_S[book.kind]:
        taken_s.append(sum(run_part(layer, layer.forward, 1, watch)))
        if now_s > next_s:
            samples.append(_sample(book))
            next_s += BUSY_S[book.kind] / BUCKETS
    size = max(len(taken_s) // BUCKETS, 1)
    book.add(
        "clocks",
        first_s=taken_s[0],
        stretches_s=[statistics.median(taken_s[at : at + size]) for at in range(0, len(taken_s), size)][:BUCKETS],
        driver=samples,
    )


def _sample(book: Notebook) -> Record:
    """Clock, power, temperature and why the clock is where it is, now; empty on a CPU."""
    if book.kind == "cpu":
        return {}
    with nvml.session() as library:
        if library is None:
            return {}
        handle = library.nvmlDeviceGetHandleByUUID(book.device.uuid)
        ask: Callable[..., Any] = partial(nvml.query, library)
        (told,) = inventory.conditions(Host(name="here", address="", cores=1, devices=(book.device,)))
        return {
            "sm_clock_hz": told.sm_clock_hz,
            "temperature_c": told.temperature_c,
            "clock_reasons": list(told.clock_reasons or ()),
            "power_mw": ask("nvmlDeviceGetPowerUsage", handle),
            "performance_state": ask("nvmlDeviceGetPerformanceState", handle),
        }


def lines(records: Sequence[Record]) -> Iterator[str]:
    """A sentence for each thing, and a table of copies."""
    for one in of_kind(records, "condition"):
        unknown = [name for name, value in one.items() if value is None]
        known = {name: value for name, value in one.items() if value is not None and name not in ("kind", "when")}
        yield f"The driver, {one['when']}: {', '.join(f'{name} {value}' for name, value in known.items())}."
        yield f"It does not tell: {', '.join(unknown) or 'nothing is missing'}."
    for one in of_kind(records, "communicator"):
        yield (
            f"One rank of {one['backend']}: open after {seconds_text(one['opened_s'])}; outside the allocator "
            f"{one['alone_bytes'] / MIB:,.0f} MiB before and {one['open_bytes'] / MIB:,.0f} MiB with it."
        )
    for one in of_kind(records, "all-reduce"):
        yield f"An all-reduce of {one['bytes']:,} bytes with itself: {seconds_text(one['seconds'])}."
    for one in of_kind(records, "stopwatch"):
        yield (
            f"A layer forward and backward: {seconds_text(one['watched_s'])} by the warm-up's stopwatch, "
            f"{seconds_text(one['wall_s'])} by the host's clock, {seconds_text(one['profiled_s'])} of work by the "
            f"profiler in {one['kernels']:.0f} pieces."
        )
    for one in of_kind(records, "clocks"):
        last_s = one["stretches_s"][-1]
        stretches = ", ".join(f"{each_s / last_s:.2f}" for each_s in one["stretches_s"])
        yield (
            f"After an idle pause the first pass took {one['first_s'] / last_s:.2f} times as long as the last ones; by "
            f"eighths of the time: {stretches}."
        )
        for sample in (one["driver"][0], one["driver"][-1]):
            if sample:
                yield f"Driver meanwhile: {', '.join(f'{name} {value}' for name, value in sample.items())}."
    copies = of_kind(records, "copy")
    if copies:
        yield ""
        yield "| copy | bytes | time | GB/s |"
        yield "|---|--:|--:|--:|"
    for one in copies:
        rate = one["bytes"] / one["seconds"] / 1e9
        yield f"| {one['name']} | {one['bytes']:,} | {seconds_text(one['seconds'])} | {rate:,.2f} |"
