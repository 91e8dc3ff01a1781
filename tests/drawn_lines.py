"""Command lines drawn by a seed: a job that is likely legal, with one to four of its flags changed.

`{a|b|c}` stands for one of a, b and c; `{}` for nothing. `X=-` takes the flag X away.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from pipette_launch.megatron.flags import flag_table, release_of

WORLD_SIZES = (1, 2, 4, 8, 8, 8, 16, 16, 16, 32, 32, 64, 128, 256, 512)
BASE = (
    "--num-layers {4|6|8|8|12|16} --hidden-size {64|128} --num-attention-heads {8|8|16} --seq-length {64|128|256} "
    "--vocab-size 1000 --tokenizer-type NullTokenizer --micro-batch-size {1|1|2} --train-iters 10 --lr 1e-4 "
    "--max-position-embeddings 256"
)
KINDS = {
    "dense": "{|--swiglu|--squared-relu --no-bias-gelu-fusion} {|--ffn-hidden-size 256}",
    "gqa": "--group-query-attention --num-query-groups {2|4|8} --swiglu --disable-bias-linear --normalization RMSNorm",
    "moe": "--num-experts {4|8|16} --disable-bias-linear --swiglu --moe-token-dispatcher-type {alltoall|alltoall|flex|"
    "allgather} {|--moe-grouped-gemm} {|--moe-ffn-hidden-size 128} {|--moe-router-topk 1 --moe-router-pre-softmax} "
    "{||--moe-shared-expert-intermediate-size 128} {|--moe-layer-freq {2|SPARSE}}",
    "mla": "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 16 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope",
    "mla moe": "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 16 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--num-experts 8 --moe-grouped-gemm --moe-ffn-hidden-size 64 --moe-router-topk {2|4} --moe-token-dispatcher-type "
    "{alltoall|flex} --moe-router-score-function {softmax|sigmoid}",
    "hybrid": "--mamba-num-groups {4|8} --mamba-head-dim 16 --position-embedding-type none --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights",
}
COMMON = (
    "{--bf16|--bf16|--bf16|--fp16|} {|--untie-embeddings-and-output-weights} {|--position-embedding-type rope} "
    "{|--attention-dropout 0 --hidden-dropout 0} {|--use-distributed-optimizer {|--overlap-grad-reduce "
    "{|--overlap-param-gather}}}"
)
SHAPES = (
    # Degrees.
    "--tensor-model-parallel-size {1|2|3|4|8|16}",
    "--pipeline-model-parallel-size {1|2|3|4|6|8}",
    "--context-parallel-size {1|2|4|8}",
    "--expert-model-parallel-size {1|2|3|4|8}",
    "--expert-tensor-parallel-size {1|2|4}",
    "--use-tp-pp-dp-mapping",
    "--sequence-parallel={|-}",
    # Stages.
    "--num-layers-per-virtual-pipeline-stage {1|2|3|4}",
    "--num-virtual-stages-per-pipeline-rank {1|2|3|4}",
    "--decoder-first-pipeline-num-layers {0|1|2|3|4}",
    "--decoder-last-pipeline-num-layers {0|1|2|3|4}",
    "--decoder-first-pipeline-num-layers {1|2|3} --decoder-last-pipeline-num-layers {1|2|3}",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers {6|10|14}",
    "--microbatch-group-size-per-virtual-pipeline-stage {1|2|3|4|8} --num-virtual-stages-per-pipeline-rank 2",
    "--no-overlap-p2p-communication",
    "--overlap-p2p-communication-warmup-flush",
    "--num-virtual-stages-per-pipeline-rank 2 --overlap-p2p-communication-warmup-flush",
    "--num-layers {3|5|6|7|9|10|12|15|16}",
    "LAYOUT",
    "LAYOUT",
    "LAYOUT",
    # Widths.
    "--hidden-size {60|96|100|128}",
    "--num-attention-heads {3|4|6|8|16} {|--kv-channels 16}",
    "--group-query-attention --num-query-groups {1|2|3|4|16}",
    "--num-query-groups {2|4}",
    "--ffn-hidden-size {100|192|250|256}",
    "--seq-length {32|48|60|64|96|256|512}",
    "--max-position-embeddings {32|64|1024}",
    "--padded-vocab-size {1000|1001|1024}",
    "--vocab-size {1000|1001} --make-vocab-size-divisible-by {1|64|128}",
    # Context parallelism.
    "--context-parallel-size {2|4} --cp-comm-type {p2p|all_gather|a2a|a2a+p2p}",
    "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes {2 2|4|2 4|1 4}",
    "--cp-comm-type {p2p|all_gather|a2a|a2a+p2p}",
    "--hierarchical-context-parallel-sizes {1|2 2|2 1}",
    # Recompute.
    "--recompute-activations",
    "--recompute-granularity {full|selective}",
    "--recompute-granularity full --recompute-method {uniform|block} --recompute-num-layers {1|2|3}",
    "--recompute-granularity full --recompute-method {uniform|block}",
    "--recompute-granularity full --recompute-num-layers 1",
    "--recompute-granularity selective --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective --recompute-num-layers 1",
    "--recompute-method {uniform|block} --recompute-num-layers 1",
    (
        "--recompute-granularity selective --recompute-modules {core_attn|mlp|moe|moe_act|layernorm|mla_up_proj|"
        "shared_experts|core_attn mlp|layernorm moe_act|nothing}"
    ),
    "--recompute-modules {core_attn|mlp|nothing}",
    "--moe-layer-recompute",
    "--moe-layer-recompute --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--distribute-saved-activations",
    (
        "--recompute-granularity full --recompute-method {uniform|block} --recompute-num-layers 1 "
        "--distribute-saved-activations --sequence-parallel=-"
    ),
)
"""Changes of degrees, stages, widths and recompute."""
OTHERS = (
    # Optimizer.
    "--use-distributed-optimizer={|-}",
    "--overlap-grad-reduce={|-}",
    "--overlap-param-gather",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "--overlap-param-gather-with-optimizer-step",
    (
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--overlap-param-gather-with-optimizer-step --num-virtual-stages-per-pipeline-rank 2 "
        "--ckpt-format {torch|torch_dist}"
    ),
    "--num-distributed-optimizer-instances {2|3|4}",
    "--use-distributed-optimizer --num-distributed-optimizer-instances {2|4}",
    "--use-distributed-optimizer --use-precision-aware-optimizer",
    "--use-precision-aware-optimizer",
    "--{main-params|main-grads|exp-avg|exp-avg-sq}-dtype {bf16|fp16|fp32|fp8}",
    (
        "--use-distributed-optimizer --use-precision-aware-optimizer "
        "--{main-params|main-grads|exp-avg|exp-avg-sq}-dtype {bf16|fp16|fp32|fp8}"
    ),
    "--optimizer {sgd|adam|muon|dist_muon|lion}",
    "--optimizer-cpu-offload {|--use-precision-aware-optimizer --use-distributed-optimizer}",
    "--optimizer-offload-fraction {0.5|1.5}",
    "--grad-reduce-in-bf16",
    "--accumulate-allreduce-grads-in-fp32",
    "--ddp-bucket-size 10000 {|--ddp-num-buckets 4}",
    "--ddp-num-buckets {0|4}",
    "--ddp-average-in-collective",
    "--ddp-reduce-scatter-with-fp32-accumulation",
    "--use-nccl-ub",
    "--disable-gloo-process-groups",
    "--calculate-per-token-loss",
    # FSDP.
    "--use-megatron-fsdp",
    (
        "--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer "
        "--data-parallel-sharding-strategy {no_shard|optim|optim_grads|optim_grads_params}"
    ),
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params",
    "--use-torch-fsdp2",
    (
        "--use-torch-fsdp2 --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion --ckpt-format "
        "{torch_dist|torch_dcp|torch} --use-distributed-optimizer=- --overlap-param-gather=-"
    ),
    "--fsdp-manual-registration",
    "--fsdp-double-buffer",
    "--data-parallel-sharding-strategy optim",
    "--init-model-with-meta-device",
    "--ckpt-format {torch|torch_dist|zarr|torch_dcp|fsdp_dtensor}",
    # Precision.
    "--fp16={|-}",
    "--bf16={|-}",
    "--fp8-format {e4m3|hybrid} {|--fp8-recipe {delayed|tensorwise|mxfp8|blockwise|custom}}",
    "--fp8-recipe {tensorwise|mxfp8}",
    "--fp8-param-gather",
    "--fp8-format hybrid --fp8-recipe {delayed|tensorwise|mxfp8|blockwise} --fp8-param-gather",
    (
        "--fp8-format hybrid --fp8-recipe {delayed|tensorwise} --first-last-layers-bf16 "
        "{|--num-layers-at-start-in-bf16 {0|1|9}}"
    ),
    "--first-last-layers-bf16",
    "--fp8-format hybrid --recompute-granularity selective --recompute-modules {moe_act|layernorm|core_attn}",
    "--fp4-format e2m1 {|--fp4-param-gather|--fp8-format hybrid|--fp4-recipe custom}",
    "--fp4-param-gather",
    "--reuse-grad-buf-for-mxfp8-param-ag",
    (
        "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag "
        "--use-distributed-optimizer {|--overlap-grad-reduce --overlap-param-gather}"
    ),
    "--fp16-lm-cross-entropy",
    "--fp32-residual-connection",
    "--loss-scale 1024",
    "--keep-fp8-transpose-cache",
    # CUDA graphs.
    "--enable-cuda-graph",
    "--external-cuda-graph",
    "--enable-cuda-graph --external-cuda-graph",
    "--cuda-graph-impl {none|local|transformer_engine|full_iteration}",
    "--enable-cuda-graph --cuda-graph-impl {local|transformer_engine}",
    (
        "--cuda-graph-impl {local|transformer_engine} --cuda-graph-scope {full|attn|mlp|moe|moe_router|moe_preprocess|"
        "full_iteration|mamba|attn mlp|moe_router moe_preprocess|full attn}"
    ),
    (
        "--cuda-graph-impl {local|transformer_engine} --cuda-graph-modules {attn|mlp|moe|moe_router|moe_preprocess|"
        "mamba|attn mlp|moe_router moe_preprocess}"
    ),
    "--cuda-graph-scope {full|attn|full_iteration}",
    "--cuda-graph-impl local --cuda-graph-scope full_iteration --no-check-for-nan-in-loss-and-grad",
    (
        "--cuda-graph-impl {local|transformer_engine} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1"
    ),
    (
        "--cuda-graph-impl {local|transformer_engine} --recompute-granularity selective "
        "--recompute-modules {moe|mlp|core_attn}"
    ),
    "--moe-pad-experts-for-cuda-graph-inference --cuda-graph-impl local",
    "--te-rng-tracker",
    "--optimizer-cuda-graph",
    # Offloading.
    "--cpu-offloading-num-layers {1|2|100}",
    "--fine-grained-activation-offloading",
    (
        "--fine-grained-activation-offloading --offload-modules {core_attn|attn_proj|core_attn attn_proj|expert_fc1|"
        "moe_act|attn_norm|mlp_norm|qkv_linear|nothing}"
    ),
    "--offload-modules core_attn",
    "--fine-grained-activation-offloading --offload-modules core_attn --cpu-offloading-num-layers 1",
    (
        "--fine-grained-activation-offloading --offload-modules {core_attn|moe_act|attn_norm} --recompute-granularity "
        "selective --recompute-modules {core_attn|moe_act|layernorm}"
    ),
    # Experts.
    "--num-experts {0|1|4|6|8}",
    "--disable-bias-linear=-",
    "--moe-token-dispatcher-type {allgather|alltoall|alltoall_seq|flex}",
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {deepep|hybridep}",
    "--moe-enable-deepep {|--moe-token-dispatcher-type flex|--moe-flex-dispatcher-backend hybridep}",
    "--moe-expert-capacity-factor {-1|1.0|2.0} {|--moe-pad-expert-input-to-capacity}",
    "--moe-pad-expert-input-to-capacity",
    "--moe-expert-capacity-factor 1.0 --moe-router-load-balancing-type {aux_loss|sinkhorn|none|seq_aux_loss}",
    "--moe-router-load-balancing-type {aux_loss|sinkhorn|none|seq_aux_loss|global_aux_loss|nothing}",
    "--moe-router-load-balancing-type aux_loss seq_aux_loss {|--moe-aux-loss-coeff 0.1|--moe-aux-loss-coeff 0.1 0.2}",
    "--moe-aux-loss-coeff {0.01|0.01 0.02}",
    "--moe-router-topk {1|2|4|9}",
    "--moe-router-topk 1 --moe-router-score-function {softmax|sigmoid}",
    "--moe-router-score-function sigmoid {|--moe-router-enable-expert-bias}",
    "--moe-router-enable-expert-bias",
    "--moe-router-num-groups {2|3|4} {|--moe-router-group-topk {1|2|5}}",
    "--moe-router-group-topk {1|2}",
    "--moe-router-dtype {fp32|fp64|bf16}",
    "--moe-router-padding-for-fp8 {|--fp8-format hybrid}",
    "--moe-router-padding-for-quantization {|--fp8-format hybrid}",
    "--moe-router-fusion",
    "--moe-permute-fusion",
    "--moe-apply-probs-on-input",
    "--moe-input-jitter-eps 0.01",
    "--moe-z-loss-coeff 0.001",
    "--moe-grouped-gemm={|-}",
    "--moe-use-legacy-grouped-gemm {|--moe-grouped-gemm}",
    "--moe-shared-expert-intermediate-size {0|100|128} {|--moe-shared-expert-overlap}",
    "--moe-shared-expert-overlap",
    "--moe-shared-expert-gate",
    "--moe-layer-freq {1|2|3|SPARSE|([0]*1+[1]*7)|([0]*4)|([1]*8)}",
    "--moe-ffn-hidden-size {64|100|128}",
    "--moe-use-upcycling {|--save /tmp/nowhere --save-interval 5}",
    "--overlap-moe-expert-parallel-comm",
    "--overlap-moe-expert-parallel-comm --expert-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank {1|2}",
    (
        "--overlap-moe-expert-parallel-comm --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--pipeline-model-parallel-size 1 {|--delay-wgrad-compute|--mtp-num-layers 1|--recompute-granularity selective}"
    ),
    "--delay-wgrad-compute",
    "--ep-overlap-early-attn-memory-release",
    "--moe-paged-stash",
    "--moe-permute-fusion-into-hybridep",
    # Overlap of tensor parallelism.
    "--tp-comm-overlap",
    "--tp-comm-overlap --tensor-model-parallel-size 2 --sequence-parallel",
    "--defer-embedding-wgrad-compute {|--wgrad-deferral-limit {-1|2}|--no-gradient-accumulation-fusion}",
    "--no-gradient-accumulation-fusion",
    "--symmetric-ar-type two_shot",
    # Batches and lengths of the training.
    "--global-batch-size {1|3|8|12|24|32|48|100|1024}",
    "--micro-batch-size {0|1|2|3|4}",
    "--decrease-batch-size-if-needed",
    "--train-samples 1000",
    "--train-iters=- --train-samples {1000|10000}",
    "--train-iters=- --train-samples 10000 --rampup-batch-size {8 8 1000|32 32 1000|1 1 100|3 5 100|64 64 5000}",
    "--rampup-batch-size 8 8 1000",
    "--step-batch-size-schedule {0:8|0:8,1K:32}",
    "--eval-global-batch-size {8|32|48}",
    "--eval-micro-batch-size {1|2|3}",
    "--lr-warmup-iters {2|10|20} {|--lr-warmup-fraction 0.1}",
    "--lr-warmup-fraction {0.1|1.0|2.0}",
    "--lr-decay-iters {5|20}",
    "--lr-decay-samples 100",
    "--lr-warmup-samples 100",
    "--min-lr {1e-5|1e-3}",
    "--lr-decay-style {constant|linear|cosine|inverse-square-root|WSD|other} {|--lr-wsd-decay-iters {2|20}}",
    "--weight-decay-incr-style {constant|linear|cosine} {|--start-weight-decay 0.01 --end-weight-decay 0.1}",
    "--start-weight-decay 0.01",
    # Multi-token prediction.
    "--mtp-num-layers {0|1|2}",
    "--mtp-num-layers 1 --position-embedding-type {rope|none|learned_absolute|yarn}",
    "--mtp-num-layers 1 --untie-embeddings-and-output-weights={|-} --position-embedding-type rope",
    "--mtp-num-layers 1 --position-embedding-type rope --pipeline-model-parallel-size {2|4}",
    # Positions, windows, softmax, norms and activations.
    "--position-embedding-type {learned_absolute|rope|yarn|none|relative|mrope}",
    "--no-position-embedding",
    "--use-rotary-position-embeddings",
    "--rotary-interleaved {|--no-rope-fusion}",
    "--no-rope-fusion",
    "--rope-type {rope|yarn}",
    "--rotary-percent 0.5",
    "--no-rope-freq {2|3|([0]*1+[1]*7)} {|--position-embedding-type rope}",
    "--window-size {127,0|16,0|(16,0)|-1,-1}",
    "--window-size 16,0 --window-attn-skip-freq {2|([1]*4)|([0]*1+[1]*7)}",
    "--window-attn-skip-freq 2",
    "--softmax-type {vanilla|off-by-one|learnable|nothing}",
    "--attention-backend {flash|fused|unfused|local|auto}",
    "--normalization {LayerNorm|RMSNorm}",
    "--apply-layernorm-1p",
    "--qk-layernorm",
    "--qk-l2-norm",
    "--qk-clip",
    "--attention-output-gate",
    "--swiglu --{squared-relu|quick-geglu|openai-gelu}",
    "--swiglu={|-}",
    "--squared-relu {|--no-bias-gelu-fusion}",
    "--quick-geglu",
    "--openai-gelu",
    "--glu-linear-offset 1.0",
    "--activation-func-clamp-value 7.0",
    "--use-te-activation-func {|--no-bias-swiglu-fusion --no-bias-gelu-fusion}",
    "--no-bias-{gelu|swiglu|dropout}-fusion",
    "--disable-bias-linear",
    "--disable-bias-linear --no-bias-gelu-fusion",
    "--add-qkv-bias",
    "--apply-query-key-layer-scaling",
    "--attention-softmax-in-fp32",
    "--no-masked-softmax-fusion",
    "--no-persist-layer-norm",
    "--apply-residual-connection-post-layernorm",
    "--multi-latent-attention",
    "--multi-latent-attention --group-query-attention --num-query-groups 4",
    "--transformer-impl {local|transformer_engine|inference_optimized}",
    "--use-flash-attn",
    "--use-legacy-models",
    "--deterministic-mode {|--use-flash-attn|--cross-entropy-loss-fusion}",
    "--cross-entropy-loss-fusion {|--cross-entropy-fusion-impl {native|te}}",
    "--use-fused-weighted-squared-relu",
    "--batch-invariant-mode {|--attention-backend flash}",
    "--fused-residual-rmsnorm {|--normalization RMSNorm}",
    "--use-cpu-initialization",
    "--apply-wd-to-qk-layernorm",
    "--use-mup",
    # Data and checkpoints.
    "--dataloader-type {single|cyclic}",
    "--reset-attention-mask",
    "--sft",
    "--mock-data",
    "--load-main-params-from-ckpt {|--no-load-optim}",
    "--save /tmp/nowhere {|--save-interval {0|5}}",
    "--async-save",
    "--dist-ckpt-optim-fully-reshardable",
    "--num-dataset-builder-threads {0|2}",
    "--phase-transition-iterations 5",
    "--check-weight-hash-across-dp-replicas-interval 5",
    "--use-persistent-ckpt-worker",
    "--replication {|--replication-jump 2}",
    "--high-priority-stream-groups {dp_cp|ep_dp}",
    "--tensor-parallel-num-weight-shards 2",
)


def drawn(text: str, rng: random.Random) -> str:
    """Choose one of each {a|b|c}, the innermost first."""
    while "{" in text:
        text = re.sub(r"\{([^{}]*)\}", lambda match: rng.choice(match[1].split("|")), text)
    return text


def flags_of(text: str) -> dict[str, tuple[str, ...] | None]:
    """Cut text into flags and their values; None for a flag that is taken away."""
    found: dict[str, tuple[str, ...] | None] = {}
    for word in text.split():
        if word.startswith("--"):
            name, _, sign = word.partition("=")
            found[name] = None if sign == "-" else ()
            last = name
        else:
            found[last] = (*(found[last] or ()), word)
    return found


def draw(seed: int, version: str) -> tuple[int, list[str]]:
    """Draw a number of ranks and a command line of flags that this release has."""
    rng = random.Random(seed)
    world_size = rng.choice(WORLD_SIZES)
    kind = rng.choice(("dense", "dense", "gqa", "gqa", "moe", "moe", "moe", "mla", "mla moe", "hybrid"))
    flags = flags_of(drawn(f"{BASE} {COMMON} {KINDS[kind]}", rng))
    degrees = _degrees(rng, world_size, flags)
    flags |= flags_of(degrees)
    if kind == "hybrid":
        _hybrid(rng, flags, version)
    if rng.random() < 0.15 and kind != "hybrid":
        flags |= flags_of("--mtp-num-layers 1 --position-embedding-type rope")
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 2, 3, 4))):
        change = rng.choice(rng.choice((SHAPES, OTHERS, OTHERS)))
        change = _layout(rng, flags) if change == "LAYOUT" else drawn(change, rng)
        flags |= flags_of(change)
    sparse = f"([0]*1+[1]*{_value(flags, '--num-layers') - 1})"
    if flags.get("--moe-layer-freq") == ("SPARSE",):
        flags["--moe-layer-freq"] = (sparse,)
    words = [(name, *values) for name, values in flags.items() if values is not None and name in flag_table(version)]
    return world_size, [word for group in words for word in group]


def _value(flags: dict[str, tuple[str, ...] | None], name: str, default: int = 1) -> int:
    return int((flags.get(name) or (str(default),))[0])


def _degrees(rng: random.Random, world_size: int, flags: dict[str, tuple[str, ...] | None]) -> str:
    """Draw degrees that divide the ranks, and a batch that they divide."""
    layers, experts = _value(flags, "--num-layers"), _value(flags, "--num-experts")

    def part(*sizes: int, of: int) -> int:
        return rng.choice([size for size in sizes if of % size == 0])

    tp = part(1, 1, 2, 2, 4, of=world_size)
    pp = part(*(size for size in (1, 1, 2, 2, 4, 8) if layers % size == 0), of=world_size // tp)
    cp = part(1, 1, 1, 2, of=world_size // (tp * pp))
    dp = world_size // (tp * pp * cp)
    text = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --context-parallel-size {cp} "
    per_rank = layers // pp
    vpp = part(1, 1, 2, per_rank, of=per_rank) if pp > 1 else 1
    if vpp > 1:
        text += f"--num-layers-per-virtual-pipeline-stage {per_rank // vpp} "
    if tp > 1 and (experts > 1 or rng.random() < 0.6):
        text += "--sequence-parallel "
    if experts > 1:
        ep = part(*(size for size in (1, 2, 4, 8) if experts % size == 0), of=world_size // (tp * pp))
        text += f"--expert-model-parallel-size {ep} "
        if rng.random() < 0.3 and world_size % (ep * pp) == 0:
            text += "--expert-tensor-parallel-size 1 "
    micro = _value(flags, "--micro-batch-size")
    return text + f"--global-batch-size {micro * dp * pp * rng.choice((1, 2, 2, 4))}"


def _hybrid(rng: random.Random, flags: dict[str, tuple[str, ...] | None], version: str) -> None:
    """Name the layers of a hybrid model, as its release does."""
    layers, pp = _value(flags, "--num-layers"), _value(flags, "--pipeline-model-parallel-size")
    letters = "".join(rng.choice("MMM*--") for _ in range(layers))
    flags["--num-layers-per-virtual-pipeline-stage"] = None
    old, release = "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec", release_of(version)
    new = "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
    flags |= flags_of(f"--spec {new if release >= (0, 18) else old}")
    if release < (0, 17):
        flags |= flags_of(f"--is-hybrid-model --hybrid-override-pattern {letters}")
        return
    if pp > 1 and rng.random() < 0.5:
        size = layers // pp // (2 if layers // pp % 2 == 0 and rng.random() < 0.4 else 1)
        letters = "|".join(letters[place : place + size] for place in range(0, layers, size))
    flags |= flags_of(f"--hybrid-layer-pattern {letters}")
    if rng.random() < 0.8:
        flags["--num-layers"] = None


def _layout(rng: random.Random, flags: dict[str, tuple[str, ...] | None]) -> str:
    """Draw a layout, often one that fits, else with one thing wrong."""
    layers, pp = _value(flags, "--num-layers"), _value(flags, "--pipeline-model-parallel-size")
    vpp, depths = rng.choice((1, 1, 2)), _value(flags, "--mtp-num-layers", 0) if "--mtp-num-layers" in flags else 0
    cuts = sorted(rng.randint(0, layers) for _ in range(pp * vpp - 1))
    if rng.random() < 0.5:
        cuts = [layers * place // (pp * vpp) for place in range(1, pp * vpp)]
    sizes = [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    stages = ["t" * size if size < 3 or rng.random() < 0.5 else f"t*{size}" for size in sizes]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "m" * depths + "L"
    wrong = rng.random()
    if wrong < 0.06:
        stages[0] = stages[0].replace("E", "")
    elif wrong < 0.12:
        stages[-1] = stages[-1].replace("L", "")
    elif wrong < 0.18:
        stages[rng.randrange(len(stages))] += rng.choice("tmELx")
    elif wrong < 0.24 and depths:
        stages[-1] = stages[-1].replace("m", "")
        stages[rng.randrange(len(stages))] += "m"
    elif wrong < 0.30:
        stages.append("")
    elif wrong < 0.40 and depths and len(stages) > 1:
        # A stage of its own for prediction.
        stages[-1] = "m" * depths + "L"
        stages[-2] += sizes[-1] * "t"
    text = rng.choice(("|", "|", ",|")).join(stages)
    return f"--pipeline-model-parallel-layout {text} --num-layers-per-virtual-pipeline-stage=-"


def draws(seeds: Sequence[int], version: str) -> list[tuple[int, list[str]]]:
    """Draw one line for each seed."""
    return [draw(seed, version) for seed in seeds]
