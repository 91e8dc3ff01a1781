"""Models of the GPU check, in the proportions of their families: real sizes for a GPU, toy sizes for a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.gpt import gpt_job
from benchmarks.gpu.jobs import DeviceKind, kernel_flags
from pipette_launch.facts import Job, Layout
from pipette_launch.megatron.performance import options_of_flags
from pipette_patches.replacements import Replacements, megatron_core_version
from pipette_patches.without_cuda import WITHOUT_ENGINE
from pipette_patches.workload import Part, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A Llama-like model: RMSNorm, rotary embeddings, gated MLP, no biases, no dropout, own output weights."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    """Number of groups of queries that share a key and value; equal to `heads` without grouping."""
    seq_length: int = 2048
    vocab: int = 32000
    experts: int = 0
    """Experts in each layer; 0 = dense. Each token goes to two experts."""


SHAPES: dict[DeviceKind, dict[str, Shape]] = {
    "cuda": {
        "1B": Shape(layers=16, hidden=2048, ffn=5504, heads=16, groups=16),
        "7B": Shape(layers=32, hidden=4096, ffn=11008, heads=32, groups=32),
        "8B GQA": Shape(layers=32, hidden=4096, ffn=14336, heads=32, groups=8, vocab=128256),
        "70B GQA": Shape(layers=80, hidden=8192, ffn=28672, heads=64, groups=8),
        "8 experts": Shape(layers=16, hidden=2048, ffn=2816, heads=16, groups=16, experts=8),
    },
    "cpu": {
        "1B": Shape(layers=16, hidden=64, ffn=176, heads=8, groups=8, seq_length=32, vocab=512),
        "7B": Shape(layers=32, hidden=64, ffn=176, heads=8, groups=8, seq_length=32, vocab=512),
        "8B GQA": Shape(layers=32, hidden=64, ffn=224, heads=16, groups=8, seq_length=32, vocab=1024),
        "70B GQA": Shape(layers=80, hidden=128, ffn=448, heads=16, groups=8, seq_length=32, vocab=512),
        "8 experts": Shape(layers=16, hidden=64, ffn=88, heads=8, groups=8, seq_length=32, vocab=512, experts=8),
    },
}


def job_of(shape: Shape, layout: Layout, *, has_te: bool) -> Job:
    """Return a bf16 job of this model with four micro-batches a step or two a stage, the larger number."""
    job = gpt_job(
        (shape.layers, shape.hidden, shape.heads),
        seq_length=shape.seq_length,
        vocab_size=shape.vocab,
        params_dtype="bf16",
        transformer_impl="transformer_engine" if has_te else "local",
        attention_backend="auto" if has_te else "local",
        global_batch_size=max(4, 2 * layout.pp) * layout.dp * layout.micro_batch_size,
        own=layout,
    )
    model = replace(
        job.model,
        ffn_hidden_size=shape.ffn,
        num_query_groups=shape.groups,
        gated_linear_unit=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        num_experts=shape.experts or None,
        moe_layer_freq=(1,) * shape.layers if shape.experts else (),
        moe_router_topk=2,
        moe_ffn_hidden_size=shape.ffn,
    )
    flags = kernel_flags(has_te=has_te)
    options = options_of_flags(flags, job.megatron_version)
    return replace(job, model=model, performance_flags=flags, options=options)


def has_transformer_engine(device_kind: str) -> bool:
    """Return whether megatron-core would build its layers from Transformer Engine's; imports megatron-core."""
    from megatron.core.models.gpt import gpt_layer_specs

    return device_kind == "cuda" and bool(getattr(gpt_layer_specs, "HAVE_TE", False))


@contextlib.contextmanager
def without_engine(device_kind: str) -> Iterator[None]:
    """Let local layers run tensor-parallel and with experts on a GPU that has neither Transformer Engine nor Apex.

    megatron-core's own local layers refuse both there. The CPU backend's replacements hold as many bytes as TE's norms.
    """
    is_needed = device_kind == "cuda" and not has_transformer_engine(device_kind)
    version = megatron_core_version()
    replacements = Replacements([one for one in WITHOUT_ENGINE if one.fits(version)] if is_needed else [])
    replacements.apply()
    try:
        yield
    finally:
        replacements.revert()


def layer_of(work: Workload) -> Part:
    """The one layer that a workload has."""
    return next(part for part in work.parts if part.chains)
