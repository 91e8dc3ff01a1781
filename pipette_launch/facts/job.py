"""The job: model, batch, the user's own configuration, and Megatron's options that affect time or memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import ClassVar, NamedTuple

from pipette_launch.facts.files import check_numbers
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import ModelSpec

PRECISION = ("--fp8", "--fp4")
"""Prefixes of the flags for FP8 and FP4. Layers that the job's own script builds have the precision of these flags."""
GRAPHS = ("--cuda-graph", "--enable-cuda-graph", "--external-cuda-graph")
"""Prefixes of the flags for CUDA graphs."""
MODELLED = (*PRECISION, "--first-last-layers-bf16", *GRAPHS)
"""Prefixes of flags that the timed layers may lack. The device model then computes their effect on time."""
OTHER_MODELS = ("--decoder-num-layers", "--decoder-seq-length", "--img-h", "--vision-pretraining")
"""Flags of models that are not decoder-only language models."""
SCRIPT_ONLY = (
    *("--enable-mhc-connections", "--experimental-attention-variant", "--hybrid-layer-pattern"),
    *("--hybrid-override-pattern", "--spec", *OTHER_MODELS),
)
"""Flags of layers that no formula knows, and that only the job's own script builds."""
RING = "p2p"
"""Megatron's default exchange of context parallelism (--cp-comm-type). Other exchanges are not measured or priced."""
SHARDS_GRADIENTS = ("optim_grads", "optim_grads_params")
"""Strategies of Megatron-FSDP that shard gradients (--data-parallel-sharding-strategy)."""

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with allocator options. The first variable that is set counts, even if its text is empty."""
EXPANDABLE = "expandable_segments"
EXPANDABLE_SEGMENTS = f"{ALLOCATOR_VARIABLES[0]}={EXPANDABLE}:True"
"""Setting of torch's allocator that lessens its cache."""


class OptimizerKind(NamedTuple):
    """Facts about a value of Megatron's `--optimizer`."""

    state_bytes: int
    """Bytes of fp32 states for one parameter, without the fp32 copy of a 16-bit weight and without SOAP's factors."""
    is_elementwise: bool
    """True if each element is updated on its own, so that splitting a matrix does not change the result."""
    is_for_matrices: bool
    """True for optimizers of the matrices of layers. Adam updates the other parameters (core_v0.20,
    emerging_optimizers.py)."""


SHARDED_MUON = "dist_muon"
"""Muon that shards whole matrices without `--use-distributed-optimizer`."""
OPTIMIZERS = {
    "adam": OptimizerKind(8, is_elementwise=True, is_for_matrices=False),
    "sgd": OptimizerKind(4, is_elementwise=True, is_for_matrices=False),
    "lion": OptimizerKind(4, is_elementwise=True, is_for_matrices=True),
    "muon": OptimizerKind(4, is_elementwise=False, is_for_matrices=True),
    SHARDED_MUON: OptimizerKind(4, is_elementwise=False, is_for_matrices=True),
    "adaptive_muon": OptimizerKind(8, is_elementwise=False, is_for_matrices=True),
    "soap": OptimizerKind(8, is_elementwise=False, is_for_matrices=True),
}
LOCAL, ENGINE, ITERATION = "local", "transformer_engine", "full_iteration"
"""Implementations of CUDA graphs (--cuda-graph-impl)."""


_EXPERTS_WITH = {"moe": ("moe_router", "moe_preprocess")}
_LOCAL_WITH = {
    **_EXPERTS_WITH,
    "attn": ("mlp",),
    "mlp": ("attn",),
    "moe_router": ("moe_preprocess",),
    "moe_preprocess": ("moe_router",),
}
"""Other parts of the same layer that a local graph holds, by the part that a flag names. One manager holds the whole
layer of attention and MLP (TransformerLayer.create_mcore_cudagraph_manager), and TransformerConfig adds `moe_router` to
`moe_preprocess` and the reverse (core_v0.16 to 0.20)."""
_IN_INFERENCE = "full_iteration_inference"
"""Scope of graphs that only inference uses."""


