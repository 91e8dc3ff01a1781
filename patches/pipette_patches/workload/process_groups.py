"""One rank of a job of any size, alone: Megatron's process groups without processes.

A fake process group lets megatron-core cut weights and activations as in the real job, while every collective returns
at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from pipette_launch.facts import Cell, Layout
from pipette_patches.replacements import Replacements, in_module


@contextlib.contextmanager
def one_rank(layout: Layout, pp_rank: int = 0, *, num_optimizer_instances: int = 1) -> Iterator[None]:
    """Be the first rank of a pipeline stage until the block ends; no process group may exist before."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel import random
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # With the distributed optimizer the shard of a stage's first rank holds no padding.
    rank = layout.rank_of(Cell(pp=pp_rank, dp=0, cp=0, tp=0))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        with Replacements(in_module("torch.distributed", {"new_group": functools.partial(_only_own, rank=rank)})):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                num_distributed_optimizer_instances=num_optimizer_instances,
                order="tp-cp-ep-pp-dp" if layout.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
                create_gloo_process_groups=False,
            )
        random.initialize_rng_tracker(force_reset=True)
        # Any seed does.
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_global_memory_buffer()
        dist.destroy_process_group()


def _only_own(original: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """Make only the groups that the rank belongs to: a job has thousands of others, which no code here uses."""

    @functools.wraps(original)
    def make(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return original(ranks, *args, **kwargs)

    return make
