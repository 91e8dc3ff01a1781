"""Bytes of activations that a schedule keeps on each rank, at the peak."""

# A = actions of all ranks, S = stages.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipette_launch.errors import FactError
from pipette_launch.facts.schedule import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT, Schedule


def peak_live_bytes(
    schedule: Schedule, chunk_bytes: Sequence[int], waiting_bytes: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Most bytes that each rank's stages hold for micro-batches whose backward is not done.

    The order alone decides: F takes its stage's bytes, B gives them back; I leaves what W needs.
    For the schedules of stock Megatron this equals `cost.memory.live_activations.peak_live_bytes` on every rank.

    Args:
        schedule: what runs.
        chunk_bytes: what each stage keeps for one micro-batch, in model order.
        waiting_bytes: what each stage's weights' gradients still need of one micro-batch once the input's is done: 32
            of the 34 + 5as/h bytes of a layer in Korthikanti et al. 2022, equation 1, of which a fully recomputed
            layer keeps 2; None = all of `chunk_bytes`.

    Raises:
        FactError: another number of stages, or a negative size.

    """
    waiting_bytes = chunk_bytes if waiting_bytes is None else waiting_bytes
    for sizes in (chunk_bytes, waiting_bytes):
        if len(sizes) != schedule.num_stages:
            raise FactError(f"bytes of {len(sizes)} stages for a schedule of {schedule.num_stages}")
        if min(sizes) < 0:
            raise FactError(f"bytes must not be negative, got {min(sizes)}")
    kept_S, for_weight_S = np.array(chunk_bytes, dtype=np.int64), np.array(waiting_bytes, dtype=np.int64)
    change_KS = np.zeros((len(KINDS), schedule.num_stages), dtype=np.int64)
    change_KS[FORWARD] = kept_S
    change_KS[BACKWARD] = -kept_S
    change_KS[INPUT] = for_weight_S - kept_S
    change_KS[WEIGHT] = -for_weight_S
    columns = schedule.columns
    delta_A = change_KS[columns.kind_A, columns.stage_A]
    first_P = np.cumsum([len(actions) for actions in schedule.ranks])[:-1]
    return tuple(int(np.cumsum(delta).max()) for delta in np.split(delta_A, first_P))
