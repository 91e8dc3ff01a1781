"""Pipeline schedules that Megatron lacks, for layouts that the search priced under Megatron's own schedules.

The patch `schedules` runs these schedules. They delay weight gradients (W), so layers must compute W apart from input
gradients. Transformer Engine's layers compute both in one pass.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import TypeVar

from pipette_launch.cost.memory.overhead import measured_overhead, num_communicators
from pipette_launch.cost.memory.peak import folded_peaks, kept_by_chunk
from pipette_launch.cost.pipeline.zero_bubble import SCHEDULES, most_kept, named_schedule, schedule_peak_bytes
from pipette_launch.errors import FactError
from pipette_launch.facts import Choice, Cluster, Job, Layout, Recompute
from pipette_launch.facts.job import flag_of
from pipette_launch.facts.layout import NO_RECOMPUTE
from pipette_launch.facts.schedule import RELEASES, ExpectedTimes, Schedule, ScheduleFile, schedule_of
from pipette_launch.search.candidates import Candidate, Promising, SearchInputs
from pipette_launch.search.choose import choice_of
from pipette_launch.search.placement import begin, improve
from pipette_launch.search.slots import IsLate, Placed

LEANEST = 2 / 9
"""Smallest share of Megatron's activations that any schedule keeps for layouts with several chunks. V-Min keeps a third
of the activations of 1F1B, and interleaved 1F1B keeps 1.5 times the activations of 1F1B."""
GAIN = 0.02
"""A schedule that Megatron lacks must save this share of the step to replace Megatron's own schedule."""
OF_ATTENTION = Recompute(granularity="selective")
"""Recompute of attention scores, assumed for the bytes kept for weight-gradient passes, which need no scores."""
MOST_LAYOUTS = 4
"""Largest number of layouts tried among those that fit under Megatron's own schedules, and again among the others."""
_ONLY_STOCK = (
    "overlap_moe_expert_parallel_comm",
    "fine_grained_activation_offloading",
    "tp_comm_overlap",
)
"""Options that depend on the order of passes in Megatron's own schedules."""

Some = TypeVar("Some", Candidate, Promising)


def unsupported(job: Job, cluster: Cluster) -> str:
    """Return the reason that the job can run only Megatron's own schedules; empty if it can run other schedules."""
    if any(host.shares_cores for host in cluster.hosts):
        return "slots share cores here, so other slots use the cores that an idle slot leaves free"
    if not RELEASES[0] <= job.release < RELEASES[1]:
        known = "from {}.{} on and before {}.{}".format(*RELEASES[0], *RELEASES[1])
        return f"they run with megatron-core {known}, and the job has {job.megatron_version}"
    options = job.options
    faults = [flag_of(name) for name in _ONLY_STOCK if getattr(options, name)]
    if options.graphs.impl != "none":
        faults.append(f"{flag_of('cuda_graph_impl')} {options.graphs.impl}")
    faults += [flag_of(name) for name in ("cpu_offloading_num_layers", "rampup_batch_size") if getattr(options, name)]
    if job.batch.earlier_sizes:
        faults.append("--step-batch-size-schedule")
    if job.model.hybrid:
        faults.append("hybrid models")
    if job.model.mtp_num_layers:
        faults.append("multi-token prediction")
    if job.model.transformer_impl != "local":
        faults.append(f"--transformer-impl {job.model.transformer_impl}")
    return f"they do not run with {faults[0]}" if faults else ""


@dataclass(frozen=True, kw_only=True)
class _LayoutMemory:
    inputs: SearchInputs
    layout: Layout
    stock_peaks: tuple[int, ...]
    """Peak bytes of each pipeline rank, predicted under Megatron's own schedule."""

    @cached_property
    def num_microbatches(self) -> int:
        """Micro-batches of one step."""
        return self.layout.num_microbatches(self.inputs.job.batch.global_batch_size)

    @cached_property
    def kept_bytes(self) -> tuple[int, ...]:
        """Bytes of one micro-batch's activations on each chunk."""
        return kept_by_chunk(self.inputs.job, self.layout)

    @cached_property
    def limit_bytes(self) -> int:
        """Largest bytes of a rank's tensors, less the memory of the schedule's additional communicators."""
        overhead = measured_overhead(self.inputs.job, self.layout, self.inputs.measurements)
        more = 2 * min(self.layout.pp - 1, 2) - 1
        each_bytes = overhead.communicators.value / num_communicators(self.inputs.job, self.layout)
        return self.inputs.limit_bytes(self.layout) - math.ceil(more * each_bytes / overhead.reserve.value)

    @cached_property
    def stock(self) -> Schedule:
        """Megatron's own schedule of the layout."""
        return schedule_of(self.layout, self.num_microbatches)

    def peaks(self, live_bytes: Sequence[int], *, is_folded: bool) -> tuple[int, ...]:
        """Predict the peak bytes of each pipeline rank from the bytes of its live activations, in a loop or in a V."""
        if not is_folded:
            stock_bytes = schedule_peak_bytes(self.stock, self.kept_bytes)
            each = zip(self.stock_peaks, stock_bytes, live_bytes, strict=True)
            return tuple(peak - stock + live for peak, stock, live in each)
        factor = self.inputs.predictor.memory_factor
        folded = folded_peaks(self.inputs.job, self.layout, live_bytes)
        return tuple(math.ceil(parts.total * factor) for parts in folded)


