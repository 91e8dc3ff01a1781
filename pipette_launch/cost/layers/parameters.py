"""How many parameters of the model lie on one rank, chunk by chunk, and which group reduces their gradients."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.layers import attention, experts
from pipette_launch.cost.layers.activations import computes_in_fp8
from pipette_launch.cost.layers.mamba import mamba_parameters
from pipette_launch.facts.job import OPTIMIZER_STATE_BYTES, SHARDS_GRADIENTS, Job
from pipette_launch.facts.layout import Ints, Layout, LayoutColumns
from pipette_launch.facts.measurements import Measurements
from pipette_launch.facts.model import KINDS_WITH_EXPERTS, TRANSFORMER_KINDS, LayerKind, ModelSpec
from pipette_launch.megatron.performance import performance_options


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Parameters on one rank, by who shares them."""

    dense: int
    """Everything but experts: gradients are reduced over dp * cp."""
    expert: int = 0
    """Experts: gradients are reduced over the expert data-parallel group."""

    def __add__(self, other: Parameters) -> Parameters:
        """Add two parts of one rank."""
        return Parameters(dense=self.dense + other.dense, expert=self.expert + other.expert)

    @property
    def count(self) -> int:
        """All of them."""
        return self.dense + self.expert


@overload
def expert_dp(layout: Layout) -> int: ...
@overload
def expert_dp(layout: LayoutColumns) -> Ints: ...
def expert_dp(layout: Layout | LayoutColumns) -> int | Ints:
    """Ranks that hold the same experts: world / (etp * ep * pp)."""
    return layout.tp * layout.cp * layout.dp * layout.pp // (layout.etp * layout.ep * layout.pp)


@overload
def experts_lie_in_stages(layout: Layout) -> bool: ...
@overload
def experts_lie_in_stages(layout: LayoutColumns) -> NDArray[np.bool_]: ...
def experts_lie_in_stages(layout: Layout | LayoutColumns) -> bool | NDArray[np.bool_]:
    """Whether each expert group lies in one pipeline stage; in the rank order tp-pp-dp it may not."""
    return (layout.use_tp_pp_dp_mapping == 0) | (layout.ep * layout.etp == layout.tp * layout.cp)


def layer_parameters(model: ModelSpec, layout: Layout, *, moe: bool) -> Parameters:
    """Count one transformer layer on one rank: attention, MLP or experts, two norms.

    Columns (QKV, first MLP matrix) split weight and bias over tp; rows (projection, second matrix) split the weight
    only. Norms and the router are on every rank.
    """
    dense = _attention(model, layout.tp) + 2 * model.norm_parameters()
    if not moe:
        return Parameters(dense=dense + _mlp(model, model.ffn_hidden_size, layout.tp))
    dense += experts.router_parameters(model)
    if model.moe_shared_expert_intermediate_size:
        dense += _mlp(model, model.moe_shared_expert_intermediate_size, layout.tp)
    local_experts = (model.num_experts or 0) // layout.ep
    return Parameters(dense=dense, expert=local_experts * _mlp(model, model.moe_ffn_hidden_size, layout.etp))


def kind_parameters(model: ModelSpec, layout: Layout, kind: LayerKind) -> Parameters:
    """Count one layer of any kind on one rank; those of hybrid models have one norm and one block."""
    norm, has_experts = model.norm_parameters(), kind in KINDS_WITH_EXPERTS
    if has_experts and not model.num_experts:
        return Parameters(dense=0)
    if kind in TRANSFORMER_KINDS:
        return layer_parameters(model, layout, moe=has_experts)
    if kind == "mamba_layer":
        assert model.hybrid is not None
        return Parameters(dense=mamba_parameters(model, model.hybrid, layout.tp) + norm)
    block = _attention(model, layout.tp)
    if kind == "attention_layer":
        return Parameters(dense=block + norm)
    whole = layer_parameters(model, layout, moe=has_experts)
    return Parameters(dense=whole.dense - block - norm, expert=whole.expert)


def word_embedding_parameters(model: ModelSpec, tp: int) -> int:
    """Rows of the padded vocabulary that one rank holds, times the hidden size."""
    return model.padded_vocab_size(tp) // tp * model.hidden_size


