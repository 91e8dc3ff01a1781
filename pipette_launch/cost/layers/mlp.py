"""Cost of the block after attention: a dense MLP, or experts with their router, under balanced routing.

Every tensor that autograd saves is counted as megatron-core 0.13 to 0.19 saves it (MO = megatron/core/transformer/moe,
line numbers of core_v0.16.1). Balanced routing means that all experts get the same number of tokens. Real routing gives
some experts more tokens than others. The formulas do not count uneven routing, but the corrections learned from
measured jobs include uneven routing.
"""

# Symbols in formulas: T = tokens of a rank, n = tokens before dispatch, M = rows that a rank's experts work on, E =
# experts, k = top-k, f = width of the MLP, h = hidden size, t = tp.

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from pipette_launch.cost.layers.block import (
    FP32_BYTES,
    MASK_BYTES,
    Activations,
    Block,
    Parameters,
    as_matrix_input,
    has_narrow_copies,
    narrow_bits,
)
from pipette_launch.cost.layers.loads import Exchange, Group, Load, PassLoads, matrix
from pipette_launch.facts.job import ITERATION, Job
from pipette_launch.facts.layout import Ints, Layout

_INDEX_BYTES = 8
_ROW_MAP_BYTES = 4
_FP8_ROWS = 16
"""The number of rows of an FP8 matrix is a multiple of 16 (MO/../../fp8_utils.py, get_fp8_align_size)."""

# GROUPED_HALF, the numbers of kernels and BIASED_TOUCHES were fitted to published layouts (docs/validation.md).
GROUPED_HALF = 3.5
"""Factor on `half_size` for products of experts: such products are fast only if each expert has many tokens."""
ROUTER_KERNELS, FUSED_ROUTER_KERNELS, FLEX_ROUTER_KERNELS = 65.0, 44.0, 24.0
"""Number of kernels of a router's forward: unfused, with `--moe-router-fusion`, and with a `flex` dispatcher too, which
prepares the dispatch in one kernel. Backwards launch 80 % as many. In Megatron-LM's guide to DeepSeek-V3 on GB200 the
router of DeepSeek-V3 launches 72, 31 and 17 kernels."""
PREPARE_KERNELS, FLEX_PREPARE_KERNELS = FUSED_ROUTER_KERNELS - FLEX_ROUTER_KERNELS + 1.0, 1.0
"""Number of the router's kernels that prepare the dispatch (`moe_preprocess`)."""
EXPERT_KERNELS = 48.0
"""Number of kernels of dispatcher and experts in a forward; a backward launches 80 % as many."""
GROUPED_KERNELS = 0.1
"""Host time to launch the product of one more expert, or its cast to FP8, relative to the host time of a kernel."""
BIASED_TOUCHES = 16.0
"""Number of times that experts with biases read or write the outputs of their two matrices in a forward. A backward
reads or writes these outputs 1.5 times as often. Separate kernels apply the biases, limits, gates and probabilities of
such experts."""
IN_DOMAIN_SHARE = 0.65
"""Share of the fastest links' bandwidth that `flex` dispatchers reach inside a domain of such links. HybridEP's own
benchmark receives 450 to 570 GB/s on 8 to 36 GB200, in dispatch and combination of rows in bf16."""
OVERLAP_COSTS = 0.15
"""Share of a hidden exchange that still costs time, because the exchange's kernels take 20 of 132 multiprocessors from
products that run at the same time (`--moe-deepep-num-sms`)."""

MXFP8 = "mxfp8"
MXFP8_SHARE = 33 / 64
"""Bytes of a token in MXFP8, with one scale byte for 32 elements, divided by its bytes in 16 bits."""


