"""Pipeline schedules whose order does not depend on measured times: Megatron's own schedules and published ones.

Line numbers refer to megatron-core's pipeline_parallel/schedules.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import LayoutError, UsageError
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedule import Action, Ranks, Schedule

Count = TypeVar("Count", int, NDArray[np.int64])

EXECUTABLE = ("eager-1f1b", "zb-h1", "zb-1p", "zb-2p", "interleaved-zb", "gis", "1f1b-v", "v-half", "v-min", "v-zb")
"""Names of the additional schedules that the patch `schedules` executes."""
RELEASES = ((0, 14), (0, 21))
"""Oldest megatron-core release that the patch `schedules` supports, and the first later release that it refuses."""
FOLDING_RELEASE = (0, 16)
"""Oldest release of megatron-core in which the patch supports the placement `v`."""


def schedule_names(given: str) -> tuple[str, ...]:
    """Read `stock`, `all` or schedule names separated by commas.

    Raise UsageError for a name that cannot be executed.
    """
    if given in ("stock", "all"):
        return EXECUTABLE if given == "all" else ()
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    for name in names:
        if name not in EXECUTABLE:
            raise UsageError(f"schedule {name!r} cannot be executed; there are stock, all, {', '.join(EXECUTABLE)}")
    return names


@lru_cache(maxsize=256)
def no_pipelining(microbatches: int) -> Schedule:
    """Return a schedule with forward and backward of each micro-batch in turn (forward_backward_no_pipelining)."""
    return _schedule("no-pipelining", _whole_backwards([0], microbatches), microbatches)


@lru_cache(maxsize=256)
def gpipe(stages: int, microbatches: int) -> Schedule:
    """Return GPipe: all forwards, then all backwards. Forwards and backwards follow the order of the micro-batches."""
    return _schedule("gpipe", _whole_backwards([microbatches] * stages, microbatches), microbatches)


@lru_cache(maxsize=256)
def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """Return 1F1B: rank r runs pp - r - 1 forwards ahead, then one forward and one backward in turn (line 2093)."""
    return _schedule("1f1b", _whole_backwards(range(stages)[::-1], microbatches), microbatches)


@lru_cache(maxsize=256)
def eager_one_forward_one_backward(stages: int, microbatches: int, extra: int | None = None) -> Schedule:
    """Return eager 1F1B (arXiv 2211.05322): additional forwards before the first backward hide the transfers.

    `extra` is the number of additional forwards, at most pp - r - 1 on rank r. With None, `extra` has its maximum: rank
    r runs 2 (pp - r - 1) forwards ahead, and rank 0 has 2 pp - 1 micro-batches in flight.
    """
    if extra is not None and extra < 0:
        raise LayoutError(f"eager 1F1B needs extra forwards >= 0, got {extra}")
    most = stages if extra is None else extra
    ranks = _whole_backwards([ahead + min(ahead, most) for ahead in reversed(range(stages))], microbatches)
    return _schedule("eager-1f1b", ranks, microbatches)


@lru_cache(maxsize=256)
def interleaved(pp: int, vpp: int, microbatches: int, group_size: int) -> Schedule:
    """Return Megatron's interleaved 1F1B: `group_size` micro-batches go through one chunk before the next chunk.

    Rank r runs 2(pp - r - 1) + (vpp - 1) * group_size chunk forwards ahead (lines 762-786). Each rank has `vpp` chunks.
    Forwards and backwards follow the schedule table (line 798), but the backwards reverse the chunks. Raise LayoutError
    if Megatron would refuse these numbers (lines 996-1019).
    """
    check_interleaving(pp=pp, vpp=vpp, microbatches=microbatches, group_size=group_size)
    ahead = [num_warmup(pp, vpp, group_size, rank) for rank in range(pp)]
    return _schedule("interleaved-1f1b", _whole_backwards(ahead, microbatches, vpp, group_size), microbatches, vpp)


@lru_cache(maxsize=256)
def grouped_split(pp: int, vpp: int, microbatches: int, group_size: int) -> Schedule:
    """Return GIS (PipeOffload, arXiv 2503.01328): interleaved groups, a short warm-up, and split backwards.

    Rank r runs (vpp - 1) * group_size + pp - r - 1 chunk forwards ahead. With groups of g < pp micro-batches (GIS-H: g
    = pp / 2), a step takes (pp - g)(vpp - 1) chunk forwards longer, but needs less memory. Rank 0 has (g(vpp - 1) +
    pp)/vpp micro-batches in flight. `interleaved` has the same parameters. Raise LayoutError if a group is too small
    for the pipeline.
    """
    ranks = _split_backwards(pp, vpp, microbatches, group_size, lags=[0] * pp)
    return _schedule("gis", ranks, microbatches, vpp)


@lru_cache(maxsize=256)
def interleaved_zero_bubble(pp: int, vpp: int, microbatches: int) -> Schedule:
    """Return a schedule of interleaved groups of pp micro-batches.

    Rank r delays weight gradients (W) by r chunk passes. The delay makes each rank hold activations of pp * vpp chunk
    passes. In the cool-down, ranks wait only for input gradients (I), which is the idea of ZB-H1 (arXiv 2401.10241).
    With one chunk, the schedule is ZB-H1.
    """
    ranks = _split_backwards(pp, vpp, microbatches, pp, lags=range(pp))
    return _schedule("interleaved-zb" if vpp > 1 else "zb-h1", ranks, microbatches, vpp)


def _schedule(name: str, ranks: Ranks, microbatches: int, vpp: int = 1) -> Schedule:
    return Schedule(name=name, pp=len(ranks), vpp=vpp, num_microbatches=microbatches, ranks=ranks)


def check_interleaving(*, pp: int, vpp: int, microbatches: int, group_size: int) -> None:
    """Raise LayoutError if Megatron's interleaved schedule would refuse to run (lines 996-1019)."""
    if pp < 2 or vpp < 2:
        raise LayoutError(f"an interleaved schedule needs pp > 1 and vpp > 1, got pp={pp} and vpp={vpp}")
    if not pp <= group_size <= microbatches:
        raise LayoutError(
            f"micro-batch group size {group_size} must lie between pp={pp} and the {microbatches} micro-batches of a "
            f"step; take fewer pipeline ranks or a smaller micro-batch"
        )
    if 0 < microbatches % group_size < pp:
        raise LayoutError(
            f"{microbatches} micro-batches leave a last group of {microbatches % group_size} after groups of "
            f"{group_size}; the last group must be empty or hold at least pp={pp}"
        )


