"""Number of parameters on one rank, their sharding, and the bytes of weights, gradients and optimizer states.

With bf16 weights, fp32 gradients, Adam and the distributed optimizer, a rank holds 6 + 12/(d*c) bytes a parameter, d =
dp and c = cp (Rajbhandari et al. 2020, ZeRO, section 5.1). MC = megatron/core of core_v0.16.1; FSDP = MC
distributed/fsdp/src/megatron_fsdp.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.layers.block import FP32_BYTES, Parameters, narrow_bits, narrow_layers
from pipette_launch.cost.layers.ends import depth_parameters
from pipette_launch.cost.layers.kinds import blocks_of, kind_parameters
from pipette_launch.cost.layers.loads import Product
from pipette_launch.facts.job import OPTIMIZERS, SHARDS_GRADIENTS, Job
from pipette_launch.facts.layout import Floats, Ints, Layout, LayoutColumns
from pipette_launch.facts.measurements import Measurements
from pipette_launch.facts.model import LayerKind, ModelSpec

IntOrInts = int | Ints
_TYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_REMAINDER_BYTES = 2
_SHARD_ALIGNMENT = 128
_BUSBW_ALIGNMENT = 1 << 16
_LEAST_UNIT = 1_000_000_000
"""Number of parameters that may wait for their reduction without a flag (FSDP megatron_fsdp.py:375-399)."""
_BUCKET = 40_000_000
"""Number of parameters in a bucket if layers are not units of FSDP (MC distributed/distributed_data_parallel.py)."""
_PACKED = (1.1, 4 / 3)
"""Buffer sizes divided by parameters, dense and of experts, if overlap cuts shards of whole matrices into buckets.

Megatron's own packing of 23 models and numbers of ranks gave 1.05 to 1.46 and 1.01 to 1.67.
"""
_ONE_SCALE = ("delayed", "tensorwise")
"""FP8 recipes with one scale for each tensor."""
_ANY_LAYOUT = (10, 11)
"""Major compute capabilities of GPUs that multiply transposed FP8 matrices."""
_FIRST_OWN_GRADIENTS = (0, 19)
"""First release in which only Megatron-FSDP's own flags choose the type of its gradients."""


@overload
def expert_dp(layout: Layout) -> int: ...
@overload
def expert_dp(layout: LayoutColumns) -> Ints: ...
def expert_dp(layout: Layout | LayoutColumns) -> int | Ints:
    """Return the number of ranks that hold the same experts: world / (etp * ep * pp)."""
    return layout.tp * layout.cp * layout.dp * layout.pp // (layout.etp * layout.ep * layout.pp)


@overload
def experts_lie_in_stages(layout: Layout) -> bool: ...
@overload
def experts_lie_in_stages(layout: LayoutColumns) -> NDArray[np.bool_]: ...
def experts_lie_in_stages(layout: Layout | LayoutColumns) -> bool | NDArray[np.bool_]:
    """Return True if each expert group is inside one pipeline stage, which rank order tp-pp-dp does not ensure."""
    return (layout.use_tp_pp_dp_mapping == 0) | (layout.ep * layout.etp == layout.tp * layout.cp)


def word_embedding_parameters(model: ModelSpec, tp: int) -> int:
    """Count the parameters of one rank's part of the word embedding, whose vocabulary is padded."""
    return model.padded_vocab_size(tp) // tp * model.hidden_size


def has_two_embeddings(model: ModelSpec) -> bool:
    """Return True if a second stage holds the word embedding, so that gradients are summed over both stages.

    A tied head and multi-token prediction need the word embedding (MC distributed/finalize_model_grads.py:146).
    """
    return model.mtp_num_layers > 0 or not model.untie_embeddings_and_output_weights


class UnitParameters(NamedTuple):
    """Number of parameters on one rank for each unit of a chunk: layers, embedding, head, prediction depths."""

    layers: dict[LayerKind, Parameters]
    """Number of parameters of one layer of each kind; 0 for kinds with experts if the model has no experts."""
    embedding: Parameters
    """Number of parameters of the first chunk's embeddings."""
    head: Parameters
    """Number of parameters of the last chunk's final norm and head."""
    prediction: Parameters
    """Number of parameters of all multi-token prediction depths, with a copy of the embedding if pp is above 1."""