def best_scheduled(
    inputs: SearchInputs,
    candidates: Sequence[Candidate],
    over_the_limit: Iterable[Promising],
    chosen: Choice,
    names: Sequence[str],
    *,
    seed: int,
    is_late: IsLate,
) -> Choice | None:
    """Return the fastest choice under one of the named schedules; None if no schedule saves `GAIN`.

    `unsupported` must be empty. The layouts `over_the_limit` fit only under schedules that need less memory. `chosen`
    is the best choice under Megatron's own schedules.
    """
    pipelined = [one for one in sorted(candidates, key=lambda one: one.placed.cost_s) if one.layout.pp > 1]

    def fitting(some: Iterable[Some]) -> Iterator[tuple[Some, list[str]]]:
        for one in some:
            fit = _fitting(inputs, one.layout, one.peak_bytes, names)
            if is_late():
                return
            if fit:
                yield one, fit

    lean = islice(fitting(over_the_limit), MOST_LAYOUTS)
    priced = ((inputs.price(one), fit) for one, fit in lean)
    found: list[Choice] = []
    for one, fit in chain(islice(fitting(pipelined), MOST_LAYOUTS), priced):
        if one is not None:
            found += _choices(inputs, one, fit, is_late)
    if not found:
        return None
    best = min(found, key=lambda choice: choice.step_time_s)
    best = _better_placed(inputs, best, random.Random(seed), is_late)
    return best if best.step_time_s <= (1 - GAIN) * chosen.step_time_s else None


def _fitting(inputs: SearchInputs, layout: Layout, stock_peaks: tuple[int, ...], names: Sequence[str]) -> list[str]:
    """List the schedules that suit a layout's chunks and fit in the memory of its ranks."""
    if layout.recompute.offload_modules:
        return []
    memory = _LayoutMemory(inputs=inputs, layout=layout, stock_peaks=stock_peaks)
    can_fold = layout.pp > 2 and not layout.layers_per_chunk
    found = []
    for name in names:
        known = SCHEDULES[name]
        is_folded = known.placement == "v"
        if known.vpp != layout.vpp or (is_folded and not can_fold):
            continue
        most_bytes = most_kept(name, memory.kept_bytes, memory.num_microbatches)
        if max(memory.peaks(list(map(math.floor, most_bytes)), is_folded=is_folded)) <= memory.limit_bytes:
            found.append(name)
    return found


def _choices(inputs: SearchInputs, candidate: Candidate, names: Sequence[str], is_late: IsLate) -> Iterator[Choice]:
    """Build schedules for a layout until `is_late`, and price the schedules that fit in memory."""
    layout = candidate.layout
    memory = _LayoutMemory(inputs=inputs, layout=layout, stock_peaks=candidate.peak_bytes)
    kept_bytes = memory.kept_bytes
    # Until the weight-gradient pass, a rank keeps the inputs of linear layers and the gradients of their outputs.
    recomputes = layout.recompute != NO_RECOMPUTE
    waiting_bytes = kept_by_chunk(inputs.job, replace(layout, recompute=OF_ATTENTION)) if recomputes else kept_bytes
    times = inputs.predictor.stage_times(layout, candidate.placed.placement)
    fits_as_stock = max(candidate.peak_bytes) <= memory.limit_bytes
    for name in names:
        if is_late():
            return
        try:
            schedule = named_schedule(
                name,
                pp=layout.pp,
                num_microbatches=memory.num_microbatches,
                times=times,
                held_S=kept_bytes,
            )
        except FactError:
            # No order of passes stays within the schedule's memory.
            continue
        live_bytes = schedule_peak_bytes(schedule, kept_bytes, waiting_bytes)
        peaks = memory.peaks(live_bytes, is_folded=schedule.placement == "v")
        if max(peaks) <= memory.limit_bytes:
            # If both schedules run each rank's forwards in the same order, dropout draws the same numbers.
            ours, stock = (
                [[action for action in actions if action.kind == "F"] for actions in each.ranks]
                for each in (schedule, memory.stock)
            )
            checks = fits_as_stock and ours == stock
            yield choice_of(
                inputs,
                layout,
                candidate.placed.placement,
                peaks=peaks,
                # No bound is known for schedules that Megatron lacks.
                bound_s=0.0,
                schedule=replace(
                    ScheduleFile.of(schedule, checks_first_step=checks),
                    times=_times(inputs, layout, candidate.placed.placement, schedule),
                ),
            )


def _better_placed(inputs: SearchInputs, choice: Choice, rng: random.Random, is_late: IsLate) -> Choice:
    """Search for a placement again, because a pipeline in a V sends nothing from the last rank to the first rank."""
    layout, order = choice.layout, choice.order
    assert order is not None
    schedule = order.schedule()
    objective = inputs.predictor.placement_cost(layout, schedule)
    problem = replace(inputs.placement_problem(layout, 0.0), objective=objective, has_linear_model=False)
    known = Placed(placement=choice.placement, cost_s=choice.step_time_s)
    placed = known.or_faster(begin(problem)[0])
    placed = improve(problem, placed, turn=0, rng=rng, is_late=is_late)
    if placed.cost_s >= choice.step_time_s:
        return choice
    better = choice_of(
        inputs,
        layout,
        placed.placement,
        peaks=choice.memory.model_bytes,
        bound_s=choice.bound_s,
        schedule=replace(order, times=_times(inputs, layout, placed.placement, schedule)),
    )
    return min(choice, better, key=lambda one: one.step_time_s)


def _times(inputs: SearchInputs, layout: Layout, placement: Sequence[int], schedule: Schedule) -> ExpectedTimes | None:
    """Return the pass times that fix the order of messages over NCCL; None over gloo, where messages need no order."""
    if inputs.cluster.device_kind != "cuda":
        return None
    return inputs.predictor.stage_times(layout, placement, schedule).expected
