"""Pipelines under schedules that Megatron lacks, for layouts that the search has priced under Megatron's own.

The patch `schedules` executes them, on Megatron's own placement of chunks or with two chunks folded.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from itertools import islice

from pipette_launch.cost.memory.folded import folded_peaks
from pipette_launch.cost.memory.peak import kept_by_chunk
from pipette_launch.cost.pipeline.live_activations import peak_live_bytes
from pipette_launch.cost.pipeline.named_schedules import SCHEDULES, named_schedule
from pipette_launch.errors import FactError, LayoutError
from pipette_launch.facts import Choice, Cluster, Job, Layout
from pipette_launch.facts.performance import flag_of
from pipette_launch.facts.schedule import Schedule
from pipette_launch.facts.schedules import schedule_of
from pipette_launch.megatron.performance import performance_options
from pipette_launch.search.candidates import Candidate, SearchInputs
from pipette_launch.search.choose import choice_of

GAIN = 0.02
"""Megatron's own code is left only for a step that is predicted shorter by this part."""
MOST_LAYOUTS = 4
"""So many pipelined layouts are tried, the fastest under Megatron's own schedules first."""


def unsupported(job: Job, cluster: Cluster) -> str:
    """Say what keeps the job to Megatron's own schedules, as the end of a sentence; empty where nothing does."""
    if any(host.shares_cores for host in cluster.hosts):
        return "slots share cores here, and what one leaves idle another takes"
    fault = _unsupported(job)
    return f"they do not run with {fault}" if fault else ""


def _unsupported(job: Job) -> str:
    """Name what the job uses that the patch cannot execute; empty where it can."""
    options = performance_options(job)
    for name in ("overlap_moe_expert_parallel_comm", "enable_cuda_graph", "external_cuda_graph", "tp_comm_overlap"):
        if getattr(options, name):
            return flag_of(name)
    if options.cuda_graph_impl != "none":
        return f"{flag_of('cuda_graph_impl')} {options.cuda_graph_impl}"
    if options.cpu_offloading_num_layers:
        return flag_of("cpu_offloading_num_layers")
    if options.rampup_batch_size:
        return flag_of("rampup_batch_size")
    return "multi-token prediction" if job.model.mtp_num_layers else ""


def best_scheduled(
    inputs: SearchInputs, candidates: Sequence[Candidate], chosen: Choice, names: Sequence[str]
) -> Choice | None:
    """Return the fastest choice under one of the named schedules; None where none saves enough of the chosen step.

    Nothing keeps the job to Megatron's own schedules (`unsupported`).

    Args:
        inputs: the job and the machines.
        candidates: what the search has priced under Megatron's own schedules.
        chosen: the best of them.
        names: of `facts.schedules.EXECUTABLE`.

    """
    ranking = sorted(candidates, key=lambda one: one.placed.cost_s)
    pipelined = islice((one for one in ranking if one.layout.pp > 1), MOST_LAYOUTS)
    found = [choice for one in pipelined for choice in _choices(inputs, one, names)]
    best = min(found, key=lambda choice: choice.step_time_s, default=None)
    return best if best and best.step_time_s <= (1 - GAIN) * chosen.step_time_s else None


def _choices(inputs: SearchInputs, candidate: Candidate, names: Sequence[str]) -> Iterator[Choice]:
    """Price a candidate under each schedule that its layout can run and that fits."""
    layout = candidate.layout
    kept_bytes = kept_by_chunk(inputs.job, layout)
    stock = schedule_of(layout, layout.num_microbatches(inputs.job.batch.global_batch_size))
    stock_bytes = peak_live_bytes(stock, kept_bytes)
    limit_bytes = inputs.limit_bytes(layout)
    for schedule in _schedules(inputs, candidate, names, kept_bytes):
        # What waits for its W is counted in full: inputs of linear layers, and the gradients of their outputs.
        live_bytes = peak_live_bytes(schedule, kept_bytes)
        if schedule.placement == "v":
            factor = inputs.predictor.memory_factor(layout)
            peaks = tuple(math.ceil(parts.total * factor) for parts in folded_peaks(inputs.job, layout, live_bytes))
        else:
            changes = zip(candidate.peak_bytes, live_bytes, stock_bytes, strict=True)
            peaks = tuple(peak + live - before for peak, live, before in changes)
        if max(peaks) <= limit_bytes:
            yield choice_of(
                inputs,
                layout,
                candidate.placed.placement,
                priced=layout,
                peaks=peaks,
                bound=(0.0, "no bound is known for schedules that Megatron lacks"),
                schedule=schedule,
            )


def _can_fold(job: Job, layout: Layout) -> bool:
    """Whether the patch can fold a layout: its chunks are equal, and no two of its ends share a weight."""
    is_even = layout.vpp == 2 and layout.pp > 2 and not layout.layers_per_chunk
    return is_even and job.model.untie_embeddings_and_output_weights


def _schedules(
    inputs: SearchInputs, candidate: Candidate, names: Sequence[str], kept_bytes: tuple[int, ...]
) -> Iterator[Schedule]:
    """Make each of the named schedules for a layout's shape and times."""
    layout = candidate.layout
    times = inputs.predictor.stage_times(layout, candidate.placed.placement)
    splits = inputs.job.model.transformer_impl == "local"
    for name in names:
        known = SCHEDULES[name]
        # Transformer Engine's layers make both gradients at once under this patch.
        if (known.splits_backward and not splits) or (known.chunks == "one") != (layout.vpp == 1):
            continue
        if known.placement == "v" and not _can_fold(inputs.job, layout):
            continue
        for group_size in (layout.pp, -(-layout.pp // 2)) if known.has_groups else (None,):
            # Not for these numbers: groups that the micro-batches do not fill, limits without an order.
            with contextlib.suppress(LayoutError, FactError):
                yield named_schedule(
                    name,
                    pp=layout.pp,
                    vpp=layout.vpp,
                    num_microbatches=layout.num_microbatches(inputs.job.batch.global_batch_size),
                    group_size=group_size,
                    times=times,
                    held_S=kept_bytes if known.by_times or known.refills else None,
                )