def unit_parameters(job: Job, layout: Layout) -> UnitParameters:
    """Count the parameters of the units of chunks.

    The counts depend only on the layout's tp, ep, etp and whether pp exceeds 1.

    With tied embeddings and more than one pipeline rank the last chunk holds a copy of the word embedding
    (megatron-core, setup_embeddings_and_output_layer).
    """
    model = job.model
    layers = {kind: kind_parameters(job, layout, kind) for kind in model.possible_kinds}
    words = word_embedding_parameters(model, layout.tp)
    learned = model.position_embedding_type == "learned_absolute"
    embedding = words + (model.max_position_embeddings * model.hidden_size if learned else 0)
    has_own_words = model.untie_embeddings_and_output_weights or layout.pp > 1
    prediction = Parameters()
    if model.mtp_num_layers:
        # Each multi-token prediction depth has layers. On a chunk other than the first, the depths also have their own
        # embeddings, beside the head's copy of a tied embedding (MC models/gpt/gpt_model.py:149-157, 240-254).
        depth = sum((layers[kind] for kind in model.prediction_kinds), Parameters())
        depth += Parameters(dense=depth_parameters(model, layout))
        prediction = depth * model.prediction_copies + Parameters(dense=embedding if layout.pp > 1 else 0)
    head = Parameters(dense=model.norm_parameters() + (words if has_own_words else 0))
    return UnitParameters(layers, Parameters(dense=embedding), head, prediction)


def chunk_parameters(job: Job, layout: Layout) -> tuple[Parameters, ...]:
    """Count the parameters of every chunk in model order, with embeddings, final norm and head.

    If the first of several chunks has the depths of multi-token prediction, the depths use this chunk's embedding.
    """
    unit, found = unit_parameters(job, layout), chunk_kinds(job.model, layout)
    # Most chunks have the same layers, so each different list of layers is summed once.
    sums = {
        kinds: sum((unit.layers[kind] * count for kind, count in Counter(kinds).items()), Parameters())
        for kinds in {kinds for kinds, _ in found}
    }
    chunks = [sums[kinds] for kinds, _ in found]
    if layout.pp == 1 or layout.mtp_chunk or not job.model.mtp_num_layers:
        chunks[0] += unit.embedding
    chunks[-1] += unit.head
    chunks[layout.mtp_chunk] += unit.prediction
    return tuple(chunks)


def chunk_kinds(model: ModelSpec, layout: Layout) -> list[tuple[tuple[LayerKind, ...], int]]:
    """Return each chunk's kinds of layers, and the number of first layers that full recompute runs again."""
    kinds, recompute, chunks, first = model.layer_kinds, layout.recompute, [], 0
    for layers in layout.chunk_layers(model.num_layers):
        again = layers if recompute.method == "uniform" else min(recompute.num_layers, layers)
        chunks.append((kinds[first : first + layers], again if recompute.granularity == "full" else 0))
        first += layers
    return chunks


def stage_parameters(job: Job, layout: Layout) -> tuple[Parameters, ...]:
    """Count the parameters of all chunks of each pipeline rank."""
    chunks = chunk_parameters(job, layout)
    return tuple(sum(chunks[rank :: layout.pp], Parameters()) for rank in range(layout.pp))


def end_parameters(job: Job, layout: Layout) -> tuple[int, int]:
    """Count one rank's parameters outside the layers, as a pair: embedding, and head with final norm."""
    unit, model = unit_parameters(job, layout), job.model
    depth = sum(unit.layers[kind].dense for kind in model.prediction_kinds)
    return unit.embedding.dense, unit.head.dense + unit.prediction.dense - model.prediction_copies * depth


