"""Pipette's cost of a mapping of hosts, priced directly and as `Flows`, and the exact optimum of one pipeline.

Conditions and source: SA:117-151 of yimjinkyu1/date2024_pipette@a2b0683.
"""

# H = hosts, K = states, P = pipelines, S = stages. Milliseconds, MB and GB/s, as Pipette has them.

from __future__ import annotations

import csv
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.planners.machines import MEASURED
from pipette_launch.search.assignment.descent import Flows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def measured_ms_per_mb() -> Floats:
    """16 hosts, time_0, key 0, directed; GB/s = value / 1000. The diagonal is filler and left 0."""
    with MEASURED.open() as lines:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    ms_HH = np.zeros((16, 16))
    for row in rows:
        if row["key"] == "0" and row["diagonal"] == "0":
            ms_HH[int(row["src_index"]), int(row["dst_index"])] = 1000.0 / float(row["bandwidth_MBps"])
    return ms_HH


@dataclass(frozen=True, kw_only=True, eq=False)
class PipetteCost:
    """T_PP + T_out of tensor parallelism over the 8 devices of a host, so that T_in is 0."""

    ms_HH: Floats
    """Milliseconds per MB from host to host."""
    stages: int
    pipeline_mb: float
    gradient_mb: float

    @classmethod
    def of_gpt(cls, ms_HH: Floats, stages: int) -> PipetteCost:
        """Hidden 3072, 64 layers, micro-batch 4, sequence 1024, fp32, vocabulary 50256, tp 8."""
        gradients = 4 * (3072 * 50256 + (64 // stages) * 16 * 3072**2) / 8
        return cls(ms_HH=ms_HH, stages=stages, pipeline_mb=4 * 1024 * 3072 * 4 / 1e6, gradient_mb=gradients / 1e6)

    @property
    def pipelines(self) -> int:
        """P = d_out."""
        return len(self.ms_HH) // self.stages

    def costs(self, state_KPS: Ints) -> Floats:
        """Milliseconds of K states: the slowest pipeline there and back, and the slowest link of the first ring."""
        hops_KP = self.ms_HH[state_KPS[:, :, :-1], state_KPS[:, :, 1:]].sum(axis=2)
        cost_K: Floats = 2 * self.pipeline_mb * hops_KP.max(axis=1)
        if self.pipelines > 1:
            first_KP = state_KPS[:, :, 0]
            slowest_K = self.ms_HH[first_KP, np.roll(first_KP, -1, axis=1)].max(axis=1)
            cost_K = cost_K + 2 * (self.pipelines - 1) / self.pipelines * self.gradient_mb * slowest_K
        return cost_K

    def cost(self, state_PS: Ints) -> float:
        """Milliseconds of one state."""
        return float(self.costs(state_PS[None])[0])

    def flows(self) -> Flows:
        """The same as a problem of seats, pipeline after pipeline."""
        seat_PS = np.arange(len(self.ms_HH)).reshape(-1, self.stages)
        pipes, hops = self.pipelines, self.stages - 1
        ring = pipes if pipes > 1 else 0
        first_P = seat_PS[:ring, 0]
        return Flows(
            seconds_THH=self.ms_HH[None],
            sender_F=np.concatenate([seat_PS[:, :-1].ravel(), first_P]),
            receiver_F=np.concatenate([seat_PS[:, 1:].ravel(), np.roll(first_P, -1)]),
            type_F=np.zeros(pipes * hops + ring, dtype=np.int64),
            weight_F=np.repeat(
                [2 * self.pipeline_mb, 2 * (pipes - 1) / pipes * self.gradient_mb], [pipes * hops, ring]
            ),
            group_F=np.concatenate([np.repeat(np.arange(pipes), hops), pipes + np.arange(ring)]),
            offset_G=np.zeros(pipes + ring),
            family_G=np.repeat([0, 1], [pipes, ring]),
        )


def shortest_path_ms(ms_HH: Floats) -> float:
    """Milliseconds per MB of the shortest open path through all hosts, exactly (Held and Karp 1962)."""
    hosts = len(ms_HH)
    least_MH = np.full((1 << hosts, hosts), np.inf)
    least_MH[1 << np.arange(hosts), np.arange(hosts)] = 0.0
    masks = np.arange(1 << hosts)
    num_M = np.array([mask.bit_count() for mask in range(1 << hosts)])
    for size in range(2, hosts + 1):
        of_size = masks[num_M == size]
        for last in range(hosts):
            with_last = of_size[of_size >> last & 1 == 1]
            before_M = with_last ^ (1 << last)
            least_MH[with_last, last] = (least_MH[before_M] + ms_HH[:, last]).min(axis=1)
    return float(least_MH[-1].min())
