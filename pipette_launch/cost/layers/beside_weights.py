"""What lies beside a rank's weights: copies in FP8, and tensors that stand in for gradients.

Megatron's hooks want a gradient from every matrix, so with `gradient_accumulation_fusion`, which adds gradients to
their buffer as they are computed, TransformerEngine hands out an empty one, made once for each shape and kept for good
(TE v2.3 on, pytorch/module/base.py, get_dummy_wgrad). Megatron's own take theirs from the same store from core_v0.14
on, which needs TE 2.6 (tensor_parallel/layers.py:597). Left out: the matrices of latent attention, and those of
experts, which come to it with TE v2.12.
"""

from __future__ import annotations

from pipette_launch.cost.layers.activations import computes_in_fp8
from pipette_launch.cost.layers.experts import router_parameters
from pipette_launch.cost.layers.parameters import chunk_kinds, kind_parameters
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import KINDS_WITH_EXPERTS, TRANSFORMER_KINDS, LayerKind, ModelSpec
from pipette_launch.megatron.performance import performance_options

_COPIES_BYTES = 2
"""One byte as it is, and one transposed for the backward."""
_FIRST_DUMMY_RELEASE = (0, 14)


def fp8_weight_bytes(job: Job, layout: Layout) -> tuple[int, ...]:
    """Count each pipeline rank's copies: two bytes for every parameter of its layers' matrices.

    TransformerEngine casts a weight with the first micro-batch of a step and keeps the result and its transpose in the
    module (TE v2.8, module/linear.py:242-262, module/base.py get_weight_workspace). With `--fp8-param-gather` the
    weights themselves are in FP8, and with their transpose as large as in bf16. No golden row of the development data
    runs in FP8 without that flag. Biases, which stay as they are, are counted with the matrices.
    """
    model = job.model
    if not computes_in_fp8(job) or performance_options(job).fp8_param_gather:
        return (0,) * layout.pp
    matrices = {kind: _matrices(model, layout, kind) for kind in model.possible_kinds}
    chunks = [sum(matrices[kind] for kind in kinds) for kinds, _ in chunk_kinds(model, layout)]
    return tuple(_COPIES_BYTES * sum(chunks[rank :: layout.pp]) for rank in range(layout.pp))


def _matrices(model: ModelSpec, layout: Layout, kind: LayerKind) -> int:
    """Parameters of one layer's linears; of a Mamba layer both projections."""
    if kind == "mamba_layer" and model.hybrid:
        return model.hybrid.mamba_matrices(model.hidden_size) // layout.tp
    norms = (2 if kind in TRANSFORMER_KINDS else 1) * model.norm_parameters()
    router = router_parameters(model) if kind in KINDS_WITH_EXPERTS else 0
    return max(0, kind_parameters(model, layout, kind).count - norms - router)


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
    if model.transformer_impl == "local" or release < _FIRST_DUMMY_RELEASE or not fused:
        return 0
    # Outputs and inputs of the matrices of attention, dense MLPs and shared experts.
    hidden = model.hidden_size
    first = 2 if model.gated_linear_unit else 1
    kinds = set(model.layer_kinds)
    widths = {
        0 if kinds.isdisjoint(("layer", "mlp_layer")) else model.ffn_hidden_size,
        model.moe_shared_expert_intermediate_size,
    } - {0}
    shapes = {(first * width // layout.tp, hidden) for width in widths}
    shapes |= {(hidden, width // layout.tp) for width in widths}
    if model.hybrid and "mamba_layer" in kinds:
        shapes |= {(model.hybrid.mamba_projected // layout.tp, hidden)}
        shapes |= {(hidden, model.hybrid.mamba_channels // layout.tp)}
    if model.latent_attention is None and not kinds.isdisjoint((*TRANSFORMER_KINDS, "attention_layer")):
        query = model.num_attention_heads // layout.tp * model.kv_channels
        key_value = 2 * max(1, model.num_query_groups // layout.tp) * model.kv_channels
        shapes |= {(query + key_value, hidden), (hidden, query)}
    if has_head:
        shapes.add((model.padded_vocab_size(layout.tp) // layout.tp, hidden))
    return model.dtype_bytes * sum(rows * columns for rows, columns in shapes)
