"""Read command lines with Megatron-LM's own parser and checks, on CPU; a program, run by test_megatron_namespace.

Standard input: a JSON list of [world size, command line]. Standard output, last line: for each what Megatron makes of
it, or its refusal as text.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from typing import Any


def chunks(config: Any) -> list[int]:
    """Layers of each chunk in model order, from the functions that build the model."""
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    layout = config.pipeline_model_parallel_layout
    places = [(rank, stage) for stage in range(vpp or 1) for rank in range(pp)]
    if layout is not None:
        return [layout.layout[rank][stage].count(LayerType.decoder) for rank, stage in places]
    if "pp_rank" in inspect.signature(get_num_layers_to_build).parameters:
        return [get_num_layers_to_build(config, stage if vpp else None, rank) for rank, stage in places]
    found = []
    for rank, stage in places:  # 0.14 asks the process groups, which take a rank for tests
        parallel_state.set_pipeline_model_parallel_world_size(pp)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
        parallel_state.set_pipeline_model_parallel_rank(rank)
        found.append(get_num_layers_to_build(config, stage if vpp else None))
    return found


def namespace(world_size: int, argv: list[str]) -> dict[str, Any]:
    """What Megatron's parser, checks and configuration make of one command line."""
    from megatron.training import arguments

    # Neither a GPU's age nor its libraries say anything about the reading of flags.
    arguments.get_device_arch_version = lambda: 9
    os.environ.update(WORLD_SIZE=str(world_size), RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
    sys.argv = ["pretrain_gpt.py", *argv]
    args = arguments.validate_args(arguments.parse_args())
    config = arguments.core_transformer_config_from_args(args)
    return {
        "tp": args.tensor_model_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "dp": args.data_parallel_size,
        "cp": args.context_parallel_size,
        "ep": args.expert_model_parallel_size,
        "etp": args.expert_tensor_parallel_size,
        "vpp": args.virtual_pipeline_model_parallel_size or 1,
        "microbatch_group_size": args.microbatch_group_size_per_vp_stage or 0,
        "chunks": chunks(config),
        "micro_batch_size": args.micro_batch_size,
        "sequence_parallel": args.sequence_parallel,
        "use_distributed_optimizer": args.use_distributed_optimizer,
        "overlap_grad_reduce": args.overlap_grad_reduce,
        "overlap_param_gather": args.overlap_param_gather,
        "use_tp_pp_dp_mapping": args.use_tp_pp_dp_mapping,
        "recompute": [
            config.recompute_granularity or "none",
            config.recompute_method or "none",
            config.recompute_num_layers or 0,
            config.recompute_modules if config.recompute_granularity == "selective" else [],
        ],
        "global_batch_size": args.global_batch_size,
        "train_iters": args.train_iters,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_query_groups,
        "kv_channels": config.kv_channels,
        "gated_linear_unit": config.gated_linear_unit,
        "normalization": config.normalization,
        "add_bias_linear": config.add_bias_linear,
        "add_qkv_bias": config.add_qkv_bias,
        "attention_dropout": config.attention_dropout,
        "num_experts": config.num_moe_experts,
        "moe_layer_freq": config.moe_layer_freq if config.num_moe_experts else [],
        "moe_router_topk": config.moe_router_topk,
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size,
        "params_dtype": str(args.params_dtype),
        "position_embedding_type": args.position_embedding_type,
        "untie": args.untie_embeddings_and_output_weights,
        "seq_length": args.seq_length,
        "padded_vocab_size": args.padded_vocab_size,
    }


def answer(world_size: int, argv: list[str]) -> dict[str, Any] | str:
    """What Megatron makes of one command line, or how it refuses."""
    try:
        return namespace(world_size, argv)
    except (AssertionError, ValueError, RuntimeError, SystemExit) as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    print("\n" + json.dumps([answer(size, argv) for size, argv in json.load(sys.stdin)]))
