"""The command line: values that the flags leave open are derived as in Megatron-LM."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence

import flags

REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
    "micro_batch_size",
    "train_iters",
    "lr",
)


class ArgumentsError(ValueError):
    """The flags contradict each other, the model or the number of processes."""


def parse(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> argparse.Namespace:
    """Read the command line and derive open values. An unknown flag ends the process with exit code 2.

    Raises:
        ArgumentsError: the flags contradict each other, or do not fit the number of processes.

    """
    args = flags.parser().parse_args(arguments)
    args.rank = int(environ.get("RANK", "0"))
    args.world_size = int(environ.get("WORLD_SIZE", "1"))
    args.local_rank = int(environ.get("LOCAL_RANK", "0"))
    missing = [name for name in REQUIRED if getattr(args, name) is None]
    if missing:
        raise ArgumentsError(f"--{missing[0].replace('_', '-')} is missing")
    _derive_model(args)
    _derive_parallel(args)
    _derive_run(args)
    return args


def dump(args: argparse.Namespace) -> str:
    """All arguments, sorted, as Megatron-LM prints them: the name and dots up to column 48, and the value."""
    names = sorted(vars(args), key=str.lower)
    lines = [f"  {name} {'.' * (48 - len(name))} {getattr(args, name)}" for name in names]
    return "\n".join([f"{'-' * 24} arguments {'-' * 24}", *lines, f"{'-' * 20} end of arguments {'-' * 21}"])


def step_flops(args: argparse.Namespace) -> float:
    """Floating-point operations of one step, as Megatron-LM counts them: multiply-adds as 2, backward as twice forward.

    The causal mask leaves half of the scores; recompute, biases and routers count as nothing (core_v0.16 and later).
    """
    hidden, heads = args.hidden_size, args.kv_channels * args.num_attention_heads
    attention = 2 * hidden * (2 * heads + 2 * args.kv_channels * args.num_query_groups) + 2 * args.seq_length * heads
    per_width = 2 * hidden * (3 if args.swiglu else 2)
    if args.num_experts is None:
        num_moe_layers = 0
    elif isinstance(args.moe_layer_freq, int):
        num_moe_layers = -(-args.num_layers // args.moe_layer_freq)
    else:
        num_moe_layers = sum(args.moe_layer_freq)
    moe_width = args.moe_router_topk * (args.moe_ffn_hidden_size or 0) + (args.moe_shared_expert_intermediate_size or 0)
    mlp = (args.num_layers - num_moe_layers) * args.ffn_hidden_size + num_moe_layers * moe_width
    forward = args.num_layers * attention + per_width * mlp + 2 * hidden * args.padded_vocab_size
    return float(3 * forward * args.seq_length * args.global_batch_size)


def num_stages(layout: str) -> int:
    """Number of stages in `--pipeline-model-parallel-layout`; `(tt|)*3` and `t*3` repeat three times."""
    text = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
    return text.count("|") + 1


def _derive_model(args: argparse.Namespace) -> None:
    if args.ffn_hidden_size is None:
        # SwiGLU has three matrices instead of two: two thirds of the width keep the parameter count.
        args.ffn_hidden_size = int(4 * args.hidden_size * 2 / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size
    args.kv_channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    if args.num_experts:
        args.moe_ffn_hidden_size = args.moe_ffn_hidden_size or args.ffn_hidden_size
    args.num_query_groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    args.add_qkv_bias = args.add_qkv_bias or args.add_bias_linear
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if args.max_position_embeddings < args.seq_length:
        raise ArgumentsError(f"--max-position-embeddings {args.max_position_embeddings} is below {args.seq_length=}")
    if args.bf16 and args.fp16:
        raise ArgumentsError("--bf16 and --fp16 exclude each other")
    if args.vocab_size < 256:
        raise ArgumentsError(f"--vocab-size {args.vocab_size}: text is read as bytes, which need at least 256")
    if args.transformer_impl == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        raise ArgumentsError("Transformer Engine is not installed; pass --transformer-impl local")
    args.moe_aux_loss_coeff = _only(args.moe_aux_loss_coeff)
    args.moe_router_load_balancing_type = _only(args.moe_router_load_balancing_type)
    args.cp_comm_type = _only(args.cp_comm_type)


def _derive_parallel(args: argparse.Namespace) -> None:
    model_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    args.data_parallel_size, rest = divmod(args.world_size, model_size)
    if rest or not args.data_parallel_size:
        raise ArgumentsError(
            f"{args.world_size} processes are not a multiple of tensor x pipeline x context parallel size = "
            f"{args.tensor_model_parallel_size} x {args.pipeline_model_parallel_size} x {args.context_parallel_size}"
        )
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = args.padded_vocab_size or -(-args.vocab_size // multiple) * multiple
    args.sequence_parallel = args.sequence_parallel and args.tensor_model_parallel_size > 1
    if args.num_experts and args.num_experts % args.expert_model_parallel_size:
        raise ArgumentsError(f"{args.num_experts} experts do not divide over {args.expert_model_parallel_size=}")
    if args.expert_model_parallel_size > 1 and not args.num_experts:
        raise ArgumentsError("--expert-model-parallel-size needs --num-experts")
    if args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce):
        raise ArgumentsError("--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce")
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    args.virtual_pipeline_model_parallel_size = _num_virtual_stages(args)
    if args.virtual_pipeline_model_parallel_size is None:
        args.overlap_p2p_comm = args.align_param_gather = False
    elif args.pipeline_model_parallel_size <= (1 if args.overlap_p2p_comm else 2):
        raise ArgumentsError(
            f"virtual stages need more than {args.pipeline_model_parallel_size} pipeline ranks"
            f"{'' if args.overlap_p2p_comm else ' with --no-overlap-p2p-communication'}"
        )


def _num_virtual_stages(args: argparse.Namespace) -> int | None:
    """Number of model chunks of each pipeline rank; None means one, as in Megatron."""
    ways = {
        "--num-layers-per-virtual-pipeline-stage": args.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": args.num_virtual_stages_per_pipeline_rank,
        "--pipeline-model-parallel-layout": args.pipeline_model_parallel_layout,
    }
    given = [flag for flag, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ArgumentsError(f"{' and '.join(given)} exclude each other")
    pp = args.pipeline_model_parallel_size
    uneven = args.decoder_first_pipeline_num_layers is not None or args.decoder_last_pipeline_num_layers is not None
    if args.pipeline_model_parallel_layout is not None:
        num, rest = divmod(num_stages(args.pipeline_model_parallel_layout), pp)
    elif args.num_layers_per_virtual_pipeline_stage is not None:
        if uneven:
            raise ArgumentsError("with uneven first or last stages use --num-virtual-stages-per-pipeline-rank")
        num, rest = divmod(_counted_layers(args), pp * args.num_layers_per_virtual_pipeline_stage)
    elif args.num_virtual_stages_per_pipeline_rank is not None:
        num, rest = args.num_virtual_stages_per_pipeline_rank, 0
    else:
        num, rest = 1, 0 if uneven else _counted_layers(args) % pp
    if rest or num < 1:
        raise ArgumentsError(f"{args.num_layers} layers do not divide into the stages that {pp=} {given} ask for")
    return num if num > 1 else None


def _counted_layers(args: argparse.Namespace) -> int:
    extra = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    return int(args.num_layers + extra)


def _derive_run(args: argparse.Namespace) -> None:
    args.global_batch_size = args.global_batch_size or args.micro_batch_size * args.data_parallel_size
    per_round = args.micro_batch_size * args.data_parallel_size
    args.num_microbatches, rest = divmod(args.global_batch_size, per_round)
    if rest or not args.num_microbatches:
        raise ArgumentsError(
            f"global batch size {args.global_batch_size} is not divisible by micro batch size x data parallel size = "
            f"{args.micro_batch_size} x {args.data_parallel_size}"
        )
    if args.save is not None and not args.save_interval:
        raise ArgumentsError("--save needs --save-interval")
    if args.min_lr > args.lr:
        raise ArgumentsError(f"--min-lr {args.min_lr} is above --lr {args.lr}")
    if args.data_path is not None and len(args.data_path) != 1:
        raise ArgumentsError(f"--data-path takes one file of text, got {len(args.data_path)} words")
    args.split = args.split or "969, 30, 1"
    args.accumulate_allreduce_grads_in_fp32 |= args.bf16 and not args.grad_reduce_in_bf16


def _only(value: object) -> object:
    """One item of a list that holds a single item; megatron-core wants lists only where there are several."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