def narrow_weight_bytes(job: Job, layout: Layout) -> tuple[int, ...]:
    """Count each pipeline rank's bytes of FP8 or FP4 weights beyond 16 bits, for the matrices of its layers.

    The result is negative if narrow weights replace larger weights. TransformerEngine casts a weight with the first
    micro-batch of a step and keeps the result and its transpose in the module (TE v2.8, module/linear.py:242-262,
    module/base.py get_weight_workspace). With `--fp8-param-gather` the weights themselves are in FP8. Blackwell
    multiplies FP8 of one scale for each tensor without a transpose (TE pytorch/utils.py, is_non_tn_fp8_gemm_supported).
    FP8 without `--fp8-param-gather` has not been checked, because NVIDIA's golden values always use this flag.
    """
    model, options, bits = job.model, job.options, narrow_bits(job)
    are_narrow = options.fp4_param_gather if options.fp4 else options.fp8_param_gather
    if not bits or (are_narrow and options.use_megatron_fsdp):
        return (0,) * layout.pp
    is_alone = bits == 8 and options.fp8_recipe in _ONE_SCALE and int(job.compute_capability or 0) in _ANY_LAYOUT
    extra = bits / 8 * (1 if is_alone else 2) - are_narrow * model.dtype_bytes
    each = {kind: sum(one.matrices() for one in blocks_of(job, layout, kind)) for kind in {*model.layer_kinds}}
    sizes = [each[kind] * is_narrow for kind, is_narrow in zip(model.layer_kinds, narrow_layers(job), strict=True)]
    ends = np.cumsum(layout.chunk_layers(model.num_layers))
    chunks = np.diff(np.cumsum([0, *sizes])[[0, *ends]])
    return tuple(int(extra * sum(chunks[rank :: layout.pp])) for rank in range(layout.pp))


