"""Train a GPT on bytes with megatron-core alone, under torchrun or pipette-launch, on GPUs or on CPU.

    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --tensor-model-parallel-size 2 ...

Every flag is a flag of Megatron-LM; README.md shows complete commands and their output.
"""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta

import arguments
import torch

from pipette_patches import registry


def main(argv: Sequence[str]) -> None:
    """Read the flags, join the other processes, train."""
    args = arguments.parse(argv)
    if args.rank == 0:
        print(arguments.dump(args), flush=True)
    device = choose_device(args.local_rank)
    join(args, device)
    import training  # after choose_device: megatron-core must not be imported before it is patched

    training.run(args, device)
    torch.distributed.destroy_process_group()


def choose_device(local_rank: int) -> torch.device:
    """Take the GPU of this process, or, on a machine without one, let megatron-core compute on the CPU."""
    if "cpu_backend" not in registry.applied() and torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    # megatron-core warns in each module and process that Transformer Engine and Apex are missing.
    warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed")
    registry.apply("cpu_backend")
    return torch.device("cpu")


def join(args: Namespace, device: torch.device) -> None:
    """Meet the other processes, and form the groups of the layout."""
    from megatron.core import parallel_state

    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    backend = args.distributed_backend if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, rank=args.rank, world_size=args.world_size, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=args.enable_gloo_process_groups,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
