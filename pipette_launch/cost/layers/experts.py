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

from pipette_launch.cost.layers.attention import local_tokens, tokens
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import ModelSpec
from pipette_launch.megatron.performance import performance_options

_FP32_BYTES = 4
_INDEX_BYTES = 8
_ROW_MAP_BYTES = 4
_MASK_BYTES = 1
_FP8_ROWS = 16
"""Rows that FP8 matrices come in (MO/../../fp8_utils.py, get_fp8_align_size)."""


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


def expert_capacity(job: Job, layout: Layout) -> int | None:
    """Most rows of one rank that one expert takes; None without a limit (MO/moe_utils.py, get_capacity)."""
    factor = performance_options(job).moe_expert_capacity_factor
    if factor is None or factor < 0:
        return None
    routed = job.model.moe_router_topk * local_tokens(job.model, layout)
    return math.ceil(routed / (job.model.num_experts or 1) * factor)


def expert_rows(job: Job, layout: Layout) -> int:
    """M: rows that the experts of one rank work on, when every expert gets as many.

    Each rank sends k*n rows and gets as many; expert tensor parallelism gathers those of its `etp` ranks, which share
    the experts' widths (MO/token_dispatcher.py:689-697). A capacity drops rows, or pads up to it (:551-566).
    """
    model, options = job.model, performance_options(job)
    num_experts = model.num_experts or 1
    each = model.moe_router_topk * local_tokens(model, layout) / num_experts
    capacity = expert_capacity(job, layout)
    if capacity is not None:
        each = capacity if options.moe_pad_expert_input_to_capacity else min(each, capacity)
    if options.moe_router_padding_for_fp8 or options.moe_router_padding_for_quantization:
        each = math.ceil(each / _FP8_ROWS) * _FP8_ROWS
    return round(each * num_experts) * layout.etp


def expert_activations(job: Job, layout: Layout) -> ExpertActivations:
    """Count what one MoE layer keeps for one micro-batch.

    The experts' inputs are one copy of M*h whatever the dispatcher: exchanges and sorts before it keep nothing, and the
    combination after it keeps indices (MO/moe_utils.py:378-460). The probability multiplies the activation, so that the
    output of the second matrix is not kept (MO/experts.py, MLP.forward with `per_token_scale`).
    """
    model = job.model
    rows = expert_rows(job, layout)
    widths = rows * model.moe_ffn_hidden_size // layout.etp
    first = 2 if model.gated_linear_unit else 1
    # Fused (MO/../../fusions/fused_bias_swiglu.py, WeightedSwiGLUFunction): only what goes in and what comes out.
    # Otherwise the activation's output too, which the probability multiplies, and for a gated unit its two factors.
    between = 0 if _fuses_activation(job) else 1 + (first - 1) * unfused_gate_copies(job.megatron_version)
    narrow = matrix_input_bytes(job)
    return ExpertActivations(
        router=_router_bytes(job, layout),
        dispatch=_dispatch_bytes(job, layout, rows) + probability_bytes(job) * rows,
        inputs=narrow * rows * model.hidden_size,
        outputs=first * model.dtype_bytes * widths,
        activation=(between * model.dtype_bytes + narrow) * widths,
        shared=_shared_bytes(job, layout),
    )


def probability_bytes(job: Job) -> int:
    """Bytes of one of the router's probabilities."""
    return {"fp32": 4, "fp64": 8}.get(performance_options(job).moe_router_dtype or "", job.model.dtype_bytes)


def _fuses_activation(job: Job) -> bool:
    """Whether the activation and the multiplication with the probability keep only their inputs."""
    options = performance_options(job)
    uses_te = job.model.transformer_impl == "transformer_engine"
    fused = job.model.gated_linear_unit and uses_te and options.bias_swiglu_fusion
    return fused or options.moe_use_legacy_grouped_gemm


def matrix_input_bytes(job: Job) -> int:
    """Bytes of one element of what a matrix multiplication keeps of its input.

    In FP8 that is the quantised input (Transformer Engine, module/grouped_linear.py: `fused_multi_quantize`), one byte;
    its scales are not counted.
    """
    is_fp8 = job.model.transformer_impl == "transformer_engine" and performance_options(job).fp8 is not None
    return 1 if is_fp8 else job.model.dtype_bytes


def unfused_gate_copies(megatron_version: str) -> int:
    """Widths that an unfused gated unit keeps beside its input and output (transformer/mlp.py, `glu`).

    The activated half; from core_v0.15 on an offset is added to the other half, whose sum is kept too.
    """
    return 1 if megatron_version.startswith(("0.12", "0.13", "0.14")) else 2