def dummy_gradient_bytes(job: Job, layout: Layout, *, has_head: bool) -> int:
    """Count the bytes of dummy gradients: one tensor in the weights' type for each shape of a rank's matrices.

    Megatron's hooks need a gradient from every matrix. With `gradient_accumulation_fusion`, TransformerEngine adds the
    real gradients to their buffer and returns an uninitialised dummy, allocated once for each shape and never freed (TE
    v2.3 on, pytorch/module/base.py, get_dummy_wgrad). Megatron's own linears use TransformerEngine's dummies with TE
    2.6 or later (tensor_parallel/layers.py:597). `has_head` is True for the last pipeline rank.
    """
    model, options = job.model, job.options
    fused = model.transformer_impl != "local" and options.gradient_accumulation_fusion
    if not fused:
        return 0
    shapes = _matrix_shapes(job, layout.tp, layout.cp, layout.ep, layout.etp)
    if has_head:
        shapes |= {(model.padded_vocab_size(layout.tp) // layout.tp, model.hidden_size)}
    return model.dtype_bytes * sum(rows * columns for rows, columns in shapes)


@lru_cache(maxsize=1024)
def _matrix_shapes(job: Job, tp: int, cp: int, ep: int, etp: int) -> frozenset[tuple[int, int]]:
    """Return the shapes of a rank's matrices, which depend only on these degrees."""
    layout = Layout(tp=tp, cp=cp, ep=ep, etp=etp, dp=ep * etp)
    linears = (one for kind in {*job.model.layer_kinds} for one in _linears(job, layout, kind))
    return frozenset((int(one.n), int(one.k)) for one in linears)


def _linears(job: Job, layout: Layout, kind: LayerKind) -> list[Product]:
    """Return the products of the forward that belong to the matrices of a layer."""
    products = (one for block in blocks_of(job, layout, kind) for one in block.loads().forward.products)
    return [one for one in products if one.is_linear]


class Sharding(NamedTuple):
    """Kinds of data that FSDP splits: expert data over the experts' own replicas, dense data over dp * cp."""

    weights: bool
    """True if a layer's weights are gathered for each pass of each micro-batch, and dropped after the pass."""
    gradients: bool
    """True if gradients are sharded, so that every micro-batch reduces its gradients."""
    states: bool


def sharding_of(job: Job) -> Sharding | None:
    """Return the sharding of Megatron-FSDP that the job's flags choose; None without it.

    The weights of embedding and head are gathered once a step and kept until the step ends (FSDP
    param_and_grad_buffer.py:1846-1865).
    """
    strategy = job.options.data_parallel_sharding_strategy
    if not job.options.use_megatron_fsdp:
        return None
    return Sharding(strategy == "optim_grads_params", strategy in SHARDS_GRADIENTS, strategy != "no_shard")


def shard_copies(job: Job) -> int:
    """Return the number of copies of Megatron-FSDP's shards, each over its share of the data-parallel ranks."""
    options = job.options
    return options.num_distributed_optimizer_instances if options.use_megatron_fsdp else 1


def layer_weight_bytes(job: Job) -> tuple[int, int]:
    """Return the bytes of one parameter of a layer: in a shard, and in the gathered layer.

    With `--fp8-param-gather` both shards and gathered weights are in FP8. MXFP8 keeps two shards: the forward gathers
    the shard of the copy by rows, the backward gathers the shard of the copy by columns.
    """
    options, wide = job.options, job.model.dtype_bytes
    if not (options.use_megatron_fsdp and options.fp8_param_gather and narrow_bits(job) == 8):
        return wide, wide
    return 2 if options.fp8_recipe == "mxfp8" else 1, 1


class Whole(NamedTuple):
    """Bytes of gathered weights and of unreduced gradients that a rank of an FSDP job holds beside its shards."""

    weights: int = 0
    """Bytes of the gathered weights of running layers, of layers gathered ahead, and of embedding and head."""
    gradients: int = 0
    """Bytes of gradients of the last layer, of the head, and of a tied embedding."""
    layer_gradients: int = 0
    """Bytes of the gradients of one layer."""
    layer_weights: int = 0
    """Bytes of the gathered weights of one layer."""
    waiting: int = 0
    """Number of layers whose gradients wait for their reduction while further layers are gathered."""
    waiting_at_end: int = 0
    """Number of layers whose gradients wait after the last gather, when finished layers have freed their gathered
    weights."""


def whole_beside_shards(job: Job, layout: Layout) -> Whole:
    """Count the bytes beside shards that FSDP needs at its peak.

    Megatron-FSDP gathers layers ahead up to half of `--suggested-communication-unit-size`. Reduced gradients are freed
    only before the next bucket's reduction, and only if more than `--suggested-communication-unit-size` parameters
    wait. With `--fsdp-double-buffer`, FSDP keeps the weights and the gradients of two layers each (FSDP
    param_and_grad_buffer.py:3084-3131, 3493-3560, 651-800). The gradient of a weight shared by embedding and head is
    reduced when the backward is over (megatron_fsdp.py:767).

    If layers are not units of FSDP, gradients form several buckets with overlap, and one bucket without overlap.
    The count ignores `--ddp-bucket-size`, `--ddp-num-buckets`, and the growth of buckets beyond 40 replicas.
    """
    sharding, options, model = sharding_of(job), job.options, job.model
    if sharding is None or not sharding.gradients:
        return Whole()
    gradient = reduced_gradient_bytes(job)
    units, (embedding, head) = unit_parameters(job, layout), end_parameters(job, layout)
    layer, gathered = max(units.layers[kind].count for kind in model.layer_kinds), layer_weight_bytes(job)[1]
    num_layers, size = model.num_layers + model.mtp_num_layers, options.suggested_communication_unit_size
    if not sharding.weights:
        total = num_layers * layer + embedding + head
        bucket = min(_BUCKET, total) if job.own.overlap_grad_reduce else total
        waiting = min((1 + (size or _LEAST_UNIT) // bucket) * bucket, total - bucket)
        return Whole(gradients=bucket * gradient, layer_gradients=layer * gradient, waiting=waiting // layer)
    last_ends = head if model.untie_embeddings_and_output_weights else head + embedding
    size = size or max(_LEAST_UNIT, 2 * layer)
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


class OnceAStep(NamedTuple):
    """Measured times, on a slot of speed 1, of the work once a step: optimizer, gradient buffers, and the host."""

    optimizer_s_per_parameter: float
    gradient_s_per_byte: float
    host_s: float

    @classmethod
    def of(cls, measured: Measurements) -> OnceAStep:
        """Read the measured times of the job's slots. A time that was not measured counts as 0 s."""
        return cls(measured.optimizer_s_per_parameter or 0.0, measured.gradient_s_per_byte, measured.step_s)

    def seconds(self, resident: Ints, gradient_bytes: Ints) -> Floats:
        """Return the seconds of ranks that update `resident` parameters and hold `gradient_bytes` of gradients."""
        return self.optimizer_s_per_parameter * resident + self.gradient_s_per_byte * gradient_bytes + self.host_s


def gradient_bytes_per_parameter(job: Job) -> int:
    """Return the bytes of one gradient in the buffers that accumulate gradients over micro-batches.

    Buffers are in fp32 or in the weights' type. With bf16 weights, `--grad-reduce-in-bf16` and `--main-grads-dtype
    bf16` choose the weights' type (training/arguments.py, validate_args). From 0.19 on, Megatron-FSDP ignores both
    flags and takes `--megatron-fsdp-main-grads-dtype` (MC distributed/fsdp/mcore_fsdp_adapter.py).
    """
    options = job.options
    if _reduces_in_fp32(job):
        return FP32_BYTES
    chosen = options.megatron_fsdp_main_grads_dtype if options.use_megatron_fsdp else "auto"
    return _TYPE_BYTES.get(chosen, job.model.dtype_bytes)


def reduced_gradient_bytes(job: Job) -> int:
    """Return the bytes of one gradient in its reduction over replicas, and in FSDP's buffers of whole gradients.

    Only Megatron-FSDP can reduce gradients in another type than it accumulates them, from 0.17 on.
    """
    options, accumulated = job.options, gradient_bytes_per_parameter(job)
    if not options.use_megatron_fsdp or _reduces_in_fp32(job):
        return accumulated
    is_narrow = job.grad_reduce_in_bf16 and job.release < _FIRST_OWN_GRADIENTS
    chosen = "bf16" if is_narrow else options.megatron_fsdp_grad_comm_dtype
    return _TYPE_BYTES.get(chosen, accumulated)


def _reduces_in_fp32(job: Job) -> bool:
    """Return True if Megatron's `grad_reduce_in_fp32` decides on the gradients' type, and chooses fp32."""
    options, dtype = job.options, job.model.params_dtype
    if options.use_megatron_fsdp and job.release >= _FIRST_OWN_GRADIENTS:
        return False
    if dtype != "bf16":
        return options.accumulate_allreduce_grads_in_fp32
    is_wide = options.accumulate_allreduce_grads_in_fp32 or options.main_grads_dtype == "fp32"
    return is_wide and not job.grad_reduce_in_bf16


@lru_cache(maxsize=64)
def _largest(job: Job) -> tuple[int, int]:
    """Return the largest number of parameters, dense and of experts, that the optimizer cannot split over ranks.

    For optimizers of whole matrices (Muon, SOAP, Lion) all plans have the own tp and etp.
    """
    if not OPTIMIZERS[job.optimizer].is_for_matrices:
        return 1, 1
    linears = [one for kind in {*job.model.layer_kinds} for one in _linears(job, job.own, kind)]
    dense, expert = (
        max((int(one.n * one.k) for one in linears if one.is_routed == is_routed), default=1)
        for is_routed in (False, True)
    )
    return dense, expert


def _share(counts: IntOrInts, ranks: IntOrInts, largest: int) -> Ints:
    """Return the most parameters that one of `ranks` gets in whole matrices: the mean, in multiples of the largest.

    Exact for equal matrices. Megatron gives each next matrix to the rank with the least work.
    """
    mean = -(-counts // np.maximum(1, ranks))
    return np.where(np.asarray(ranks) > 1, -(-mean // largest) * largest, counts)


def buffered_parameters(job: Job, dense: IntOrInts, expert: IntOrInts, layout: Layout | LayoutColumns) -> Ints:
    """Count the elements of the flat buffers for weights and gradients, padded so that all shards are equal.

    With the distributed optimizer a bucket ends at a multiple of lcm(d*c, 128), and of 2^16 too with
    `--ddp-pad-buckets-for-high-nccl-busbw` (MC distributed/param_and_grad_buffer.py:638-666). The dense parameters
    count as one bucket, and the experts' parameters as another. Megatron also starts each parameter at a multiple of
    64, which is left out. Shards of whole matrices are as large as the largest shard, unless
    `--no-use-layer-wise-param-layout` leaves the buffers as they are (MC optimizer/layer_wise_optimizer.py, 0.18 on).
    """
    extra = _BUSBW_ALIGNMENT if job.options.ddp_pad_buckets_for_high_nccl_busbw else _SHARD_ALIGNMENT
    packed = (0.0, 0.0)
    if OPTIMIZERS[job.optimizer].is_for_matrices:
        if not job.options.use_layer_wise_param_layout:
            return np.asarray(dense + expert)
        packed = _PACKED
    padded = np.zeros_like(dense + expert)
    groups = zip((dense, expert), (layout.dp * layout.cp, expert_dp(layout)), _largest(job), packed, strict=True)
    for count, ranks, largest, growth in groups:
        cut = np.where((ranks > 1) & (layout.overlap_grad_reduce == 1), np.rint(count * growth), 0).astype(np.int64)
        multiple = np.lcm(ranks, extra)
        padded = padded - (-np.maximum(ranks * _share(count, ranks, largest), cut) // multiple) * multiple
    return np.where(layout.use_distributed_optimizer, padded, dense + expert)


def shard(
    job: Job, dense: IntOrInts, expert: IntOrInts, layout: Layout | LayoutColumns, *, across: bool = False
) -> Ints:
    """Return one rank's share of parameters, rounded up: dense over dp * cp, experts over their data-parallel group.

    The parameters are split over all ranks of the group if `across`, else over the ranks of one optimizer instance.
    """
    instances = 1 if across else job.options.num_distributed_optimizer_instances
    groups = zip((dense, expert), (layout.dp * layout.cp, expert_dp(layout)), _largest(job), strict=True)
    shares = (np.minimum(counts, _share(counts, ranks // instances, largest)) for counts, ranks, largest in groups)
    return np.asarray(sum(shares))


def weight_bytes(
    job: Job, dense: IntOrInts, expert: IntOrInts, ends: IntOrInts, layout: Layout | LayoutColumns
) -> Ints:
    """Count the bytes of the weights that a rank holds between passes: all weights, or a shard under FSDP.

    `ends` is the number of dense parameters outside the layers, which are never in FP8.
    """
    sharding = sharding_of(job)
    if sharding is None or not sharding.weights:
        return buffered_parameters(job, dense, expert, layout) * job.model.dtype_bytes
    layers = shard(job, dense - ends, expert, layout) * layer_weight_bytes(job)[0]
    return layers + shard(job, ends, 0, layout) * job.model.dtype_bytes


def held_gradients(job: Job, dense: IntOrInts, expert: IntOrInts, layout: Layout | LayoutColumns) -> Ints:
    """Count the gradient elements that a rank accumulates over the micro-batches of a step, without padding."""
    sharding = sharding_of(job)
    return shard(job, dense, expert, layout) if sharding and sharding.gradients else np.asarray(dense + expert)


def resident_parameters(job: Job, dense: IntOrInts, expert: IntOrInts, layout: Layout | LayoutColumns) -> Ints:
    """Count the parameters whose optimizer states one rank holds. The distributed optimizer shards these states.

    With `--num-distributed-optimizer-instances` each instance of the optimizer holds all states, unless FSDP shards
    states over all instances.
    """
    sharding, options = sharding_of(job), job.options
    across = options.use_megatron_fsdp and options.outer_dp_sharding_strategy == "optim"
    is_sharded = sharding.states if sharding else layout.use_distributed_optimizer
    return np.where(is_sharded, shard(job, dense, expert, layout, across=across), dense + expert)


def optimizer_bytes(
    job: Job, dense: IntOrInts, expert: IntOrInts, layout: Layout | LayoutColumns, *, ends: IntOrInts = 0
) -> tuple[Ints, Ints]:
    """Count the optimizer's states on one rank, and the temporaries of its step.

    torch's foreach Adam, which runs without TransformerEngine, needs 4 temporary bytes a parameter. The optimizer
    copies gradients that are not fp32 to fp32, which needs another 4 bytes a parameter. The precision-aware optimizer
    instead copies each state that is not fp32 to fp32, for all dense or for all expert parameters at once. The
    optimizer updates dense parameters and expert parameters one after the other (TE 2.8, optimizers/fused_adam.py,
    step). Muon and similar optimizers leave `ends`, the parameters outside the layers, to Adam. With
    `--no-use-layer-wise-param-layout` one rank gets a whole embedding. Only Adam's states can be offloaded:
    `--optimizer-cpu-offload` needs the precision-aware optimizer, which needs Adam.
    """
    resident = resident_parameters(job, dense, expert, layout)
    options = job.options
    offloaded = options.optimizer_offload_fraction if options.optimizer_cpu_offload else 0.0
    per_parameter = state_bytes_per_parameter(job)
    states = np.rint(resident * (per_parameter * (1 - offloaded))).astype(np.int64)
    if OPTIMIZERS[job.optimizer].is_for_matrices:
        is_split = layout.use_distributed_optimizer * options.use_layer_wise_param_layout
        outside = np.where(is_split, -(-ends // (layout.dp * layout.cp)), ends)
        states = resident_parameters(job, dense - ends, expert, layout) * per_parameter
        states = states + outside * (OPTIMIZERS["adam"].state_bytes + _master_bytes(job))
    step = 0 if job.model.transformer_impl == "transformer_engine" or job.optimizer == "sgd" else FP32_BYTES
    if gradient_bytes_per_parameter(job) != FP32_BYTES and not options.use_precision_aware_optimizer:
        step += FP32_BYTES
    groups = (resident_parameters(job, dense, 0, layout), resident_parameters(job, 0, expert, layout))
    copies = FP32_BYTES * sum(size != FP32_BYTES for size in _chosen_state_bytes(job))
    return states, resident * step + np.maximum(*groups) * copies


def state_bytes_per_parameter(job: Job) -> int:
    """Return the bytes of optimizer states on a rank for each parameter that the rank's optimizer holds.

    Adam keeps two moments of 4 bytes and, for 2-byte weights, an fp32 copy of 4 bytes. SGD keeps one momentum of 4
    bytes and the fp32 copy. The precision-aware optimizer keeps moments in the types that the user's flags choose. The
    precision-aware optimizer keeps only the lower half of a bf16 weight's fp32 copy, because the weight itself is the
    upper half (MC optimizer/__init__.py:365-390, optimizer_config.py:192, 351-384). SOAP also keeps two square matrices
    in fp32 for each side of a matrix (Emerging-Optimizers, soap.py).
    """
    if job.optimizer == "soap":
        kinds = Counter(job.model.layer_kinds).items()
        matrices = [(one, one.count * layers) for kind, layers in kinds for one in _linears(job, job.own, kind)]
        factors = 2 * FP32_BYTES * sum(number * (one.n**2 + one.k**2) for one, number in matrices)
        each = math.ceil(factors / sum(number * one.n * one.k for one, number in matrices))
        return OPTIMIZERS["soap"].state_bytes + _master_bytes(job) + each
    if job.optimizer != "adam" or not job.options.use_precision_aware_optimizer:
        return OPTIMIZERS[job.optimizer].state_bytes + _master_bytes(job)
    return sum(_chosen_state_bytes(job)) + (_REMAINDER_BYTES if _keeps_remainders(job) else 0)


def step_bytes_per_parameter(job: Job) -> int:
    """Return the bytes that an optimizer step reads and writes for each parameter that the rank's optimizer holds.

    The step reads the gradient twice, reads and writes each state, and writes the weight: 8 + 24 + 2 bytes for Adam on
    16-bit weights. An fp32 weight, or a bf16 weight that is half of its fp32 copy, is also read. A state that is not
    fp32 is copied to fp32 and back (see `optimizer_bytes`). Only the precision-aware optimizer reads 16-bit gradients
    directly. Other optimizers read an fp32 copy of the gradients. The bytes moved to make this fp32 copy are not
    counted.
    """
    is_aware = job.options.use_precision_aware_optimizer
    gradient = gradient_bytes_per_parameter(job) if is_aware else FP32_BYTES
    is_own_copy = job.model.params_dtype == "fp32" or _keeps_remainders(job)
    weight = (2 if is_own_copy else 1) * job.model.dtype_bytes
    copied = sum(2 * (size + FP32_BYTES) for size in _chosen_state_bytes(job) if size != FP32_BYTES)
    narrow = sum(FP32_BYTES - size for size in _chosen_state_bytes(job))
    return 2 * gradient + 2 * (state_bytes_per_parameter(job) + narrow) + weight + copied


def _master_bytes(job: Job) -> int:
    """Return the bytes of the fp32 copy of one 16-bit weight; 0 for fp32 weights."""
    return 0 if job.model.params_dtype == "fp32" else FP32_BYTES


def _keeps_remainders(job: Job) -> bool:
    """Return True if a bf16 weight is the upper half of its fp32 copy, and the optimizer keeps only the lower half."""
    options = job.options
    wide = _TYPE_BYTES.get(options.main_params_dtype, FP32_BYTES) == FP32_BYTES
    return options.use_precision_aware_optimizer and job.model.params_dtype == "bf16" and wide


def _chosen_state_bytes(job: Job) -> tuple[int, ...]:
    """Return the bytes of each state of the precision-aware optimizer in its chosen type: moments, then fp32 copies."""
    options = job.options
    if not options.use_precision_aware_optimizer or job.optimizer == "sgd":
        return ()
    types = [options.exp_avg_dtype, options.exp_avg_sq_dtype]
    if job.model.params_dtype != "fp32" and not _keeps_remainders(job):
        types.append(options.main_params_dtype)
    return tuple(_TYPE_BYTES.get(dtype, FP32_BYTES) for dtype in types)
