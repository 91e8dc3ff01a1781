"""The blocks behind attention: a dense MLP, or experts with their router, under balanced routing.

Every tensor that autograd saves is counted as megatron-core 0.13 to 0.19 saves it (MO = megatron/core/transformer/moe,
line numbers of core_v0.16.1). Balanced routing means that all experts get the same number of tokens. Real routing is
less even. These formulas do not include the difference; corrections from measured jobs do.
"""

# T = tokens of a rank, n = tokens before dispatch, M = rows that a rank's experts work on, E = experts, k = top-k,
# f = width of one expert on one rank, h = hidden size, t = tp.

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pipette_launch.cost.layers.block import (
    FP32_BYTES,
    MASK_BYTES,
    Activations,
    Block,
    Exchange,
    Group,
    Load,
    Parameters,
    PassLoads,
    computes_in_fp8,
    dropout_mask_bytes,
    is_captured,
    local_tokens,
    matrix,
    matrix_input_bytes,
    residual_bytes,
    stream_bytes,
    tokens,
)
from pipette_launch.facts.job import ITERATION, Job, PerformanceOptions
from pipette_launch.facts.layout import Ints, Layout
from pipette_launch.facts.model import ModelSpec
from pipette_launch.megatron.performance import performance_options

_INDEX_BYTES = 8
_ROW_MAP_BYTES = 4
_FP8_ROWS = 16
"""The number of rows of an FP8 matrix is a multiple of 16 (MO/../../fp8_utils.py, get_fp8_align_size)."""

# GROUPED_RATE, ROUTED_KERNELS, BIASED_TOUCHES and IN_DOMAIN_SHARE were fitted together to 59 published layouts of MoE
# models (docs/validation.md).
GROUPED_RATE = 0.67
"""Speed of products of many experts, each with its own tokens, relative to one product of all tokens."""
ROUTED_KERNELS = 92.0
"""Kernels of router and dispatcher in a forward; the backward has 80 % of them. The router alone launches 72 if nothing
is fused (Megatron-LM's guide to DeepSeek-V3 on GB200)."""
BIASED_TOUCHES = 18.0
"""Number of times that experts with biases read or write the outputs of their two matrices in a forward. A backward has
1.5 times this number. Biases, limits, gates and probabilities are separate kernels."""
IN_DOMAIN_SHARE = 0.42
"""Share of the fastest links' bandwidth that `flex` dispatchers reach inside their domain."""
OVERLAP_COSTS = 0.15
"""Share of a hidden exchange that still costs time: its kernels take 20 of 132 multiprocessors from the products beside
them (`--moe-deepep-num-sms`)."""


