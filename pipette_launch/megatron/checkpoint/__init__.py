"""What checkpoints let a plan change: those that a job loads, and those that it will save."""

from pipette_launch.megatron.checkpoint.continuation import Continuation, continuation
from pipette_launch.megatron.checkpoint.demands import demands, unseen_note
from pipette_launch.megatron.checkpoint.folders import checkpoint_folder, record_path, saved_iteration
from pipette_launch.megatron.checkpoint.model_arguments import with_checkpoint_arguments

__all__ = [
    "Continuation",
    "checkpoint_folder",
    "continuation",
    "demands",
    "record_path",
    "saved_iteration",
    "unseen_note",
    "with_checkpoint_arguments",
]