def has_two_embeddings(model: ModelSpec) -> bool:
    """Return whether a second stage holds the word embedding too, so that gradients are summed over both.

    A tied head needs it, and so does multi-token prediction (megatron-core, finalize_model_grads.py:146).
    """
    return model.mtp_num_layers > 0 or not model.untie_embeddings_and_output_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitParameters:
    """Parameters of what chunks are made of, on one rank."""

    layers: dict[LayerKind, Parameters]
    """Of every kind that the model may have; nothing for kinds with experts where it has none."""
    embedding: Parameters
    """What the first chunk has besides its layers."""
    head: Parameters
    """Final norm and head, on the last chunk."""
    prediction: Parameters
    """All depths of multi-token prediction, with their copy of the embedding if there are several stages."""


def unit_parameters(model: ModelSpec, layout: Layout) -> UnitParameters:
    """Return what `chunk_parameters` adds up; of the layout only tp, ep, etp and whether pp is above 1 matter.

    With tied embeddings and more than one pipeline rank the last chunk holds a copy of the word embedding
    (megatron-core, setup_embeddings_and_output_layer).
    """
    layers = {kind: kind_parameters(model, layout, kind) for kind in model.possible_kinds}
    words = word_embedding_parameters(model, layout.tp)
    learned = model.position_embedding_type == "learned_absolute"
    embedding = words + (model.max_position_embeddings * model.hidden_size if learned else 0)
    has_own_words = model.untie_embeddings_and_output_weights or layout.pp > 1
    head = Parameters(dense=model.norm_parameters() + (words if has_own_words else 0))
    prediction = Parameters(dense=0)
    if model.mtp_num_layers:
        # Each depth of multi-token prediction has a layer, and a chunk that is not the first embeddings to look up,
        # beside the head's copy of a tied embedding (megatron-core, gpt_model.py:149-157, 240-254).
        depth = sum((layers[kind] for kind in model.prediction_kinds), Parameters(dense=0))
        own, copies = attention.prediction_parameters(model, layout), model.prediction_copies
        copied = embedding if layout.pp > 1 else 0
        prediction = Parameters(dense=copies * (depth.dense + own) + copied, expert=copies * depth.expert)
    return UnitParameters(layers=layers, embedding=Parameters(dense=embedding), head=head, prediction=prediction)


def chunk_parameters(model: ModelSpec, layout: Layout) -> tuple[Parameters, ...]:
    """Count every chunk in model order: embeddings on the first, final norm and head on the last.

    If the first of several chunks has the depths of multi-token prediction, they look up its own embedding.
    """
    unit = unit_parameters(model, layout)
    kinds = [kinds for kinds, _ in chunk_kinds(model, layout)]
    counted = {each: Counter(each) for each in set(kinds)}
    of_kinds = {
        each: Parameters(
            dense=sum(unit.layers[kind].dense * count for kind, count in counts.items()),
            expert=sum(unit.layers[kind].expert * count for kind, count in counts.items()),
        )
        for each, counts in counted.items()
    }
    chunks = [of_kinds[each] for each in kinds]
    if layout.pp == 1 or layout.mtp_chunk or not model.mtp_num_layers:
        chunks[0] += unit.embedding
    chunks[-1] += unit.head
    chunks[layout.mtp_chunk] += unit.prediction
    return tuple(chunks)


def chunk_kinds(model: ModelSpec, layout: Layout) -> list[tuple[tuple[LayerKind, ...], int]]:
    """Return the kinds of each chunk's layers in model order, and how many of the first full recompute runs again."""
    kinds, recompute, chunks, first = model.layer_kinds, layout.recompute, [], 0
    for layers in layout.chunk_layers(model.num_layers):
        again = layers if recompute.method == "uniform" else min(recompute.num_layers, layers)
        chunks.append((kinds[first : first + layers], again if recompute.granularity == "full" else 0))
        first += layers
    return chunks


def stage_parameters(model: ModelSpec, layout: Layout) -> tuple[Parameters, ...]:
    """Count every pipeline rank, all its chunks together."""
    return by_rank(chunk_parameters(model, layout), layout.pp)


def by_rank(chunks: tuple[Parameters, ...], pp: int) -> tuple[Parameters, ...]:
    """Add up the chunks of each pipeline rank."""
    return tuple(sum(chunks[rank::pp], Parameters(dense=0)) for rank in range(pp))