class _FeedForward(Block):
    """Costs of two matrices with an activation between the matrices, for any width."""

    def matrix_parameters(self, width: int, shards: int, hidden_size: int = 0) -> int:
        """Count the parameters of both matrices and their biases.

        Tensor parallelism also splits the bias of the first matrix.
        """
        hidden, second = hidden_size or self.model.hidden_size, width // shards
        first = second * self.gates
        return hidden * (first + second) + (first + hidden if self.model.add_bias_linear else 0)

    def mlp_loads(self, width: int) -> PassLoads:
        """Return the work of both matrices on all tokens, and of the activation."""
        hidden, cut = self.model.hidden_size, width // self.layout.tp
        matrices = matrix(self.tokens, self.gates * cut, hidden) + matrix(self.tokens, hidden, cut)
        return matrices + self.activation_loads(self.tokens * cut)

    def activation_loads(self, elements: float) -> PassLoads:
        """Return the work of an activation; with 2 gates its result is multiplied by another tensor."""
        one_bytes = elements * self.model.dtype_bytes
        return PassLoads(
            forward=Load(moved_bytes=(self.gates + 1) * one_bytes, kernels=2),
            input_grad=Load(moved_bytes=(2 * self.gates + 1) * one_bytes, kernels=2),
        )

    def unfused_copies(self) -> int:
        """Return the number of tensors of the second matrix's width that only an unfused gated unit keeps.

        A gated unit keeps the activated half of its input, and the sum of the other half with an offset
        (transformer/mlp.py, `glu`).
        """
        return (self.gates - 1) * 2


class Mlp(_FeedForward):
    """Dense MLP."""

    graph_parts = ("mlp",)
    recompute_module = "mlp"

    def __init__(self, job: Job, layout: Layout, domain: int = 1) -> None:
        super().__init__(job, layout, domain)
        model = self.model
        self.width_bytes = model.dtype_bytes * self.tokens * model.ffn_hidden_size // layout.tp
        """Bytes of a tensor as wide as the input of the second matrix."""

    def parameters(self) -> Parameters:
        """Count the parameters of both matrices and their biases."""
        return Parameters(dense=self.matrix_parameters(self.model.ffn_hidden_size, self.layout.tp))

    def activations(self) -> Activations:
        """Count the activations of the norm, the output of the first matrix, and the input of the second matrix.

        The two matrices of an MLP keep 6f/h for fused SwiGLU, 4f/h for GELU, and 8f/h or 10f/h for unfused SwiGLU, in
        units of s*b*h bytes.
        """
        copies = 0 if self.options.bias_swiglu_fusion else self.unfused_copies()
        return Activations(
            mlp_input=self.stream_bytes(),
            mlp_norm=as_matrix_input(self.job, self.residual_bytes),
            mlp=(self.gates + copies) * self.width_bytes,
            mlp_activation=as_matrix_input(self.job, self.width_bytes),
            dropout_masks=self.dropout_mask_bytes,
            fuses_mlp_norm=self.uses_te,
        )

    def backward_bytes(self) -> int:
        """Count the larger need of bytes: of the second matrix's backward, or of the activation's backward.

        The second matrix's backward needs the gradients of its output (gathered under sequence parallelism) and of its
        input. Without `gradient_accumulation_fusion` the matrix's own gradient exists once in the weights' type. The
        activation's backward needs the gradient of the first matrix's output.
        """
        model, layout, residual = self.model, self.layout, self.residual_bytes
        gathered = residual * layout.tp if layout.sequence_parallel else 0
        dropped = residual if model.hidden_dropout > 0 else 0
        second = residual + dropped + gathered + self.width_bytes
        if not self.options.gradient_accumulation_fusion:
            second += model.dtype_bytes * model.hidden_size * model.ffn_hidden_size // layout.tp
        return max(second, residual + self.activations().mlp)

    def loads(self) -> PassLoads:
        """Return the work of both matrices and the activation."""
        return self.mlp_loads(self.model.ffn_hidden_size)

    def module_flops(self) -> dict[str, float]:
        """Return the FLOPs per token of both matrices: 2 for each weight (Narayanan et al. 2021, appendix)."""
        return {"mlp": 2.0 * self.model.mlp_parameters()}

    def column_flops(self) -> float:
        """Return the FLOPs per token of the first matrix."""
        return 2.0 * self.model.hidden_size * self.model.ffn_hidden_size * self.gates