def _router_bytes(job: Job, layout: Layout) -> int:
    """Count what TopKRouter.routing saves (MO/router.py:531-640, MO/moe_utils.py:600-740)."""
    model, options = job.model, performance_options(job)
    local, num_experts, topk = local_tokens(model, layout), model.num_experts or 0, model.moe_router_topk
    balancing, coefficients = options.moe_router_load_balancing_type, options.moe_aux_loss_coeff
    # One coefficient stands for all; without weight a balancing makes no loss.
    weights = zip(balancing, (*coefficients, *coefficients[-1:] * len(balancing)), strict=False)
    has_losses = any(weight > 0 for _, weight in weights)
    is_sigmoid, one = options.moe_router_score_function == "sigmoid", probability_bytes(job)
    every, chosen = local * num_experts, local * topk
    if "sinkhorn" in balancing:
        return every * (one if topk == 1 else _FP32_BYTES) + every * _MASK_BYTES
    if options.moe_router_fusion:
        kept = every * (_FP32_BYTES + _MASK_BYTES)
    elif is_sigmoid:
        kept = every * _FP32_BYTES + chosen * (_INDEX_BYTES + one) + local * one
    elif options.moe_router_pre_softmax:
        kept = every * _FP32_BYTES + chosen * _INDEX_BYTES
    else:
        kept = chosen * (_FP32_BYTES + _INDEX_BYTES)
    losses = (every + local) * one if is_sigmoid else every * _FP32_BYTES
    losses = (losses + chosen * _INDEX_BYTES) * has_losses
    z_loss = (every + local) * one if options.moe_z_loss_coeff is not None else 0
    capacity = expert_capacity(job, layout)
    dropped = every * _MASK_BYTES + num_experts * capacity * _INDEX_BYTES if capacity is not None else 0
    return kept + losses + z_loss + dropped


def _dispatch_bytes(job: Job, layout: Layout, rows: int) -> int:
    """Count the permutation's maps, the probabilities that it selects from, and its index (MO/moe_utils.py:313-376).

    The all-gather dispatcher permutes all gathered tokens for the local experts, alltoall the rank's own for all
    experts; padded to capacity, indices of rows and of probabilities do. The fused kernels keep one map of 2E + 1
    entries a token instead (Transformer Engine, permutation.py).
    """
    options, dispatcher = performance_options(job), performance_options(job).moe_token_dispatcher_type
    seen, experts, sent = local_tokens(job.model, layout), job.model.num_experts or 0, rows
    if dispatcher == "allgather":
        seen, experts = seen * layout.etp * layout.ep, experts // layout.ep
    else:
        sent = rows // layout.etp
    if options.moe_pad_expert_input_to_capacity and expert_capacity(job, layout) is not None:
        return 2 * sent * _INDEX_BYTES
    if options.moe_permute_fusion or dispatcher == "flex":
        return seen * (2 * experts + 1) * _ROW_MAP_BYTES
    return seen * experts * (_MASK_BYTES + probability_bytes(job)) + sent * _INDEX_BYTES


def _shared_bytes(job: Job, layout: Layout) -> int:
    """Count the shared expert: a dense MLP on the rank's tokens, split over tp (MO/shared_experts.py).

    Its input is the norm's output, which the layer keeps anyway; overlapped with the dispatcher it gathers that by
    itself and keeps the whole (:150-156). A gate keeps the output that it multiplies.
    """
    model, options = job.model, performance_options(job)
    width = model.moe_shared_expert_intermediate_size
    if not width:
        return 0
    widths = 3 if model.gated_linear_unit else 2
    if model.gated_linear_unit and not _fuses_activation(job):
        widths += unfused_gate_copies(job.megatron_version)
    kept = model.dtype_bytes * tokens(model, layout) * (width // layout.tp) * widths
    gathered = options.moe_shared_expert_overlap and layout.sequence_parallel and layout.tp > 1
    kept += model.dtype_bytes * tokens(model, layout) * model.hidden_size if gathered else 0
    gate = local_tokens(model, layout) * (model.hidden_size + 1) if options.moe_shared_expert_gate else 0
    return kept + model.dtype_bytes * gate


def gather_buffer_bytes(job: Job, layout: Layout) -> int:
    """N*h: what the all-gather dispatcher gathers into Megatron's global buffer (MO/token_dispatcher.py:264-267)."""
    model = job.model
    group = layout.etp * layout.ep
    dispatcher = performance_options(job).moe_token_dispatcher_type
    if not model.num_experts or group == 1 or dispatcher != "allgather":
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
    rows = expert_rows(job, layout)
    first = 2 if model.gated_linear_unit else 1
    width = model.moe_ffn_hidden_size // layout.etp
    at_once = (
        rows if performance_options(job).moe_grouped_gemm else -(-rows // max(1, (model.num_experts or 1) // layout.ep))
    )
    of_width = model.dtype_bytes * (1 + first)
    if not _fuses_activation(job):
        of_width = max(of_width, 3 * probability_bytes(job) - model.dtype_bytes)
    computing = model.dtype_bytes * rows * model.hidden_size + at_once * width * of_width
    moving = model.dtype_bytes * 2 * rows * model.hidden_size
    return max(computing, moving) + 2 * model.dtype_bytes * local_tokens(model, layout) * model.hidden_size


def router_parameters(model: ModelSpec) -> int:
    """Weights of the router, and from core_v0.15 on its bias where linear layers have one (MO/router.py:51-61)."""
    return (model.num_experts or 0) * (model.hidden_size + (1 if model.add_bias_linear else 0))
