"""Bytes of activations that a schedule keeps on each rank, at the peak."""

# A = actions of all ranks, S = stages.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipette_launch.errors import FactError
from pipette_launch.facts.schedule import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT, Schedule


def peak_live_bytes(schedule: Schedule, chunk_bytes: Sequence[int], w_share: float = 1.0) -> tuple[int, ...]:
    """Most bytes that each rank's stages hold for micro-batches whose backward is not done.

    The order alone decides: F takes its stage's bytes, B gives them back; I gives back all but the share that W needs.
    For the schedules of stock Megatron this equals `cost.memory.live_activations.peak_live_bytes` on every rank.

    Args:
        schedule: what runs.
        chunk_bytes: what each stage keeps for one micro-batch, in model order.
        w_share: of these bytes, what the weight gradient still needs once the input's is done: 32/(34 + 5as/h) of a
            layer of Korthikanti et al. 2022, equation 1; 1 = all of them.

    Raises:
        FactError: another number of stages, a negative size, or a share outside 0 to 1.

    """
    if len(chunk_bytes) != schedule.num_stages:
        raise FactError(f"bytes of {len(chunk_bytes)} stages for a schedule of {schedule.num_stages}")
    if min(chunk_bytes) < 0 or not 0 <= w_share <= 1:
        raise FactError(f"bytes must not be negative and w_share lies in 0..1, got {min(chunk_bytes)} and {w_share}")
    kept_S = np.array(chunk_bytes, dtype=np.int64)
    for_weight_S = np.rint(kept_S * w_share).astype(np.int64)
    change_KS = np.zeros((len(KINDS), schedule.num_stages), dtype=np.int64)
    change_KS[FORWARD] = kept_S
    change_KS[BACKWARD] = -kept_S
    change_KS[INPUT] = for_weight_S - kept_S
    change_KS[WEIGHT] = -for_weight_S
    columns = schedule.columns
    delta_A = change_KS[columns.kind_A, columns.stage_A]
    first_P = np.cumsum([len(actions) for actions in schedule.ranks])[:-1]
    return tuple(int(np.cumsum(delta).max()) for delta in np.split(delta_A, first_P))
