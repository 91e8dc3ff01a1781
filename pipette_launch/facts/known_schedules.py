"""The schedules whose order needs no times: Megatron's own, and those that a few counts describe."""

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
"""Schedules beside Megatron's own that the patch `schedules` executes, by name."""
RELEASES = ((0, 14), (0, 21))
"""Oldest release of megatron-core that the patch `schedules` supports, and the first that it refuses again."""
FOLDING_RELEASE = (0, 16)
"""Oldest release of megatron-core with which the patch folds a pipeline."""


def schedule_names(given: str) -> tuple[str, ...]:
    """Read `stock`, `all` or names between commas; raises UsageError for a name that cannot be executed."""
    if given in ("stock", "all"):
        return EXECUTABLE if given == "all" else ()
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    for name in names:
        if name not in EXECUTABLE:
            raise UsageError(f"no schedule {name!r} can be executed; there are stock, all, {', '.join(EXECUTABLE)}")
    return names


@lru_cache(maxsize=256)
def no_pipelining(microbatches: int) -> Schedule:
    """One rank: forward and backward of each micro-batch in turn (megatron-core, forward_backward_no_pipelining)."""
    ranks = _whole_backwards([0], microbatches)
    return Schedule(name="no-pipelining", pp=1, vpp=1, num_microbatches=microbatches, ranks=ranks)