class CudaGraphs(NamedTuple):
    """CUDA graphs of a training step that a job's flags request, in words that are equal for all releases of Megatron.

    All code that depends on graphs reads this class: prices, rules, and notes.
    """

    impl: str
    """`none`, `local`, `transformer_engine` or `full_iteration`."""
    modules: frozenset[str]
    """Parts of a layer that the flags name. If empty, one graph holds a whole layer or a whole iteration."""

    def captured(self, parts: Iterable[str]) -> frozenset[str]:
        """Return the parts of a layer whose kernels a graph launches, out of all `parts` of the layer.

        Parts have Megatron's names: `attn`, `mlp`, `mamba`, and for experts `moe_router`, `moe_preprocess` and `moe`.
        A graph of `moe` holds the whole block of experts. Without such a graph, `moe` is the rest of the block.
        """
        layer = frozenset(parts)
        if self.impl == "none":
            return frozenset()
        if self.impl == ITERATION or not self.modules:
            return layer
        others = _LOCAL_WITH if self.impl == LOCAL else _EXPERTS_WITH
        named = self.modules & layer
        return layer & named.union(*(others.get(part, ()) for part in named))


def _option(flag: str, *, default: bool) -> bool:
    """Declare an option whose flag cannot be derived from the field's name by replacing underscores with dashes."""
    option: bool = field(default=default, metadata={"flag": flag})
    return option


