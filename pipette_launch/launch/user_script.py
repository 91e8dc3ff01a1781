"""The user's script, read and written in Megatron's words."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from pipette_launch import megatron
from pipette_launch.facts import files

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
