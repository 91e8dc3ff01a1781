"""The device model's own figures, each measured by itself: what `facts.machines.accelerator.Efficiency` stands for.

How much of the peak products and flash attention reach, how much of the bandwidth, what the host spends on a kernel,
and what CUDA graphs save of that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu.jobs import DeviceKind
from benchmarks.gpu.notebook import Notebook, Record, of_kind
from benchmarks.gpu.shapes import Shape, job_of, layer_of
from pipette_launch.cost.layers.kinds import kind_loads
from pipette_launch.errors import PipetteError
from pipette_launch.facts import ComputeCase, Layout
from pipette_launch.probe.compute.timing import Habits, time_calls, time_part
from pipette_launch.probe.instruments import Stopwatch
from pipette_launch.text import seconds_text
from pipette_patches import workload
from pipette_patches.workload import Part

SQUARES: dict[DeviceKind, tuple[int, ...]] = {"cuda": (1024, 2048, 4096, 8192), "cpu": (64, 128, 256)}
NARROW: dict[DeviceKind, tuple[int, ...]] = {"cuda": (128, 256, 512), "cpu": (16, 32)}
"""One side of a product whose other sides are of the largest square."""
SPAN_BYTES: dict[DeviceKind, int] = {"cuda": 1 << 30, "cpu": 1 << 22}
FLASH: dict[DeviceKind, tuple[tuple[int, int, int], ...]] = {
    "cuda": ((1, 2048, 128), (1, 8192, 128), (4, 4096, 128)),
    "cpu": ((1, 64, 16),),
}
"""Micro-batch, sequence and channels of a head of flash attention, each with 32 heads (2 on a CPU)."""
TINY = Shape(layers=1, hidden=256, ffn=704, heads=4, groups=4, seq_length=64, vocab=512)
"""So small that a GPU waits for the host."""


def products(book: Notebook, watch: Stopwatch, habits: Habits) -> None:
    """Square products, and products that are short in one dimension: what `matmul_share` and `half_size` stand for."""
    large = SQUARES[book.kind][-1]
    shapes = [(size, size, size) for size in SQUARES[book.kind]]
    shapes += [side for short in NARROW[book.kind] for side in ((short, large, large), (large, large, short))]
    for m, n, k in shapes:
        left = torch.randn(m, k, dtype=torch.bfloat16, device=book.kind)
        # As a layer's weights lie: row by row of the output.
        right = torch.randn(n, k, dtype=torch.bfloat16, device=book.kind).t()
        out = torch.empty(m, n, dtype=torch.bfloat16, device=book.kind)
        samples = time_calls(partial(torch.mm, left, right, out=out), stopwatch=watch, habits=habits)
        book.add("product", m=m, n=n, k=k, flops=2 * m * n * k, seconds=samples.median_s, spread=samples.spread)


def flash(book: Notebook, watch: Stopwatch, habits: Habits) -> None:
    """Causal attention by torch's own flash kernel, forward and backward."""
    heads = 32 if book.kind == "cuda" else 2
    for size, length, channels in FLASH[book.kind]:
        query, key, value = (
            torch.randn(size, heads, length, channels, dtype=torch.bfloat16, device=book.kind, requires_grad=True)
            for _ in range(3)
        )

        def forward(q: Any = query, k: Any = key, v: Any = value) -> torch.Tensor:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both(run: Callable[[], torch.Tensor] = forward, inputs: Any = (query, key, value)) -> object:
            output = run()
            return torch.autograd.grad(output, inputs, torch.ones_like(output))

        one_way, whole = (time_calls(work, stopwatch=watch, habits=habits) for work in (forward, both))  # type: ignore[arg-type]
        # Half of the square lies behind the mask; the backward has 5 products to the forward's 2.
        flops = 2.0 * size * heads * length * length * channels
        backward_s = max(whole.median_s - one_way.median_s, 1e-9)
        book.add("flash", size=size, length=length, flops=flops, seconds=one_way.median_s, backward_s=backward_s)


def bandwidth(book: Notebook, watch: Stopwatch, habits: Habits) -> None:
    """A copy, and an addition of two spans into a third."""
    count = SPAN_BYTES[book.kind] // 2
    one, two, out = (torch.ones(count, dtype=torch.bfloat16, device=book.kind) for _ in range(3))
    works: tuple[tuple[str, Callable[[], object], int], ...] = (
        ("copy", partial(out.copy_, one), 2),
        ("add", partial(torch.add, one, two, out=out), 3),
    )
    for name, work, passes in works:
        samples = time_calls(work, stopwatch=watch, habits=habits)  # type: ignore[arg-type]
        book.add("copy", name=name, bytes=passes * 2 * count, seconds=samples.median_s)


