"""Seconds of one pipeline for a step, by depth and number of micro-batches, from the cost model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from benchmarks.lost_nodes.jobs import DEVICES_PER_HOST, Case, device, for_layouts, with_batch
from benchmarks.lost_nodes.shares import Pipelines
from pipette_launch.cost.memory.overhead import allowed_bytes, overhead_of
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.defaults import MEMORY_MARGIN
from pipette_launch.facts import Layout, Measurements
from pipette_launch.facts.layout import Recompute
from pipette_launch.search.layout_axes import balanced_chunks, by_flops

FULL = Recompute(granularity="full", method="uniform", num_layers=1)
MOST_STAGES = 24
LONG = (32, 48, 96)
"""Depths beyond, for pipelines without TP."""
MOST_HOSTS = 128
"""Most hosts of replicas beside which a pipeline is priced: more change the time of a ring little."""
_AFTER = ("data_parallel", "embedding_gradients", "optimizer", "parameter_gather")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Pipelines of one kind and any depth."""

    tp: int
    micro_batch_size: int
    recompute: Recompute
    interleaved: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Seconds of a pipeline of one depth."""

    fixed_s: float
    """Filling and draining, gradients, optimizer."""
    each_s: float
    """Each micro-batch more."""
    forward_s: float
    """The slowest stage's forward of a micro-batch."""
    after_s: float
    """The part of `fixed_s` after the pipeline."""

    def pipelines(self, count: int) -> Pipelines:
        """Number of pipelines."""
        return Pipelines(count=count, fixed_s=self.fixed_s, each_s=self.each_s)


class Paces:
    """Prices pipelines of one case; each is priced once."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._job = case.job(case.hosts)
        self._seconds = by_flops(self._job.model)
        self._device = device()
        self.of = lru_cache(None)(self._of)
        self.fits = lru_cache(None)(self._fits)

    @property
    def most_stages(self) -> int:
        """The deepest pipeline that is tried."""
        return min(self._job.model.num_layers, MOST_STAGES)

    @property
    def long(self) -> tuple[int, ...]:
        """Deeper ones, for pipelines without TP."""
        return tuple(depth for depth in LONG if depth <= self._job.model.num_layers)

    def shapes(self, *, tps: tuple[int, ...], recomputes: tuple[Recompute, ...], interleaved: bool) -> Iterator[Shape]:
        """Kinds of pipelines, with micro-batches of 1, 2 and 4 samples."""
        for tp in tps:
            for size in (1, 2, 4):
                for recompute in recomputes:
                    for turns in (False, True)[: 1 + interleaved]:
                        yield Shape(tp=tp, micro_batch_size=size, recompute=recompute, interleaved=turns)

    def layout(self, shape: Shape, depth: int, replicas: int) -> Layout:
        """A layout of equal pipelines of some depth; interleaved ones have as many chunks as layers allow, to 8."""
        layers = self._job.model.num_layers
        vpp = max((v for v in (1, 2, 4, 8) if v * depth <= layers), default=1) if shape.interleaved and depth > 1 else 1
        is_even = layers % (depth * vpp) == 0
        return Layout(
            tp=shape.tp,
            pp=depth,
            dp=replicas,
            vpp=vpp,
            micro_batch_size=shape.micro_batch_size,
            layers_per_chunk=() if is_even else balanced_chunks(self._seconds, pp=depth, vpp=vpp),
            sequence_parallel=shape.tp > 1,
            recompute=shape.recompute,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        )

    def _of(self, shape: Shape, depth: int) -> Pace:
        """Price it beside replicas of its own depth, at the usual number of micro-batches and at twice that."""
        hosts_each = depth * shape.tp / DEVICES_PER_HOST
        step = DEVICES_PER_HOST // math.gcd(DEVICES_PER_HOST, depth * shape.tp)
        replicas = max(step, int(min(MOST_HOSTS, self._case.hosts) / hosts_each) // step * step)
        layout = self.layout(shape, depth, replicas)
        measured = self._measured(layout)
        share = self._case.batch / shape.micro_batch_size / (self._case.hosts / hosts_each)
        group = depth if layout.vpp > 1 else 1
        few = max(group, round(share / group) * group)
        first, second = (
            Predictor(with_batch(self._job, replicas * shape.micro_batch_size * count), measured)
            for count in (few, 2 * few)
        )
        order = range(layout.world_size)
        step_time = first.step_time(layout, order)
        each_s = (second.step_time(layout, order).total_s - step_time.total_s) / few
        return Pace(
            fixed_s=max(step_time.total_s - few * each_s, 0.0),
            each_s=each_s,
            forward_s=float(first.placement_cost(layout).work.forward_s_S.max()) * layout.vpp,
            after_s=sum(step_time.breakdown_s[part] for part in _AFTER),
        )

    def _measured(self, layout: Layout) -> Measurements:
        return for_layouts(self._job, (layout,), hosts=layout.world_size // DEVICES_PER_HOST)

    def _fits(self, shape: Shape, depth: int, replicas: int, *, copies: int = 1) -> bool:
        """True if memory suffices when each rank keeps the states of the given number of stages."""
        layout = self.layout(shape, depth, replicas)
        each = replicas * shape.micro_batch_size
        group = depth if layout.vpp > 1 else 1
        rounds = math.ceil(self._case.batch / each / group) * group
        parts = peak_memory_bytes(with_batch(self._job, each * rounds), layout)
        need = max(one.total + (copies - 1) * one.static for one in parts)
        overhead = overhead_of(self._job, layout, device_kind="cuda", device_name=self._device.name)
        return overhead.device_peak_bytes(need) <= allowed_bytes(self._device.memory_bytes, memory_margin=MEMORY_MARGIN)
