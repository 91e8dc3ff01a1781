"""Bytes that all live micro-batches keep on the stages of many layouts (see `memory_live` and `memory` for one)."""

# N = layouts, S = stages and C = model chunks of all layouts, one layout after another; V = chunks of one stage.

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.columns.layouts import Field, Ints, LayoutColumns, codes_of
from pipette_launch.cost.memory.live_chunks import peak_live_bytes
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout

Flags = NDArray[np.bool_]
LAYER: tuple[Field, ...] = ("tp", "cp", "ep", "etp", "micro_batch_size", "sequence_parallel", "recompute")
"""What the bytes of a layer and of the model's ends depend on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Where each stage stands, and how many micro-batches its layout runs."""

    layouts: LayoutColumns
    starts_N: Ints
    row_S: Ints
    stage_S: Ints
    microbatches_N: Ints

    @classmethod
    def of(cls, job: Job, layouts: LayoutColumns) -> Stages:
        """Lay out the stages; raises LayoutError for the first layout that cuts the batch unevenly."""
        per_round = layouts.micro_batch_size * layouts.dp
        microbatches, rest = np.divmod(job.batch.global_batch_size, per_round)
        for row in np.flatnonzero(rest)[:1]:
            layouts.layout(int(row)).num_microbatches(job.batch.global_batch_size)
        ends_N = np.cumsum(layouts.pp)
        starts = ends_N - layouts.pp
        rows = np.repeat(np.arange(len(layouts)), layouts.pp)
        return cls(
            layouts=layouts,
            starts_N=starts,
            row_S=rows,
            stage_S=np.arange(len(rows)) - starts[rows],
            microbatches_N=microbatches,
        )

    @property
    def last_N(self) -> Ints:
        """The last stage of each layout."""
        return self.starts_N + self.layouts.pp - 1

    def spread(self, size_N: Ints, *, first: Ints | None = None, last: Ints | None = None) -> Ints:
        """Give every stage of a layout the same, but for its ends; a single stage is the last one."""
        size_S: Ints = np.repeat(size_N, self.layouts.pp)
        if first is not None:
            size_S[self.starts_N] = first
        if last is not None:
            size_S[self.last_N] = last
        return size_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """What the chunks of layouts keep for one micro-batch; layouts that cut and keep the same share theirs."""

    starts_N: Ints
    """The first chunk of each layout; the others follow in model order."""
    bytes_C: Ints


