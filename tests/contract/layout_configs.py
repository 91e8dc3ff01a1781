"""Build megatron-core's own configuration and process groups for some layouts; a program, run by test_emitted_layouts.

Standard input: a JSON list of objects with the fields of TransformerConfig that a command line sets, and beside them
`world_size`, `use_tp_pp_dp_mapping`, `global_batch_size`, `micro_batch_size`, `ddp`, `vpp`. Standard output, last line:
for each the layers of its chunks, or its refusal as text.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

DEGREES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def chunks(config: Any) -> list[int]:
    """Layers of each chunk in model order, from the functions that build the model."""
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    places = [(rank, stage) for stage in range(vpp or 1) for rank in range(pp)]
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return [layout.layout[rank][stage].count(LayerType.decoder) for rank, stage in places]
    return [get_num_layers_to_build(config, stage if vpp else None, rank) for rank, stage in places]


def configured(asked: dict[str, Any]) -> list[int]:
    """What megatron-core makes of one layout; raises where it refuses."""
    world_size, vpp = asked.pop("world_size"), asked.pop("vpp")
    swapped, batch_size = asked.pop("use_tp_pp_dp_mapping"), asked.pop("global_batch_size")
    micro_batch_size, ddp, latent = asked.pop("micro_batch_size"), asked.pop("ddp"), asked.pop("latent")
    sizes = {name: asked[name] for name in DEGREES}
    dp = world_size // (sizes[DEGREES[0]] * sizes[DEGREES[1]] * sizes[DEGREES[2]])
    order = "tp-cp-ep-pp-dp" if swapped else "tp-cp-ep-dp-pp"
    parallel_state.initialize_model_parallel(**sizes, order=order, create_gloo_process_groups=False)
    calculator = ConstantNumMicroBatchesCalculator(batch_size, micro_batch_size, dp, False, rank=0)
    assert calculator.get() * micro_batch_size * dp == batch_size
    DistributedDataParallelConfig(**ddp)
    OptimizerConfig(optimizer="adam", lr=1e-4, use_distributed_optimizer=ddp["use_distributed_optimizer"])
    kind = MLATransformerConfig if latent else TransformerConfig
    config = kind(
        **asked,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )
    return chunks(config)


def answer(asked: dict[str, Any]) -> list[int] | str:
    """What megatron-core makes of one layout, or how it refuses."""
    try:
        return configured(asked)
    except (AssertionError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    samples = json.load(sys.stdin)
    # The checks and the ranks of each group are wanted, not thousands of groups.
    parallel_state.create_group = lambda *_, **__: torch.distributed.group.WORLD
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=samples[0]["world_size"])
    print("\n" + json.dumps([answer(asked) for asked in samples]))