class Mlp(Block):
    """Dense MLP."""

    graph_module = "mlp"

    def parameters(self, model: ModelSpec, layout: Layout) -> Parameters:
        """Count the parameters of both matrices and their biases; tp also splits the first matrix's bias."""
        return Parameters(dense=_matrices(model, model.ffn_hidden_size, layout.tp))

    def shapes(self, model: ModelSpec, layout: Layout) -> set[tuple[int, int]]:
        """Return (outputs, inputs) of both matrices."""
        return _matrix_shapes(model, model.ffn_hidden_size, layout.tp)

    def activations(self, job: Job, layout: Layout) -> Activations:
        """Count the activations of the norm, the output of the first matrix, and the input of the second matrix.

        Both matrices' part is 6f/h for fused SwiGLU, 4f/h for GELU, and 8f/h or 10f/h for unfused SwiGLU, in units of
        s*b*h bytes. The contract test of saved bytes confirms these factors.
        """
        model, is_fp8 = job.model, computes_in_fp8(job)
        act, residual = _width_bytes(job, layout), residual_bytes(model, layout)
        first = (2 if model.gated_linear_unit else 1) * act
        if model.gated_linear_unit and not performance_options(job).bias_swiglu_fusion:
            first += unfused_gate_copies(job.megatron_version) * act
        return Activations(
            mlp_input=stream_bytes(job, layout),
            mlp_norm=residual // model.dtype_bytes if is_fp8 else residual,
            mlp=first,
            mlp_activation=act // model.dtype_bytes if is_fp8 else act,
            dropout_masks=dropout_mask_bytes(model, layout),
            fuses_mlp_norm=model.transformer_impl == "transformer_engine",
        )

    def backward_bytes(self, job: Job, layout: Layout) -> int:
        """Return the larger need of the second matrix and of the activation.

        The second matrix needs its output's gradient, gathered under sequence parallelism, and its input's gradient.
        Without `gradient_accumulation_fusion` the matrix's own gradient exists once in the weights' type. The
        activation needs the gradient of the first matrix's output.
        """
        model, residual = job.model, residual_bytes(job.model, layout)
        gathered = residual * layout.tp if layout.sequence_parallel else 0
        dropped = residual if model.hidden_dropout > 0 else 0
        own_gradient = model.dtype_bytes * model.hidden_size * model.ffn_hidden_size // layout.tp
        alone = 0 if performance_options(job).gradient_accumulation_fusion else own_gradient
        second = residual + dropped + gathered + _width_bytes(job, layout) + alone
        return max(second, residual + self.activations(job, layout).mlp)

    def loads(self, job: Job, layout: Layout) -> PassLoads:
        """Return the work of both matrices and the activation."""
        return mlp_loads(job.model, layout, job.model.ffn_hidden_size)

    def module_flops(self, model: ModelSpec) -> dict[str, float]:
        """Return the FLOPs per token of both matrices: 2 for each weight (Narayanan et al. 2021, appendix)."""
        return {"mlp": 2.0 * model.mlp_parameters()}

    def column_flops(self, model: ModelSpec) -> float:
        """Return the FLOPs per token of the first matrix."""
        return 2.0 * model.hidden_size * model.ffn_hidden_size * (2 if model.gated_linear_unit else 1)


