"""The main job with layers of Transformer Engine, Megatron's default: measured, planned, launched, beside torchrun."""

from __future__ import annotations

import importlib.util
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.gpu import main_job
from benchmarks.gpu.jobs import ENGINE_WORDS, kernel_flags
from benchmarks.gpu.main_job import Job
from benchmarks.gpu.notebook import Notebook

lines = main_job.lines
"""Same records as the main job."""


def measure(book: Notebook) -> None:
    """Run the job from nothing and under torchrun with the plan's flags, if the engine is installed."""
    is_installed = importlib.util.find_spec("transformer_engine") is not None
    book.add("engine", is_installed=is_installed)
    if not is_installed:
        book.miss("the main job with Transformer Engine", "it is not installed")
        return
    with tempfile.TemporaryDirectory() as name:
        job = Job(book=book, folder=Path(name), implementation=(*ENGINE_WORDS, *kernel_flags(has_te=True)))
        if book.attempt("pipette-launch from nothing", partial(main_job.run_cold, job)):
            book.attempt("torchrun with the plan's flags", partial(main_job.run_torchrun, job, job.plan()))
