"""Where a job's checkpoints lie, and what stands beside them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pipette_launch.errors import FileFormatError
from pipette_launch.facts import files
from pipette_launch.megatron.flags import Arguments, newest_release

RECORD_NAME = "pipette-plan.json"
TRACKER_NAME = "latest_checkpointed_iteration.txt"


def record_path(arguments: Sequence[str]) -> Path | None:
    """Where the launcher writes the plan beside the checkpoints that it will make; None without `--save`.

    The record's `chosen` must be what really runs, also after a fallback.
    """
    save = Arguments.parse(arguments, newest_release()).get("save")
    return Path(save) / RECORD_NAME if save else None


def saved_iteration(arguments: Sequence[str]) -> str:
    """The newest iteration that a checkpoint in the job's `--save` was written at, as Megatron notes it, or nothing."""
    path = record_path(arguments)
    return tracked_iteration(path.parent) if path else ""


def tracked_iteration(root: Path) -> str:
    """What Megatron's tracker file in a folder of checkpoints says; empty where it cannot be read."""
    try:
        name = files.read_bytes(root / TRACKER_NAME).decode("ascii").strip()
    except (FileFormatError, UnicodeError):
        return ""
    # Megatron writes nothing else; a path would lead out of the folder.
    return name if name == "release" or re.fullmatch(r"\d{1,15}", name) else ""


def checkpoint_folder(arguments: Arguments) -> tuple[Path, bool] | None:
    """The folder of the checkpoint that Megatron would load, and whether it loads the optimizer; None for a new run."""
    reads_optimizer = not (arguments.get("finetune") or arguments.get("no_load_optim"))
    for dest, optimizer in (("load", reads_optimizer), ("pretrained_checkpoint", False)):
        root, step = arguments.get(dest), arguments.get("ckpt_step")
        name = str(step) if step is not None else tracked_iteration(Path(root)) if root else ""
        folder = Path(root or "") / (f"iter_{int(name):07d}" if name.isdigit() else name)
        if root and name and folder.is_dir():
            # A release has no optimizer state to load.
            return folder, optimizer and name != "release"
    return None