@dataclass(frozen=True, kw_only=True, slots=True)
class PerformanceOptions:
    """Values of Megatron's options. Field names are Megatron's destinations, and defaults are Megatron's defaults.

    `megatron.performance` reads the options from a command line. To read a further flag, add a field to this class.
    """

    OMITS_DEFAULTS: ClassVar[bool] = True
    """Files name only the options that differ from these defaults."""

    # Precision.
    accumulate_allreduce_grads_in_fp32: bool = False
    apply_query_key_layer_scaling: bool = False
    attention_softmax_in_fp32: bool = False
    first_last_layers_bf16: bool = False
    fp32_residual_connection: bool = False
    fp4: str | None = field(default=None, metadata={"flag": "--fp4-format"})
    """FP4 format of the layers, such as `e2m1`. With None, the layers do not use FP4."""
    fp4_param_gather: bool = False
    fp8: str | None = field(default=None, metadata={"flag": "--fp8-format"})
    """FP8 format of the layers, `e4m3` or `hybrid`. With None, the layers do not use FP8."""
    fp8_output_proj: bool = False
    """True if the output layer runs in FP8 too."""
    fp8_param_gather: bool = False
    fp8_recipe: str = "delayed"
    num_layers_at_end_in_bf16: int = 1
    """Number of last layers in bf16. This option has an effect only with `--first-last-layers-bf16`."""
    num_layers_at_start_in_bf16: int = 1

    # Fused kernels.
    apply_rope_fusion: bool = _option("--no-rope-fusion", default=True)
    bias_swiglu_fusion: bool = _option("--no-bias-swiglu-fusion", default=True)
    cross_entropy_fusion_impl: str = "native"
    cross_entropy_loss_fusion: bool = False
    deterministic_mode: bool = False
    gradient_accumulation_fusion: bool = _option("--no-gradient-accumulation-fusion", default=True)
    masked_softmax_fusion: bool = _option("--no-masked-softmax-fusion", default=True)

    # Options of communication, and of the overlap of communication with compute.
    async_tensor_model_parallel_allreduce: bool = _option("--no-async-tensor-model-parallel-allreduce", default=True)
    cp_comm_type: tuple[str, ...] = (RING,)
    ddp_pad_buckets_for_high_nccl_busbw: bool = False
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    nccl_communicator_config_path: str | None = None
    overlap_moe_expert_parallel_comm: bool = False
    overlap_p2p_comm: bool = _option("--no-overlap-p2p-communication", default=True)
    overlap_p2p_comm_warmup_flush: bool = _option("--overlap-p2p-communication-warmup-flush", default=False)
    overlap_param_gather_with_optimizer_step: bool = False
    tp_comm_overlap: bool = False
    use_sharp: bool = False

    # Optimizer.
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    main_grads_dtype: str = "fp32"
    main_params_dtype: str = "fp32"
    num_distributed_optimizer_instances: int = 1
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0
    use_layer_wise_param_layout: bool = _option("--no-use-layer-wise-param-layout", default=True)
    use_precision_aware_optimizer: bool = False

    # Sharded parameters.
    data_parallel_sharding_strategy: str = "no_shard"
    """`no_shard`, `optim`, `optim_grads` or `optim_grads_params`, which is Megatron's default from 0.18 on."""
    fsdp_double_buffer: bool = False
    keep_fp8_transpose_cache: bool = False
    megatron_fsdp_grad_comm_dtype: str = "auto"
    """Type in which Megatron-FSDP reduces gradients. `auto` = type of `megatron_fsdp_main_grads_dtype`."""
    megatron_fsdp_main_grads_dtype: str = "auto"
    """Type in which Megatron-FSDP accumulates gradients. `auto` = type of the weights."""
    nccl_ub: bool = _option("--use-nccl-ub", default=False)
    outer_dp_sharding_strategy: str = "no_shard"
    suggested_communication_unit_size: int | None = None
    """Number of parameters whose gradients are reduced together. Parameters are gathered ahead in twice this number."""
    use_megatron_fsdp: bool = False

    # Options of the activations that a forward keeps for the backward, on the device or on the host.
    activation_offload_fraction: float = 1.0
    """Share of the modules, in each chunk, whose activations are offloaded. The last modules stay on the device."""
    cpu_offloading_num_layers: int = 0
    defer_embedding_wgrad_compute: bool = False
    delta_offload_bytes_across_pp_ranks: int = 0
    """Bytes that each next pipeline rank keeps on the device instead of offloading them."""
    distribute_saved_activations: bool = False
    fine_grained_activation_offloading: bool = False
    min_offloaded_tensor_size: int = 1 << 20
    """Least number of elements of an offloaded tensor."""
    offload_modules: tuple[str, ...] = ()
    """Modules whose inputs `fine_grained_activation_offloading` moves to the host."""
    wgrad_deferral_limit: int = 0
    """Number of micro-batches whose embedding gradients may be deferred. 0 = all micro-batches of a step."""

    # CUDA graphs.
    cuda_graph_impl: str = "none"
    cuda_graph_modules: tuple[str, ...] = ()
    """Parts of a layer with CUDA graphs. Before 0.18 this option had the name `cuda_graph_scope`."""
    cuda_graph_scope: tuple[str, ...] = ()
    cuda_graph_scope_deprecated: tuple[str, ...] = field(default=(), metadata={"flag": "--cuda-graph-scope"})
    """Destination of the flag `--cuda-graph-scope` from 0.18 on."""
    enable_cuda_graph: bool = False
    external_cuda_graph: bool = False
    inference_cuda_graph_scope: str | None = None
    """`none`, `layer` or `block`. With `block`, graphs of blocks for inference replace graphs of whole layers."""

    # Experts.
    moe_aux_loss_coeff: tuple[float, ...] = (0.0,)
    moe_combine_bwd_dtype: str = "bf16"
    moe_dispatch_fwd_dtype: str = "bf16"
    moe_enable_deepep: bool = False
    moe_expert_capacity_factor: float | None = None
    moe_expert_rank_capacity_factor: float | None = None
    """Rows for which each rank allocates buffers, divided by the rows of balanced routing."""
    moe_flex_dispatcher_backend: str = "deepep"
    moe_grouped_gemm: bool = False
    moe_input_jitter_eps: float | None = None
    moe_pad_experts_for_cuda_graph_inference: bool = False
    moe_pad_expert_input_to_capacity: bool = False
    moe_paged_stash: bool = False
    moe_paged_stash_buffer_size_factor_cuda: float = 1.1
    moe_permute_fusion: bool = False
    moe_router_dtype: str | None = None
    moe_router_force_load_balancing: bool = False
    moe_router_fusion: bool = False
    moe_router_group_topk: int | None = None
    moe_router_load_balancing_type: tuple[str, ...] = ("aux_loss",)
    moe_router_num_groups: int | None = None
    moe_router_padding_for_fp8: bool = False
    moe_router_padding_for_quantization: bool = False
    moe_router_pre_softmax: bool = False
    moe_router_score_function: str = "softmax"
    moe_shared_expert_overlap: bool = False
    moe_token_dispatcher_type: str = "allgather"  # noqa: S105  this token is text, not a password
    moe_use_legacy_grouped_gemm: bool = False
    moe_z_loss_coeff: float | None = None
    use_fused_weighted_squared_relu: bool = False

    # Options of batches, and of the loading of batches.
    create_attention_mask_in_dataloader: bool = _option("--no-create-attention-mask-in-dataloader", default=True)
    dataloader_inter_document_masking: bool = False
    """From Megatron 0.19 on, batches contain boundaries of documents instead of a mask."""
    dataloader_type: str | None = None
    decrease_batch_size_if_needed: bool = False
    eval_global_batch_size: int | None = None
    eval_micro_batch_size: int | None = None
    freeze_all_layers: bool = False
    """True if a step runs only forwards, for the logits of a teacher."""
    num_workers: int = 2
    """Data loader processes of each rank that loads data."""
    padded_vocab_size: int = 0
    """Vocabulary size with padding. 0 = no flag sets the padded size."""
    rampup_batch_size: tuple[int, ...] = ()
    """Batch size ramp-up: first batch size, increment, and number of samples of the ramp-up.

    Without a ramp-up, the tuple is empty.
    """
    sft: bool = False

    @property
    def graphs(self) -> CudaGraphs:
        """CUDA graphs that the options request.

        Three flags select an implementation, and three flags select modules. From 0.18 on, the module `full_iteration`
        of both flags selects an implementation too (cuda_graph_config.py).
        """
        impl = LOCAL if self.enable_cuda_graph else ENGINE if self.external_cuda_graph else self.cuda_graph_impl
        migrated = {*self.cuda_graph_modules, *self.cuda_graph_scope_deprecated}
        modules = {*migrated, *self.cuda_graph_scope} - {"full"}
        named = frozenset(modules - {ITERATION, _IN_INFERENCE})
        if (impl == LOCAL and ITERATION in modules) or (impl == "none" and ITERATION in migrated):
            return CudaGraphs(ITERATION, named)
        in_inference = self.inference_cuda_graph_scope == "block" or _IN_INFERENCE in modules
        if impl == LOCAL and in_inference and not named:
            return CudaGraphs("none", named)
        return CudaGraphs(impl, frozenset(modules - {_IN_INFERENCE}))