class ExpertActivations(NamedTuple):
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
    """Bytes of the shared expert."""


class Experts(_FeedForward):
    """Block of router, experts, and shared expert."""

    graph_parts = ("moe_router", "moe_preprocess", "moe")
    recompute_module = "moe"

    def __init__(self, job: Job, layout: Layout, domain: int = 1) -> None:
        super().__init__(job, layout, domain)
        model = self.model
        self.num_experts = model.num_experts or 1
        self.local_experts = max(1, self.num_experts // layout.ep)
        self.width = model.moe_ffn_hidden_size // layout.etp
        """Width of one expert on one rank."""
        self.shared_width = model.moe_shared_expert_intermediate_size
        self.row_width = model.moe_latent_size or model.hidden_size
        """Channels of the tokens that experts receive; fewer than the hidden size if experts work on latents."""
        self.row_bytes = model.dtype_bytes * self.row_width
        self.dispatcher = self.options.moe_token_dispatcher_type
        self.probability_bytes = {"fp32": 4, "fp64": 8}.get(self.options.moe_router_dtype or "", model.dtype_bytes)

    def parameters(self) -> Parameters:
        """Count the dense parameters, and the parameters of the rank's own experts.

        Router, shared expert with its gate, and projections to and from latents are dense.
        """
        model, layout = self.model, self.layout
        shared = self.matrix_parameters(self.shared_width, layout.tp) if self.shared_width else 0
        expert = self.matrix_parameters(model.moe_ffn_hidden_size, layout.etp, self.row_width)
        dense = self.router_parameters() + shared + self.latent_parameters()
        return Parameters(dense=dense, expert=(model.num_experts or 0) // layout.ep * expert)

    def latent_parameters(self) -> int:
        """Count the projections to and from latents, which every rank has in full (MO/moe_layer.py:170-196)."""
        hidden, latent = self.model.hidden_size, self.model.moe_latent_size
        return 2 * hidden * latent + (hidden + latent) * (latent > 0 and self.model.add_bias_linear)

    def router_parameters(self) -> int:
        """Count the weights of router and gate, which no linear has, and the router's bias.

        The router has a bias if linears have biases (MO/router.py:51-61).
        """
        gate = self.model.hidden_size * (self.shared_width > 0 and self.model.moe_shared_expert_gate)
        return (self.model.num_experts or 0) * (self.model.hidden_size + self.model.add_bias_linear) + gate

    def matrices(self) -> int:
        """Count the parameters of the experts' matrices, without the router."""
        return self.parameters().count - self.router_parameters()

    def activations(self) -> Activations:
        """Count the activations of norm, router, dispatch and experts. The norm has a separate kernel."""
        kept = self.kept()
        return Activations(
            mlp_input=self.stream_bytes(),
            mlp_norm=self.residual_bytes,
            mlp=kept.router + kept.dispatch + kept.inputs + kept.outputs + self._latent_bytes(),
            mlp_activation=kept.activation,
            shared_experts=kept.shared,
            dropout_masks=self.dropout_mask_bytes,
            has_experts=True,
        )

    def _latent_bytes(self) -> int:
        """Count the inputs of the projections to and from latents. In 16 bits the first is the norm's output."""
        if not self.model.moe_latent_size:
            return 0
        cast = as_matrix_input(self.job, self.residual_bytes) if narrow_bits(self.job) else 0
        return cast + as_matrix_input(self.job, self.local_tokens * self.row_bytes)

    def kept(self) -> ExpertActivations:
        """Count the bytes that router and experts keep.

        With every dispatcher, the experts keep one copy of their input, M*h elements. Exchanges and sorts before the
        experts keep nothing, and the combination after the experts keeps indices (MO/moe_utils.py:378-460). The
        probability multiplies the activation, so the output of the second matrix is not kept (MO/experts.py,
        MLP.forward with `per_token_scale`).
        """
        rows, dtype = self.rows(), self.model.dtype_bytes
        width_bytes = dtype * (rows * self.model.moe_ffn_hidden_size // self.layout.etp)
        # A fused activation keeps only its input and output (MO/../../fusions/fused_bias_swiglu.py,
        # WeightedSwiGLUFunction). An unfused activation also keeps its output before the multiplication with the
        # probability, and a gated unit keeps its two factors.
        between = 0 if self._fuses_activation() else 1 + self.unfused_copies()
        return ExpertActivations(
            router=self._router_bytes(),
            dispatch=self._dispatch_bytes(rows) + self.probability_bytes * rows,
            inputs=as_matrix_input(self.job, rows * self.row_bytes),
            outputs=self.gates * width_bytes,
            activation=between * width_bytes + as_matrix_input(self.job, width_bytes),
            shared=self._shared_bytes(),
        )

    def rows(self) -> int:
        """Return M, the number of rows that the experts of one rank compute.

        Under balanced routing each rank sends k*n rows to experts and receives k*n rows. Expert tensor parallelism
        splits the experts' widths over `etp` ranks and gathers the rows of these ranks
        (MO/token_dispatcher.py:689-697). An expert capacity drops rows beyond the capacity, or pads rows up to the
        capacity (MO/token_dispatcher.py:551-566). A capacity of the rank sets the rows of all buffers, but a paged
        stash keeps the rows with its own spare (0.20, MO/paged_stash.py).
        """
        options, capacity = self.options, self.capacity()
        each = self.model.moe_router_topk * self.local_tokens / self.num_experts
        if capacity is not None:
            each = capacity if options.moe_pad_expert_input_to_capacity else min(each, capacity)
        if options.moe_router_padding_for_fp8 or options.moe_router_padding_for_quantization:
            each = math.ceil(each / _FP8_ROWS) * _FP8_ROWS
        spare = options.moe_expert_rank_capacity_factor or 1.0
        if options.moe_paged_stash:
            spare = abs(options.moe_paged_stash_buffer_size_factor_cuda)
        return round(spare * each * self.num_experts) * self.layout.etp

    def capacity(self) -> int | None:
        """Return the most rows that a rank may send to each expert; None = no limit (MO/moe_utils.py, get_capacity)."""
        factor = self.options.moe_expert_capacity_factor
        if factor is None or factor < 0:
            return None
        return math.ceil(self.model.moe_router_topk * self.local_tokens / self.num_experts * factor)

    def _fuses_activation(self) -> bool:
        """Return True if the activation and its multiplication with the probability keep only their inputs."""
        options = self.options
        gated = self.model.gated_linear_unit
        fused = options.bias_swiglu_fusion if gated else options.use_fused_weighted_squared_relu
        return (self.uses_te and fused) or options.moe_use_legacy_grouped_gemm

    def _router_bytes(self) -> int:
        """Count the bytes that Megatron's TopKRouter.routing saves (MO/router.py:531-640, MO/moe_utils.py:600-740)."""
        options, local, topk = self.options, self.local_tokens, self.model.moe_router_topk
        num_experts, capacity, one = self.model.num_experts or 0, self.capacity(), self.probability_bytes
        balancing, coefficients = options.moe_router_load_balancing_type, options.moe_aux_loss_coeff
        every, chosen = local * num_experts, local * topk
        if "sinkhorn" in balancing:
            return every * (one if topk == 1 else FP32_BYTES) + every * MASK_BYTES
        is_sigmoid = options.moe_router_score_function == "sigmoid"
        if options.moe_router_fusion:
            kept = every * (FP32_BYTES + MASK_BYTES)
        elif is_sigmoid:
            kept = every * FP32_BYTES + chosen * (_INDEX_BYTES + one) + local * one
        elif options.moe_router_pre_softmax:
            kept = every * FP32_BYTES + chosen * _INDEX_BYTES
        else:
            kept = chosen * (FP32_BYTES + _INDEX_BYTES)
        # A single coefficient applies to all balancing losses; a balancing with coefficient 0 computes no loss.
        weights = zip(balancing, (*coefficients, *coefficients[-1:] * len(balancing)), strict=False)
        if any(weight > 0 for _, weight in weights):
            kept += ((every + local) * one if is_sigmoid else every * FP32_BYTES) + chosen * _INDEX_BYTES
        if options.moe_z_loss_coeff is not None:
            kept += (every + local) * one
        return kept + (0 if capacity is None else every * MASK_BYTES + num_experts * capacity * _INDEX_BYTES)

    def _dispatch_bytes(self, rows: int) -> int:
        """Count the bytes of the permutation's maps, input probabilities and index (MO/moe_utils.py:313-376).

        The all-gather dispatcher permutes all gathered tokens for the local experts; `alltoall` permutes the rank's own
        tokens for all experts. If rows are padded to a capacity, both dispatchers keep indices of rows and of
        probabilities. Fused kernels keep only one map of 2E + 1 entries a token (Transformer Engine, permutation.py).
        """
        options, layout, dispatcher = self.options, self.layout, self.dispatcher
        seen, experts, sent = self.local_tokens, self.model.num_experts or 0, rows // layout.etp
        if dispatcher == "allgather":
            seen, experts, sent = seen * layout.etp * layout.ep, experts // layout.ep, rows
        if options.moe_pad_expert_input_to_capacity and self.capacity() is not None:
            return 2 * sent * _INDEX_BYTES
        if options.moe_permute_fusion or dispatcher == "flex":
            return seen * (2 * experts + 1) * _ROW_MAP_BYTES
        return seen * experts * (MASK_BYTES + self.probability_bytes) + sent * _INDEX_BYTES

    def _shared_bytes(self) -> int:
        """Count the shared expert: a dense MLP on the rank's tokens, split over tp (MO/shared_experts.py).

        The shared expert's input is the norm's output, which the layer keeps anyway, and with delayed scaling of FP8
        a narrow copy. A shared expert that overlaps with the dispatcher gathers its own input and keeps the gathered
        input (MO/shared_experts.py:150-156). If the shared expert has a gate, the gate keeps the shared expert's
        output.
        """
        options, layout, dtype = self.options, self.layout, self.model.dtype_bytes
        if not self.shared_width:
            return 0
        width_bytes = dtype * self.tokens * (self.shared_width // layout.tp)
        widths = self.gates + (0 if self._fuses_activation() else self.unfused_copies())
        kept = width_bytes * widths + as_matrix_input(self.job, width_bytes)
        kept += has_narrow_copies(self.job) * as_matrix_input(self.job, self.residual_bytes)
        if options.moe_shared_expert_overlap and layout.sequence_parallel and layout.tp > 1:
            kept += dtype * self.tokens * self.model.hidden_size
        return kept + self.model.moe_shared_expert_gate * self.local_tokens * dtype * (self.model.hidden_size + 1)

    def gather_buffer_bytes(self) -> int:
        """Count the bytes of tokens that the all-gather dispatcher gathers into Megatron's buffer; 0 without experts.

        Source: MO/token_dispatcher.py:264.
        """
        group = self.layout.etp * self.layout.ep
        is_used = self.model.num_experts and group > 1 and self.dispatcher == "allgather"
        return self.local_tokens * group * self.row_bytes if is_used else 0

    def backward_bytes(self) -> int:
        """Count the larger need of bytes: for computing, or for moving the gradients of the experts' rows.

        The second matrices' backward needs the gradients of their output (M*h), of their input, and of the first
        matrices' output. The gradient of the probability also needs the product of the second matrices' input gradient
        with the activation. If the activation is not fused, three of its gradients have the type of the probabilities
        when the second matrices' input is freed. Moving the gradients back through sort and exchange needs two copies
        of M*h. The layer's own gradient exists while the gradients of the experts' rows are computed and while they are
        moved.
        """
        rows, dtype = self.rows(), self.model.dtype_bytes
        at_once = rows if self.options.moe_grouped_gemm else -(-rows // self.local_experts)
        of_width = dtype * (1 + self.gates)
        if not self._fuses_activation():
            of_width = max(of_width, 3 * self.probability_bytes - dtype)
        computing = rows * self.row_bytes + at_once * self.width * of_width
        return max(computing, 2 * rows * self.row_bytes) + 2 * self.residual_bytes

    def loads(self) -> PassLoads:
        """Return the work of router, dispatcher, shared expert, and k * T / t tokens in experts, for any ep and etp."""
        return sum(self.loads_of_parts().values(), PassLoads())

    def loads_of_parts(self) -> dict[str, PassLoads]:
        """Return the work of the router with the shared expert, of the preparation of the dispatch, and of the rest.

        A shared expert that overlaps with the dispatcher is a part of the rest (TransformerConfig, `moe_router`).
        """
        options, is_flex = self.options, self.dispatcher == "flex"
        every = FLEX_ROUTER_KERNELS if is_flex else FUSED_ROUTER_KERNELS
        prepare = FLEX_PREPARE_KERNELS if is_flex else PREPARE_KERNELS
        router = (every if options.moe_router_fusion else ROUTER_KERNELS) - prepare
        routed = matrix(self.local_tokens, self.num_experts, self.model.hidden_size, is_linear=False)
        routed += PassLoads(forward=Load(kernels=router), input_grad=Load(kernels=0.8 * router))
        prepared = PassLoads(forward=Load(kernels=prepare), input_grad=Load(kernels=0.8 * prepare))
        shared, rest = self.mlp_loads(self.shared_width) if self.shared_width else PassLoads(), self._expert_loads()
        if options.moe_shared_expert_overlap:
            rest += shared
        else:
            routed += shared
        return dict(zip(self.graph_parts, (routed, prepared, rest), strict=True))

    def _expert_loads(self) -> PassLoads:
        """Return the work of dispatcher and experts."""
        model, options, local, width = self.model, self.options, self.local_tokens, self.width
        routed, mine = model.moe_router_topk * local * self.layout.etp, self.local_experts
        loads = matrix(routed / mine, self.gates * width, self.row_width, count=mine, half=GROUPED_HALF)
        loads += matrix(routed / mine, self.row_width, width, count=mine, half=GROUPED_HALF)
        loads += self.activation_loads(routed * width)
        if not options.moe_grouped_gemm:
            loads = loads.launched(mine)  # One expert after another (MO/experts.py, SequentialMLP).
        if model.moe_latent_size:
            loads += matrix(local, self.row_width, model.hidden_size) + matrix(local, model.hidden_size, self.row_width)
        moved = self._touches() * model.moe_router_topk * local * self.row_bytes
        is_biased = model.add_bias_linear and options.graphs.impl != ITERATION
        biased = is_biased * BIASED_TOUCHES * routed * (self.gates * width + self.row_width) * model.dtype_bytes
        each = GROUPED_KERNELS * mine * (4 if options.fp8 or options.fp4 else 2)
        return loads + PassLoads(
            forward=Load(moved_bytes=moved + biased, kernels=EXPERT_KERNELS + each),
            input_grad=Load(moved_bytes=moved + 1.5 * biased, kernels=0.8 * EXPERT_KERNELS + 1.5 * each),
        )

    def module_flops(self) -> dict[str, float]:
        """Return the FLOPs per token of all experts of a token, and of the shared expert alone."""
        model = self.model
        shared = 2.0 * model.mlp_parameters(self.shared_width) if self.shared_width else 0.0
        latents = 4.0 * model.hidden_size * model.moe_latent_size
        routed = 2.0 * model.moe_router_topk * model.expert_parameters() + latents
        return {"moe": routed + shared, "shared_experts": shared}

    def is_cut_by_tp(self) -> bool:
        """Return True if there is a shared expert, which tensor parallelism cuts."""
        return self.shared_width > 0

    def exchanges(self, once_S: Ints, again_S: Ints) -> Iterator[Exchange]:
        """Yield the exchanges that move tokens to their experts and back, in forward and backward.

        `alltoall` sends k copies of each token over ep and gathers them over etp. `flex` sends one copy to each rank
        that has some of the token's experts, or to each NVLink domain if ep spans several domains. `allgather`,
        Megatron's default, gathers every token over ep * etp ranks and reduce-scatters the experts' outputs
        (MO/token_dispatcher.py).
        """
        layout, dispatcher, topk = self.layout, self.dispatcher, self.model.moe_router_topk
        size: float = self.local_tokens * self.row_bytes
        group: Group = "ep_etp"
        members, twice_S = layout.etp * layout.ep, once_S + again_S
        if dispatcher != "allgather":
            sent = size * (self._copies_of_a_token() if dispatcher == "flex" else topk)
            if layout.ep > 1:
                yield from self._token_exchanges(sent, once_S, again_S)
            size, group, members = size * topk, "etp", layout.etp
        if members > 1:
            yield Exchange.of("all_gather", group, size * members, once_S, twice_S)
            yield Exchange.of("reduce_scatter", group, size * members, once_S, twice_S)

    def _token_exchanges(self, sent: float, once_S: Ints, again_S: Ints) -> Iterator[Exchange]:
        """Yield dispatch and combine; one may be in MXFP8, the dispatch in the forward, the combine in the backward."""
        options = self.options
        narrow, back = (each == MXFP8 for each in (options.moe_dispatch_fwd_dtype, options.moe_combine_bwd_dtype))
        few_S = narrow * once_S, narrow * again_S + back * once_S
        rest_S = 2 * once_S - few_S[0], 2 * (once_S + again_S) - few_S[1]
        for size, times in [(sent, rest_S), (sent * MXFP8_SHARE, few_S)][: 2 if narrow or back else 1]:
            if options.overlap_moe_expert_parallel_comm:
                yield Exchange.of("all_to_all", "ep", size * OVERLAP_COSTS, *times)
                yield Exchange.of("all_to_all", "ep", size * (1 - OVERLAP_COSTS), *times, behind="other_layer_s")
            else:
                yield Exchange.of("all_to_all", "ep", size, *times)

    def _copies_of_a_token(self) -> float:
        """Return the mean number of ranks, or of NVLink domains if ep spans several, that have a token's experts.

        A router with groups of experts takes the experts of a token from `moe_router_group_topk` groups. The number of
        ranks is divided by IN_DOMAIN_SHARE, the share of the bandwidth that dispatchers reach inside a domain.
        """
        ep, topk, domain, options = self.layout.ep, self.model.moe_router_topk, self.domain, self.options
        groups = options.moe_router_num_groups
        places = float(ep if ep <= domain else -(-ep // domain))
        if groups and options.moe_router_group_topk and places >= groups:
            places *= options.moe_router_group_topk / groups
        hit = places * (1 - (1 - 1 / places) ** topk)
        return hit / IN_DOMAIN_SHARE if ep <= domain else hit

    def _touches(self) -> float:
        """Return how often the dispatcher reads or writes each copy of a token in a pass, without the exchange.

        The `alltoall` dispatcher permutes tokens before the exchange and sorts tokens by expert after it, and undoes
        both steps later. The backends of the `flex` dispatcher permute tokens once before and once after the experts.
        If a CUDA graph captures the whole step, experts read the permuted tokens directly.
        """
        if self.dispatcher != "flex":
            return 8.0
        return 2.0 if self.options.graphs.impl == ITERATION else 6.0
