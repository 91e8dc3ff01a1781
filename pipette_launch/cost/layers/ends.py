"""Cost of the embedding, of the head with the loss, and of the depths of multi-token prediction.

MC = megatron/core of core_v0.16.1, TE = TransformerEngine v2.8, MTP = MC transformer/multi_token_prediction.py,
GPT = MC models/gpt/gpt_model.py.
"""

# Symbols in formulas: T = tokens of one micro-batch on a rank, V = padded vocabulary, t = tp, c = cp.

from __future__ import annotations

from pipette_launch.cost.layers.block import FP32_BYTES, MASK_BYTES, Sizes
from pipette_launch.cost.layers.loads import Load, PassLoads, matrix
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import ModelSpec

_TOKEN_ID_BYTES = 8


def attention_mask_bytes(job: Job, layout: Layout) -> int:
    """Count the bytes of the attention mask (b * s/c * s) that first and last pipeline rank load for a forward pass.

    Megatron's data loader makes the attention mask unless a flag forbids the mask, although causal attention does not
    use it (datasets/gpt_dataset.py, _get_ltor_masks_and_position_ids).
    """
    options = job.options
    makes = options.create_attention_mask_in_dataloader and not options.dataloader_inter_document_masking
    return MASK_BYTES * Sizes(job, layout).tokens * job.model.seq_length if makes else 0


def loaded_mask_bytes(job: Job, layout: Layout) -> int:
    """Count the bytes for loading an attention mask: b * s * s, and the rank's own part with context parallelism.

    Ranks of the first and last pipeline stage hold the whole mask on their device before context parallelism copies
    each rank's part (training/utils.py, get_batch_on_this_tp_rank; MC utils.py, get_batch_on_this_cp_rank; core_v0.16
    to 0.20).
    """
    part = attention_mask_bytes(job, layout)
    return layout.cp * part + (part if layout.cp > 1 else 0)


def sample_bytes(job: Job) -> int:
    """Count the bytes of one sample from the data loader: tokens, labels, positions, loss mask and attention mask."""
    mask = job.own.cp * attention_mask_bytes(job, job.own) // job.own.micro_batch_size
    return (3 * _TOKEN_ID_BYTES + FP32_BYTES) * job.model.seq_length + mask


def head_bytes(job: Job, layout: Layout) -> int:
    """Count the bytes of final norm, logits and loss of one micro-batch: 4*s*b*h/c (/t) + 6*s*b*V/(t*c) in bf16.

    Each depth of multi-token prediction computes its own loss, which keeps a copy of the depth's logits. A Python
    variable of Megatron keeps the logits of one depth alive as long as the head's logits (GPT:611-660).
    """
    sizes, depths, dtype = Sizes(job, layout), job.model.mtp_num_layers, job.model.dtype_bytes
    copy, gradient = loss_bytes_per_logit(job)
    each = (1 + min(depths, 1)) * dtype + (1 + depths) * copy + gradient
    return 2 * sizes.residual_bytes + sizes.tokens * _vocabulary(job.model, layout) * each


def loss_bytes_per_logit(job: Job) -> tuple[int, int]:
    """Return two numbers of bytes for each logit: kept by the loss beside the logit, and needed later by its backward.

    Megatron's loss keeps an fp32 copy of 2-byte logits, and changes this copy in place to the softmax and then to the
    gradient. The fp32 copy exists beside the logits in the forward, and beside the logits' gradient in the backward.
    Logits in fp32 have no copy (measured; MC tensor_parallel/cross_entropy.py:24-33). With `--cross-entropy-fusion-impl
    native`, the compiled backward writes the gradient to another fp32 tensor (MC fusions/fused_cross_entropy.py,
    calculate_gradients). TE's fused loss changes the logits in place (TE common/triton/cross_entropy.py).
    """
    options = job.options
    fuses = options.cross_entropy_loss_fusion
    if job.model.dtype_bytes == FP32_BYTES or (fuses and options.cross_entropy_fusion_impl == "te"):
        return 0, 0
    return FP32_BYTES, FP32_BYTES if fuses else 0