_OPTIONS = {option.name: option for option in fields(PerformanceOptions)}


def flag_of(option: str) -> str:
    """Return the flag that sets an option, for messages: `fp8` -> `--fp8-format`.

    Raise KeyError for an unknown option.
    """
    return str(_OPTIONS[option].metadata.get("flag", f"--{option.replace('_', '-')}"))


def allocator_options(config: str) -> dict[str, str]:
    """Split `a:1,b:[64:8,>:1]` into names and values. The last of several values counts."""
    items = (item.partition(":") for item in re.split(r",(?![^\[]*\])", config))
    return {name: value for name, _, value in items if name}


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Number of samples of one optimizer step (global batch size), which is equal for all layouts."""

    global_batch_size: int
    earlier_sizes: tuple[int, ...] = ()
    """Number of samples of earlier steps, if `--step-batch-size-schedule` changes the number during the training."""

    def __post_init__(self) -> None:
        check_numbers(self, "global_batch_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A Megatron training job, read from a command line for a given number of ranks."""

    model: ModelSpec
    batch: Batch
    own: Layout
    """Layout of the user's own configuration, or its substitute if Megatron would refuse the configuration."""
    pinned: tuple[str, ...]
    """Sorted names of the layout fields that a plan must not change, because of `--pipette-fix` or a checkpoint."""
    notes: tuple[str, ...]
    """Reasons for pinned and assumed values, one sentence each. Screen and plan file show the sentences."""
    megatron_version: str
    """Release whose flags the script takes, such as `0.16.1`."""
    grad_reduce_in_bf16: bool
    optimizer: str
    log_interval: int
    train_iters: int | None
    options: PerformanceOptions = field(hash=False)
    """Megatron's options that affect time, memory or legality, with the defaults of the job's release."""
    performance_flags: tuple[str, ...]
    """Sorted flags of these options and of the options without a formula, as `--flag value`, for notes and digests."""
    cublas_workspace_config: str = ""
    """CUBLAS_WORKSPACE_CONFIG of the workers, which sets the size of cuBLAS's buffers.

    The text is empty if the environment does not set the variable.
    """
    allocator_config: str = ""
    """Options of torch's CUDA allocator in the workers' environment, without blanks.

    The text is empty if the environment does not set the variable.
    """
    compute_capability: float | None = None
    """CUDA's compute capability of the GPUs, such as 8.9. None = unknown."""
    own_refusal: str = ""
    """Reason why Megatron refuses the user's own configuration.

    `own` is a substitute if Megatron refuses the configuration. The reason is empty if Megatron accepts the
    configuration.
    """

    @property
    def release(self) -> tuple[int, ...]:
        """Major and minor number of the Megatron release: `0.16.1` -> (0, 16)."""
        return tuple(int(part) for part in self.megatron_version.split(".")[:2] if part.isdigit())
