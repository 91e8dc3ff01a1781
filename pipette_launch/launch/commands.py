"""What the workers run: torchrun's own command, with the plan's arguments put in."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from pipette_launch.agent.controller import WorkerCommand

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pipette_launch.facts.messages.round import Decision
    from pipette_launch.launch.options import Options

PATCH_RUNNER = "pipette_patches.run"


def warmup(options_file: Path) -> WorkerCommand:
    """Run one probe worker on every slot."""
    return WorkerCommand(
        entrypoint=os.environ.get("PYTHON_EXEC", sys.executable),
        arguments=("-u", "-m", "pipette_launch.probe.run", str(options_file)),
        # Not another number of threads than in training: torchrun sets it for several workers, and leaves one alone.
        environment={},
    )


def training(
    decision: Decision, options: Options, entrypoint: str | Callable[..., Any], arguments: Sequence[str]
) -> WorkerCommand:
    """Run the user's script under a decision.

    Args:
        decision: what to put in.
        options: the script as the user named it.
        entrypoint: torchrun's own program for the workers.
        arguments: torchrun's own arguments for it; they end with the script's.

    """
    given = len(options.script_arguments)
    head = list(arguments[: len(arguments) - given])
    tail = list(options.script_arguments if decision.script_arguments is None else decision.script_arguments)
    if decision.patches:
        head = _patched(head, decision.patches)
    return WorkerCommand(entrypoint=entrypoint, arguments=(*head, *tail), environment=decision.environment)


def _patched(head: Sequence[str], patches: Sequence[str]) -> list[str]:
    """`-u [-m] SCRIPT` becomes `-u -m pipette_patches.run --patch NAME -- [-m] SCRIPT`."""
    unbuffered, *script = head
    named = [word for name in patches for word in ("--patch", name)]
    return [unbuffered, "-m", PATCH_RUNNER, *named, "--", *script]
