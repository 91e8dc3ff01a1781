"""The user's settings: the `--pipette-*` flags, and the script in Megatron's arguments."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from pipette_launch import defaults, megatron
from pipette_launch.errors import OptionError, PipetteError, check_share
from pipette_launch.facts import Choice, Job, Layout, Plan, files
from pipette_launch.megatron import Dialect, dialect_of

if TYPE_CHECKING:
    from pipette_launch.search.solve import SolveOptions

logger = logging.getLogger(__name__)

OnSick: TypeAlias = Literal["warn", "exclude", "fail"]
LEAST_TRIAL_ITERS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The launcher's own flags, and the script as the user named it."""

    script: str
    script_arguments: tuple[str, ...]
    runs_python: bool
    """True if torchrun starts the script with a Python interpreter, so that patches can run before the script."""
    is_module: bool
    plan: Path | None = None
    probe_to: Path | None = None
    """File for the measurements of a job that only measures; None for a job that trains."""
    fix: tuple[str, ...] = ()
    on_error: Literal["train", "fail"] | None = None
    """Reaction to an error. With None, the job trains, but stops if a flag names something that does not exist."""
    on_sick: OnSick = "warn"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    host_order: Literal["measured", "given"] = "measured"
    """Order of the hosts of a job that cannot be planned: by measured links, or torchrun's order."""
    budget_s: float = defaults.WARMUP_BUDGET_S
    margin: float = defaults.MARGIN
    memory_margin: float = defaults.MEMORY_MARGIN
    cache: Path | None = None
    """Folder of the cache; None keeps no plans."""
    dry_run: bool = False
    detail: Literal["quiet", "usual", "verbose"] = "usual"
    """Amount of output. quiet: errors and the chosen plan; usual: short screens and progress; verbose: all notes and a
    log."""
    trials: int = defaults.TRIALS
    """Number of plans to try in addition to the user's own configuration; 0 runs no trials."""
    trial_iters: int = defaults.TRIAL_ITERS
    """Number of measured iterations of each trial, after the warm-up iterations."""
    schedules: tuple[str, ...] = ()
    """Pipeline schedules that a plan may use in addition to Megatron's own."""
    is_function: bool = False
    """True if torchrun runs the script as a function (`--run-path`)."""
    watch: Literal["warn", "restart", "off"] = "warn"
    """Reaction if steps become slower during the training."""
    watch_limit: float = defaults.WATCH_LIMIT
    """Fraction by which steps may become longer before `watch` reacts."""
    seed: int = defaults.SEED
    tolerate: int = 0
    """Largest number of lost hosts for which plans are made ahead, limited by MIN of --nnodes."""
    spares: int = 0
    """Number of hosts that are measured and then stand by, limited by MIN of --nnodes."""
    metrics_file: Path | None = None
    """File of metrics for Prometheus; None writes no metrics."""
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if self.plan is not None and self.probe_to is not None:
            raise OptionError(("plan", "probe"), "exclude each other: a plan needs no measurements; give one of them")
        if not self.budget_s > 0:
            raise OptionError("budget", f"must be above 0 seconds, got {self.budget_s:g}")
        if self.budget_s == math.inf:
            raise OptionError("budget", "must be finite, got inf; name a number of seconds")
        for name in ("trials", "tolerate", "spares"):
            if getattr(self, name) < 0:
                raise OptionError(name, f"must be at least 0, got {getattr(self, name)}")
        if self.trial_iters < LEAST_TRIAL_ITERS:
            least = f"must be at least {LEAST_TRIAL_ITERS}, got {self.trial_iters}"
            raise OptionError("trial_iters", f"{least}: fewer step times do not show how much they scatter")
        check_share("margin", self.margin)
        check_share("memory_margin", self.memory_margin)
        if not 0 <= self.watch_limit < math.inf:
            raise OptionError("watch_limit", f"must be at least 0 and finite (0.02 is 2 %), got {self.watch_limit:g}")

    @property
    def only_looks(self) -> bool:
        """True if the job measures the machines or shows the plan, and trains nothing."""
        return self.dry_run or self.probe_to is not None

    def search_options(self) -> SolveOptions:
        """Return the search's options; the search takes at most --pipette-budget and `defaults.SEARCH_BUDGET_S`."""
        # Import the search only here, because a start with a cached plan does not search.
        from pipette_launch.search.solve import SolveOptions

        usual = SolveOptions(
            margin=self.margin,
            memory_margin=self.memory_margin,
            budget_s=min(self.budget_s, defaults.SEARCH_BUDGET_S),
            seed=self.seed,
            schedules=self.schedules if self.runs_python else (),
            num_ranked=defaults.TOP,
        )
        return replace(usual, num_alternatives=max(usual.num_alternatives, self.trials))


class Script:
    """The user's script and environment, read and written in Megatron's arguments."""

    def __init__(self, options: Options, environ: Mapping[str, str]) -> None:
        self._options = options
        self._environ = environ
        self.capability: float | None = None
        """CUDA's compute capability of the job's first GPU; None until the GPU is known."""
        self._dialect: Dialect | PipetteError | None = None

    def dialect(self, world_size: int) -> Dialect:
        """Return reader and writer of the script's arguments; a recipe's script runs once, for `world_size` ranks."""
        options = self._options
        if self._dialect is None:
            try:
                self._dialect = dialect_of(options.script_arguments, script=options.script, world_size=world_size)
            except PipetteError as error:
                self._dialect = error
        if isinstance(self._dialect, PipetteError):
            raise self._dialect
        return self._dialect

    def read(self, world_size: int, device_kind: str, *, global_batch_size: int | None = None) -> Job:
        """Read the job for `world_size` ranks; raises the same errors as `megatron.read_job`.

        With the `global_batch_size` of another number of ranks, the user's own configuration may be illegal.
        """
        version = megatron.script_version(self._options.script, self._environ)
        words = self.dialect(world_size).flags(version)
        if global_batch_size is not None and megatron.global_batch_size(words) is None:
            words = (*words, "--global-batch-size", str(global_batch_size))
        return megatron.read_job(
            words,
            world_size=world_size,
            megatron_version=version,
            device_kind=device_kind,
            script=self._options.script,
            fix=self._options.fix,
            environment=self._environ,
            capability=self.capability,
            for_planning=global_batch_size is not None,
            is_launched=True,
        )

    def words(self, job: Job, layout: Layout) -> tuple[str, ...]:
        """Return the script's arguments with the flags or overrides of a layout."""
        return self.dialect(layout.world_size).written(job, layout)

    def environment(self, job: Job, layout: Layout, device_kind: str, *, is_own: bool) -> dict[str, str]:
        """Return the variables that a layout needs; the user's own layout keeps the user's own variables."""
        needed = megatron.environment(job, layout, device_kind=device_kind)
        return {name: value for name, value in needed.items() if not is_own or name not in self._environ}

    def leave_record(self, plan: Plan, choice: Choice | None) -> None:
        """Write the plan beside the job's checkpoints, because a job that loads the checkpoints needs the plan."""
        path = megatron.record_path(self._options.script_arguments)
        if path is None or self._options.dry_run:
            return
        try:
            # Let other users read the plan, because every user who may load the checkpoints needs the plan.
            files.write(path, replace(plan, chosen=choice or plan.own, keeps_own=choice is None), shared=True)
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s): a job that loads the checkpoint will not know its plan", path, error
            )