@lru_cache(maxsize=256)
def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in the order of the micro-batches."""
    ranks = _whole_backwards([microbatches] * stages, microbatches)
    return Schedule(name="gpipe", pp=stages, vpp=1, num_microbatches=microbatches, ranks=ranks)


@lru_cache(maxsize=256)
def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """1F1B: rank r runs pp - r - 1 forwards ahead, then one forward and one backward in turn (schedules.py:2093)."""
    ranks = _whole_backwards(range(stages)[::-1], microbatches)
    return Schedule(name="1f1b", pp=stages, vpp=1, num_microbatches=microbatches, ranks=ranks)


@lru_cache(maxsize=256)
def eager_one_forward_one_backward(stages: int, microbatches: int, extra: int | None = None) -> Schedule:
    """1F1B with more forwards ahead, so that a transfer hides behind them.

    Args:
        stages: pipeline ranks.
        microbatches: of one step.
        extra: forwards ahead beyond those of 1F1B, at most pp - r - 1 on rank r; None = that many, so
            2 (pp - r - 1) in all and 2 pp - 1 micro-batches alive on rank 0 (eager 1F1B, arXiv 2211.05322).

    """
    if extra is not None and extra < 0:
        raise LayoutError(f"eager 1F1B runs 0 or more forwards more ahead than 1F1B, got {extra}")
    most = stages if extra is None else extra
    ranks = _whole_backwards([ahead + min(ahead, most) for ahead in reversed(range(stages))], microbatches)
    return Schedule(name="eager-1f1b", pp=stages, vpp=1, num_microbatches=microbatches, ranks=ranks)


@lru_cache(maxsize=256)
def interleaved(pp: int, vpp: int, microbatches: int, group_size: int) -> Schedule:
    """Megatron's interleaved 1F1B: groups of micro-batches go through one chunk before the next.

    Rank r runs 2(pp - r - 1) + (vpp - 1) * group_size chunk forwards ahead (schedules.py:762-786); both passes follow
    the schedule table (schedules.py:798), the backward with the chunks reversed.

    Args:
        pp: pipeline ranks.
        vpp: chunks of each rank.
        microbatches: of one step.
        group_size: micro-batches that go through one chunk before the next.

    Raises:
        LayoutError: Megatron would refuse these numbers (schedules.py:996-1019).

    """
    check_interleaving(pp=pp, vpp=vpp, microbatches=microbatches, group_size=group_size)
    ahead = [num_warmup(pp, vpp, group_size, rank) for rank in range(pp)]
    ranks = _whole_backwards(ahead, microbatches, vpp, group_size)
    return Schedule(name="interleaved-1f1b", pp=pp, vpp=vpp, num_microbatches=microbatches, ranks=ranks)


@lru_cache(maxsize=256)
def grouped_split(pp: int, vpp: int, microbatches: int, group_size: int) -> Schedule:
    """GIS (PipeOffload, arXiv 2503.01328): interleaved groups, a short warm-up, each backward split into I and then W.

    Rank r runs (vpp - 1) * group_size + pp - r - 1 chunk forwards ahead; groups may be
    smaller than the pipeline (GIS-H: half of it), which costs (pp - g)(vpp - 1) chunk forwards and saves as much memory
    as it leaves in flight: (g(vpp - 1) + pp)/vpp micro-batches on rank 0. Parameters are those of `interleaved`.

    Raises:
        LayoutError: the groups are too small for the pipeline, as their last one may be.

    """
    ranks = _split_backwards(pp, vpp, microbatches, group_size, lags=[0] * pp)
    return Schedule(name="gis", pp=pp, vpp=vpp, num_microbatches=microbatches, ranks=ranks)


@lru_cache(maxsize=256)
def interleaved_zero_bubble(pp: int, vpp: int, microbatches: int) -> Schedule:
    """Interleaved groups of pp, a short warm-up, and W delayed by r chunk passes on rank r.

    So each rank holds as many chunk passes as rank 0, pp * vpp, and the cool-down is a chain of I alone (the idea of
    ZB-H1, arXiv 2401.10241, on the interleaved order). With one chunk it is ZB-H1.
    """
    ranks = _split_backwards(pp, vpp, microbatches, pp, lags=range(pp))
    name = "interleaved-zb" if vpp > 1 else "zb-h1"
    return Schedule(name=name, pp=pp, vpp=vpp, num_microbatches=microbatches, ranks=ranks)


def check_interleaving(*, pp: int, vpp: int, microbatches: int, group_size: int) -> None:
    """Raise LayoutError where Megatron's interleaved schedule would refuse to run (schedules.py:996-1019).

    Parameters are those of `interleaved`.
    """
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
            f"{group_size}; it must hold at least pp={pp}, or none"
        )


def schedule_table(vpp: int, microbatches: int, group_size: int) -> tuple[tuple[int, int], ...]:
    """(micro-batch, chunk) of each forward of a rank, in order (schedules.py:798, get_schedule_table)."""
    return tuple(
        (microbatch, chunk)
        for start in range(0, microbatches, group_size)
        for chunk in range(vpp)
        for microbatch in range(start, min(start + group_size, microbatches))
    )


def num_warmup(pp: Count, vpp: Count, group_size: Count, rank: Count) -> Count:
    """Forwards that a rank of an interleaved schedule runs before its first backward (not capped by their number).

    Parameters are those of `interleaved`, as numbers or as arrays of equal shapes.
    """
    return 2 * (pp - rank - 1) + (vpp - 1) * group_size


def schedule_of(layout: Layout, num_microbatches: int) -> Schedule:
    """Return the schedule that stock Megatron runs for a layout (get_forward_backward_func, schedules.py:45-151)."""
    if layout.pp == 1:
        return no_pipelining(num_microbatches)
    if layout.vpp == 1:
        return one_forward_one_backward(layout.pp, num_microbatches)
    return interleaved(layout.pp, layout.vpp, num_microbatches, layout.microbatch_group_size or layout.pp)


def _whole_backwards(ahead: Sequence[int], microbatches: int, vpp: int = 1, group_size: int = 1) -> Ranks:
    """Run `ahead[r]` forwards on rank r, then one backward and one forward in turn, then the backwards that are left.

    The backwards take the order of the forwards with the chunks reversed.
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
    """Run groups with a short warm-up, backwards split: on rank r, W follows `lags[r]` backward passes after its I.

    Two groups in a row must hold pp - 1 micro-batches, or a rank could wait for a backward before it has sent the
    forwards that the backward needs (tried for every pp < 12, vpp < 5, g < pp + 4, n <= 3g: all that this lets pass can
    run; of what it refuses, 734 of 840 deadlock).
    """
    if min(pp, vpp, microbatches, group_size) < 1:
        raise LayoutError(
            f"pp={pp}, vpp={vpp}, groups of {group_size} and {microbatches} micro-batches must be positive"
        )
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
