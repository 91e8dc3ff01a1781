"""The job's own script as the program that builds and trains the measured models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipette_launch.facts import Job, Layout
from pipette_launch.facts.job import PRECISION
from pipette_launch.megatron.script import FORCED_BALANCE, forces_balance, played_arguments
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

    @classmethod
    def of(cls, options: WarmupOrder) -> OwnScript | None:
        """Return the script that the order names; None if the order names no script."""
        if not options.script:
            return None
        *flag, name = options.script
        program = Program(patches=(), name=name, is_module=bool(flag), arguments=options.script_arguments)
        origin = name
        if program.is_module:
            spec = importlib.util.find_spec(name)
            origin = (spec and spec.origin) or ""
        text = Path(origin).read_text(errors="replace") if Path(origin).is_file() else ""
        return cls(program=program, mocks_data="megatron.training" in text)

    @staticmethod
    def timed_flags(job: Job) -> tuple[str, ...]:
        """Return the job's precision flags, which change layers from the job's script but not layers from flags."""
        return tuple(flag for flag in job.performance_flags if flag.startswith(PRECISION))

    def notes(self, job: Job) -> list[str]:
        """Return a sentence on routing if the script's routers choose experts at random while they are measured."""
        if not (self.mocks_data and forces_balance(job)):
            return []
        return [f"compute: every expert got about as many tokens while it was measured ({FORCED_BALANCE})"]

    def for_layers(self, job: Job, layout: Layout) -> Callable[[], None]:
        """Return a function that runs the script for one layer of each kind."""
        return self._run(job, layout, single_layers=True)

    def for_stages(self, job: Job, layout: Layout) -> Callable[[], None]:
        """Return a function that runs the script for the whole model."""
        return self._run(job, layout, single_layers=False)

    def _run(self, job: Job, layout: Layout, *, single_layers: bool) -> Callable[[], None]:
        words = played_arguments(
            self.program.arguments, job=job, layout=layout, mocks_data=self.mocks_data, single_layers=single_layers
        )
        return partial(run_script, replace(self.program, arguments=words))
