"""Megatron's own offloading runs on abstract tensors, and the closed form agrees with it."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from facts_for_tests import tiny_job, tiny_model
from oracle.executor import Executor

from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.facts import Batch, Job, LatentAttention, Layout

LATENT = {
    "latent_attention": LatentAttention(
        q_lora_rank=768, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128
    ),
    "qk_layernorm": True,
}


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    """One worker for all tests here."""
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    with Executor() as started:
        yield started


def job_of(layout: Layout, modules: str, **changes: Any) -> Job:
    """A bf16 model of 8 layers of experts and 8 micro-batches, that offloads if modules are named."""
    shape = {
        "num_layers": 8,
        "params_dtype": "bf16",
        "transformer_impl": "transformer_engine",
        "attention_backend": "fused",
        "hidden_size": 1024,
        "ffn_hidden_size": 2048,
        "num_attention_heads": 16,
        "num_query_groups": 4,
        "kv_channels": 128,
        "seq_length": 4096,
        "max_position_embeddings": 4096,
        "vocab_size": 4096,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "num_experts": 8,
        "moe_layer_freq": (1,) * 8,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 1024,
    }
    flags = ["--moe-grouped-gemm", "--moe-permute-fusion", "--moe-token-dispatcher-type alltoall"]
    if modules:
        flags += ["--fine-grained-activation-offloading", f"--offload-modules {modules}"]
    batch = Batch(global_batch_size=8 * layout.dp * layout.micro_batch_size)
    model = tiny_model(**(shape | changes))
    return tiny_job(layout.world_size, model=model, own=layout, batch=batch, performance_flags=tuple(flags))


@pytest.mark.parametrize(
    ("layout", "modules", "changes"),
    [
        (Layout(pp=2, dp=4, ep=4), "expert_fc1 moe_act", {}),
        (Layout(pp=2, dp=4, ep=4), "qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act", {}),
        (Layout(pp=2, vpp=2, dp=4, ep=4), "core_attn expert_fc1 moe_act", {}),
        (Layout(tp=2, pp=2, dp=2, ep=4, sequence_parallel=True), "core_attn attn_proj moe_act", {}),
        (Layout(dp=4, ep=4), "attn_norm mlp_norm core_attn attn_proj expert_fc1 moe_act", LATENT),
    ],
)
def test_peaks_are_those_of_the_closed_form(
    executor: Executor, layout: Layout, modules: str, changes: dict[str, Any]
) -> None:
    """Within 5 % on every stage, and below the peaks without offloading."""
    job = job_of(layout, modules, **changes)
    found = [memory.peak for memory in executor.execute(job, layout, range(layout.pp))]
    without = [parts.total for parts in peak_memory_bytes(job_of(layout, "", **changes), layout)]

    assert pytest.approx([parts.total for parts in peak_memory_bytes(job, layout)], rel=0.05) == found
    assert all(peak < plain for peak, plain in zip(found, without, strict=True))