class Experts(Block):
    """Router, experts, and the shared expert."""

    def parameters(self, model: ModelSpec, layout: Layout) -> Parameters:
        """Count the parameters of router and shared expert, which are dense, and of the rank's own experts."""
        shared_width = model.moe_shared_expert_intermediate_size
        dense = router_parameters(model) + (_matrices(model, shared_width, layout.tp) if shared_width else 0)
        local_experts = (model.num_experts or 0) // layout.ep
        return Parameters(dense=dense, expert=local_experts * _matrices(model, model.moe_ffn_hidden_size, layout.etp))

    def matrices(self, model: ModelSpec, layout: Layout) -> int:
        """Count the parameters of the experts' matrices, without the router."""
        return self.parameters(model, layout).count - router_parameters(model)

    def shapes(self, model: ModelSpec, layout: Layout) -> set[tuple[int, int]]:
        """Return the shapes of the shared expert; shapes of routed experts, from TE v2.12 on, are left out."""
        width = model.moe_shared_expert_intermediate_size
        return _matrix_shapes(model, width, layout.tp) if width else set()

    def activations(self, job: Job, layout: Layout) -> Activations:
        """Count the activations of norm, router, dispatch and experts; the norm is never part of a matrix's kernel."""
        found = expert_activations(job, layout)
        return Activations(
            mlp_input=stream_bytes(job, layout),
            mlp_norm=residual_bytes(job.model, layout),
            mlp=found.routed - found.activation,
            mlp_activation=found.activation,
            shared_experts=found.shared,
            dropout_masks=dropout_mask_bytes(job.model, layout),
            has_experts=True,
        )

    def backward_bytes(self, job: Job, layout: Layout) -> int:
        """Return the larger need of computing and of moving the gradients of the experts' rows.

        The second matrices' backward needs the gradients of their output (M*h), of their input, and of the first
        matrices' output. The probability's gradient also needs the product of the input's gradient with the activation.
        If the activation is not fused and probabilities have a wider type, three gradients of the activation have this
        wider type when the second matrices' input is freed. Moving rows back through sort and exchange needs two copies
        of M*h and the layer's own gradient.
        """
        model, rows = job.model, expert_rows(job, layout)
        first = 2 if model.gated_linear_unit else 1
        local_experts = max(1, (model.num_experts or 1) // layout.ep)
        at_once = rows if performance_options(job).moe_grouped_gemm else -(-rows // local_experts)
        of_width = model.dtype_bytes * (1 + first)
        if not _fuses_activation(job):
            of_width = max(of_width, 3 * probability_bytes(job) - model.dtype_bytes)
        computing = model.dtype_bytes * rows * model.hidden_size
        computing += at_once * (model.moe_ffn_hidden_size // layout.etp) * of_width
        moving = model.dtype_bytes * 2 * rows * model.hidden_size
        return max(computing, moving) + 2 * model.dtype_bytes * local_tokens(model, layout) * model.hidden_size

    def loads(self, job: Job, layout: Layout) -> PassLoads:
        """Return the work of router, dispatcher, shared expert, and k * T / t tokens in experts, for any ep and etp."""
        model, options = job.model, performance_options(job)
        local = local_tokens(model, layout)
        routed = model.moe_router_topk * local * layout.etp
        width = model.moe_ffn_hidden_size // layout.etp
        gates = 2 if model.gated_linear_unit else 1
        num_experts = model.num_experts or 1
        mine = max(1, num_experts // layout.ep)
        loads = matrix(local, num_experts, model.hidden_size, is_linear=False)
        loads += matrix(routed / mine, gates * width, model.hidden_size, count=mine, rate=GROUPED_RATE)
        loads += matrix(routed / mine, model.hidden_size, width, count=mine, rate=GROUPED_RATE)
        loads += _activation_loads(routed * width * model.dtype_bytes, gates)
        moved = touches(options) * model.moe_router_topk * local * model.hidden_size * model.dtype_bytes
        is_biased = model.add_bias_linear and not is_captured(options, ITERATION)
        biased = is_biased * BIASED_TOUCHES * routed * (gates * width + model.hidden_size) * model.dtype_bytes
        loads += PassLoads(
            forward=Load(moved_bytes=moved + biased, kernels=ROUTED_KERNELS),
            input_grad=Load(moved_bytes=moved + 1.5 * biased, kernels=0.8 * ROUTED_KERNELS),
        )
        if model.moe_shared_expert_intermediate_size:
            loads += mlp_loads(model, layout, model.moe_shared_expert_intermediate_size)
        # The router and the preparation of the dispatch have about half of the kernel launches.
        return loads.without_launches(0.5 if is_captured(options, "moe_router") else 0.0)

    def module_flops(self, model: ModelSpec) -> dict[str, float]:
        """Return the FLOPs per token of all experts of a token, and of the shared expert alone."""
        width = model.moe_shared_expert_intermediate_size
        shared = 2.0 * model.mlp_parameters(width) if width else 0.0
        routed = 2.0 * model.moe_router_topk * model.mlp_parameters(model.moe_ffn_hidden_size)
        return {"moe": routed + shared, "shared_experts": shared}

    def column_flops(self, model: ModelSpec) -> float:  # noqa: ARG002
        """Return 0: tensor parallelism gathers nothing for a matrix of experts."""
        return 0.0

    def is_cut_by_tp(self, model: ModelSpec) -> bool:
        """Return True if there is a shared expert, which tensor parallelism cuts."""
        return model.moe_shared_expert_intermediate_size > 0

    def exchanges(self, job: Job, layout: Layout, once_S: Ints, again_S: Ints, domain: int) -> Iterator[Exchange]:
        """Yield the exchanges that move tokens to their experts and back, in forward and backward.

        `alltoall` sends k copies of each token over ep and gathers them over etp. `flex` sends one copy to each rank
        that has some of the token's experts, or to each domain of fast links if there are several. `allgather`,
        Megatron's default, gathers every token over ep * etp and scatters the sums (MO/token_dispatcher.py).
        """
        model, options = job.model, performance_options(job)
        size: float = model.dtype_bytes * local_tokens(model, layout) * model.hidden_size
        group: Group = "ep_etp"
        members, twice_S = layout.etp * layout.ep, once_S + again_S
        dispatcher = options.moe_token_dispatcher_type
        if dispatcher != "allgather":
            if layout.ep > 1:
                topk = model.moe_router_topk
                sent = size * (copies_of_a_token(topk, layout.ep, domain) if dispatcher == "flex" else topk)
                times = (2 * once_S, 2 * twice_S)
                if options.overlap_moe_expert_parallel_comm:
                    yield Exchange.of("all_to_all", "ep", sent * OVERLAP_COSTS, *times)
                    yield Exchange.of("all_to_all", "ep", sent * (1 - OVERLAP_COSTS), *times, behind="other_layer_s")
                else:
                    yield Exchange.of("all_to_all", "ep", sent, *times)
            size, group, members = size * model.moe_router_topk, "etp", layout.etp
        if members > 1:
            yield Exchange.of("all_gather", group, size * members, once_S, twice_S)
            yield Exchange.of("reduce_scatter", group, size * members, once_S, twice_S)


MLP, EXPERTS = Mlp(), Experts()


def mlp_loads(model: ModelSpec, layout: Layout, ffn_hidden_size: int) -> PassLoads:
    """Return the work of one dense MLP of width `ffn_hidden_size`."""
    width, gates = ffn_hidden_size // layout.tp, 2 if model.gated_linear_unit else 1
    rows = tokens(model, layout)
    matrices = matrix(rows, gates * width, model.hidden_size) + matrix(rows, model.hidden_size, width)
    return matrices + _activation_loads(rows * width * model.dtype_bytes, gates)


def _activation_loads(one_bytes: float, gates: int) -> PassLoads:
    """Return the work of an activation on `one_bytes`; with 2 gates its result is multiplied by another tensor."""
    return PassLoads(
        forward=Load(moved_bytes=(gates + 1) * one_bytes, kernels=2),
        input_grad=Load(moved_bytes=(2 * gates + 1) * one_bytes, kernels=2),
    )


def _matrices(model: ModelSpec, ffn_hidden_size: int, shards: int) -> int:
    second = ffn_hidden_size // shards
    first = second * (2 if model.gated_linear_unit else 1)
    bias = first + model.hidden_size if model.add_bias_linear else 0
    return model.hidden_size * (first + second) + bias


def _matrix_shapes(model: ModelSpec, width: int, tp: int) -> set[tuple[int, int]]:
    gates = 2 if model.gated_linear_unit else 1
    return {(gates * width // tp, model.hidden_size), (model.hidden_size, width // tp)}


def _width_bytes(job: Job, layout: Layout) -> int:
    """Return the bytes of a tensor as wide as the input of the second matrix."""
    return job.model.dtype_bytes * tokens(job.model, layout) * job.model.ffn_hidden_size // layout.tp


def unfused_gate_copies(megatron_version: str) -> int:
    """Return the number of tensors, each half as wide as the input, that an unfused gated unit keeps in addition.

    Beside input and output, these are the activated half and, from core_v0.15 on, the sum of the other half with an
    offset (transformer/mlp.py, `glu`).
    """
    return 1 if megatron_version.startswith(("0.12", "0.13", "0.14")) else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertActivations:
    """Bytes that a block of experts keeps, without the norm before it."""

    router: int
    """Bytes of scores, chosen experts, and tensors of auxiliary losses."""
    dispatch: int
    """Bytes of the maps and probabilities that the backward needs to return gradients to their tokens."""
    inputs: int
    """Bytes of the rows that the experts compute."""
    outputs: int
    """Bytes of the outputs of the first matrices."""
    activation: int
    """Bytes of the tensors between first and second matrices, which recompute of `moe_act` does not keep."""
    shared: int
    """The shared expert."""

    @property
    def routed(self) -> int:
        """Bytes of all parts but the shared expert."""
        return self.router + self.dispatch + self.inputs + self.outputs + self.activation


def expert_capacity(job: Job, layout: Layout) -> int | None:
    """Return the most rows of a rank for each expert; None = no limit (MO/moe_utils.py, get_capacity)."""
    factor = performance_options(job).moe_expert_capacity_factor
    if factor is None or factor < 0:
        return None
    routed = job.model.moe_router_topk * local_tokens(job.model, layout)
    return math.ceil(routed / (job.model.num_experts or 1) * factor)


def expert_rows(job: Job, layout: Layout) -> int:
    """Return M, the number of rows that the experts of one rank compute.

    Each rank sends k*n rows and receives k*n rows. Expert tensor parallelism splits the experts' widths over `etp`
    ranks and gathers the rows of these ranks (MO/token_dispatcher.py:689-697). An expert capacity drops rows beyond the
    capacity, or pads rows up to it (:551-566).
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
    """Count the bytes that a block of experts keeps.

    With every dispatcher the experts' inputs are one copy of M*h. Exchanges and sorts before the experts keep nothing,
    and the combination after the experts keeps indices (MO/moe_utils.py:378-460). The probability multiplies the
    activation, so the output of the second matrix is not kept (MO/experts.py, MLP.forward with `per_token_scale`).
    """
    model, narrow = job.model, matrix_input_bytes(job)
    rows = expert_rows(job, layout)
    widths = rows * model.moe_ffn_hidden_size // layout.etp
    first = 2 if model.gated_linear_unit else 1
    # A fused activation keeps only its input and output (MO/../../fusions/fused_bias_swiglu.py,
    # WeightedSwiGLUFunction). An unfused activation also keeps its output before the multiplication with the
    # probability, and a gated unit keeps its two factors.
    between = 0 if _fuses_activation(job) else 1 + (first - 1) * unfused_gate_copies(job.megatron_version)
    return ExpertActivations(
        router=_router_bytes(job, layout),
        dispatch=_dispatch_bytes(job, layout, rows) + probability_bytes(job) * rows,
        inputs=narrow * rows * model.hidden_size,
        outputs=first * model.dtype_bytes * widths,
        activation=(between * model.dtype_bytes + narrow) * widths,
        shared=_shared_bytes(job, layout),
    )


def probability_bytes(job: Job) -> int:
    """Return the bytes of one probability of the router."""
    return {"fp32": 4, "fp64": 8}.get(performance_options(job).moe_router_dtype or "", job.model.dtype_bytes)


def _fuses_activation(job: Job) -> bool:
    """Return True if the activation and its multiplication with the probability keep only their inputs."""
    options = performance_options(job)
    uses_te = job.model.transformer_impl == "transformer_engine"
    fused = job.model.gated_linear_unit and uses_te and options.bias_swiglu_fusion
    return fused or options.moe_use_legacy_grouped_gemm


def _router_bytes(job: Job, layout: Layout) -> int:
    """Count the bytes that TopKRouter.routing saves (MO/router.py:531-640, MO/moe_utils.py:600-740)."""
    model, options = job.model, performance_options(job)
    local, num_experts, topk = local_tokens(model, layout), model.num_experts or 0, model.moe_router_topk
    balancing, coefficients = options.moe_router_load_balancing_type, options.moe_aux_loss_coeff
    # A single coefficient applies to all balancing losses; a balancing with coefficient 0 computes no loss.
    weights = zip(balancing, (*coefficients, *coefficients[-1:] * len(balancing)), strict=False)
    has_losses = any(weight > 0 for _, weight in weights)
    is_sigmoid, one = options.moe_router_score_function == "sigmoid", probability_bytes(job)
    every, chosen = local * num_experts, local * topk
    if "sinkhorn" in balancing:
        return every * (one if topk == 1 else FP32_BYTES) + every * MASK_BYTES
    if options.moe_router_fusion:
        kept = every * (FP32_BYTES + MASK_BYTES)
    elif is_sigmoid:
        kept = every * FP32_BYTES + chosen * (_INDEX_BYTES + one) + local * one
    elif options.moe_router_pre_softmax:
        kept = every * FP32_BYTES + chosen * _INDEX_BYTES
    else:
        kept = chosen * (FP32_BYTES + _INDEX_BYTES)
    losses = (every + local) * one if is_sigmoid else every * FP32_BYTES
    losses = (losses + chosen * _INDEX_BYTES) * has_losses
    z_loss = (every + local) * one if options.moe_z_loss_coeff is not None else 0
    capacity = expert_capacity(job, layout)
    dropped = every * MASK_BYTES + num_experts * capacity * _INDEX_BYTES if capacity is not None else 0
    return kept + losses + z_loss + dropped


def _dispatch_bytes(job: Job, layout: Layout, rows: int) -> int:
    """Count the bytes of the permutation's maps, input probabilities and index (MO/moe_utils.py:313-376).

    The all-gather dispatcher permutes all gathered tokens for the local experts; `alltoall` permutes the rank's own
    tokens for all experts. If rows are padded to a capacity, both dispatchers keep indices of rows and of
    probabilities. The fused kernels keep one map of 2E + 1 entries a token instead (Transformer Engine,
    permutation.py).
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
    return seen * experts * (MASK_BYTES + probability_bytes(job)) + sent * _INDEX_BYTES


def _shared_bytes(job: Job, layout: Layout) -> int:
    """Count the shared expert: a dense MLP on the rank's tokens, split over tp (MO/shared_experts.py).

    The shared expert's input is the norm's output, which the layer keeps anyway. If the shared expert overlaps with the
    dispatcher, it gathers its input itself and keeps the gathered input (:150-156). A gate keeps the output that it
    multiplies.
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
    """Count the tokens that the all-gather dispatcher gathers into Megatron's buffer (MO/token_dispatcher.py:264)."""
    model, group = job.model, layout.etp * layout.ep
    dispatcher = performance_options(job).moe_token_dispatcher_type
    if not model.num_experts or group == 1 or dispatcher != "allgather":
        return 0
    return model.dtype_bytes * local_tokens(model, layout) * group * model.hidden_size


def router_parameters(model: ModelSpec) -> int:
    """Count the router's weights, and from core_v0.15 on its bias if linear layers have one (MO/router.py:51-61)."""
    return (model.num_experts or 0) * (model.hidden_size + (1 if model.add_bias_linear else 0))


def touches(options: PerformanceOptions) -> float:
    """Return how often the dispatcher reads or writes each copy of a token in a pass, without the exchange.

    `alltoall` permutes tokens before the exchange and sorts them by expert afterwards, and does both again on the way
    back. Backends of `flex` permute tokens once each way. If a CUDA graph captures the whole step, experts read the
    permuted tokens directly.
    """
    dispatcher = options.moe_token_dispatcher_type
    if dispatcher != "flex":
        return 8.0
    return 2.0 if is_captured(options, ITERATION) else 6.0


def copies_of_a_token(topk: int, ep: int, domain: int) -> float:
    """Return the mean number of ranks, or of domains if there are several, that have some of a token's experts.

    Inside a domain of fast links, dispatchers reach only IN_DOMAIN_SHARE of the bandwidth. The result therefore counts
    more copies there.
    """
    places = ep if ep <= domain else -(-ep // domain)
    hit = places * (1 - (1 - 1 / places) ** topk)
    return hit / IN_DOMAIN_SHARE if ep <= domain else hit
