"""The memory of each pipeline rank by kind, as the closed form or the executed model has it, with all overhead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipette_launch.cost.memory import MemoryParts, peak_memory_bytes
from pipette_launch.cost.overhead import Overhead
from pipette_launch.facts import Job
from pipette_launch.facts.prediction import StageMemory


def closed_form(job: Job, pp_ranks: Sequence[int], overhead: Overhead) -> tuple[StageMemory, ...]:
    """Count the tensors of these pipeline ranks by formula."""
    parts, layers = peak_memory_bytes(job, job.own), job.own.stage_layers(job.model.num_layers)
    return tuple(_stage(rank, layers[rank], parts[rank], overhead) for rank in pp_ranks)


def peaks_in_optimizer(job: Job, pp_ranks: Sequence[int]) -> Iterator[int]:
    """Pipeline ranks that hold most while the optimizer steps, when no activation lives."""
    parts = peak_memory_bytes(job, job.own)
    return (rank for rank in pp_ranks if steps_highest(parts[rank]))


def steps_highest(parts: MemoryParts) -> bool:
    """Whether the optimizer's temporaries, and not the activations, make the peak."""
    return parts.optimizer_step > 0 and parts.total == parts.static + parts.optimizer_step


def split(parts: MemoryParts) -> dict[str, int]:
    """What lives at the peak, by the kinds that users are shown; it sums to `parts.total`.

    Buffers are the rest: what is neither states, activations nor logits.
    """
    if steps_highest(parts):
        kept = {"optimizer": parts.optimizer + parts.optimizer_step, "activations": 0, "logits": 0}
    else:
        kept = {
            "optimizer": parts.optimizer,
            "activations": parts.activations + parts.recompute + parts.embedding,
            "logits": parts.head,
        }
    found = {"weights": parts.weights, "gradients": parts.gradients, **kept}
    return {**found, "buffers": parts.total - sum(found.values())}


def _stage(pp_rank: int, num_layers: int, parts: MemoryParts, overhead: Overhead) -> StageMemory:
    peak = overhead.device_peak_bytes(parts.total)
    return StageMemory(
        pp_rank=pp_rank,
        num_layers=num_layers,
        parts_bytes={**split(parts), "overhead": peak - parts.total},
        model_peak_bytes=parts.total,
        peak_bytes=peak,
    )
