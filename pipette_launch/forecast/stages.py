"""The memory of each pipeline rank by kind, as the closed form or the executed model has it, with all overhead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pipette_launch.cost.memory.overhead import MeasuredStages, Overhead
from pipette_launch.cost.memory.peak import MemoryParts, peak_memory_bytes
from pipette_launch.errors import PlanError
from pipette_launch.facts import Job, Measurements
from pipette_launch.facts.messages import ExecutedParts
from pipette_launch.facts.prediction import StageMemory

NEEDED = {"torch": "torch", "megatron-core": "megatron"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What a method has counted."""

    stages: tuple[StageMemory, ...]
    stepping: tuple[int, ...]
    """Pipeline ranks that hold most while the optimizer steps, when no activation lives."""
    notes: tuple[str, ...] = ()


def closed_form(
    job: Job, pp_ranks: Sequence[int], overhead: Overhead, *, measured: Measurements | None = None
) -> Counted:
    """Count the tensors of these pipeline ranks by formula; a stage that the warm-up ran has the peak that it had.

    That is the figure which the planner takes. The split by kind stays the formula's, scaled to the measured peak.

    Args:
        job: its own layout is counted.
        pp_ranks: the pipeline ranks to count.
        overhead: what a rank holds beside the model.
        measured: peaks of stages that a warm-up ran; None = none.

    """
    parts = peak_memory_bytes(job, job.own)
    predicted = [one.total for one in parts]
    ran = MeasuredStages(job, measured) if measured else None
    peaks = ran.peaks(job.own, predicted) if ran else predicted
    return Counted(
        stages=tuple(_stage(job, rank, scaled(parts[rank].by_kind(), peaks[rank]), overhead) for rank in pp_ranks),
        stepping=tuple(rank for rank in pp_ranks if steps_highest(parts[rank])),
        notes=ran.notes(job.own) if ran else (),
    )


def scaled(kinds: Mapping[str, int], peak_bytes: int) -> dict[str, int]:
    """Scale a split by kind so that it sums to a peak; rounding goes to the largest kind."""
    counted = sum(kinds.values())
    scaled = {name: size * peak_bytes // counted for name, size in kinds.items()}
    scaled[max(scaled, key=lambda name: scaled[name])] += peak_bytes - sum(scaled.values())
    return scaled


def executed(job: Job, pp_ranks: Sequence[int], overhead: Overhead, *, cache: Path | None) -> Counted:
    """Count them by running megatron-core's own code under fake tensors, in a process of its own.

    Args:
        job: its own layout is counted.
        pp_ranks: the pipeline ranks to count.
        overhead: what a rank holds beside the model.
        cache: a folder that keeps what was found; None keeps nothing.

    Raises:
        PlanError: megatron-core or torch is missing, refuses the layout, or does something that is not modelled.

    """
    from pipette_launch.cost.memory.abstract_execution import execute

    missing = [name for name, module in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise PlanError(
            f"abstract execution runs megatron-core's own code, and {' and '.join(missing)} cannot be imported here; "
            f"install what is missing, or count by formula with --method closed"
        )
    found = execute(job, job.own, pp_ranks, cache=cache)
    return Counted(
        stages=tuple(_stage(job, memory.pp_rank, executed_kinds(memory.parts), overhead) for memory in found),
        stepping=tuple(memory.pp_rank for memory in found if memory.parts.optimizer_step),
        notes=tuple(dict.fromkeys(note for memory in found for note in memory.notes)),
    )


def steps_highest(parts: MemoryParts) -> bool:
    """Whether the optimizer's temporaries, and not the activations, make the peak."""
    return parts.optimizer_step > 0 and parts.total == parts.static + parts.optimizer_step


def executed_kinds(parts: ExecutedParts) -> dict[str, int]:
    """Split an executed peak as `MemoryParts.by_kind` splits a counted one; the values sum to it."""
    return {
        "weights": parts.weights,
        "gradients": parts.gradients,
        "optimizer": parts.optimizer,
        "activations": parts.activations + parts.working + parts.embedding,
        "logits": parts.logits,
        "buffers": parts.buffers + parts.optimizer_step,
    }


def _stage(job: Job, pp_rank: int, kinds: Mapping[str, int], overhead: Overhead) -> StageMemory:
    allocated = sum(kinds.values())
    peak = overhead.device_peak_bytes(allocated)
    return StageMemory(
        pp_rank=pp_rank,
        num_layers=job.own.stage_layers(job.model.num_layers)[pp_rank],
        parts_bytes={**kinds, "overhead": peak - allocated},
        model_peak_bytes=allocated,
        peak_bytes=peak,
    )