def _attention(model: ModelSpec, tp: int) -> int:
    if model.latent_attention:
        return attention.attention_parameters(model, model.latent_attention, tp)
    query = model.num_attention_heads * model.kv_channels // tp
    # With fewer groups than ranks, each rank holds a whole group (megatron-core, attention.py).
    key_value = 2 * max(1, model.num_query_groups // tp) * model.kv_channels
    bias = (query + key_value if model.add_bias_linear or model.add_qkv_bias else 0) + (
        model.hidden_size if model.add_bias_linear else 0
    )
    # Norms of one head's query and key (megatron-core, attention.py, q_layernorm and k_layernorm).
    norms = 2 * model.kv_channels * (2 if model.normalization == "LayerNorm" else 1) if model.qk_layernorm else 0
    return model.hidden_size * (query + key_value + query) + bias + norms


def _mlp(model: ModelSpec, ffn_hidden_size: int, tp: int) -> int:
    second = ffn_hidden_size // tp
    first = second * (2 if model.gated_linear_unit else 1)
    bias = first + model.hidden_size if model.add_bias_linear else 0
    return model.hidden_size * (first + second) + bias


_LEAST_UNIT = 1_000_000_000
"""Parameters that wait for their reduction at once where no flag says how many (FSDP megatron_fsdp.py:375-399)."""
_BUCKET = 40_000_000
"""Parameters of a bucket where layers are no units (distributed_data_parallel.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """What each data-parallel rank holds a share of: experts over their own ranks, everything else over dp * cp."""

    weights: bool
    """Layers are gathered for each pass of each micro-batch, and dropped behind it."""
    gradients: bool
    """They are reduced in every micro-batch."""
    states: bool
    keeps_ends: bool
    """Embedding and head are gathered once a step and stay."""
    gathers_twice: bool
    """In the backward once more."""


def sharding_of(job: Job) -> Sharding | None:
    """Read how the job's own flags shard it; None without FSDP.

    Megatron-FSDP: FSDP param_and_grad_buffer.py:1846-1865. torch FSDP2 wraps layers, embedding and head, each a unit
    (megatron/core/distributed/torch_fully_sharded_data_parallel.py).
    """
    options = performance_options(job)
    if options.use_megatron_fsdp:
        strategy = options.data_parallel_sharding_strategy
        return Sharding(
            weights=strategy == "optim_grads_params",
            gradients=strategy in SHARDS_GRADIENTS,
            states=strategy != "no_shard",
            keeps_ends=True,
            gathers_twice=True,
        )
    if options.use_torch_fsdp2:
        twice = options.torch_fsdp2_reshard_after_forward
        return Sharding(weights=True, gradients=True, states=True, keeps_ends=False, gathers_twice=twice)
    return None


def shard_copies(job: Job) -> int:
    """Count the copies of what Megatron-FSDP shards, each over its share of the data-parallel ranks."""
    options = performance_options(job)
    return options.num_distributed_optimizer_instances if options.use_megatron_fsdp else 1


def layer_weight_bytes(job: Job) -> tuple[int, int]:
    """Return the bytes of a layer's parameter in a shard, and in what is gathered.

    With `--fp8-param-gather` both are FP8; MXFP8 has one shard for rows and one for columns, and gathers the rows for
    the forward and the columns for the backward. torch FSDP2 gathers no FP8 (arguments.py, validate_args).
    """
    options = performance_options(job)
    wide = job.model.dtype_bytes
    if not (options.use_megatron_fsdp and options.fp8_param_gather and computes_in_fp8(job)):
        return wide, wide
    return 2 if options.fp8_recipe == "mxfp8" else 1, 1


def end_parameters(model: ModelSpec, layout: Layout) -> tuple[int, int]:
    """Count the parameters outside the layers on one rank: of the embedding, and of head and final norm."""
    unit = unit_parameters(model, layout)
    depth = sum(unit.layers[kind].dense for kind in model.prediction_kinds)
    return unit.embedding.dense, unit.head.dense + unit.prediction.dense - model.prediction_copies * depth


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Bytes that stand whole beside the shards."""

    weights: int = 0
    """Layers at work or gathered ahead, and the ends of the model."""
    gradients: int = 0
    """When the backward reaches the last layer: of that layer, of the head, and of an embedding that is the head."""
    layer_gradients: int = 0
    """Of one layer."""
    layer_weights: int = 0
    """Of one layer that is gathered."""
    waiting: int = 0
    """So many further layers' gradients wait for their reduction, while as many layers as before are gathered."""
    waiting_at_end: int = 0
    """So many more wait while gathered layers become fewer, one for each, as none is left to gather ahead."""


def whole_beside_shards(job: Job, layout: Layout, gradient: int) -> Whole:
    """Count what one rank of a sharded job holds whole; `gradient` bytes for each gradient.

    Megatron-FSDP gathers layers ahead until they have half of `--suggested-communication-unit-size`, and frees reduced
    gradients only before the next bucket's reduction, once more than so many parameters wait; `--fsdp-double-buffer`
    keeps two layers of each (FSDP param_and_grad_buffer.py:3084-3131, 3493-3560, 651-800). A weight that embedding and
    head share is reduced when the backward is over (megatron_fsdp.py:767). torch FSDP2 holds two units of each.
    """
    sharding = sharding_of(job)
    if sharding is None or not sharding.gradients:
        return Whole()
    options, model = performance_options(job), job.model
    units = unit_parameters(model, layout)
    layer = max(units.layers[kind].count for kind in model.layer_kinds)
    embedding, head = end_parameters(model, layout)
    _, gathered = layer_weight_bytes(job)
    if not options.use_megatron_fsdp:
        both = layer + max(layer, head)
        return Whole(weights=both * gathered, gradients=both * gradient)
    num_layers = model.num_layers + model.mtp_num_layers
    if not sharding.weights:
        return _whole_buckets(job, num_layers * layer + embedding + head, layer, gradient)
    last_ends = head if model.untie_embeddings_and_output_weights else head + embedding
    size = options.suggested_communication_unit_size or max(_LEAST_UNIT, 2 * layer)
    ahead, waiting, own = -(-(size // 2) // layer), 1 + max(0, size - head) // layer, 1
    if options.fsdp_double_buffer or options.nccl_ub:
        ahead, waiting, own = 1, 0, min(2, num_layers)
    at_once = 1 + min(ahead, num_layers - 1)
    waiting = min(waiting, num_layers - own)
    early = min(waiting, num_layers - at_once)
    return Whole(
        weights=layer * at_once * gathered + (embedding + head) * model.dtype_bytes,
        gradients=(own * layer + last_ends) * gradient,
        layer_gradients=layer * gradient,
        layer_weights=layer * gathered,
        waiting=early,
        waiting_at_end=waiting - early,
    )


def _whole_buckets(job: Job, total: int, layer: int, gradient: int) -> Whole:
    """Count whole gradients where layers are no units: in buckets, or all in one unless their reduction overlaps.

    That flag stays as the user has it under FSDP. `--ddp-bucket-size` and `--ddp-num-buckets` are left out, and that
    buckets grow beyond 40 replicas.
    """
    bucket = min(_BUCKET, total) if job.own.overlap_grad_reduce else total
    size = performance_options(job).suggested_communication_unit_size or _LEAST_UNIT
    waiting = min((1 + size // bucket) * bucket, total - bucket)
    return Whole(gradients=bucket * gradient, layer_gradients=layer * gradient, waiting=waiting // layer)


Floats = NDArray[np.float64]
IntOrInts = int | Ints
_FP32_BYTES = 4
_STATE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_REMAINDER_BYTES = 2
_SHARD_ALIGNMENT = 128
_BUSBW_ALIGNMENT = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class OnceAStep:
    """What a slot of speed 1 does once a step, after its gradients are reduced or before its first pass."""

    optimizer_s_per_parameter: float
    gradient_s_per_byte: float
    host_s: float

    @classmethod
    def of(cls, measurements: Measurements) -> OnceAStep:
        """Take what was measured; what was not counts as 0 s."""
        return cls(
            optimizer_s_per_parameter=measurements.optimizer_s_per_parameter or 0.0,
            gradient_s_per_byte=measurements.gradient_s_per_byte,
            host_s=measurements.step_s,
        )

    def seconds(self, resident: Ints, gradient_bytes: Ints) -> Floats:
        """Price ranks that step `resident` parameters, and hold so many bytes of gradients whoever steps them."""
        return self.optimizer_s_per_parameter * resident + self.gradient_s_per_byte * gradient_bytes + self.host_s


def gradient_bytes_per_parameter(job: Job) -> int:
    """Return 4 for fp32 accumulation, which bf16 forces unless reduced in bf16; 2 for fp16.

    torch FSDP2 reduces and keeps gradients in the weights' type.
    """
    if performance_options(job).use_torch_fsdp2:
        return job.model.dtype_bytes
    if job.model.params_dtype == "fp16":
        return _FP32_BYTES if performance_options(job).accumulate_allreduce_grads_in_fp32 else 2
    return 2 if job.grad_reduce_in_bf16 else _FP32_BYTES


def buffered_parameters(job: Job, dense: IntOrInts, expert: IntOrInts, layout: Layout | LayoutColumns) -> Ints:
    """Count the elements of the flat buffers for weights and gradients, padded so that all shards are equal.

    With the distributed optimizer a bucket ends at a multiple of lcm(d*c, 128), and of 2^16 too with
    `--ddp-pad-buckets-for-high-nccl-busbw` (MC distributed/param_and_grad_buffer.py:638-666). Counted as one bucket for
    the dense and one for the experts' parameters; that each parameter starts at a multiple of 64 is left out.
    """
    parts = padded(job, dense, layout.dp * layout.cp) + padded(job, expert, expert_dp(layout))
    return np.where(layout.use_distributed_optimizer, parts, dense + expert)


def weight_bytes(
    job: Job, dense: IntOrInts, expert: IntOrInts, ends: IntOrInts, layout: Layout | LayoutColumns
) -> Ints:
    """Count the bytes of the weights that one rank keeps: all of its own, or under FSDP a shard.

    Args:
        job: its flags say whether weights are sharded.
        dense: parameters of one rank that are no experts.
        expert: its experts.
        ends: of the dense ones those outside the layers, which are never in FP8.
        layout: who shares them.

    """
    sharding = sharding_of(job)
    if sharding is None or not sharding.weights:
        return buffered_parameters(job, dense, expert, layout) * job.model.dtype_bytes
    replicas = layout.dp * layout.cp
    layers = shard(job, dense - ends, replicas) + shard(job, expert, expert_dp(layout))
    return layers * layer_weight_bytes(job)[0] + shard(job, ends, replicas) * job.model.dtype_bytes


def held_gradients(job: Job, dense: IntOrInts, expert: IntOrInts, layout: Layout | LayoutColumns) -> Ints:
    """Count the gradients that one rank keeps from micro-batch to micro-batch, without padding."""
    sharding = sharding_of(job)
    if sharding is None or not sharding.gradients:
        return np.asarray(dense + expert)
    return shard(job, dense, layout.dp * layout.cp) + shard(job, expert, expert_dp(layout))


def resident_parameters(job: Job, dense: IntOrInts, expert: IntOrInts, layout: Layout | LayoutColumns) -> Ints:
    """Count the parameters whose optimizer state one rank holds.

    The distributed optimizer shards them over d*c, experts over their own data-parallel group; with
    `--num-distributed-optimizer-instances` each instance shards for itself, unless FSDP shards states over all.
    """
    sharding, options = sharding_of(job), performance_options(job)
    across = options.use_megatron_fsdp and options.outer_dp_sharding_strategy == "optim"
    parts = shard(job, dense, layout.dp * layout.cp, across=across)
    parts = parts + shard(job, expert, expert_dp(layout), across=across)
    return np.where(sharding.states if sharding else layout.use_distributed_optimizer, parts, dense + expert)


def padded(job: Job, counts: IntOrInts, num_shards: IntOrInts) -> Ints:
    """Pad buckets of so many elements for so many shards; see `buffered_parameters`."""
    extra = _BUSBW_ALIGNMENT if performance_options(job).ddp_pad_buckets_for_high_nccl_busbw else 1
    multiple = np.lcm(np.lcm(num_shards, _SHARD_ALIGNMENT), extra)
    return np.asarray(-(-counts // multiple) * multiple)


def shard(job: Job, counts: IntOrInts, num_shards: IntOrInts, *, across: bool = False) -> Ints:
    """Give one rank its share of so many elements, rounded up, `across` all instances of the optimizer or within one.

    See `resident_parameters`.
    """
    instances = 1 if across else performance_options(job).num_distributed_optimizer_instances
    return np.asarray(-(-counts // np.maximum(1, num_shards // instances)))


def optimizer_bytes(job: Job, dense: IntOrInts, expert: IntOrInts, layout: Layout | LayoutColumns) -> tuple[Ints, Ints]:
    """Count the optimizer's states on one rank, and the temporaries of its step.

    Temporaries: torch's foreach Adam, which runs without TransformerEngine, 4 bytes a parameter; gradients that are not
    fp32 are copied to fp32, 4 bytes. The precision-aware optimizer copies each state that is not fp32 to fp32 instead,
    of all parameters of its group at once; dense and expert parameters are stepped one after the other (TE 2.8,
    optimizers/fused_adam.py, step). Optimizers other than Adam and SGD are counted as Adam.
    """
    resident = resident_parameters(job, dense, expert, layout)
    options = performance_options(job)
    offloaded = options.optimizer_offload_fraction if options.optimizer_cpu_offload else 0.0
    states = np.rint(resident * (state_bytes_per_parameter(job) * (1 - offloaded))).astype(np.int64)
    step = 0 if job.model.transformer_impl == "transformer_engine" or job.optimizer == "sgd" else _FP32_BYTES
    if gradient_bytes_per_parameter(job) != _FP32_BYTES and not options.use_precision_aware_optimizer:
        step += _FP32_BYTES
    groups = (resident_parameters(job, dense, 0, layout), resident_parameters(job, 0, expert, layout))
    copies = _FP32_BYTES * sum(size != _FP32_BYTES for size in _chosen_state_bytes(job))
    return states, resident * step + np.maximum(*groups) * copies


def state_bytes_per_parameter(job: Job) -> int:
    """Bytes of the optimizer's states for one parameter that it holds.

    Adam keeps two moments of 4 bytes and, for 2-byte weights, an fp32 copy of 4; SGD keeps one momentum of 4. The
    precision-aware optimizer keeps moments in chosen types, and of a bf16 weight's fp32 copy only the lower half, as
    the weight itself is the upper one (MC optimizer/__init__.py:365-390, optimizer_config.py:192, 351-384).
    """
    if job.optimizer == "sgd" or not performance_options(job).use_precision_aware_optimizer:
        states = OPTIMIZER_STATE_BYTES.get(job.optimizer, OPTIMIZER_STATE_BYTES["adam"])
        return states + (0 if job.model.params_dtype == "fp32" else _FP32_BYTES)
    return sum(_chosen_state_bytes(job)) + (_REMAINDER_BYTES if _keeps_remainders(job) else 0)


def step_bytes_per_parameter(job: Job) -> int:
    """Bytes that the optimizer's step reads and writes for one parameter that it holds.

    Its gradient is read for the norm and for the step, each state is read and written, the weight is written: 8 + 24 +
    2 for Adam on 16-bit weights. A weight that is all or half of its own fp32 copy is read too. A state in a chosen
    type is copied to fp32 first, and back (see `optimizer_bytes`). Only the precision-aware optimizer reads gradients
    that are not fp32 as they are; others read the fp32 copy, and making that is not counted.
    """
    is_aware = performance_options(job).use_precision_aware_optimizer
    gradient = gradient_bytes_per_parameter(job) if is_aware else _FP32_BYTES
    is_own_copy = job.model.params_dtype == "fp32" or _keeps_remainders(job)
    weight = (2 if is_own_copy else 1) * job.model.dtype_bytes
    copied = sum(2 * (size + _FP32_BYTES) for size in _chosen_state_bytes(job) if size != _FP32_BYTES)
    narrow = sum(_FP32_BYTES - size for size in _chosen_state_bytes(job))
    return 2 * gradient + 2 * (state_bytes_per_parameter(job) + narrow) + weight + copied


def _keeps_remainders(job: Job) -> bool:
    """Whether a bf16 weight is the upper half of its fp32 copy, of which the optimizer keeps the lower one alone."""
    options = performance_options(job)
    wide = _STATE_BYTES.get(options.main_params_dtype, _FP32_BYTES) == _FP32_BYTES
    return options.use_precision_aware_optimizer and job.model.params_dtype == "bf16" and wide


def _chosen_state_bytes(job: Job) -> tuple[int, ...]:
    """Bytes of each state in a type that the precision-aware optimizer was given: moments, and whole fp32 copies."""
    options = performance_options(job)
    if not options.use_precision_aware_optimizer or job.optimizer == "sgd":
        return ()
    types = [options.exp_avg_dtype, options.exp_avg_sq_dtype]
    if job.model.params_dtype != "fp32" and not _keeps_remainders(job):
        types.append(options.main_params_dtype)
    return tuple(_STATE_BYTES.get(dtype, _FP32_BYTES) for dtype in types)
