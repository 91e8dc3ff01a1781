"""What a rank's chunks hold at most for micro-batches that are under way, by Megatron's own schedules."""

# M = passes of a rank's chunks in schedule order, V = model chunks of a rank.

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedules import num_warmup, schedule_table


def peak_live_bytes(layout: Layout, rank: int, num_microbatches: int, chunk_bytes_V: tuple[int, ...]) -> int:
    """Most bytes that a rank's chunks hold for micro-batches whose backward is to come.

    1F1B: min(m, p - r) micro-batches. Interleaved: warm-up + 1 chunk passes, capped by their number, each with the
    bytes of its own chunk (memory.md section 4, megatron.md 8.3; schedules.py:762-786, 2093).
    """
    if layout.vpp == 1:
        return min(num_microbatches, layout.pp - rank) * chunk_bytes_V[0]
    if len(set(chunk_bytes_V)) == 1:
        return live_chunks(layout, rank, num_microbatches) * chunk_bytes_V[0]
    group_size = layout.microbatch_group_size or layout.pp
    ahead = num_warmup(layout.pp, layout.vpp, group_size, rank)
    chunks_M = _chunk_order(layout.vpp, _repeating(num_microbatches, layout.vpp, group_size, ahead), group_size)
    weights_V = np.array(chunk_bytes_V, dtype=np.int64)
    forward = np.cumsum(weights_V[chunks_M])
    backward = np.concatenate(([0], np.cumsum(weights_V[layout.vpp - 1 - chunks_M])))
    done = np.maximum(np.arange(len(forward)) - ahead, 0)
    return int((forward - backward[done]).max())


def live_chunks(layout: Layout, rank: int, num_microbatches: int) -> int:
    """Most passes of an interleaved rank's chunks whose backward is to come: the warm-up and one more."""
    group_size = layout.microbatch_group_size or layout.pp
    return min(num_warmup(layout.pp, layout.vpp, group_size, rank) + 1, num_microbatches * layout.vpp)


def _repeating(num_microbatches: int, vpp: int, group_size: int, ahead: int) -> int:
    """Cut whole groups from the middle of the schedule: after the warm-up every group holds what the last one held."""
    groups, rest = divmod(num_microbatches, group_size)
    return min(groups, -(-ahead // (vpp * group_size)) + 2) * group_size + rest


@lru_cache(maxsize=1024)
def _chunk_order(vpp: int, num_microbatches: int, group_size: int) -> NDArray[np.int64]:
    return np.array([chunk for _, chunk in schedule_table(vpp, num_microbatches, group_size)], dtype=np.int64)
