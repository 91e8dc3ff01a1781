"""The passes that torch's profiler measured in a job, as tracks beside the predicted ones."""

# A = actions.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter

from pipette_launch.errors import PlanError
from pipette_launch.facts import Plan
from pipette_launch.facts.outcome import ProfiledRank
from pipette_launch.planning.picture import DrawnStep
from pipette_launch.report.trace_events import PASSES, Event, named, span

MOST_PASSES = 10_000
"""Of all ranks; of more, the first of each rank are drawn."""


def profile_events(pid: int, plan: Plan, step: DrawnStep, ranks: Sequence[ProfiledRank]) -> Iterator[Event]:
    """Draw the last step that was profiled, a track for each rank; its passes are in the order of the predicted ones.

    Args:
        pid: the process of the tracks.
        plan: of which the chosen configuration was profiled.
        step: its predicted step.
        ranks: what was measured; empty draws nothing.

    Raises:
        PlanError: these are not the passes of that configuration.

    """
    layout = plan.chosen.layout
    if not ranks:
        return
    if not {"I", "W"}.isdisjoint(step.kind_A):
        raise PlanError(f"{plan.chosen.schedule} splits its backwards, and the profiler shows no halves of them")
    drawn = []
    for one in ranks:
        if one.world_size != layout.world_size or one.rank >= layout.world_size:
            raise PlanError(
                f"the profile is of rank {one.rank} of {one.world_size}, the plan of {layout.world_size} ranks"
            )
        stage = layout.cell_of(one.rank).pp
        row = [index for index, rank in enumerate(step.rank_A) if rank == stage]
        steps, rest = divmod(len(one.kind_A), len(row))
        if rest or not steps:
            passes = f"{len(one.kind_A)} passes, no multiple of the {len(row)} of a step of {layout.words()}"
            raise PlanError(f"rank {one.rank} was profiled with {passes}: the profile is of another configuration")
        drawn.append((one, stage, row, steps))
    begins_s = min(one.start_s_A[(steps - 1) * len(row)] for one, _, row, steps in drawn)
    words = f"measured, the last of {max(map(itemgetter(3), drawn))} steps under torch's profiler, which slows the host"
    yield named("process_name", pid, 0, words)
    for tid, (one, stage, row, steps) in enumerate(drawn, 1):
        yield named("thread_name", pid, tid, f"pipeline rank {stage}, RANK {one.rank}")
        yield from islice(
            _passes(step, one, row, (steps - 1) * len(row), (pid, tid), begins_s), MOST_PASSES // len(drawn)
        )


def _passes(
    step: DrawnStep, one: ProfiledRank, row: Sequence[int], first: int, at: tuple[int, int], begins_s: float
) -> Iterator[Event]:
    """The k-th forward of a step is the k-th that was predicted for the rank, and so are backwards."""
    predicted = {kind: iter([index for index in row if step.kind_A[index] == kind]) for kind in "FB"}
    for place in range(first, first + len(row)):
        kind = one.kind_A[place]
        index = next(predicted[kind], None)
        if index is None:
            raise PlanError(f"a step of rank {one.rank} has other passes than the plan: of another configuration")
        name = f"{PASSES[kind]} {step.microbatch_A[index]}"
        start_s, end_s = one.start_s_A[place] - begins_s, one.end_s_A[place] - begins_s
        yield span(name, "pass", at, max(start_s, 0.0), max(end_s, 0.0), stage=step.stage_A[index])
