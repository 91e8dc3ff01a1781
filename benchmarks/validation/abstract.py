"""Memory by abstract execution, as a method of the table."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from benchmarks.abstract_worker import Executor
from benchmarks.validation.golden_score import Estimate
from pipette_launch.facts import Job
from pipette_launch.facts.messages import ExecutedMemory


class Abstract:
    """One worker for all jobs; answers are kept in a folder where one is given."""

    def __init__(self, cache: Path | None, *, python: str = sys.executable) -> None:
        self._executor = Executor(cache=cache, python=python)

    def __enter__(self) -> Abstract:  # noqa: PYI034 typing.Self is newer than Python 3.10
        """The worker starts with the first job."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the worker."""
        self._executor.close()

    def last_stage(self, job: Job) -> Estimate:
        """Estimate the last pipeline stage; raises PlanError where megatron-core refuses the job."""
        memory = self.stage(job, job.own.pp - 1)
        return Estimate(static_bytes=memory.allocated_after_step, peak_bytes=memory.peak)

    def stage(self, job: Job, pp_rank: int) -> ExecutedMemory:
        """Execute one pipeline rank."""
        (memory,) = self._executor.execute(job, job.own, (pp_rank,))
        return memory
