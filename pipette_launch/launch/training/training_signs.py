"""Signs that a job has trained although its output shows no iteration: `--log-interval` may be long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipette_launch import megatron

if TYPE_CHECKING:
    from collections.abc import Collection

SETTLED_S = 600.0
"""A plan that cannot start mostly shows it within this time: imports, data, a checkpoint, the first step."""
SETTLED_STEPS = 20
"""And within this many steps, where steps are long."""


def has_trained(
    *, lived_s: float, step_time_s: float, exit_codes: Collection[int], saved_before: str, saved_now: str
) -> bool:
    """Whether a job that died without showing an iteration is taken to have trained, so that its plan is kept.

    Args:
        lived_s: from the workers' start to the first death.
        step_time_s: as predicted for the plan.
        exit_codes: of the workers that died.
        saved_before: the newest checkpoint when the workers started.
        saved_now: the newest checkpoint after their death.

    """
    return (
        saved_now != saved_before
        or bool(set(exit_codes) & set(megatron.RERUN_EXIT_CODES))
        or lived_s >= max(SETTLED_S, SETTLED_STEPS * step_time_s)
    )
