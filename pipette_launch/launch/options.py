"""What the `--pipette-*` flags said."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from pipette_launch import defaults, megatron
from pipette_launch.errors import UsageError
from pipette_launch.facts import files

OnSick: TypeAlias = Literal["warn", "exclude", "fail"]
LEAST_TRIAL_ITERS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The launcher's own settings, and the script as the user named it."""

    script: str
    script_arguments: tuple[str, ...]
    runs_python: bool
    """Whether torchrun starts the script with a Python interpreter of its own, so that patches can be put before it."""
    is_module: bool
    plan: Path | None = None
    probe_to: Path | None = None
    """Measure only, and write what was measured there."""
    fix: tuple[str, ...] = ()
    on_error: Literal["train", "fail"] | None = None
    """None, not said: as `train`, but flags that ask for what is not there stop the job."""
    on_sick: OnSick = "warn"
    """What becomes of nodes with which something is amiss."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    budget_s: float = defaults.WARMUP_BUDGET_S
    margin: float = defaults.MARGIN
    memory_margin: float = defaults.MEMORY_MARGIN
    cache: Path | None = None
    """Where plans are kept; None keeps none."""
    dry_run: bool = False
    detail: Literal["quiet", "usual", "verbose"] = "usual"
    """How much the terminal shows: errors and what was chosen; short screens and progress; all notes and a log."""
    trials: int = defaults.TRIALS
    """How many plans to try beside the user's own configuration before the training; 0 = none."""
    trial_iters: int = defaults.TRIAL_ITERS
    """How many step times of each trial count."""
    schedules: tuple[str, ...] = ()
    """Pipeline schedules that a plan may use beside Megatron's own, by name."""
    is_function: bool = False
    """Whether torchrun runs the script as a function (`--run-path`)."""
    watch: Literal["warn", "restart", "off"] = "warn"
    """What to do where steps slow down during the training."""
    watch_limit: float = defaults.WATCH_LIMIT
    """By which fraction they may."""
    seed: int = defaults.SEED
    tolerate: int = 0
    """For the loss of up to so many hosts plans are made ahead, as far as MIN of --nnodes allows."""
    spares: int = 0
    """So many hosts are measured with the others and stand by, as far as MIN of --nnodes allows."""
    metrics_file: Path | None = None
    """Where figures of the job are written for Prometheus; None writes none."""
    max_restarts: int = 0
    """--max-restarts."""

    def __post_init__(self) -> None:
        if self.plan is not None and self.probe_to is not None:
            raise UsageError("--pipette-plan needs no warm-up, and --pipette-probe is nothing else; give one of them")
        if not self.budget_s > 0:
            raise UsageError(f"--pipette-budget must be above 0 seconds, got {self.budget_s:g}")
        if self.budget_s == math.inf:
            raise UsageError("--pipette-budget must be finite, got inf; name a number of seconds")
        if self.trials < 0:
            raise UsageError(f"--pipette-trials must be at least 0, got {self.trials}")
        for name, value in (("tolerate", self.tolerate), ("spares", self.spares)):
            if value < 0:
                raise UsageError(f"--pipette-{name} must be at least 0, got {value}")
        if self.trial_iters < LEAST_TRIAL_ITERS:
            raise UsageError(
                f"--pipette-trial-iters must be at least {LEAST_TRIAL_ITERS}, got {self.trial_iters}: fewer step times "
                f"do not tell how much they scatter"
            )
        for flag, fraction, below in (
            ("--pipette-margin", self.margin, 1),
            ("--pipette-memory-margin", self.memory_margin, 1),
            ("--pipette-watch-limit", self.watch_limit, math.inf),
        ):
            if not 0 <= fraction < below:
                limit = f"at least 0 and below {below:g} (0.02 is 2 %)"
                raise UsageError(f"{flag} must be {limit}, got {fraction:g}")

    @property
    def plan_settings(self) -> tuple[float | str, ...]:
        """What a plan depends on, beside the job and its machines."""
        return (self.margin, self.memory_margin, *self.schedules)

    @property
    def only_looks(self) -> bool:
        """Whether nothing is to be trained."""
        return self.dry_run or self.probe_to is not None


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipette_launch.facts import Choice, Job, Layout, Plan
    from pipette_launch.launch.options import Options

logger = logging.getLogger(__name__)


class Script:
    """What the user started, with the variables that he set."""

    def __init__(self, options: Options, environ: Mapping[str, str]) -> None:
        self._options = options
        self._environ = environ
        self.device_name = ""
        """Of the first device, as soon as it is known."""

    def read(self, world_size: int, device_kind: str, *, global_batch_size: int | None = None) -> Job:
        """Read the job for so many ranks; raises what `megatron.read_job` does.

        Args:
            world_size: how many.
            device_kind: `cuda` or `cpu`.
            global_batch_size: that of the same job on other ranks; then its own configuration need not suit these.

        """
        words = self._options.script_arguments
        if global_batch_size is not None and megatron.global_batch_size(words) is None:
            words = (*words, "--global-batch-size", str(global_batch_size))
        return megatron.read_job(
            words,
            world_size=world_size,
            megatron_version=megatron.script_version(self._options.script, self._environ),
            device_kind=device_kind,
            fix=self._options.fix,
            environment=self._environ,
            device_name=self.device_name,
            for_planning=global_batch_size is not None,
            is_launched=True,
        )

    def words(self, job: Job, layout: Layout) -> tuple[str, ...]:
        """Return the arguments with a layout put in."""
        return megatron.write_arguments(self._options.script_arguments, job=job, layout=layout)

    def trial_words(self, words: Sequence[str], job: Job) -> megatron.TrialWords:
        """Make arguments fit for a trial; raises what `megatron.trial_arguments` does."""
        return megatron.trial_arguments(words, job.megatron_version)

    def environment(self, layout: Layout, device_kind: str, *, is_own: bool) -> dict[str, str]:
        """Return the variables that a layout needs."""
        needed = megatron.environment(layout, device_kind=device_kind, device_name=self.device_name)
        # torchrun would have left the user's own variables alone.
        return {name: value for name, value in needed.items() if not is_own or name not in self._environ}

    def leave_record(self, plan: Plan, choice: Choice | None) -> None:
        """Leave the plan beside the checkpoints that its job will write, for the job that loads them."""
        path = megatron.record_path(self._options.script_arguments)
        if path is None or self._options.dry_run:
            return
        try:
            # Whoever may load the checkpoints needs it.
            files.write(path, replace(plan, chosen=choice or plan.own, keeps_own=choice is None), shared=True)
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s): a job that loads the checkpoint will not know its plan", path, error
            )
