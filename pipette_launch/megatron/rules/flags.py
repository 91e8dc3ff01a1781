"""Rules that depend on flags alone: no layout mends them."""

from __future__ import annotations

from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.rules.broken import Broken, BrokenRule


def flag_faults(arguments: Arguments) -> Broken:
    """Check flags that exclude or need each other."""
    depths = arguments.get("mtp_num_layers") or 0
    if depths > 1 and arguments.get("overlap_moe_expert_parallel_comm"):
        yield BrokenRule(
            f"{arguments.shown('overlap_moe_expert_parallel_comm')} allows one depth of multi-token prediction",
            ("mtp_num_layers",),
            "use --mtp-num-layers 1 or remove it",
        )
