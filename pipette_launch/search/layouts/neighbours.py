"""Layouts that differ from one in a single choice: what a plan must not lose to."""

# N = cuts, M = their variants.

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pipette_launch.cost.columns.layouts import Ints, LayoutColumns
    from pipette_launch.facts import Layout
    from pipette_launch.search.layouts.enumerate import Cuts

DEGREES = ("tp", "pp", "dp", "cp", "ep", "etp", "use_tp_pp_dp_mapping")
"""Another of these moves ranks to other cells, so that the placement says nothing: that is no neighbour."""


def neighbours(cuts: Cuts, layout: Layout) -> LayoutColumns:
    """List the legal layouts with the same degrees that differ in one choice.

    A choice is the micro-batch, how the layers are cut into chunks, the group of micro-batches, sequence parallelism,
    the distributed optimizer, the overlaps, or recompute. What has to follow a choice may differ with it: the group
    follows micro-batch and chunks, the gathers' overlap follows the optimizer.
    """
    columns = cuts.columns
    same_N = np.ones(len(columns), dtype=bool)
    for name in DEGREES:
        same_N &= getattr(columns, name) == getattr(layout, name)
    rows = np.flatnonzero(same_N)
    rows = rows[_num_cut_choices(columns.take(rows), layout) <= 1]
    _, found = cuts.spread(rows)
    num_M = _num_cut_choices(found, layout) + _num_saver_choices(found, layout)
    return found.take(np.flatnonzero(num_M == 1))


def _num_cut_choices(columns: LayoutColumns, layout: Layout) -> Ints:
    size_N = columns.micro_batch_size != layout.micro_batch_size
    cut = np.array([each == layout.layers_per_chunk for each in columns.cuts])
    chunks_N = (columns.vpp != layout.vpp) | ~cut[columns.layers_per_chunk]
    group_N = (columns.microbatch_group_size != layout.microbatch_group_size) & ~size_N & ~chunks_N
    num_N: Ints = size_N.astype(np.int64) + chunks_N + group_N
    return num_N


def _num_saver_choices(columns: LayoutColumns, layout: Layout) -> Ints:
    again = np.array([each == layout.recompute for each in columns.recomputes])
    optimizer_N = columns.use_distributed_optimizer != layout.use_distributed_optimizer
    overlap_N = columns.overlap_grad_reduce != layout.overlap_grad_reduce
    overlap_N |= (columns.overlap_param_gather != layout.overlap_param_gather) & ~optimizer_N
    parallel_N = columns.sequence_parallel != layout.sequence_parallel
    num_N: Ints = parallel_N.astype(np.int64) + optimizer_N + overlap_N + ~again[columns.recompute]
    return num_N
