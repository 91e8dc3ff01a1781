"""What an MoE layer keeps for one micro-batch, and the parameters of its experts and router, under balanced routing.

Every tensor that autograd saves is counted by itself, as megatron-core 0.13 to 0.19 saves it (MO = megatron/core/
transformer/moe, line numbers of core_v0.16.1). Routing is taken as balanced: every expert gets the same number of
tokens. Real routing is not; what that adds belongs to the correction, not to the model's bytes.
"""

# n = tokens of a rank before dispatch, N = after the all-gather, M = rows that its experts work on,
# E = experts, El = local experts, k = top-k, f = width of one expert on one rank, h = hidden size.

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from pipette_launch.cost.layers.attention import local_tokens, tokens
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import ModelSpec
from pipette_launch.facts.performance import PerformanceOptions
from pipette_launch.megatron.performance import performance_options

_FP32_BYTES = 4
_INDEX_BYTES = 8
_ROW_MAP_BYTES = 4
_MASK_BYTES = 1
_FP8_ROWS = 16
"""Rows that FP8 matrices come in (MO/../../fp8_utils.py, get_fp8_align_size)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertOptions:
    """How a job routes and runs its experts: Megatron's flags that have no field of their own in a job."""

    dispatcher: Literal["allgather", "alltoall", "flex"]
    grouped: bool
    """All local experts by one grouped matrix multiplication."""
    fused_activation: bool
    """The activation and the multiplication with the probability keep only their inputs."""
    permute_fusion: bool
    router_fusion: bool
    router_bytes: int
    """Bytes of one probability."""
    balancing: tuple[str, ...]
    """Load balancing that makes a loss of its own, or `sinkhorn`."""
    z_loss: bool
    score_function: Literal["softmax", "sigmoid"]
    pre_softmax: bool
    capacity_factor: float | None
    pads_to_capacity: bool
    pads_for_fp8: bool
    shared_overlap: bool
    shared_gate: bool


def expert_options(job: Job) -> ExpertOptions:
    """Read them from a job's performance options."""
    return _expert_options(performance_options(job), job.model)


@lru_cache(maxsize=64)
def _expert_options(given: PerformanceOptions, model: ModelSpec) -> ExpertOptions:
    kinds, coefficients = given.moe_router_load_balancing_type, given.moe_aux_loss_coeff
    coefficients += coefficients[-1:] * len(kinds)
    factor = given.moe_expert_capacity_factor
    uses_te = model.transformer_impl == "transformer_engine"
    fused = model.gated_linear_unit and uses_te and given.bias_swiglu_fusion
    return ExpertOptions(
        dispatcher=_dispatcher(given.moe_token_dispatcher_type),
        grouped=given.moe_grouped_gemm,
        fused_activation=fused or given.moe_use_legacy_grouped_gemm,
        permute_fusion=given.moe_permute_fusion,
        router_fusion=given.moe_router_fusion,
        router_bytes={"fp32": 4, "fp64": 8}.get(given.moe_router_dtype or "", model.dtype_bytes),
        balancing=tuple(
            kind for kind, weight in zip(kinds, coefficients, strict=False) if kind == "sinkhorn" or weight > 0
        ),
        z_loss=given.moe_z_loss_coeff is not None,
        score_function="sigmoid" if given.moe_router_score_function == "sigmoid" else "softmax",
        pre_softmax=given.moe_router_pre_softmax,
        capacity_factor=factor if factor is not None and factor >= 0 else None,
        pads_to_capacity=given.moe_pad_expert_input_to_capacity,
        pads_for_fp8=given.moe_router_padding_for_fp8 or given.moe_router_padding_for_quantization,
        shared_overlap=given.moe_shared_expert_overlap,
        shared_gate=given.moe_shared_expert_gate,
    )


def _dispatcher(word: str) -> Literal["allgather", "alltoall", "flex"]:
    if word == "allgather":
        return "allgather"
    return "flex" if word == "flex" else "alltoall"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertActivations:
    """Bytes that one MoE layer keeps for one micro-batch, besides the output of the norm before it."""

    router: int
    """Scores, chosen experts, and what the auxiliary losses need."""
    dispatch: int
    """Maps and probabilities that put the gradients back in place."""
    inputs: int
    """Rows that the experts work on."""
    outputs: int
    """Outputs of the first matrices."""
    activation: int
    """What lies between the first matrices and the second: all that recomputing `moe_act` brings back."""
    shared: int
    """All of the shared expert."""

    @property
    def routed(self) -> int:
        """Everything but the shared expert."""
        return self.router + self.dispatch + self.inputs + self.outputs + self.activation


