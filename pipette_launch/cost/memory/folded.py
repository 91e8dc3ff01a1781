"""Peaks of a pipeline that is folded: two chunks on each rank, and both ends of the model on the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from pipette_launch.cost.memory.parts import MemoryParts
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout


def folded_peaks(job: Job, layout: Layout, live_bytes: Sequence[int]) -> tuple[MemoryParts, ...]:
    """Predict every pipeline rank's peak for a layout of two equal chunks on each rank, folded.

    Args:
        job: the training job.
        layout: three pipeline ranks or more, so that one of them has no end of the model under Megatron's placement.
        live_bytes: what each rank's chunks keep of all live micro-batches.

    Raises:
        LayoutError: the layout cuts the layers or the batch unevenly.

    """
    first, middle, *_, last = peak_memory_bytes(job, layout)
    held = {
        kind: getattr(first, kind) + getattr(last, kind) - getattr(middle, kind)
        for kind in ("weights", "gradients", "optimizer", "dummy_gradients", "optimizer_step")
    }
    held |= {kind: max(getattr(first, kind), getattr(last, kind)) for kind in ("shared_buffer", "loading")}
    held["embedding"] = first.embedding
    ranks = ({**asdict(last), **held}, *(asdict(middle) for _ in live_bytes[1:]))
    return tuple(MemoryParts(**{**parts, "activations": live}) for parts, live in zip(ranks, live_bytes, strict=True))
