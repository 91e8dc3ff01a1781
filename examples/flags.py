"""Flags of Megatron-LM that this trainer understands, with names, defaults and meanings."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping

INTEGERS: Mapping[str, int | None] = {
    "--num-layers": None,
    "--hidden-size": None,
    "--ffn-hidden-size": None,
    "--num-attention-heads": None,
    "--kv-channels": None,
    "--num-query-groups": 1,
    "--seq-length": None,
    "--max-position-embeddings": None,
    "--rotary-base": 10000,
    "--make-vocab-size-divisible-by": 128,
    "--vocab-size": 256,
    "--padded-vocab-size": None,
    "--num-experts": None,
    "--moe-router-topk": 2,
    "--moe-ffn-hidden-size": None,
    "--moe-shared-expert-intermediate-size": None,
    "--tensor-model-parallel-size": 1,
    "--pipeline-model-parallel-size": 1,
    "--context-parallel-size": 1,
    "--expert-model-parallel-size": 1,
    "--expert-tensor-parallel-size": None,
    "--num-layers-per-virtual-pipeline-stage": None,
    "--num-virtual-stages-per-pipeline-rank": None,
    "--decoder-first-pipeline-num-layers": None,
    "--decoder-last-pipeline-num-layers": None,
    "--recompute-num-layers": None,
    "--wgrad-deferral-limit": 0,
    "--ddp-bucket-size": None,
    "--micro-batch-size": None,
    "--global-batch-size": None,
    "--train-iters": None,
    "--log-interval": 100,
    "--eval-interval": None,
    "--eval-iters": 100,
    "--save-interval": None,
    "--exit-interval": None,
    "--exit-duration-in-mins": None,
    "--lr-decay-iters": None,
    "--lr-warmup-iters": 0,
    "--hysteresis": 2,
    "--seed": 1234,
    "--distributed-timeout-minutes": 10,
}
FLOATS: Mapping[str, float | None] = {
    "--rotary-percent": 1.0,
    "--attention-dropout": 0.1,
    "--hidden-dropout": 0.1,
    "--init-method-std": 0.02,
    "--moe-z-loss-coeff": None,
    "--moe-expert-capacity-factor": None,
    "--lr": None,
    "--min-lr": 0.0,
    "--lr-warmup-fraction": None,
    "--lr-warmup-init": 0.0,
    "--weight-decay": 0.01,
    "--clip-grad": 1.0,
    "--adam-beta1": 0.9,
    "--adam-beta2": 0.999,
    "--adam-eps": 1e-8,
    "--loss-scale": None,
    "--initial-loss-scale": 2.0**32,
    "--min-loss-scale": 1.0,
    "--loss-scale-window": 1000.0,
}
TEXTS: Mapping[str, str | None] = {
    "--pipeline-model-parallel-layout": None,
    "--split": None,
    "--save": None,
    "--load": None,
}
CHOICES: Mapping[str, tuple[str | None, ...]] = {  # the default comes first
    "--position-embedding-type": ("learned_absolute", "rope", "none"),
    "--normalization": ("LayerNorm", "RMSNorm"),
    "--moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "--moe-router-score-function": ("softmax", "sigmoid"),
    "--moe-router-dtype": (None, "fp32", "fp64"),
    "--recompute-granularity": (None, "full", "selective"),
    "--recompute-method": (None, "uniform", "block"),
    "--lr-decay-style": ("linear", "constant", "cosine", "inverse-square-root"),
    "--optimizer": ("adam",),
    "--transformer-impl": ("transformer_engine", "local"),
    "--attention-backend": ("auto", "flash", "fused", "unfused", "local"),
    "--ckpt-format": ("torch_dist", "fsdp_dtensor"),
    "--data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "--dataloader-type": ("single",),
    "--distributed-backend": ("nccl", "gloo"),
}
SWITCHES = (
    "--group-query-attention",
    "--swiglu",
    "--squared-relu",
    "--add-qkv-bias",
    "--qk-layernorm",
    "--use-rotary-position-embeddings",
    "--rotary-interleaved",
    "--untie-embeddings-and-output-weights",
    "--attention-softmax-in-fp32",
    "--apply-query-key-layer-scaling",
    "--moe-grouped-gemm",
    "--moe-router-force-load-balancing",
    "--moe-router-pre-softmax",
    "--moe-permute-fusion",
    "--moe-shared-expert-overlap",
    "--sequence-parallel",
    "--use-tp-pp-dp-mapping",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--defer-embedding-wgrad-compute",
    "--tp-comm-overlap",
    "--recompute-activations",
    "--distribute-saved-activations",
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--use-megatron-fsdp",
    "--use-torch-fsdp2",
    "--bf16",
    "--fp16",
    "--accumulate-allreduce-grads-in-fp32",
    "--grad-reduce-in-bf16",
    "--calculate-per-token-loss",
    "--cross-entropy-loss-fusion",
    "--use-cpu-initialization",
    "--deterministic-mode",
    "--no-persist-layer-norm",
    "--log-throughput",
    "--finetune",
    "--no-save-optim",
    "--no-save-rng",
    "--no-load-optim",
    "--no-load-rng",
    "--dist-ckpt-optim-fully-reshardable",
)
OFF_SWITCHES = {
    "--disable-bias-linear": "add_bias_linear",
    "--no-overlap-p2p-communication": "overlap_p2p_comm",
    "--no-align-grad-reduce": "align_grad_reduce",
    "--no-align-param-gather": "align_param_gather",
    "--torch-fsdp2-no-reshard-after-forward": "torch_fsdp2_reshard_after_forward",
    "--no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "--no-bias-gelu-fusion": "bias_gelu_fusion",
    "--no-bias-swiglu-fusion": "bias_swiglu_fusion",
    "--no-bias-dropout-fusion": "bias_dropout_fusion",
    "--no-masked-softmax-fusion": "masked_softmax_fusion",
    "--no-rope-fusion": "apply_rope_fusion",
    "--no-check-for-nan-in-loss-and-grad": "check_for_nan_in_loss_and_grad",
    "--disable-gloo-process-groups": "enable_gloo_process_groups",
}


def parser() -> argparse.ArgumentParser:
    """Make the parser; as Megatron-LM's, it knows no abbreviations and ends the process with 2 at an unknown flag."""
    made = argparse.ArgumentParser(
        description="Train a GPT on bytes with megatron-core. Every flag is Megatron-LM's own.", allow_abbrev=False
    )
    for flag, integer in INTEGERS.items():
        made.add_argument(flag, type=int, default=integer)
    for flag, real in FLOATS.items():
        made.add_argument(flag, type=float, default=real)
    for flag, text in TEXTS.items():
        made.add_argument(flag, default=text)
    for flag, choices in CHOICES.items():
        made.add_argument(flag, choices=[choice for choice in choices if choice], default=choices[0])
    for flag in SWITCHES:
        made.add_argument(flag, action="store_true")
    for flag, dest in OFF_SWITCHES.items():
        made.add_argument(flag, dest=dest, action="store_false")
    made.add_argument("--norm-epsilon", dest="layernorm_epsilon", type=float, default=1e-5)
    made.add_argument(
        "--microbatch-group-size-per-virtual-pipeline-stage", dest="microbatch_group_size_per_vp_stage", type=int
    )
    made.add_argument(
        "--overlap-p2p-communication-warmup-flush", dest="overlap_p2p_comm_warmup_flush", action="store_true"
    )
    made.add_argument("--moe-layer-freq", type=layer_frequency, default=1)
    made.add_argument("--moe-aux-loss-coeff", type=float, nargs="+", default=0.0)
    made.add_argument("--moe-router-load-balancing-type", nargs="+", default="aux_loss")
    made.add_argument("--recompute-modules", nargs="+")
    made.add_argument("--cp-comm-type", nargs="+", default=["p2p"])
    made.add_argument("--data-path", nargs="*")
    return made


def layer_frequency(text: str) -> int | list[int]:
    """`--moe-layer-freq`: an integer, or a list built with `+` and `*` as in `([0]*1+[1]*3)*2`.

    Raises:
        argparse.ArgumentTypeError: it is neither.

    """

    def value(node: ast.AST) -> int | list[int]:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.List(elts=elements):
                return [int(str(value(element))) for element in elements]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)  # type: ignore[operator]
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)  # type: ignore[operator]
        raise TypeError

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither an integer nor a list such as ([0]*1+[1]*3)*2"
        ) from error