def expert_capacity(model: ModelSpec, layout: Layout, options: ExpertOptions) -> int | None:
    """Most rows of one rank that one expert takes; None without a limit (MO/moe_utils.py, get_capacity)."""
    if options.capacity_factor is None:
        return None
    routed = model.moe_router_topk * local_tokens(model, layout)
    return math.ceil(routed / (model.num_experts or 1) * options.capacity_factor)


def expert_rows(model: ModelSpec, layout: Layout, options: ExpertOptions) -> int:
    """M: rows that the experts of one rank work on, when every expert gets as many.

    Each rank sends k*n rows and gets as many; expert tensor parallelism gathers those of its `etp` ranks, which share
    the experts' widths (MO/token_dispatcher.py:689-697). A capacity drops rows, or pads up to it (:551-566).
    """
    num_experts = model.num_experts or 1
    each = model.moe_router_topk * local_tokens(model, layout) / num_experts
    capacity = expert_capacity(model, layout, options)
    if capacity is not None:
        each = capacity if options.pads_to_capacity else min(each, capacity)
    if options.pads_for_fp8:
        each = math.ceil(each / _FP8_ROWS) * _FP8_ROWS
    return round(each * num_experts) * layout.etp


def expert_activations(job: Job, layout: Layout) -> ExpertActivations:
    """Count what one MoE layer keeps for one micro-batch.

    The experts' inputs are one copy of M*h whatever the dispatcher: exchanges and sorts before it keep nothing, and the
    combination after it keeps indices (MO/moe_utils.py:378-460). The probability multiplies the activation, so that the
    output of the second matrix is not kept (MO/experts.py, MLP.forward with `per_token_scale`).
    """
    model = job.model
    options = expert_options(job)
    rows = expert_rows(model, layout, options)
    widths = rows * model.moe_ffn_hidden_size // layout.etp
    outputs, between = activation_widths(job, fused=options.fused_activation)
    narrow = matrix_input_bytes(job)
    return ExpertActivations(
        router=_router_bytes(model, layout, options),
        dispatch=_dispatch_bytes(model, layout, options, rows) + options.router_bytes * rows,
        inputs=narrow * rows * model.hidden_size,
        outputs=outputs * model.dtype_bytes * widths,
        activation=((between - 1) * model.dtype_bytes + narrow) * widths,
        shared=_shared_bytes(job, layout, options),
    )


def matrix_input_bytes(job: Job) -> int:
    """Bytes of one element of what a matrix multiplication keeps of its input.

    In FP8 that is the quantised input (Transformer Engine, module/grouped_linear.py: `fused_multi_quantize`), one byte;
    its scales are not counted.
    """
    is_fp8 = job.model.transformer_impl == "transformer_engine" and performance_options(job).fp8 is not None
    return 1 if is_fp8 else job.model.dtype_bytes


def activation_widths(job: Job, *, fused: bool) -> tuple[int, int]:
    """Expert widths kept of the first matrices' outputs, and of what comes between them and the second matrices.

    Fused (MO/../../fusions/fused_bias_swiglu.py, WeightedSwiGLUFunction): only what goes in and what comes out.
    Otherwise the activation's output too, which the probability multiplies, and for a gated unit its two factors.
    """
    first = 2 if job.model.gated_linear_unit else 1
    if fused:
        return first, 1
    return first, 2 + (unfused_gate_copies(job.megatron_version) if job.model.gated_linear_unit else 0)


def unfused_gate_copies(megatron_version: str) -> int:
    """Widths that an unfused gated unit keeps beside its input and output (transformer/mlp.py, `glu`).

    The activated half; from core_v0.15 on an offset is added to the other half, whose sum is kept too.
    """
    return 1 if megatron_version.startswith(("0.12", "0.13", "0.14")) else 2


def _router_bytes(model: ModelSpec, layout: Layout, options: ExpertOptions) -> int:
    """Count what TopKRouter.routing saves (MO/router.py:531-640, MO/moe_utils.py:600-740)."""
    local, num_experts, topk = local_tokens(model, layout), model.num_experts or 0, model.moe_router_topk
    every, chosen = local * num_experts, local * topk
    if "sinkhorn" in options.balancing:
        scores = every * (options.router_bytes if topk == 1 else _FP32_BYTES)
        return scores + every * _MASK_BYTES
    if options.router_fusion:
        kept = every * (_FP32_BYTES + _MASK_BYTES)
    elif options.score_function == "sigmoid":
        kept = every * _FP32_BYTES + chosen * (_INDEX_BYTES + options.router_bytes) + local * options.router_bytes
    elif options.pre_softmax:
        kept = every * _FP32_BYTES + chosen * _INDEX_BYTES
    else:
        kept = chosen * (_FP32_BYTES + _INDEX_BYTES)
    losses = every * _FP32_BYTES + chosen * _INDEX_BYTES if options.balancing else 0
    if losses and options.score_function == "sigmoid":
        losses = (every + local) * options.router_bytes + chosen * _INDEX_BYTES
    z_loss = (every + local) * options.router_bytes if options.z_loss else 0
    capacity = expert_capacity(model, layout, options)
    dropped = every * _MASK_BYTES + num_experts * capacity * _INDEX_BYTES if capacity is not None else 0
    return kept + losses + z_loss + dropped


