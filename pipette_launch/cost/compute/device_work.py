"""What the parts of a model ask of a device for one micro-batch: products, bytes moved and kernels, pass by pass.

T = s * b / c tokens of one rank, t = tp, e = bytes of an element. Products are Narayanan et al. 2021 (appendix), cut as
Shoeybi et al. 2019 cut them; tensors that are read and written are those of `cost.layers.activations`.
"""

from __future__ import annotations

from pipette_launch.cost.compute.expert_work import expert_loads
from pipette_launch.cost.compute.loads import Load, PassLoads, Product, is_captured, matrix, mlp
from pipette_launch.cost.compute.mamba_work import mamba_loads
from pipette_launch.cost.layers import activations, attention
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import TRANSFORMER_KINDS, LatentAttention, LayerKind, ModelSpec
from pipette_launch.megatron.performance import performance_options

GRADIENT_PASSES = 4
"""Times that each byte of the gradient buffers, which no optimizer shards, is read or written once a step: cleared
(megatron-core, DistributedDataParallel.zero_grad_buffer), read for NaN, read and written by the division by the
replicas (ParamAndGradBuffer, start_grad_sync; with one replica there is no division)."""

_KERNELS_PER_COLLECTIVE = 3.0


def layer_loads(job: Job, layout: Layout, *, moe: bool) -> PassLoads:
    """One transformer layer on one rank: of its communication only what the host does to start it."""
    options = performance_options(job)
    rest = _attention(job.model, layout) + _norms_and_residuals(job.model, layout) + _launches(layout)
    rest = rest.without_launches(1.0 if is_captured(options, "attn") else 0.0)
    loads = rest + (expert_loads(job, layout) if moe else mlp(job.model, layout, job.model.ffn_hidden_size))
    return loads.without_launches(1.0 if is_captured(options, "full_iteration") else 0.0)


def kind_loads(job: Job, layout: Layout, kind: LayerKind) -> PassLoads:
    """Return the same of one layer of any kind; those of hybrid models have one block with one norm."""
    if kind in TRANSFORMER_KINDS:
        return layer_loads(job, layout, moe=kind == "moe_layer")
    model, options = job.model, performance_options(job)
    around = _norms_and_residuals(model, layout, blocks=1) + _launches(layout, blocks=1)
    if kind == "mamba_layer":
        assert model.hybrid is not None
        loads, scope = mamba_loads(model, model.hybrid, layout), "mamba"
    elif kind == "attention_layer":
        loads, scope = _attention(model, layout), "attn"
    else:
        loads, scope = mlp(model, layout, model.ffn_hidden_size), "mlp"
    if kind == "expert_layer":
        loads = expert_loads(job, layout) + around
    else:
        loads = (loads + around).without_launches(1.0 if is_captured(options, scope) else 0.0)
    return loads.without_launches(1.0 if is_captured(options, "full_iteration") else 0.0)


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
    """Final norm, product with the vocabulary, cross-entropy: logits pass about ten times in fp32.

    Transformer Engine's cross-entropy reads the logits twice, and writes their gradients in their place.
    """
    model, options = job.model, performance_options(job)
    tokens = attention.tokens(model, layout)
    vocabulary = model.padded_vocab_size(layout.tp) // layout.tp
    logits = tokens * vocabulary
    norm = 2 * _residual_elements(model, layout) * model.dtype_bytes
    matrices = matrix(tokens, vocabulary, model.hidden_size, is_linear=False)
    # Cast to fp32, maximum, subtract in place, exponential in place, sum; then divide in place and scale.
    forward = norm + logits * (model.dtype_bytes + 4 + 4 + 8 + 8 + 4 + 8)
    backward = 2 * norm + logits * (8 + 4 + model.dtype_bytes)
    if options.cross_entropy_loss_fusion and options.cross_entropy_fusion_impl == "te":
        forward, backward = norm + 3 * logits * model.dtype_bytes, 2 * norm + 2 * logits * model.dtype_bytes
    return matrices + PassLoads(
        forward=Load(moved_bytes=forward, kernels=14),
        input_grad=Load(moved_bytes=backward, kernels=8),
        weight_grad=Load(kernels=1),
    )


