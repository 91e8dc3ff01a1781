"""The two halves of a layout: degrees and memory options."""

from __future__ import annotations

from typing import NamedTuple

from pipette_launch.facts import Recompute


class Degrees(NamedTuple):
    """How the ranks are divided, before chunks, micro-batches and memory options are chosen."""

    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    etp: int
    use_tp_pp_dp_mapping: bool = False

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert shard, where the expert grid divides the ranks."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def has_replicas(self) -> bool:
        """Whether any weights lie on several ranks, which then reduce their gradients."""
        return self.dp * self.cp > 1 or self.expert_dp > 1


class MemoryOptions(NamedTuple):
    """How a layout saves memory or hides communication, beside its degrees, chunks and micro-batch."""

    sequence_parallel: bool
    use_distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    recompute: Recompute
