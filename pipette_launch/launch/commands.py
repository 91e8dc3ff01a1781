"""What the workers run: torchrun's own command, with the plan's arguments put in."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipette_launch.agent.controller import WorkerCommand
from pipette_launch.facts import files, schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pipette_launch.facts.messages import Decision
    from pipette_launch.launch.options import Options

PATCH_RUNNER = "pipette_patches.run"
WANDB_NOTES = "WANDB_NOTES"
NOTES_HEAD = "pipette-launch: "
SCHEDULES = "schedules"
"""The patch that executes schedules beside Megatron's own."""


def warmup(options_file: Path) -> WorkerCommand:
    """Run one probe worker on every slot."""
    return WorkerCommand(
        entrypoint=os.environ.get("PYTHON_EXEC", sys.executable),
        arguments=("-u", "-m", "pipette_launch.probe.run", str(options_file)),
        # Not another number of threads than in training: torchrun sets it for several workers, and leaves one alone.
        environment={},
    )


def order_check(device_kind: str, tp: int, ranks: Sequence[int]) -> WorkerCommand:
    """Check NCCL on every device of a node, in the order that training gives them to these ranks.

    It is checked among all of them, and among the `tp` ranks of each tensor-parallel group.
    """
    return WorkerCommand(
        entrypoint=os.environ.get("PYTHON_EXEC", sys.executable),
        arguments=("-u", "-m", "pipette_launch.probe.order_check", device_kind, str(tp), *map(str, ranks)),
        environment={},
    )


def training(
    decision: Decision,
    options: Options,
    entrypoint: str | Callable[..., Any],
    arguments: Sequence[str],
    *,
    folder: Path,
) -> WorkerCommand:
    """Run the user's script under a decision.

    Args:
        decision: what to put in.
        options: the script as the user named it.
        entrypoint: torchrun's own program for the workers.
        arguments: torchrun's own arguments for it; they end with the script's.
        folder: a private one of this node, for the pipeline's schedule where the script runs under a patch.

    """
    given = len(options.script_arguments)
    head = list(arguments[: len(arguments) - given])
    tail = list(options.script_arguments if decision.script_arguments is None else decision.script_arguments)
    patches, environment = decision.patches, {**_wandb_notes(decision, options), **decision.environment}
    if decision.choice is not None and decision.choice.order is not None:
        path = folder / "schedule.json"
        files.write(path, decision.choice.order)
        patches, environment = (*patches, SCHEDULES), {**environment, schedule.VARIABLE: str(path)}
    if patches:
        head = _patched(head, patches)
    return WorkerCommand(entrypoint=entrypoint, arguments=(*head, *tail), environment=environment)


def _wandb_notes(decision: Decision, options: Options) -> dict[str, str]:
    """Let Megatron's own W&B run say which plan it follows: `wandb.init` takes its notes from this variable."""
    plan, choice = decision.plan, decision.choice
    wants = any(word.partition("=")[0] == "--wandb-project" for word in options.script_arguments)
    # Those of the attempt before are in the agent's own variables.
    is_users = not os.environ.get(WANDB_NOTES, NOTES_HEAD).startswith(NOTES_HEAD)
    if plan is None or decision.phase != "train" or not wants or is_users:
        return {}
    # Imported when it is needed: most jobs do without it.
    from pipette_launch.report import chosen_line

    runs = replace(plan, chosen=choice or plan.own, keeps_own=choice is None)
    return {WANDB_NOTES: f"{NOTES_HEAD}{chosen_line(runs)}"}


def _patched(head: Sequence[str], patches: Sequence[str]) -> list[str]:
    """`-u [-m] SCRIPT` becomes `-u -m pipette_patches.run --patch NAME -- [-m] SCRIPT`."""
    unbuffered, *script = head
    named = [word for name in patches for word in ("--patch", name)]
    return [unbuffered, "-m", PATCH_RUNNER, *named, "--", *script]