def deferred_bytes(job: Job, layout: Layout) -> int:
    """Count the bytes that each micro-batch keeps for the head's weight gradient, deferred until the cool-down.

    `--defer-embedding-wgrad-compute` with several pipeline ranks keeps the head's input and the gradient of the logits
    (MC tensor_parallel/layers.py:509-511, 1003-1008).
    """
    if not job.options.defer_embedding_wgrad_compute:
        return 0
    sizes = Sizes(job, layout)
    return sizes.residual_bytes + job.model.dtype_bytes * sizes.tokens * _vocabulary(job.model, layout)


def embedding_loads(job: Job, layout: Layout) -> PassLoads:
    """Return the work of the embedding: it copies rows in the forward and adds up their gradients in the backward."""
    rows = Sizes(job, layout).residual_bytes
    dropout = 2.5 * rows if job.model.hidden_dropout > 0 else 0.0
    return PassLoads(
        forward=Load(moved_bytes=2 * rows + dropout, kernels=4),
        input_grad=Load(moved_bytes=dropout, kernels=2),
        weight_grad=Load(moved_bytes=3 * rows, kernels=2),
    )


def head_loads(job: Job, layout: Layout) -> PassLoads:
    """Return the work of final norm, product with the vocabulary, and cross-entropy.

    Megatron's loss reads or writes the logits about ten times in fp32, by cast, maximum, subtraction, exponential, sum,
    division and scaling. TE's cross-entropy reads the logits twice, and overwrites them with their gradients. The
    product runs in 16 bits, or with `--fp8-output-proj` in the format of the layers' linears.
    """
    model, options, sizes = job.model, job.options, Sizes(job, layout)
    vocabulary, dtype, norm = _vocabulary(model, layout), model.dtype_bytes, 2 * sizes.residual_bytes
    logits = sizes.tokens * vocabulary
    forward = norm + logits * (dtype + 4 + 4 + 8 + 8 + 4 + 8)
    backward = 2 * norm + logits * (8 + 4 + dtype)
    if options.cross_entropy_loss_fusion and options.cross_entropy_fusion_impl == "te":
        forward, backward = norm + 3 * logits * dtype, 2 * norm + 2 * logits * dtype
    return matrix(sizes.tokens, vocabulary, model.hidden_size, is_linear=options.fp8_output_proj) + PassLoads(
        forward=Load(moved_bytes=forward, kernels=14),
        input_grad=Load(moved_bytes=backward, kernels=8),
        weight_grad=Load(kernels=1),
    )


def depth_parameters(model: ModelSpec, layout: Layout) -> int:
    """Count the parameters of one depth of multi-token prediction beside its layers (MTP:593-650).

    A depth has norms of embedding and hidden state, a projection from 2h to h, split over tp, and a final norm.
    """
    return 3 * model.norm_parameters() + 2 * model.hidden_size * model.hidden_size // layout.tp


def depth_bytes(job: Job, layout: Layout) -> int:
    """Count the bytes that a depth keeps beside its layers and its head (MTP:653-745, GPT:592-625).

    A depth keeps the inputs of three norms and both halves of the projection's input. Each depth also keeps its part of
    the tensor that all heads read. Its token ids and the dropout mask of its embedding are left out.
    """
    return 6 * Sizes(job, layout).residual_bytes


def depth_loads(job: Job, layout: Layout, layers: PassLoads) -> PassLoads:
    """Return the work of one depth: embedding, two norms, a projection from 2h to h, layers, a head and a loss."""
    hidden, sizes = job.model.hidden_size, Sizes(job, layout)
    projection, rows = matrix(sizes.tokens, hidden // layout.tp, 2 * hidden), sizes.residual_bytes
    # Each of a depth's two norms reads and writes T * h elements. Concatenating the norms' outputs reads and writes 2 *
    # T * h elements.
    joins = PassLoads(forward=Load(moved_bytes=8 * rows, kernels=3), input_grad=Load(moved_bytes=10 * rows, kernels=4))
    return embedding_loads(job, layout) + joins + projection + layers + head_loads(job, layout)


def _vocabulary(model: ModelSpec, layout: Layout) -> int:
    return model.padded_vocab_size(layout.tp) // layout.tp
