"""A worker for the tests: prints, as a line of JSON, the gradient buckets that megatron-core makes of some weights.

Standard input: a JSON list of [data-parallel ranks, elements of a bucket]; the answer has the elements of each bucket,
without padding, for each.
"""

import inspect
import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

WEIGHTS, LAYERS = (128, 6144, 4096, 128, 28672, 14336), 6
"""Elements of a layer's weights, a thousand times fewer than in a model of 7 billion with TP 4."""


def buckets(num_ranks: int, bucket_elements: int) -> list[int]:
    """Unpadded elements of each bucket, as a distributed optimizer saves them."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    params = [torch.nn.Parameter(torch.empty(size, dtype=torch.bfloat16)) for _ in range(LAYERS) for size in WEIGHTS]
    groups = type("Groups", (), {"tp": dist.group.WORLD, "dp_cp": dist.group.WORLD})
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
    arguments: dict[str, Any] = {
        "ddp_config": config,
        "param_dtype": torch.bfloat16,
        "grad_dtype": torch.bfloat16,
        "params": params,
        "params_with_names": [(param, str(place)) for place, param in enumerate(params)],
        "data_parallel_group": dist.group.WORLD,
        "bucket_size": bucket_elements,
        "param_to_name": {param: str(place) for place, param in enumerate(params)},
        "gradient_scaling_factor": 1.0,
        "param_indices": list(range(len(params))),
        "nccl_ub": False,
        "pg_collection": groups,
    }
    # megatron-core 0.19 takes each parameter with its name, and its optimizer computes the buckets.
    known = inspect.signature(_ParamAndGradBuffer).parameters
    if "param_layout" in known:
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        layout = DistributedOptimizer._compute_per_buffer_param_layout(params, bucket_elements, num_ranks, config)
        arguments["param_layout"] = layout
    buffer = _ParamAndGradBuffer(**{name: value for name, value in arguments.items() if name in known})
    dist.destroy_process_group()
    return [bucket.numel_unpadded for bucket in buffer.buckets]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    print(json.dumps([buckets(*case) for case in json.load(sys.stdin)]))