def host_bound(book: Notebook, watch: Stopwatch, habits: Habits, has_te: bool) -> None:
    """A layer too small for the device: its time is the host's, and over its kernels `launch_s`. Then as a graph."""
    job = job_of(TINY, Layout(), has_te=has_te)
    loads = kind_loads(job, Layout(), "layer")
    with workload.workload(job, ComputeCase(tp=1, cp=1, micro_batch_size=1), device_kind=book.kind) as work:
        layer = layer_of(work)
        found = time_part(layer, ComputeCase(tp=1, cp=1, micro_batch_size=1), slot=0, stopwatch=watch, habits=habits)
        book.add(
            "host",
            forward_s=found.forward.median_s,
            backward_s=found.input_grad.median_s + found.weight_grad.median_s,
            forward_kernels=loads.forward.kernels,
            backward_kernels=(loads.input_grad + loads.weight_grad).kernels,
        )
        book.attempt("a CUDA graph of that layer", partial(_graph, book, layer))


def _graph(book: Notebook, layer: Part) -> None:
    """Capture and replay the same layer's forward and backward, so that only the device's own time remains."""
    from megatron.core import tensor_parallel

    if book.kind != "cuda":
        raise PipetteError("CUDA graphs need CUDA")
    # Nothing is dropped out, and switching random states cannot be captured.
    no_fork = mock.patch.object(tensor_parallel.get_cuda_rng_tracker(), "fork", return_value=contextlib.nullcontext())
    with no_fork, layer.accumulating():
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                layer.backward(layer.forward(1))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer.backward(layer.forward(1))
        replayed_s = _wall_s(graph.replay)
        eager_s = _wall_s(lambda: layer.backward(layer.forward(1)))
    book.add("graph", eager_s=eager_s, replayed_s=replayed_s)


def _wall_s(work: Callable[[], object], times: int = 50) -> float:
    """Seconds of one of many in a row, host and device together."""
    work()
    torch.cuda.synchronize()
    before_s = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - before_s) / times


def lines(records: Sequence[Record]) -> Iterator[str]:
    """A sentence for each figure, as the device model would have to have it."""
    products = of_kind(records, "product")
    if products:
        rates = sorted(one["flops"] / one["seconds"] for one in products)
        share, half = fitted(products)
        yield (
            f"Products in bf16 run at {rates[0] / 1e12:,.3f} to {rates[-1] / 1e12:,.3f} TFLOP/s; fitted, an endless "
            f"one at {share / 1e12:,.3f} TFLOP/s, with half_size {half:.0f}."
        )
    for one in of_kind(records, "flash"):
        forward, backward = one["flops"] / one["seconds"] / 1e12, 2.5 * one["flops"] / one["backward_s"] / 1e12
        yield (
            f"Flash attention of {one['size']} x {one['length']} tokens: forward {forward:,.3f} TFLOP/s, backward "
            f"{backward:,.3f}."
        )
    for one in of_kind(records, "copy"):
        yield f"Memory, {one['name']}: {one['bytes'] / one['seconds'] / 1e9:,.1f} GB/s."
    for one in of_kind(records, "host"):
        for name in ("forward", "backward"):
            seconds, kernels = one[f"{name}_s"], one[f"{name}_kernels"]
            yield (
                f"A layer that waits for the host, {name}: {seconds_text(seconds)} for {kernels:g} kernels as the "
                f"device model counts them, {seconds / kernels * 1e6:.1f} us each (launch_s)."
            )
    for one in of_kind(records, "graph"):
        eager, replayed = seconds_text(one["eager_s"]), seconds_text(one["replayed_s"])
        yield f"That layer and its backward: {eager}, as a CUDA graph {replayed}."


def fitted(products: Sequence[Record]) -> tuple[float, float]:
    """Flops/s of an endless product and `half_size`: 1/rate = (1 + half_size * (1/m + 1/n + 1/k)) / endless rate.

    Least squares of the relative error, as the model's error counts in shares of a product's time.
    """
    rates = np.array([one["flops"] / one["seconds"] for one in products])
    ends = np.array([1 / one["m"] + 1 / one["n"] + 1 / one["k"] for one in products])
    columns = np.stack([np.ones_like(ends), ends], axis=1) * rates[:, None]
    (inverse, slope), *_ = np.linalg.lstsq(columns, np.ones_like(rates), rcond=None)
    return float(1 / inverse), float(slope / inverse)
