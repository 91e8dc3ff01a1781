"""One front door to every schedule by its name, with the numbers that it takes and the reason where it takes none."""

# S = stages, P = pipeline ranks.

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipette_launch.cost.pipeline.greedy import Task
from pipette_launch.cost.pipeline.timeline import StageTimes
from pipette_launch.cost.pipeline.v_schedules import one_forward_one_backward_v, v_schedule
from pipette_launch.cost.pipeline.zero_bubble import refilled, zero_bubble
from pipette_launch.errors import FactError, LayoutError
from pipette_launch.facts.schedule import Placement, Schedule, rank_of
from pipette_launch.facts.schedules import (
    eager_one_forward_one_backward,
    gpipe,
    grouped_split,
    interleaved,
    interleaved_zero_bubble,
    one_forward_one_backward,
)

Chunks = Literal["one", "two", "several"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What a name stands for."""

    sentence: str
    chunks: Chunks = "one"
    """How many chunks each rank holds."""
    placement: Placement = "loop"
    peak: Callable[[int, int, int], float]
    """Most micro-batches that a rank keeps, of pp, vpp and group size, W not yet run counted in full."""
    by_times: bool = False
    """Whether stage times decide its order, and a memory limit may."""


KNOWN: dict[str, Known] = {
    "gpipe": Known(sentence="all forwards, then all backwards", peak=lambda _p, _v, _g: float("inf")),
    "1f1b": Known(sentence="one forward and one backward in turn", peak=lambda p, _v, _g: p),
    "eager-1f1b": Known(sentence="1F1B with up to twice the forwards ahead", peak=lambda p, _v, _g: 2 * p - 1),
    "interleaved-1f1b": Known(
        sentence="Megatron's interleaved schedule of virtual stages",
        chunks="several",
        peak=lambda p, v, g: (2 * (p - 1) + (v - 1) * g + 1) / v,
    ),
    "gis": Known(
        sentence="interleaved groups, a short warm-up, W after I; groups may be as small as half the pipeline",
        chunks="several",
        peak=lambda p, v, g: (g * (v - 1) + p) / v,
    ),
    "zb-h1": Known(sentence="1F1B with W delayed by a count for each rank", peak=lambda p, _v, _g: p),
    "interleaved-zb": Known(
        sentence="interleaved groups, a short warm-up, W delayed", chunks="several", peak=lambda p, _v, _g: p
    ),
    "zb-1p": Known(sentence="zero bubble within 1F1B's memory", peak=lambda p, _v, _g: p, by_times=True),
    "zb-2p": Known(sentence="zero bubble within twice 1F1B's memory", peak=lambda p, _v, _g: 2 * p, by_times=True),
    "v-zb": Known(
        sentence="V placement within 1F1B's memory",
        chunks="two",
        placement="v",
        peak=lambda p, _v, _g: p,
        by_times=True,
    ),
    "v-half": Known(
        sentence="V placement within half of 1F1B's memory",
        chunks="two",
        placement="v",
        peak=lambda p, _v, _g: (p + 2) // 2,
        by_times=True,
    ),
    "v-min": Known(
        sentence="V placement within a third of 1F1B's memory",
        chunks="two",
        placement="v",
        peak=lambda p, _v, _g: (p + 4) // 3,
        by_times=True,
    ),
    "1f1b-v": Known(
        sentence="V placement, whole backwards, two thirds of 1F1B's memory",
        chunks="two",
        placement="v",
        peak=lambda p, _v, _g: (2 * p + 2) // 3,
        by_times=True,
    ),
}
"""Every schedule by its name."""

UNSPLIT = frozenset({"gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "1f1b-v"})
"""Those that run each backward whole."""


def named_schedule(
    name: str,
    *,
    pp: int,
    vpp: int = 1,
    num_microbatches: int,
    group_size: int | None = None,
    extra: int | None = None,
    times: StageTimes | None = None,
    held_S: Sequence[float] | None = None,
    w_share: float = 1.0,
    limit_P: Sequence[float] | None = None,
    objective: Literal["makespan", "span"] = "makespan",
) -> Schedule:
    """Return a schedule by its name.

    Args:
        name: one of `KNOWN`.
        pp: pipeline ranks.
        vpp: chunks of each rank.
        num_microbatches: of one step.
        group_size: micro-batches that pass a chunk before the next (interleaved-1f1b and gis); None = pp.
        extra: forwards ahead beyond 1F1B's (eager-1f1b); None = as many as 1F1B's own.
        times: of the stages, with input and weight gradients apart. Schedules that times decide take equal ones where
            they are None; gis and interleaved-zb put their W anew where they are given.
        held_S: what each stage keeps for one micro-batch, in any unit; None = equal parts of one micro-batch.
        w_share: the share of it that W still needs.
        limit_P: most that each rank may keep, in the unit of `held_S`; None = what the schedule is known for.
        objective: what schedules that times decide keep short; `span` only with zero bubble's post-validation.

    Raises:
        LayoutError: there is no such schedule of these numbers; the message gives the reason.
        FactError: times, sizes or limits contradict each other, or the limits leave no order.

    """
    known = _known(name)
    group = _checked_group(name, known, pp=pp, vpp=vpp, num_microbatches=num_microbatches, group_size=group_size)
    if extra is not None and name != "eager-1f1b":
        raise LayoutError(f"{name} has no forwards more ahead to choose; extra={extra} is eager-1f1b's")
    refills = times is not None and name in ("gis", "interleaved-zb")
    if not known.by_times and not refills:
        if limit_P is not None:
            raise LayoutError(f"the order of {name} is fixed and takes no memory limit; cost.live counts what it keeps")
        return _counted(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches, group=group, extra=extra)
    held = tuple(held_S) if held_S is not None else (1 / vpp,) * (pp * vpp)
    task = Task(
        pp=pp,
        vpp=vpp,
        placement=known.placement,
        num_microbatches=num_microbatches,
        times=times if times is not None else _equal_times(pp * vpp),
        held_S=held,
        w_share=w_share,
        limit_P=tuple(limit_P) if limit_P is not None else _limits(known, pp=pp, vpp=vpp, group=group, held_S=held),
        objective=objective,
    )
    if refills:
        stock = _counted(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches, group=group, extra=extra)
        return refilled(stock, _split(name, task))
    return _timed(name, task)


def _counted(name: str, *, pp: int, vpp: int, num_microbatches: int, group: int, extra: int | None) -> Schedule:
    """A schedule whose order needs no times."""
    make: dict[str, Callable[[], Schedule]] = {
        "gpipe": lambda: gpipe(pp, num_microbatches),
        "1f1b": lambda: one_forward_one_backward(pp, num_microbatches),
        "eager-1f1b": lambda: eager_one_forward_one_backward(pp, num_microbatches, extra),
        "interleaved-1f1b": lambda: interleaved(pp, vpp, num_microbatches, group),
        "gis": lambda: grouped_split(pp, vpp, num_microbatches, group),
        "zb-h1": lambda: interleaved_zero_bubble(pp, 1, num_microbatches),
        "interleaved-zb": lambda: interleaved_zero_bubble(pp, vpp, num_microbatches),
    }
    return make[name]()


def _timed(name: str, task: Task) -> Schedule:
    """A schedule whose order its times decide."""
    if name == "1f1b-v":
        return one_forward_one_backward_v(task)
    if task.placement == "v":
        return v_schedule(name, _split(name, task))
    return zero_bubble(name, _split(name, task))


def _known(name: str) -> Known:
    if name not in KNOWN:
        near = difflib.get_close_matches(name.lower(), KNOWN, n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        raise LayoutError(f"no schedule is called {name!r}{guess} Known are {', '.join(KNOWN)}")
    return KNOWN[name]


def _checked_group(name: str, known: Known, *, pp: int, vpp: int, num_microbatches: int, group_size: int | None) -> int:
    """The group size, once the numbers are those of the schedule."""
    if min(pp, vpp, num_microbatches) < 1:
        raise LayoutError(f"{name}: pp={pp}, vpp={vpp} and {num_microbatches} micro-batches must be positive")
    fits = {"one": vpp == 1, "two": vpp == 2, "several": vpp > 1}[known.chunks]
    if not fits:
        raise LayoutError(f"{name} has {known.chunks} chunks on each rank, got vpp={vpp}")
    if known.chunks != "one" and pp == 1:
        raise LayoutError(f"{name} needs a pipeline, got pp=1")
    if group_size is not None and name not in ("interleaved-1f1b", "gis"):
        raise LayoutError(f"{name} has no micro-batch groups to choose, got group_size={group_size}")
    return pp if group_size is None else group_size


def _equal_times(stages: int) -> StageTimes:
    hops = (0.0,) * (stages - 1)
    one = (1.0,) * stages
    return StageTimes(
        forward_s=one, backward_s=(2.0,) * stages, input_s=one, weight_s=one, forward_hop_s=hops, backward_hop_s=hops
    )


def _limits(known: Known, *, pp: int, vpp: int, group: int, held_S: tuple[float, ...]) -> tuple[float, ...]:
    """What each rank keeps of so many micro-batches as the schedule is known for."""
    held_P = [0.0] * pp
    for stage, held in enumerate(held_S[: pp * vpp]):
        held_P[rank_of(stage, pp=pp, placement=known.placement)] += held
    return tuple(known.peak(pp, vpp, group) * held for held in held_P)


def _split(name: str, task: Task) -> Task:
    """The task, once its times tell the halves of the backward apart."""
    if not task.times.input_s:
        raise FactError(f"{name} splits the backward: give input_s and weight_s of each stage")
    return task
