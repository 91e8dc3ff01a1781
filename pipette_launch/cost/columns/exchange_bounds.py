"""Exposed seconds of the collectives inside the passes over the best links, for many layouts at once.

Sizes grow with the micro-batch and nothing else does, so the collectives of layouts that differ in it are listed once.
"""

# U = groups of layouts that agree, L = lines whose lowest counts, X = what chunks are made of.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.columns.layouts import LayoutColumns
from pipette_launch.cost.communication.collectives import Fabric, Kind
from pipette_launch.cost.communication.groups import group_sizes
from pipette_launch.cost.communication.traffic import Hiding, LayerCounts, exchanges_of, hop_bytes
from pipette_launch.cost.compute.stages import ComputeTable, case_of
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import ComputeCase

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_HIDING = (Hiding(core_attention_s=1.0), Hiding(input_grad_s=1.0), Hiding(weight_grad_s=1.0))
"""One second of each: what an exchange passes behind is a sum of shares of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    """One collective of micro-batches of one sample."""

    kind: Kind
    members: int
    size_bytes: float
    passes_2X: Floats
    """How many of them forward and backward of each part run."""
    hidden_3: Floats
    """Shares of `_HIDING` that each passes behind."""


class ExchangeTable:
    """The collectives of one job's layouts, each listed and priced once."""

    def __init__(self, job: Job, compute: ComputeTable, fabric: Fabric, parts: LayerCounts) -> None:
        self._job = job
        self._compute = compute
        self._fabric = fabric
        self._parts = parts
        """A stage for each of X."""
        self._items: dict[Layout, tuple[tuple[_Item, ...], int]] = {}
        self._shares: dict[Layout, tuple[Floats, ...]] = {}
        self._hiding: dict[ComputeCase, tuple[float, float, float]] = {}

    def seconds_U3X(self, columns: LayoutColumns) -> Floats:
        """Forward and backward seconds that nothing hides, by part; third the hop between two slots, X times."""
        groups = columns.groups("tp", "cp", "sequence_parallel", "ep", "etp")
        cases = columns.groups("tp", "cp", "micro_batch_size")
        hidden_U3 = np.array([self._hidden(columns.layout(int(row))) for row in cases.first_U])[cases.group_N]
        found = np.zeros((len(columns), 3, len(self._parts.head)))
        order = np.argsort(groups.group_N, kind="stable")
        bounds = np.flatnonzero(np.diff(groups.group_N[order])) + 1
        for rows in np.split(order, bounds) if len(order) else ():
            items, hop = self._items_of(columns.layout(int(rows[0])))
            samples = columns.micro_batch_size[rows].astype(np.float64)
            for item in items:
                whole_s = self._fabric.bounds_s(item.kind, item.members, item.size_bytes * samples)
                shown_s = np.maximum(whole_s - hidden_U3[rows] @ item.hidden_3, 0.0)
                found[rows, :2] += shown_s[:, None, None] * item.passes_2X
            if self._fabric.cluster.num_slots > 1:
                found[rows, 2] = self._fabric.bounds_s("send", 2, hop * samples)[:, None]
        return found

    def _hidden(self, layout: Layout) -> tuple[float, float, float]:
        case = case_of(layout)
        if case not in self._hiding:
            hiding = self._compute.hiding(layout)
            self._hiding[case] = (hiding.core_attention_s, hiding.input_grad_s, hiding.weight_grad_s)
        return self._hiding[case]

    def _items_of(self, layout: Layout) -> tuple[tuple[_Item, ...], int]:
        """List the collectives of a layout's groups, and the bytes of a hop, with one sample in a micro-batch."""
        one = Layout(
            tp=layout.tp,
            cp=layout.cp,
            dp=layout.ep * layout.etp,
            ep=layout.ep,
            etp=layout.etp,
            sequence_parallel=layout.sequence_parallel,
        )
        if one not in self._items:
            sizes = group_sizes(one)
            shares = iter(self._shares_of(one))
            items = tuple(
                _Item(
                    kind=item.kind,
                    members=sizes[item.group],
                    size_bytes=item.size_bytes,
                    passes_2X=np.array([item.forward, item.backward]),
                    hidden_3=np.zeros(3) if item.part == "expert_parallel" else next(shares),
                )
                for item in exchanges_of(self._job, one, self._parts, Hiding())
            )
            self._items[one] = (items, hop_bytes(self._job, one))
        return self._items[one]

    def _shares_of(self, layout: Layout) -> tuple[Floats, ...]:
        """Return what each collective passes behind, in shares of `_HIDING`; those of experts pass behind nothing."""
        dense = Layout(tp=layout.tp, cp=layout.cp, sequence_parallel=layout.sequence_parallel)
        if dense not in self._shares:
            tried = [exchanges_of(self._job, dense, self._parts, hiding) for hiding in _HIDING]
            self._shares[dense] = tuple(
                np.array([each.hidden_s for each in ways])
                for ways in zip(*tried, strict=True)
                if ways[0].part != "expert_parallel"
            )
        return self._shares[dense]
