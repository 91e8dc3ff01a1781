"""Bytes that all live micro-batches keep on the stages of layouts under Megatron's own schedules."""

# N = layouts, S = stages and C = model chunks of all layouts, layout by layout. V = chunks of one stage, M = passes of
# a stage's chunks in schedule order.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts.job import Job
from pipette_launch.facts.known_schedules import num_warmup, schedule_table
from pipette_launch.facts.layout import Field, Ints, LayoutColumns, codes_of

LAYER: tuple[Field, ...] = ("tp", "cp", "ep", "etp", "micro_batch_size", "sequence_parallel", "recompute")
"""Fields that decide the bytes of a layer and of the model's ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """All stages of several layouts in one row: each stage's layout, and the number of micro-batches of each layout."""

    layouts: LayoutColumns
    starts_N: Ints
    row_S: Ints
    stage_S: Ints
    microbatches_N: Ints

    @classmethod
    def of(cls, job: Job, layouts: LayoutColumns) -> Stages:
        """Return the stages of all layouts; raises LayoutError for the first layout that divides the batch unevenly."""
        microbatches, rest = np.divmod(job.batch.global_batch_size, layouts.micro_batch_size * layouts.dp)
        for row in np.flatnonzero(rest)[:1]:
            layouts.layout(int(row)).num_microbatches(job.batch.global_batch_size)
        starts = np.cumsum(layouts.pp) - layouts.pp
        rows = np.repeat(np.arange(len(layouts)), layouts.pp)
        return cls(
            layouts=layouts,
            starts_N=starts,
            row_S=rows,
            stage_S=np.arange(len(rows)) - starts[rows],
            microbatches_N=microbatches,
        )

    @property
    def _last_N(self) -> Ints:
        return self.starts_N + self.layouts.pp - 1

    def spread(
        self, size_N: Ints, *, first: Ints | None = None, last: Ints | None = None, prediction: Ints | None = None
    ) -> Ints:
        """Give all stages of a layout one size, except its first, last and multi-token prediction's stage.

        If a layout has a single stage, this stage gets `last`.
        """
        size_S: Ints = np.repeat(size_N, self.layouts.pp)
        if prediction is not None:
            size_S[self._last_N - self.layouts.chunks_after_mtp % self.layouts.pp] = prediction
        if first is not None:
            size_S[self.starts_N] = first
        if last is not None:
            size_S[self._last_N] = last
        return size_S