def prediction_loads(job: Job, layout: Layout) -> PassLoads:
    """One depth of multi-token prediction: embedding, two norms, the projection of both, layers, a head and loss."""
    model = job.model
    rows = _residual_elements(model, layout) * model.dtype_bytes
    projection = matrix(attention.tokens(model, layout), model.hidden_size // layout.tp, 2 * model.hidden_size)
    # Each norm reads and writes; then both are joined, which reads and writes twice as much.
    joins = PassLoads(forward=Load(moved_bytes=8 * rows, kernels=3), input_grad=Load(moved_bytes=10 * rows, kernels=4))
    layers = sum((kind_loads(job, layout, kind) for kind in model.prediction_kinds), PassLoads())
    return embedding_loads(job, layout) + joins + projection + layers + head_loads(job, layout)


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
        matrices = matrix(tokens, query + 2 * key, model.hidden_size) + matrix(tokens, model.hidden_size, query)
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
    loads = matrix(tokens, latent.kv_lora_rank + latent.qk_pos_emb_head_dim, hidden)
    loads += matrix(tokens, heads * (latent.qk_head_dim + latent.v_head_dim), latent.kv_lora_rank)
    loads += matrix(tokens, hidden, heads * latent.v_head_dim)
    if latent.q_lora_rank is None:
        return loads + matrix(tokens, query, hidden)
    return loads + matrix(tokens, latent.q_lora_rank, hidden) + matrix(tokens, query, latent.q_lora_rank)


def core_attention_loads(model: ModelSpec, layout: Layout) -> PassLoads:
    """Scores, softmax and context of one layer: flash attention, or every score written out.

    Flash: half of 2 * T * s * a * (d of query + d of value) / t is behind the causal mask and skipped, and so is what
    lies outside a window (as in the mean of all layers); the backward has 5 products to the forward's 2 (Dao 2023).
    Otherwise scores and context in full, and T * s * a / t scores written, masked and normalised, dropped, and read
    again.
    """
    tokens, one = attention.tokens(model, layout), model.seq_length
    heads = model.num_attention_heads // layout.tp
    latent = model.latent_attention
    query, value = (latent.query_channels, latent.v_head_dim) if latent else (model.kv_channels, model.kv_channels)
    if is_flash(model):
        scores_seen = 0.5 * tokens * one * heads * model.window_share
        flops = 2.0 * scores_seen * (query + value)
        return PassLoads(
            forward=Load(attention_flops=flops, exponentials=scores_seen, kernels=2),
            input_grad=Load(attention_flops=2.5 * flops, exponentials=scores_seen, kernels=4),
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


def _norms_and_residuals(model: ModelSpec, layout: Layout, *, blocks: int = 2) -> PassLoads:
    """One norm and one bias-dropout-add for each block of a layer: T * h elements, over t with sequence parallelism.

    Backward, the gradients of the two ways around attention and around the MLP are added up, and those of the biases
    are summed over the tokens.
    """
    one = _residual_elements(model, layout) * model.dtype_bytes
    mask = 0.5 * one if model.hidden_dropout > 0 else 0.0
    biases = one if model.add_bias_linear else 0
    return PassLoads(
        forward=Load(moved_bytes=blocks * (2 * one + 3 * one + mask), kernels=3 * blocks),
        input_grad=Load(moved_bytes=blocks * (3 * one + 2 * one + mask + 3 * one + biases), kernels=5 * blocks),
    )


def _launches(layout: Layout, *, blocks: int = 2) -> PassLoads:
    """Tensor-parallel collectives of a layer's blocks, each worth a few kernels to the host (torch's process group)."""
    if layout.tp == 1:
        return PassLoads()
    forward, backward = (2, 3) if layout.sequence_parallel else (1, 1)
    return PassLoads(
        forward=Load(kernels=blocks * forward * _KERNELS_PER_COLLECTIVE),
        input_grad=Load(kernels=blocks * backward * _KERNELS_PER_COLLECTIVE),
    )


def _residual_elements(model: ModelSpec, layout: Layout) -> int:
    return activations.residual_bytes(model, layout) // model.dtype_bytes
