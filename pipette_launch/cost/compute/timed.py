"""Shapes of computation that a warm-up times, and the flags that its layers do not have."""

from __future__ import annotations

from dataclasses import replace

from pipette_launch.facts.job import MODELLED, Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import ComputeCase


def case_of(layout: Layout) -> ComputeCase:
    """Return the shape of computation that a layout runs on each slot."""
    return ComputeCase(tp=layout.tp, cp=layout.cp, micro_batch_size=layout.micro_batch_size)


def layout_of(job: Job, case: ComputeCase) -> Layout:
    """Return a layout that runs a case, with the experts of the user's own."""
    own = Layout(dp=job.own.ep, ep=job.own.ep)
    return replace(own, tp=case.tp, cp=case.cp, micro_batch_size=case.micro_batch_size, sequence_parallel=case.tp > 1)


def as_timed(job: Job) -> Job:
    """Return the job as its layers were timed: in 16 bits, without CUDA graphs and attention windows."""
    kept = tuple(flag for flag in job.performance_flags if not flag.startswith(MODELLED))
    return replace(job, performance_flags=kept, model=replace(job.model, attention_windows=()))
