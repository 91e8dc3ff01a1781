"""The job's own script as the program that builds and trains the measured models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipette_launch.facts import Device, Job, Layout
from pipette_launch.facts.job import ENGINE, GRAPHS, LOCAL, PRECISION
from pipette_launch.megatron.script import FORCED_BALANCE, environment, forces_balance, played_arguments
from pipette_launch.probe.messages import WarmupOrder
from pipette_patches.play import run_script
from pipette_patches.run import Program


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnScript:
    """The job's own script, which builds and trains the measured models."""

    program: Program
    """The script with the user's arguments."""
    mocks_data: bool
    """True if the script uses Megatron-LM's trainer, which can train on mock data."""
    captures: bool = False
    """True if the script captures CUDA graphs of its layers while it is measured."""
    device: Device | None = None

    @classmethod
    def of(cls, options: WarmupOrder) -> OwnScript:
        """Return the script that an order with a job names."""
        assert options.job is not None, "this warm-up times only links"
        *flag, name = options.script
        program = Program(patches=(), name=name, is_module=bool(flag), arguments=options.script_arguments)
        spec = importlib.util.find_spec(name) if program.is_module else None
        origin = Path((spec and spec.origin) or "" if program.is_module else name)
        text = origin.read_text(errors="replace") if origin.is_file() else ""
        # A graph of a whole iteration has no layers.
        captures = options.job.options.graphs.impl in (LOCAL, ENGINE) and options.device_kind == "cuda"
        has_mocks, device = "megatron.training" in text, options.device(0)
        return cls(program=program, mocks_data=has_mocks, captures=captures, device=device)

    def timed_flags(self, job: Job) -> tuple[str, ...]:
        """Return the job's flags of precision and graphs that the timed layers have."""
        timed = (*PRECISION, *(GRAPHS if self.captures else ()))
        return tuple(flag for flag in job.performance_flags if flag.startswith(timed))

    def notes(self, job: Job) -> tuple[str, ...]:
        """Return a sentence on routing if the script's routers choose experts at random while they are measured."""
        note = f"compute: every expert got about as many tokens while it was measured ({FORCED_BALANCE})"
        return (note,) if self.mocks_data and forces_balance(job) else ()

    def prepared(self, job: Job, layout: Layout, *, single_layers: bool) -> Callable[[], None]:
        """Return a function that runs the script for the whole model, or for one layer of each kind."""
        own = {"mocks_data": self.mocks_data, "captures": self.captures}
        words = played_arguments(self.program.arguments, job=job, layout=layout, single_layers=single_layers, **own)
        needed: dict[str, str] = {}
        if self.device is not None:
            needed = environment(job, layout, device_kind=self.device.kind)
        return partial(run_script, replace(self.program, arguments=words), **needed)
