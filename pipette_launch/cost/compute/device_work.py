"""What the parts of a model ask of a device for one micro-batch: products, bytes moved and kernels, pass by pass.

T = s * b / c tokens of one rank, t = tp, e = bytes of an element. Products are Narayanan et al. 2021 (appendix), cut as
Shoeybi et al. 2019 cut them; tensors that are read and written are those of `cost.layers.activations`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.cost.layers import activations, attention
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import LatentAttention, ModelSpec

ADAM_BYTES_PER_PARAMETER = 34
"""fp32 gradient read for the norm and for the step, master weight and two moments read and written, weight written:
8 + 24 + 2."""
GRADIENT_PASSES = 4
"""Times that each byte of the gradient buffers, which no optimizer shards, is read or written once a step: cleared
(megatron-core, DistributedDataParallel.zero_grad_buffer), read for NaN, read and written by the division by the
replicas (ParamAndGradBuffer, start_grad_sync; with one replica there is no division)."""

_KERNELS_PER_COLLECTIVE = 3.0
_ACCUMULATED_BYTES = 8
"""fp32 gradient of each weight, read and written for each micro-batch (gradient accumulation fusion)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """`count` matrix products of m x k by k x n."""

    m: float
    n: float
    k: float
    count: float = 1.0

    @property
    def flops(self) -> float:
        """Multiply-adds counted as 2."""
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one pass of one part asks of the device."""

    products: tuple[Product, ...] = ()
    attention_flops: float = 0.0
    """Of flash attention, which runs at a rate of its own."""
    moved_bytes: float = 0.0
    """Read and written by kernels that compute next to nothing."""
    kernels: float = 0.0

    def __add__(self, other: Load) -> Load:
        """Run one after the other."""
        return Load(
            products=self.products + other.products,
            attention_flops=self.attention_flops + other.attention_flops,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            kernels=self.kernels + other.kernels,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PassLoads:
    """The three passes of a part; one that asks for nothing is left out."""

    forward: Load = Load()
    input_grad: Load = Load()
    weight_grad: Load = Load()

    def __add__(self, other: PassLoads) -> PassLoads:
        """Run one after the other."""
        return PassLoads(
            forward=self.forward + other.forward,
            input_grad=self.input_grad + other.input_grad,
            weight_grad=self.weight_grad + other.weight_grad,
        )


def layer_loads(job: Job, layout: Layout, *, moe: bool) -> PassLoads:
    """One transformer layer on one rank: of its communication only what the host does to start it."""
    mlp = _experts(job, layout) if moe else _mlp(job.model, layout, job.model.ffn_hidden_size)
    return _attention(job.model, layout) + mlp + _norms_and_residuals(job.model, layout) + _launches(layout)


def is_flash(model: ModelSpec) -> bool:
    """Whether no score is written to memory."""
    return not attention.is_local(model) and model.attention_backend != "unfused"


def embedding_loads(job: Job, layout: Layout) -> PassLoads:
    """Look up and, backward, add up rows of h; dropout where there is one."""
    rows = _residual_elements(job.model, layout) * job.model.dtype_bytes
    dropout = 2.5 * rows if job.model.hidden_dropout > 0 else 0.0
    return PassLoads(
        forward=Load(moved_bytes=2 * rows + dropout, kernels=4),
        input_grad=Load(moved_bytes=dropout, kernels=2),
        weight_grad=Load(moved_bytes=3 * rows, kernels=2),
    )


def head_loads(job: Job, layout: Layout) -> PassLoads:
    """Final norm, product with the vocabulary, cross-entropy: logits pass about ten times in fp32."""
    model = job.model
    tokens = attention.tokens(model, layout)
    vocabulary = model.padded_vocab_size(layout.tp) // layout.tp
    logits = tokens * vocabulary
    norm = 2 * _residual_elements(model, layout) * model.dtype_bytes
    matrices = _matrix(tokens, vocabulary, model.hidden_size)
    # Cast to fp32, maximum, subtract in place, exponential in place, sum; then divide in place and scale.
    forward = norm + logits * (model.dtype_bytes + 4 + 4 + 8 + 8 + 4 + 8)
    backward = 2 * norm + logits * (8 + 4 + model.dtype_bytes)
    return matrices + PassLoads(
        forward=Load(moved_bytes=forward, kernels=14),
        input_grad=Load(moved_bytes=backward, kernels=8),
        weight_grad=Load(kernels=1),
    )


def prediction_loads(job: Job, layout: Layout) -> PassLoads:
    """One depth of multi-token prediction: embedding, two norms, the projection of both, a layer, a head and loss."""
    model = job.model
    rows = _residual_elements(model, layout) * model.dtype_bytes
    matrix = _matrix(attention.tokens(model, layout), model.hidden_size // layout.tp, 2 * model.hidden_size)
    # Each norm reads and writes; then both are joined, which reads and writes twice as much.
    joins = PassLoads(forward=Load(moved_bytes=8 * rows, kernels=3), input_grad=Load(moved_bytes=10 * rows, kernels=4))
    layer = layer_loads(job, layout, moe=model.has_expert_prediction)
    return embedding_loads(job, layout) + joins + matrix + layer + head_loads(job, layout)


def _attention(model: ModelSpec, layout: Layout) -> PassLoads:
    tokens, latent = attention.tokens(model, layout), model.latent_attention
    if latent:
        matrices, groups, width = (
            _latent_projections(model, latent, layout),
            model.num_attention_heads,
            latent.qk_pos_emb_head_dim,
        )
    else:
        query = model.num_attention_heads * model.kv_channels // layout.tp
        key = max(1, model.num_query_groups // layout.tp) * model.kv_channels
        matrices = _matrix(tokens, query + 2 * key, model.hidden_size) + _matrix(tokens, model.hidden_size, query)
        groups, width = max(layout.tp, model.num_query_groups), model.kv_channels
    turned = (model.num_attention_heads + groups) // layout.tp * width
    rotary = 4.0 * tokens * turned * model.dtype_bytes if latent or model.position_embedding_type == "rope" else 0.0
    turn = Load(moved_bytes=rotary, kernels=4 if rotary else 0)
    return matrices + PassLoads(forward=turn, input_grad=turn) + core_attention_loads(model, layout)


def _latent_projections(model: ModelSpec, latent: LatentAttention, layout: Layout) -> PassLoads:
    """Down to the latents, whole on each rank, and up to the heads of this one (megatron-core, MLA:441-553)."""
    tokens = attention.tokens(model, layout)
    hidden, heads = model.hidden_size, model.num_attention_heads // layout.tp
    query = heads * latent.query_channels
    loads = _matrix(tokens, latent.kv_lora_rank + latent.qk_pos_emb_head_dim, hidden)
    loads += _matrix(tokens, heads * (latent.qk_head_dim + latent.v_head_dim), latent.kv_lora_rank)
    loads += _matrix(tokens, hidden, heads * latent.v_head_dim)
    if latent.q_lora_rank is None:
        return loads + _matrix(tokens, query, hidden)
    return loads + _matrix(tokens, latent.q_lora_rank, hidden) + _matrix(tokens, query, latent.q_lora_rank)


def core_attention_loads(model: ModelSpec, layout: Layout) -> PassLoads:
    """Scores, softmax and context of one layer: flash attention, or every score written out.

    Flash: half of 2 * T * s * a * (d of query + d of value) / t is behind the causal mask and skipped; the backward has
    5 products to the forward's 2 (Dao 2023). Otherwise scores and context in full, and T * s * a / t scores written,
    masked and normalised, dropped, and read again.
    """
    tokens, one = attention.tokens(model, layout), model.seq_length
    heads = model.num_attention_heads // layout.tp
    latent = model.latent_attention
    query, value = (latent.query_channels, latent.v_head_dim) if latent else (model.kv_channels, model.kv_channels)
    if is_flash(model):
        flops = 1.0 * tokens * one * heads * (query + value)
        return PassLoads(
            forward=Load(attention_flops=flops, kernels=2), input_grad=Load(attention_flops=2.5 * flops, kernels=4)
        )
    batch = heads * tokens / one
    scores = Product(m=one, n=one, k=query, count=batch)
    context = Product(m=one, n=value, k=one, count=batch)
    probabilities = batch * one * one * model.dtype_bytes
    dropout = 2.5 * probabilities if model.attention_dropout > 0 else 0.0
    return PassLoads(
        forward=Load(products=(scores, context), moved_bytes=2 * probabilities + dropout, kernels=8),
        input_grad=Load(
            products=(scores, scores, context, context), moved_bytes=3 * probabilities + dropout, kernels=10
        ),
    )


def _mlp(model: ModelSpec, layout: Layout, ffn_hidden_size: int) -> PassLoads:
    tokens = attention.tokens(model, layout)
    width = ffn_hidden_size // layout.tp
    gates = 2 if model.gated_linear_unit else 1
    matrices = _matrix(tokens, gates * width, model.hidden_size) + _matrix(tokens, model.hidden_size, width)
    return matrices + _activation(tokens * width * model.dtype_bytes, gates)


def _activation(one_bytes: float, gates: int) -> PassLoads:
    return PassLoads(
        forward=Load(moved_bytes=(gates + 1) * one_bytes, kernels=2),
        input_grad=Load(moved_bytes=(2 * gates + 1) * one_bytes, kernels=2),
    )


def _experts(job: Job, layout: Layout) -> PassLoads:
    """Balanced routing: topk * T / t tokens' worth of whole experts on each rank, whatever ep and etp are."""
    model = job.model
    tokens = attention.tokens(model, layout)
    local = tokens / layout.tp if layout.sequence_parallel else tokens
    routed = model.moe_router_topk * local * layout.etp
    width = model.moe_ffn_hidden_size // layout.etp
    gates = 2 if model.gated_linear_unit else 1
    num_experts = model.num_experts or 1
    mine = max(1, num_experts // layout.ep)
    loads = _matrix(routed / mine, gates * width, model.hidden_size, count=mine)
    loads += _matrix(routed / mine, model.hidden_size, width, count=mine)
    loads += _activation(routed * width * model.dtype_bytes, gates)
    loads += _matrix(local, num_experts, model.hidden_size)
    # Tokens are sorted by expert and back: each copy is read and written twice in each pass.
    sorted_bytes = 4.0 * model.moe_router_topk * local * model.hidden_size * model.dtype_bytes
    loads += PassLoads(
        forward=Load(moved_bytes=sorted_bytes, kernels=20),
        input_grad=Load(moved_bytes=sorted_bytes, kernels=16),
    )
    if model.moe_shared_expert_intermediate_size:
        loads += _mlp(model, layout, model.moe_shared_expert_intermediate_size)
    return loads


def _norms_and_residuals(model: ModelSpec, layout: Layout) -> PassLoads:
    """Two norms and two bias-dropout-adds over T * h elements, over t with sequence parallelism.

    Backward, the gradients of the two ways around attention and around the MLP are added up, and those of the biases
    are summed over the tokens.
    """
    one = _residual_elements(model, layout) * model.dtype_bytes
    mask = 0.5 * one if model.hidden_dropout > 0 else 0.0
    biases = one if model.add_bias_linear else 0
    return PassLoads(
        forward=Load(moved_bytes=2 * (2 * one) + 2 * (3 * one + mask), kernels=6),
        input_grad=Load(moved_bytes=2 * (3 * one) + 2 * (2 * one + mask) + 2 * (3 * one + biases), kernels=10),
    )


def _launches(layout: Layout) -> PassLoads:
    """Tensor-parallel collectives of a layer, each worth a few kernels to the host (torch's process group)."""
    if layout.tp == 1:
        return PassLoads()
    forward, backward = (4, 6) if layout.sequence_parallel else (2, 2)
    return PassLoads(
        forward=Load(kernels=forward * _KERNELS_PER_COLLECTIVE),
        input_grad=Load(kernels=backward * _KERNELS_PER_COLLECTIVE),
    )


def _matrix(tokens: float, outputs: float, inputs: float, *, count: float = 1.0) -> PassLoads:
    """One weight matrix: y = xW forward, dx = dy W' and dW = x' dy backward, added to the gradient of the step."""
    return PassLoads(
        forward=Load(products=(Product(m=tokens, n=outputs, k=inputs, count=count),), kernels=1.5),
        input_grad=Load(products=(Product(m=tokens, n=inputs, k=outputs, count=count),), kernels=1.5),
        weight_grad=Load(
            products=(Product(m=outputs, n=inputs, k=tokens, count=count),),
            moved_bytes=_ACCUMULATED_BYTES * outputs * inputs * count,
            kernels=2,
        ),
    )


def _residual_elements(model: ModelSpec, layout: Layout) -> int:
    return activations.residual_bytes(model, layout) // model.dtype_bytes
