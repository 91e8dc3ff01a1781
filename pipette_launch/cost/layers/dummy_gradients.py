"""Tensors that stand in for weight gradients which were added to the gradient buffer already.

Megatron's hooks want a gradient from every matrix, so with `gradient_accumulation_fusion` TransformerEngine hands out
an empty one, made once for each shape and kept for good (TE v2.3 on, pytorch/module/base.py, get_dummy_wgrad).
Megatron's own take theirs from the same store from core_v0.14 on, which needs TE 2.6 (tensor_parallel/layers.py:597).
Left out: the matrices of latent attention, and those of experts, which come to it with TE v2.12.
"""

from __future__ import annotations

from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import ModelSpec
from pipette_launch.megatron.performance import performance_options

_FIRST_RELEASE = (0, 14)


def dummy_gradient_bytes(job: Job, layout: Layout, *, has_head: bool) -> int:
    """Count one tensor in the weights' type for each distinct shape of a rank's matrices.

    Args:
        job: its model, release and flags decide.
        layout: tensor parallelism cuts the matrices.
        has_head: whether the rank is the last of the pipeline.

    """
    model = job.model
    release = tuple(int(part) for part in job.megatron_version.split(".")[:2] if part.isdigit())
    fused = performance_options(job).gradient_accumulation_fusion
    if model.transformer_impl == "local" or release < _FIRST_RELEASE or not fused:
        return 0
    shapes = _layer_shapes(model, layout)
    if has_head:
        shapes.add((model.padded_vocab_size(layout.tp) // layout.tp, model.hidden_size))
    return model.dtype_bytes * sum(rows * columns for rows, columns in shapes)


def _layer_shapes(model: ModelSpec, layout: Layout) -> set[tuple[int, int]]:
    """Outputs and inputs of the matrices of attention, dense MLPs and shared experts."""
    hidden = model.hidden_size
    first = 2 if model.gated_linear_unit else 1
    is_all_moe = bool(model.moe_layer_freq) and all(model.moe_layer_freq)
    widths = {0 if is_all_moe else model.ffn_hidden_size, model.moe_shared_expert_intermediate_size} - {0}
    shapes = {(first * width // layout.tp, hidden) for width in widths}
    shapes |= {(hidden, width // layout.tp) for width in widths}
    if model.latent_attention is None:
        query = model.num_attention_heads // layout.tp * model.kv_channels
        key_value = 2 * max(1, model.num_query_groups // layout.tp) * model.kv_channels
        shapes |= {(query + key_value, hidden), (hidden, query)}
    return shapes
