"""What checkpoints that a job will save let another layout change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipette_launch.facts import Job, Layout
from pipette_launch.megatron.checkpoint.kept_fields import (
    EQUAL_BUCKETS_DP,
    IN_BUCKETS,
    MODEL_FIELDS,
    RNG_OF_EXPERTS,
    fixes_random_state,
    kept_fields,
)
from pipette_launch.megatron.flags import Arguments, release_of
from pipette_launch.megatron.pins import OPTIMIZER_FIELDS

FREEING_FLAG = {
    "dp_reshardable": "--dist-ckpt-optim-fully-reshardable",
    "dp_zero_gather_scatter": "a save without --no-ckpt-fully-parallel-save",
}
"""By how a distributed optimizer is saved, what the run that saves has to do for a plan to change everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """What a start after the loss of hosts goes on from, and what that lets another layout change."""

    kept: tuple[str, ...] = ()
    """Fields of the layout that wrote the checkpoints which another layout must keep to load them."""
    bucket_dp: int = 0
    """Replicas up to which gradient buckets are equally large; 0 where their size does not matter."""
    note: str = ""
    """What a loss would cost, or which flag would free what is kept; empty where neither is worth a word."""

    def can_load(self, before: Layout, after: Layout) -> bool:
        """Whether a job under one layout can load what another has written."""
        buckets = [max(self.bucket_dp, layout.dp * layout.cp) if self.bucket_dp else 0 for layout in (before, after)]
        return buckets[0] == buckets[1] and all(getattr(before, name) == getattr(after, name) for name in self.kept)


def continuation(words: Sequence[str], job: Job, layout: Layout) -> Continuation:
    """Say what another layout must keep to go on from the checkpoints that a job writes under this one.

    The run that saves decides: its format, and for the distributed optimizer how its state is sharded.

    Args:
        words: the user's own, behind the script's name.
        job: as they were read.
        layout: what the job runs under.

    """
    arguments = Arguments.parse(words, job.megatron_version)
    save, load = arguments.get("save"), arguments.get("load")
    if not save:
        return Continuation(note="--save is not given: after the loss of a host the job starts over from iteration 0")
    if not load or Path(load) != Path(save):
        again = f"from what {arguments.shown('load')} holds" if load else "from iteration 0"
        return Continuation(
            note=f"--load does not name the folder of --save: after the loss of a host the job starts over {again}; "
            f"give --load {save}"
        )
    has_optimizer = not any(map(arguments.get, ("no_save_optim", "no_load_optim", "finetune")))
    is_sharded = layout.use_distributed_optimizer
    ckpt_format = arguments.get("ckpt_format")
    if ckpt_format != "torch_dist":
        fields = (*MODEL_FIELDS, *(OPTIMIZER_FIELDS if has_optimizer else ()))
        also = f" with {FREEING_FLAG['dp_reshardable']}" if has_optimizer and is_sharded else ""
        note = f"--ckpt-format {ckpt_format} fixes {', '.join(fields)}; --ckpt-format torch_dist{also} lets them change"
        return Continuation(kept=fields, note=note)
    sharding = _sharding_of_saves(arguments)
    kept = kept_fields(arguments, sharding, is_sharded=is_sharded) if has_optimizer else ()
    if len(kept) > 1:
        is_sized = any(map(arguments.get, ("ddp_bucket_size", "ddp_num_buckets")))
        # Without overlap all gradients lie in one bucket.
        counts_replicas = layout.overlap_grad_reduce and not is_sized and sharding in IN_BUCKETS
        note = (
            f"the distributed optimizer saves its state as {sharding}, which fixes {', '.join(kept)}; "
            f"{FREEING_FLAG.get(sharding, '')} lets all of it change"
        )
        return Continuation(kept=kept, bucket_dp=EQUAL_BUCKETS_DP if counts_replicas else 0, note=note)
    if fixes_random_state(arguments, layout.ep):
        return Continuation(kept=(*kept, "cp", "dp"), note=f"{RNG_OF_EXPERTS}: both stay; --no-load-rng frees them")
    return Continuation(kept=kept)


def _sharding_of_saves(arguments: Arguments) -> str:
    """How the distributed optimizer's state will be saved (`distrib_optim_sharding_type`)."""
    if arguments.get("dist_ckpt_optim_fully_reshardable"):
        return "fully_reshardable"
    if release_of(arguments.version) >= (0, 15) and not arguments.get("dist_ckpt_save_pre_mcore_014"):
        return "dp_reshardable"
    is_parallel = arguments.get("ckpt_fully_parallel_save") is not False
    return "fully_sharded_model_space" if is_parallel else "dp_zero_gather_scatter"
