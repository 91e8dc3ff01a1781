"""One rank of a job of any size, alone: Megatron's process groups without processes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from pipette_launch.facts import Cell, Job, Layout
from pipette_patches.replacements import Replacement, Replacements
from pipette_patches.workload.config import flags
from pipette_patches.workload.layers import SEED


def rank_of_stage(layout: Layout, pp_rank: int) -> int:
    """The first rank of a pipeline stage: with the distributed optimizer its shard holds no padding."""
    return layout.rank_of(Cell(pp=pp_rank, dp=0, cp=0, tp=0))


@contextlib.contextmanager
def one_rank(job: Job, layout: Layout, pp_rank: int) -> Iterator[None]:
    """Be one rank of the job until the block ends; no process group may exist before."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel import random
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = rank_of_stage(layout, pp_rank)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        with _only_own_groups(rank):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                num_distributed_optimizer_instances=int(flags(job).get("--num-distributed-optimizer-instances", 1)),
                order="tp-cp-ep-pp-dp" if layout.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
                create_gloo_process_groups=False,
            )
        random.initialize_rng_tracker(force_reset=True)
        tensor_parallel.model_parallel_cuda_manual_seed(SEED)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_global_memory_buffer()
        dist.destroy_process_group()


def _only_own_groups(rank: int) -> Replacements:
    """Make only the groups that the rank belongs to: a job has thousands of others, which no code here uses."""

    def only_own(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            if ranks is not None and rank not in ranks:
                return dist.GroupMember.NON_GROUP_MEMBER
            return original(ranks, *args, **kwargs)

        return make

    return Replacements([Replacement(module="torch.distributed", path="new_group", make=only_own)])