def _chunk_layers(job: Job, layouts: LayoutColumns) -> tuple[Ints, Ints, Ints]:
    """Return the first chunk of each layout (N), the layout of each chunk (C) and its number of layers (C)."""
    counts = layouts.pp * layouts.vpp
    starts = np.cumsum(counts) - counts
    rows = np.repeat(np.arange(len(layouts)), counts)
    layers = (job.model.num_layers // np.maximum(counts, 1))[rows]
    even = np.array([not cut for cut in layouts.cuts])[layouts.layers_per_chunk]
    for row in np.flatnonzero(even & (job.model.num_layers % counts != 0))[:1]:
        layouts.layout(int(row)).chunk_layers(job.model.num_layers)
    for index, cut in enumerate(layouts.cuts):
        mine = np.flatnonzero(layouts.layers_per_chunk == index) if cut else np.zeros(0, dtype=np.int64)
        for row in mine[:1]:
            layouts.layout(int(row)).chunk_layers(job.model.num_layers)
        layers[np.isin(rows, mine)] = np.tile(np.array(cut, dtype=np.int64), len(mine))
    return starts, rows, layers


def chunk_bytes(job: Job, layouts: LayoutColumns, layer: dict[str, Ints]) -> Chunks:
    """What each chunk keeps for one micro-batch (`memory.chunk_activation_bytes`).

    Full recompute keeps an input for each unit: of k layers, or of one for the first k of a chunk.
    """
    groups = layouts.groups(*LAYER, "pp", "vpp", "layers_per_chunk")
    layouts, layer = layouts.take(groups.first_U), {name: each[groups.first_U] for name, each in layer.items()}
    starts, rows, layers = _chunk_layers(job, layouts)
    before = np.cumsum(layers) - layers
    before -= before[starts][rows]
    methods = [is_uniform_or_block(recompute.method) for recompute in layouts.recomputes]
    is_uniform, is_block = np.array(methods)[layouts.recompute[rows]].T
    size = np.array([max(1, recompute.num_layers) for recompute in layouts.recomputes])[layouts.recompute[rows]]
    first = np.minimum(size, layers)
    again = np.where(is_uniform, layers, np.where(is_block, first, 0))
    inputs = np.where(is_uniform, -(-layers // size), np.where(is_block, first, 0))
    pattern = job.model.moe_layer_freq or (0,) * job.model.num_layers
    experts = np.concatenate(([0], np.cumsum(pattern, dtype=np.int64)))
    moe = experts[before + layers] - experts[before + again]
    dense = layers - again - moe
    size_C = inputs * layer["stream"][rows] + dense * layer["dense"][rows] + moe * layer["moe"][rows]
    size_C[starts + layouts.pp * layouts.vpp - 1] += layer["prediction"]
    return Chunks(starts_N=starts[groups.group_N], bytes_C=size_C)


def is_uniform_or_block(method: str) -> tuple[bool, bool]:
    """Two flags for a method of full recompute; neither is set without."""
    return method == "uniform", method == "block"


def live_bytes(stages: Stages, chunks: Chunks) -> Ints:
    """Bytes of all live micro-batches on each stage (`memory_live.peak_live_bytes`)."""
    layouts, row = stages.layouts, stages.row_S
    pp, vpp = layouts.pp[row], layouts.vpp[row]
    own = chunks.starts_N[row] + stages.stage_S
    live = np.minimum(stages.microbatches_N[row], pp - stages.stage_S)
    group_size = np.where(layouts.microbatch_group_size > 0, layouts.microbatch_group_size, layouts.pp)[row]
    # facts.schedules.num_warmup
    warmup = 2 * (pp - stages.stage_S - 1) + (vpp - 1) * group_size
    live = np.where(vpp > 1, np.minimum(warmup + 1, stages.microbatches_N[row] * vpp), live)
    kept: Ints = live * chunks.bytes_C[own]
    equal = _own_chunks_are_equal(own, pp, vpp, chunks.bytes_C)
    for at in np.flatnonzero(~equal):
        sizes = chunks.bytes_C[own[at] : own[at] + pp[at] * vpp[at] : pp[at]]
        kept[at] = _uneven(stages, int(at), tuple(sizes.tolist()))
    return kept


def _own_chunks_are_equal(own_S: Ints, pp_S: Ints, vpp_S: Ints, bytes_C: Ints) -> Flags:
    equal = np.ones(len(own_S), dtype=bool)
    for turn in range(1, int(vpp_S.max(initial=1))):
        some = np.flatnonzero(vpp_S > turn)
        equal[some] &= bytes_C[own_S[some] + turn * pp_S[some]] == bytes_C[own_S[some]]
    return equal


def _uneven(stages: Stages, at: int, sizes_V: tuple[int, ...]) -> int:
    """Walk the schedule of one stage whose chunks keep different amounts."""
    row = int(stages.row_S[at])
    layouts = stages.layouts
    return _walked(
        int(layouts.pp[row]),
        int(layouts.vpp[row]),
        int(layouts.microbatch_group_size[row]),
        int(stages.stage_S[at]),
        int(stages.microbatches_N[row]),
        sizes_V,
    )


@lru_cache(maxsize=1 << 16)
def _walked(pp: int, vpp: int, group_size: int, rank: int, num_microbatches: int, sizes_V: tuple[int, ...]) -> int:
    layout = Layout(pp=pp, vpp=vpp, microbatch_group_size=group_size)
    return peak_live_bytes(layout, rank, num_microbatches, sizes_V)


def input_bytes(stages: Stages, layer: dict[str, Ints]) -> Ints:
    """What the model's inputs keep (`memory.input_bytes`): proportional to the live micro-batches of one chunk.

    Args:
        stages: where each stage stands.
        layer: columns of N: `embedding`, which the first stage keeps, and `kept_mask`, which both ends keep.

    """
    kept = np.zeros(len(stages.row_S), dtype=np.int64)
    first, mask = layer["embedding"] + layer["kept_mask"], layer["kept_mask"]
    kept[stages.starts_N] = first * _end_chunk_live(stages, stages.starts_N, is_last=False)
    behind = np.flatnonzero((stages.layouts.pp > 1) & (mask > 0))
    last = stages.last_N[behind]
    kept[last] = mask[behind] * _end_chunk_live(stages, last, is_last=True)
    return kept


def _end_chunk_live(stages: Stages, some: Ints, *, is_last: bool) -> Ints:
    """Most micro-batches of the first (or the last) chunk that some stages hold at once."""
    layouts, rows = stages.layouts, stages.row_S[some]
    columns = (layouts.pp[rows], layouts.vpp[rows], layouts.microbatch_group_size[rows], stages.microbatches_N[rows])
    _, first, group = np.unique(codes_of(columns), return_index=True, return_inverse=True)
    counts = []
    for at in some[first]:
        only = [0] * int(layouts.vpp[stages.row_S[at]])
        only[-1 if is_last else 0] = 1
        counts.append(_uneven(stages, int(at), tuple(only)))
    return np.array(counts, dtype=np.int64)[group.reshape(-1)]
