"""What the two ends of the model keep and need: the embedding in front, the head and the loss behind.

MC = megatron/core of core_v0.16.1, TE = TransformerEngine v2.8.
"""

# T = tokens of one micro-batch on a rank, V = padded vocabulary, p = pipeline ranks.

from __future__ import annotations

import numpy as np

from pipette_launch.cost.layers.attention import local_tokens, tokens
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Ints, Layout
from pipette_launch.megatron.performance import performance_options

_FP32_BYTES = 4
_MASK_BYTES = 1
_TOKEN_ID_BYTES = 8


def embedding_bytes(job: Job, layout: Layout) -> int:
    """Count token ids of one micro-batch and the embedding's dropout mask: 8*s*b + s*b*h."""
    model = job.model
    mask = local_tokens(model, layout) * model.hidden_size * _MASK_BYTES if model.hidden_dropout > 0 else 0
    return _TOKEN_ID_BYTES * tokens(model, layout) + mask


def attention_mask_bytes(job: Job, layout: Layout) -> int:
    """Count the mask b * s/c * s of one byte that the first and the last pipeline rank load for a forward pass.

    Megatron's data loader makes it unless told not to, though causal attention has no use for it (datasets/
    gpt_dataset.py, _get_ltor_masks_and_position_ids). On the golden rows: 7B, micro-batch 2 of 8192 tokens, 128 MiB;
    the test without it holds 4 MiB less than its twin, which is its size there.
    """
    options = performance_options(job)
    if not options.create_attention_mask_in_dataloader or options.dataloader_inter_document_masking:
        return 0
    return _MASK_BYTES * tokens(job.model, layout) * job.model.seq_length


def whole_mask_bytes(job: Job, layout: Layout) -> int:
    """Count the mask b * s * s of a micro-batch as the data loader makes it, before context parallelism cuts it."""
    return layout.cp * attention_mask_bytes(job, layout)


def loaded_mask_bytes(job: Job, layout: Layout) -> int:
    """Count the mask while a micro-batch is loaded: the whole of it, and then this rank's part beside it.

    Every rank of the first and of the last pipeline stage moves the whole mask to its device, or receives it there,
    before context parallelism copies its part (training/utils.py, get_batch_on_this_tp_rank; MC utils.py,
    get_batch_on_this_cp_rank; core_v0.14 to 0.20).
    """
    part = attention_mask_bytes(job, layout) if layout.cp > 1 else 0
    return whole_mask_bytes(job, layout) + part


def head_bytes(job: Job, layout: Layout) -> int:
    """Count final norm, logits and loss of one micro-batch: 4*s*b*h/c (/t) + 6*s*b*V/(t*c) in bf16.

    Each depth of multi-token prediction computes a loss of its own, whose copy is kept, and one of their logits is a
    variable that lives as long as the head's (MC models/gpt/gpt_model.py:611-660).
    """
    model = job.model
    elements = tokens(model, layout) * (model.padded_vocab_size(layout.tp) // layout.tp)
    copy, gradient = loss_bytes_per_logit(job)
    depths = model.mtp_num_layers
    each = (1 + min(depths, 1)) * model.dtype_bytes + (1 + depths) * copy + gradient
    return 2 * model.dtype_bytes * local_tokens(model, layout) * model.hidden_size + elements * each


def loss_bytes_per_logit(job: Job) -> tuple[int, int]:
    """Bytes for each logit that the loss keeps for its backward, and that its backward needs on top, beside the logit.

    Megatron's: an fp32 copy of 2-byte logits, which becomes softmax and gradient in place; it is there with the logits
    going forward and with their gradient going backward. fp32 logits are worked on in place (measured;
    MC tensor_parallel/cross_entropy.py:24-33). Fused natively: the compiled backward writes the gradient to
    another fp32 tensor (MC fusions/fused_cross_entropy.py, calculate_gradients; golden H100 rows hold T*V/t*4 = 393 MiB
    more). Fused by TE: everything in place of the logits (TE common/triton/cross_entropy.py).
    """
    if job.model.dtype_bytes == _FP32_BYTES:
        return 0, 0
    options = performance_options(job)
    if not options.cross_entropy_loss_fusion:
        return _FP32_BYTES, 0
    return (0, 0) if options.cross_entropy_fusion_impl == "te" else (_FP32_BYTES, _FP32_BYTES)


def deferred_bytes(job: Job, layout: Layout) -> int:
    """Count what one deferred micro-batch keeps for the head's weight gradient until the cool-down.

    With `--defer-embedding-wgrad-compute` and more than one pipeline rank: the head's input and the gradient of the
    logits (MC tensor_parallel/layers.py:509-511, 1003-1008).
    """
    if not performance_options(job).defer_embedding_wgrad_compute:
        return 0
    model = job.model
    vocabulary = model.padded_vocab_size(layout.tp) // layout.tp
    return model.dtype_bytes * (local_tokens(model, layout) * model.hidden_size + tokens(model, layout) * vocabulary)


def deferred_microbatches(job: Job, num_microbatches: Ints) -> Ints:
    """Count the micro-batches that are deferred: `--wgrad-deferral-limit` limits their number, 0 defers all."""
    limit = performance_options(job).wgrad_deferral_limit
    return np.minimum(num_microbatches, limit) if limit else num_microbatches
