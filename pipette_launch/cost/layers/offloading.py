"""What fine-grained activation offloading moves to the host and back, for one layer and one micro-batch.

Megatron copies what autograd saves within the modules of `--offload-modules`, tensor by tensor, and takes most of these
tensors from the device by force (MC = megatron/core of core_v0.16.1, pipeline_parallel/
fine_grained_activation_offload.py). The groups of a chunk's last layer stay where its backward is next, so that each
later backward of a module brings the same module's tensors of the layer below back: one layer's are there at any time.
"""

# T = tokens of one micro-batch on a rank, n = its sequence-parallel share, M = rows of the rank's experts.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipette_launch.cost.layers import attention, experts
from pipette_launch.cost.layers.attention import local_tokens, tokens
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.megatron.performance import performance_options

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloaded:
    """Bytes of one layer for one micro-batch."""

    attention: int = 0
    """Kept by norm and attention without offloading, and not with it."""
    mlp: int = 0
    """The same of the MLP and its norm."""
    moved: int = 0
    """Copied to the host, and back for the backward."""
    in_forward: int = 0
    """What a forward needs while another micro-batch's backward is next: that one's last layer, which is back, and its
    own layer, of which nothing has left yet, with the scores of an unfused core."""

    @property
    def left(self) -> int:
        """What leaves the device."""
        return self.attention + self.mlp


class _Tensor(NamedTuple):
    """One tensor that autograd saves."""

    elements: int
    kept: int
    """Bytes that leave the device with it; 0 where something else holds it too."""
    moved: int


def offloaded(job: Job, layout: Layout, *, moe: bool, recomputed: tuple[str, ...]) -> Offloaded:
    """Count what leaves of a layer, whose modules `recomputed` run again in the backward."""
    options = performance_options(job)
    if not options.fine_grained_activation_offloading or job.model.transformer_impl != "transformer_engine":
        return Offloaded()
    sides = (
        _attention(job, layout, options.offload_modules, recomputed),
        _mlp(job, layout, options.offload_modules, recomputed) if moe else (),
    )
    of_attention, of_mlp = (
        [tensor for tensor in side if tensor.elements >= options.min_offloaded_tensor_size] for side in sides
    )
    away, moved = (sum(getattr(tensor, name) for tensor in (*of_attention, *of_mlp)) for name in ("kept", "moved"))
    scores = attention.core_bytes(job, layout) if job.model.attention_backend == "unfused" and moved else 0
    return Offloaded(
        attention=sum(tensor.kept for tensor in of_attention),
        mlp=sum(tensor.kept for tensor in of_mlp),
        moved=moved,
        in_forward=moved + away + scores,
    )


def _hidden(job: Job, layout: Layout, *, is_stream: bool) -> _Tensor:
    """A tensor of n * h: between layers, or as the norms make it."""
    elements = local_tokens(job.model, layout) * job.model.hidden_size
    wide = is_stream and performance_options(job).fp32_residual_connection
    size = elements * (_FP32_BYTES if wide else job.model.dtype_bytes)
    return _Tensor(elements, size, size)


def _attention(job: Job, layout: Layout, modules: tuple[str, ...], recomputed: tuple[str, ...]) -> Iterator[_Tensor]:
    """Tensors that are saved up to the output projection (MC transformer/attention.py, multi_latent_attention.py)."""
    model = job.model
    is_latent = model.latent_attention is not None
    if is_latent and "attn_norm" in modules:
        yield _hidden(job, layout, is_stream=True)
    if "qkv_linear" in modules:
        yield from _projection(job, layout, recomputed)
    if "core_attn" in modules and not {"core_attn", "mla_up_proj"} & set(recomputed):
        yield from _core(job, layout)
    if "attn_proj" in modules:
        elements = _output_elements(job, layout)
        in_fp8 = elements if experts.matrix_input_bytes(job) == 1 and not is_latent else 0
        yield _Tensor(elements, elements * model.dtype_bytes + in_fp8, in_fp8 or elements * model.dtype_bytes)


def _projection(job: Job, layout: Layout, recomputed: tuple[str, ...]) -> Iterator[_Tensor]:
    """Inputs of the projections to query, key and value: with the norm's own input where it is part of the matrix."""
    model, latent = job.model, job.model.latent_attention
    if latent is None:
        yield _hidden(job, layout, is_stream=True)
        elements = local_tokens(model, layout) * model.hidden_size
        size = elements * experts.matrix_input_bytes(job)
        yield _Tensor(elements, size, size)
        return
    if "layernorm" not in recomputed:
        yield _hidden(job, layout, is_stream=False)
    shard, query, key_value = local_tokens(model, layout), latent.q_lora_rank or 0, latent.kv_lora_rank
    widths = [query, key_value + latent.qk_pos_emb_head_dim, *((query, key_value) if model.qk_layernorm else ())]
    for width in widths:
        yield _Tensor(shard * width, shard * width * model.dtype_bytes, shard * width * model.dtype_bytes)


def _core(job: Job, layout: Layout) -> Iterator[_Tensor]:
    """Query, key and value; what the core keeps; and its output, which the output projection keeps too."""
    model, latent = job.model, job.model.latent_attention
    vectors, heads = tokens(model, layout), model.num_attention_heads // layout.tp
    if latent is None:
        groups = max(1, model.num_query_groups // layout.tp)
        widths = [count * model.kv_channels for count in (heads, groups, groups)]
    else:
        widths = [heads * width for width in (latent.query_channels, latent.query_channels, latent.v_head_dim)]
    for width in widths:
        size = vectors * width * model.dtype_bytes
        yield _Tensor(vectors * width, size, size)
    if model.attention_backend == "unfused":
        # Without dropout softmax and product save the same probabilities: two copies come back.
        size, copies = attention.core_bytes(job, layout), 1 if model.attention_dropout > 0 else 2
        yield _Tensor(vectors * heads * model.seq_length, size, copies * size)
        return
    elements = _output_elements(job, layout)
    # Saved here and by the projection: what is offloaded with that is counted there.
    yield _Tensor(elements, 0, elements * model.dtype_bytes)


def _output_elements(job: Job, layout: Layout) -> int:
    """Elements of the core's output."""
    model, latent = job.model, job.model.latent_attention
    channels = latent.v_head_dim if latent else model.kv_channels
    return tokens(model, layout) * (model.num_attention_heads // layout.tp) * channels


def _mlp(job: Job, layout: Layout, modules: tuple[str, ...], recomputed: tuple[str, ...]) -> Iterator[_Tensor]:
    """Tensors that are saved by the norm before experts and by grouped experts (MC transformer/moe/experts.py)."""
    model = job.model
    if "mlp_norm" in modules:
        yield _hidden(job, layout, is_stream=True)
    if "moe" in recomputed or not performance_options(job).moe_grouped_gemm:
        return
    rows, routed = experts.expert_rows(job, layout), experts.expert_activations(job, layout)
    if "expert_fc1" in modules:
        # In FP8 the input is then saved as it is (`set_save_original_input`).
        yield _Tensor(rows * model.hidden_size, routed.inputs, rows * model.hidden_size * model.dtype_bytes)
    if "moe_act" in modules:
        width = rows * model.moe_ffn_hidden_size // layout.etp
        input_of_second = width * experts.matrix_input_bytes(job)
        between = 0 if "moe_act" in recomputed else routed.activation - input_of_second
        elements = routed.outputs // model.dtype_bytes
        yield _Tensor(elements, routed.outputs + between, routed.outputs + between)