def chunk_bytes(job: Job, layouts: LayoutColumns, layer: dict[str, Ints]) -> tuple[Ints, Ints]:
    """Count the bytes that each chunk's layers keep for one micro-batch.

    Full recompute keeps only the input of each unit. With method `uniform` a unit is k layers. With method `block` each
    of a chunk's first k layers is a unit, and the chunk's other layers keep all activations.

    Args:
        job: the training job.
        layouts: N layouts.
        layer: columns of N: bytes of one layer of each kind, of the `stream` between layers, and of all depths of
            multi-token `prediction`.

    Returns:
        The index of each layout's first chunk (N), and the bytes that each chunk keeps (C). The other chunks of a
        layout follow its first chunk in model order. Layouts with equal figures share their chunks.

    """
    groups = layouts.groups(*LAYER, "pp", "vpp", "layers_per_chunk", "chunks_after_mtp")
    layouts, layer = layouts.take(groups.first_U), {name: each[groups.first_U] for name, each in layer.items()}
    counts = layouts.pp * layouts.vpp
    starts, rows = np.cumsum(counts) - counts, np.repeat(np.arange(len(layouts)), counts)
    layers = (job.model.num_layers // np.maximum(counts, 1))[rows]
    for index, cut in enumerate(layouts.cuts):
        mine = np.flatnonzero(layouts.layers_per_chunk == index)
        # `chunk_layers` raises LayoutError for a division of layers that is not allowed, or for the first uneven
        # division.
        for row in mine[:1] if cut else mine[job.model.num_layers % counts[mine] != 0][:1]:
            layouts.layout(int(row)).chunk_layers(job.model.num_layers)
        if cut:
            layers[np.isin(rows, mine)] = np.tile(np.array(cut, dtype=np.int64), len(mine))
    # Number of layers before each chunk in the chunk's own layout.
    before = np.cumsum(layers) - layers
    before -= before[starts][rows]
    units = [(each.method == "uniform", each.method == "block", max(1, each.num_layers)) for each in layouts.recomputes]
    is_uniform, is_block, size = np.array(units, dtype=np.int64)[layouts.recompute[rows]].T
    first = np.minimum(size, layers)
    again = np.where(is_uniform, layers, np.where(is_block, first, 0))
    inputs = np.where(is_uniform, -(-layers // size), np.where(is_block, first, 0))
    size_C = inputs * layer["stream"][rows]
    kinds = np.array(job.model.layer_kinds)
    for kind in set(job.model.layer_kinds):
        ahead = np.concatenate(([0], np.cumsum(kinds == kind, dtype=np.int64)))
        size_C += (ahead[before + layers] - ahead[before + again]) * layer[kind][rows]
    size_C[starts + counts - 1 - layouts.chunks_after_mtp] += layer["prediction"]
    return starts[groups.group_N], size_C


def _live_passes(pp: Ints, vpp: Ints, group_size: Ints, stage: Ints, num_microbatches: Ints) -> Ints:
    """Count the most forward passes of a stage's chunks whose backward has not run; group size 0 means `pp`.

    1F1B has min(m, p - r) of m micro-batches on rank r of p (Narayanan et al. 2021, section 2.2). The interleaved
    schedule has the passes of the warm-up and one more pass, but at most all passes (megatron-core,
    pipeline_parallel/schedules.py:762-786 of core_v0.16.1).
    """
    ahead = num_warmup(pp, vpp, np.where(group_size > 0, group_size, pp), stage)
    one_chunk = np.minimum(num_microbatches, pp - stage)
    return np.asarray(np.where(vpp > 1, np.minimum(ahead + 1, num_microbatches * vpp), one_chunk))


def _have_equal_chunks(pp: Ints, vpp: Ints, first: Ints, bytes_C: Ints) -> NDArray[np.bool_]:
    """Return True for stages whose chunks all keep the same bytes; `first` = index of each stage's first chunk."""
    equal = np.ones(len(first), dtype=bool)
    for turn in range(1, int(vpp.max(initial=1))):
        some = np.flatnonzero(equal & (vpp > turn))
        equal[some] = bytes_C[first[some] + turn * pp[some]] == bytes_C[first[some]]
    return equal


def live_bytes(stages: Stages, chunk_N: Ints, bytes_C: Ints) -> Ints:
    """Count the bytes of all live micro-batches on each stage; `chunk_N` and `bytes_C` come from `chunk_bytes`."""
    layouts, row = stages.layouts, stages.row_S
    pp, vpp = layouts.pp[row], layouts.vpp[row]
    own = chunk_N[row] + stages.stage_S
    group_size, microbatches = layouts.microbatch_group_size[row], stages.microbatches_N[row]
    kept: Ints = _live_passes(pp, vpp, group_size, stages.stage_S, microbatches) * bytes_C[own]
    uneven = np.flatnonzero(~_have_equal_chunks(pp, vpp, own, bytes_C))
    if len(uneven):
        all_bytes, first = bytes_C.tolist(), own[uneven].tolist()
        shapes = zip(first, pp[uneven].tolist(), vpp[uneven].tolist(), strict=True)
        sizes = [tuple(all_bytes[at : at + ranks * chunks : ranks]) for at, ranks, chunks in shapes]
        kept[uneven] = _walked(stages, uneven, sizes)
    return kept


def beyond_first_chunk(stages: Stages, chunk_N: Ints, bytes_C: Ints) -> Ints:
    """Count the bytes by which a first stage's peak in a later chunk exceeds its peak in its first chunk (N).

    With few micro-batches all forwards of the first chunk run early in the warm-up of an interleaved schedule, when
    less memory is in use. The difference is counted only if all chunks keep the same bytes, else 0.
    """
    layouts, microbatches = stages.layouts, stages.microbatches_N
    pp, vpp = layouts.pp, layouts.vpp
    size = np.where(layouts.microbatch_group_size > 0, layouts.microbatch_group_size, pp)
    most = _live_passes(pp, vpp, size, np.zeros_like(pp), microbatches)
    groups = -(-microbatches // size)
    run_before_last_group = (groups - 1) * size * vpp
    own_last = run_before_last_group + microbatches - (groups - 1) * size
    equal = (vpp > 1) & _have_equal_chunks(pp, vpp, chunk_N, bytes_C)
    return np.where(equal, np.maximum(most - own_last, 0) * bytes_C[chunk_N], 0)


def _walked(stages: Stages, some: Ints, sizes: Iterable[tuple[int, ...]]) -> list[int]:
    """Count the peak bytes of some stages by walking through their schedules, given the bytes of their chunks."""
    layouts, row = stages.layouts, stages.row_S[some]
    shapes = layouts.pp[row], layouts.vpp[row], layouts.microbatch_group_size[row]
    columns = (*shapes, stages.stage_S[some], stages.microbatches_N[row])
    rows = zip(*(column.tolist() for column in columns), sizes, strict=True)
    return [peak_live_bytes(*figures) for figures in rows]


@lru_cache(maxsize=1 << 16)
def peak_live_bytes(
    pp: int, vpp: int, group_size: int, stage: int, num_microbatches: int, chunk_bytes_V: tuple[int, ...]
) -> int:
    """Count the most bytes that a stage's chunks hold for micro-batches whose backward has not run.

    A chunk runs `group_size` micro-batches in a row (0 means `pp`), and keeps `chunk_bytes_V` for each micro-batch.
    """
    if vpp == 1:
        return min(num_microbatches, pp - stage) * chunk_bytes_V[0]
    group_size = group_size or pp
    ahead = num_warmup(pp, vpp, group_size, stage)
    # Whole groups in the middle are left out, because after the warm-up all groups reach the same peak.
    groups, rest = divmod(num_microbatches, group_size)
    repeating = min(groups, -(-ahead // (vpp * group_size)) + 2) * group_size + rest
    chunks_M = _chunk_order(vpp, repeating, group_size)
    weights_V = np.array(chunk_bytes_V, dtype=np.int64)
    forward = np.cumsum(weights_V[chunks_M])
    backward = np.concatenate(([0], np.cumsum(weights_V[vpp - 1 - chunks_M])))
    done = np.maximum(np.arange(len(forward)) - ahead, 0)
    return int((forward - backward[done]).max())


@lru_cache(maxsize=1024)
def _chunk_order(vpp: int, num_microbatches: int, group_size: int) -> Ints:
    return np.array([chunk for _, chunk in schedule_table(vpp, num_microbatches, group_size)], dtype=np.int64)


def input_bytes(stages: Stages, layer: dict[str, Ints], *, all_chunks_load: bool = False) -> Ints:
    """Count bytes of the model's inputs, for all live micro-batches of the chunks that load them.

    The first rank keeps token ids and the embedding's dropout mask. Recompute keeps the attention mask, because it
    keeps all arguments of its layers. The mask exists in the first chunk, in the last chunk, and in the chunk of
    multi-token prediction.

    Args:
        stages: all stages of N layouts.
        layer: columns of N: `embedding` = bytes kept on the first stage, `kept_mask` = bytes kept by chunks that load
            data.
        all_chunks_load: True if all chunks of the first and of the last rank load data, as in releases before
            core_v0.15.

    """
    layouts, mask = stages.layouts, layer["kept_mask"]
    zero, last_chunk = np.zeros_like(layouts.pp), layouts.vpp - 1
    last_N = stages.starts_N + layouts.pp - 1
    prediction = layouts.pp * layouts.vpp - 1 - layouts.chunks_after_mtp
    kept = np.zeros(len(stages.row_S), dtype=np.int64)
    kept[stages.starts_N] = layer["embedding"] * _chunk_live(stages, stages.starts_N, zero)
    loaders = (
        (stages.starts_N, zero - all_chunks_load, layouts.pp > 0),
        (last_N, zero - 1 if all_chunks_load else last_chunk, layouts.pp > 1),
        (stages.starts_N + prediction % layouts.pp, prediction // layouts.pp, layouts.chunks_after_mtp > 0),
    )
    for place_N, chunk_N, loads_N in loaders:
        rows = np.flatnonzero(loads_N & (mask > 0))
        kept[place_N[rows]] += mask[rows] * _chunk_live(stages, place_N[rows], chunk_N[rows])
    return kept


def _chunk_live(stages: Stages, some: Ints, chunk: Ints) -> Ints:
    """Count the most micro-batches that some stages hold at once, of chunk number `chunk`, or of all chunks if -1."""
    layouts, rows = stages.layouts, stages.row_S[some]
    shape = (layouts.pp[rows], layouts.vpp[rows], layouts.microbatch_group_size[rows], stages.microbatches_N[rows])
    codes = codes_of((*shape, stages.stage_S[some], chunk + 1))
    _, first, group = np.unique(codes, return_index=True, return_inverse=True)
    turns = zip(layouts.vpp[rows][first].tolist(), chunk[first].tolist(), strict=True)
    sizes = [tuple(int(own in (turn, -1)) for turn in range(vpp)) for vpp, own in turns]
    return np.array(_walked(stages, some[first], sizes), dtype=np.int64)[group.reshape(-1)]