def schedule_table(vpp: int, microbatches: int, group_size: int) -> tuple[tuple[int, int], ...]:
    """Return (micro-batch, chunk) of each forward of a rank, in order of execution (line 798, get_schedule_table)."""
    return tuple(
        (microbatch, chunk)
        for start in range(0, microbatches, group_size)
        for chunk in range(vpp)
        for microbatch in range(start, min(start + group_size, microbatches))
    )


def num_warmup(pp: Count, vpp: Count, group_size: Count, rank: Count) -> Count:
    """Return the number of warm-up forwards of a rank, after which forwards and backwards alternate (interleaved)."""
    return 2 * (pp - rank - 1) + (vpp - 1) * group_size


def schedule_of(layout: Layout, num_microbatches: int) -> Schedule:
    """Return the schedule that stock Megatron runs for a layout (get_forward_backward_func, lines 45-151)."""
    if layout.pp == 1:
        return no_pipelining(num_microbatches)
    if layout.vpp == 1:
        return one_forward_one_backward(layout.pp, num_microbatches)
    return interleaved(layout.pp, layout.vpp, num_microbatches, layout.microbatch_group_size or layout.pp)


def _whole_backwards(ahead: Sequence[int], microbatches: int, vpp: int = 1, group_size: int = 1) -> Ranks:
    """Run `ahead[r]` forwards on rank r, then one forward and one backward in turn, then the remaining backwards.

    Backwards have the order of the forwards, but with reversed chunks.
    """
    pp, order = len(ahead), schedule_table(vpp, microbatches, group_size)
    ranks = []
    for rank, most in enumerate(ahead):
        forward = [Action(chunk * pp + rank, "F", microbatch) for microbatch, chunk in order]
        backward = [Action((vpp - 1 - chunk) * pp + rank, "B", microbatch) for microbatch, chunk in order]
        first = min(most, len(forward))
        turns = chain.from_iterable(zip(forward[first:], backward, strict=False))
        ranks.append((*forward[:first], *turns, *backward[len(forward) - first :]))
    return tuple(ranks)


def _split_backwards(pp: int, vpp: int, microbatches: int, group_size: int, *, lags: Sequence[int]) -> Ranks:
    """Run groups with a short warm-up and split backwards.

    Rank r runs a weight gradient (W) `lags[r]` backwards after the input gradient (I) of the same pass. Two successive
    groups must hold at least pp - 1 micro-batches together. With fewer micro-batches, a rank could wait for a backward
    before the rank has sent the forwards that this backward needs. All schedules of n micro-batches in groups of g were
    tested for pp < 12, vpp < 5, g < pp + 4 and n <= 3g. All accepted schedules ran, and 734 of the 840 refused
    schedules deadlocked.
    """
    if min(pp, vpp, microbatches, group_size) < 1:
        sizes = f"pp={pp}, vpp={vpp}, groups of {group_size} and {microbatches} micro-batches"
        raise LayoutError(f"{sizes} must be positive")
    last = microbatches % group_size or group_size
    if vpp > 1 and microbatches > group_size and group_size + last < pp - 1:
        raise LayoutError(
            f"{microbatches} micro-batches in groups of {group_size} end with a group of {last}; two groups in a row "
            f"need {pp - 1} micro-batches for pp={pp}: take larger groups, or as many micro-batches as fill them"
        )
    ahead = [(vpp - 1) * group_size + pp - rank - 1 for rank in range(pp)]
    ranks = []
    for lag, whole in zip(lags, _whole_backwards(ahead, microbatches, vpp, group_size), strict=True):
        actions: list[Action] = []
        waiting: list[Action] = []
        for action in whole:
            if action.kind == "F":
                actions.append(action)
                continue
            actions.append(action._replace(kind="I"))
            waiting.append(action._replace(kind="W"))
            if len(waiting) > lag:
                actions.append(waiting.pop(0))
        ranks.append((*actions, *waiting))
    return tuple(ranks)