def _dispatch_bytes(model: ModelSpec, layout: Layout, options: ExpertOptions, rows: int) -> int:
    """Count the permutation's maps, the probabilities that it selects from, and its index (MO/moe_utils.py:313-376).

    The all-gather dispatcher permutes all gathered tokens for the local experts, alltoall the rank's own for all
    experts; padded to capacity, indices of rows and of probabilities do. The fused kernels keep one map of 2E + 1
    entries a token instead (Transformer Engine, permutation.py).
    """
    local, num_experts = local_tokens(model, layout), model.num_experts or 0
    if options.dispatcher == "allgather":
        seen, experts, sent = local * layout.etp * layout.ep, num_experts // layout.ep, rows
    else:
        seen, experts, sent = local, num_experts, rows // layout.etp
    if options.pads_to_capacity and options.capacity_factor is not None:
        return 2 * sent * _INDEX_BYTES
    if options.permute_fusion or options.dispatcher == "flex":
        return seen * (2 * experts + 1) * _ROW_MAP_BYTES
    return seen * experts * (_MASK_BYTES + options.router_bytes) + sent * _INDEX_BYTES


def _shared_bytes(job: Job, layout: Layout, options: ExpertOptions) -> int:
    """Count the shared expert: a dense MLP on the rank's tokens, split over tp (MO/shared_experts.py).

    Its input is the norm's output, which the layer keeps anyway; overlapped with the dispatcher it gathers that by
    itself and keeps the whole (:150-156). A gate keeps the output that it multiplies.
    """
    model = job.model
    width = model.moe_shared_expert_intermediate_size
    if not width:
        return 0
    widths = 3 if model.gated_linear_unit else 2
    if model.gated_linear_unit and not options.fused_activation:
        widths += unfused_gate_copies(job.megatron_version)
    kept = model.dtype_bytes * tokens(model, layout) * (width // layout.tp) * widths
    gathered = options.shared_overlap and layout.sequence_parallel and layout.tp > 1
    kept += model.dtype_bytes * tokens(model, layout) * model.hidden_size if gathered else 0
    gate = local_tokens(model, layout) * (model.hidden_size + 1) if options.shared_gate else 0
    return kept + model.dtype_bytes * gate


def gather_buffer_bytes(job: Job, layout: Layout) -> int:
    """N*h: what the all-gather dispatcher gathers into Megatron's global buffer (MO/token_dispatcher.py:264-267)."""
    model = job.model
    group = layout.etp * layout.ep
    if not model.num_experts or group == 1:
        return 0
    if expert_options(job).dispatcher != "allgather":
        return 0
    return model.dtype_bytes * local_tokens(model, layout) * group * model.hidden_size


def exchange_bytes(job: Job, layout: Layout) -> int:
    """Most that the backward of one MoE layer needs for a while, beyond what the layer keeps.

    While the second matrices' gradient is computed: the gradient of their output (M*h), that of their input, its
    product with the activation for the probability's gradient, and that of the first matrices' outputs. Where the
    activation is not fused and probabilities are wider than it, three of its gradients are as wide as they, when the
    second matrices' input is freed. While rows go back through sort and exchange: two copies of M*h and the layer's own
    gradient.
    """
    model = job.model
    options = expert_options(job)
    rows = expert_rows(model, layout, options)
    first = 2 if model.gated_linear_unit else 1
    width = model.moe_ffn_hidden_size // layout.etp
    at_once = rows if options.grouped else -(-rows // max(1, (model.num_experts or 1) // layout.ep))
    of_width = model.dtype_bytes * (1 + first)
    if not options.fused_activation and options.router_bytes > model.dtype_bytes:
        of_width = max(of_width, 3 * options.router_bytes - model.dtype_bytes)
    computing = model.dtype_bytes * rows * model.hidden_size + at_once * width * of_width
    moving = model.dtype_bytes * 2 * rows * model.hidden_size
    return max(computing, moving) + 2 * model.dtype_bytes * local_tokens(model, layout) * model.hidden_size


def router_parameters(model: ModelSpec) -> int:
    """Weights of the router, and from core_v0.15 on its bias where linear layers have one (MO/router.py:51-61)."""
    return (model.num_experts or 0) * (model.hidden_size + (1 if model.add_bias_linear else 0))
