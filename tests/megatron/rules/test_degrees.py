"""Rules of the degrees TP, PP, CP, EP and ETP."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import LATENT, changed_job, tiny_job, tiny_model
from megatron_lines import job

from pipette_launch.facts import Batch, GatedDelta, HybridLayers, Layout, Recompute, SparseAttention
from pipette_launch.megatron.rules.broken import Rules
from pipette_launch.megatron.rules.degrees import pipeline_faults, tensor_faults
from pipette_launch.megatron.rules.judge import broken_rule


def test_transformer_engine_has_whole_projections_down_to_the_latents() -> None:
    """Transformer Engine does not shard the projections to latents, so any TP is legal."""
    latent = replace(LATENT, q_lora_rank=33)
    model = tiny_model(latent_attention=latent, transformer_impl="transformer_engine")

    assert [] == [*tensor_faults(Rules.of(tiny_job(4, model=model), device_kind="cuda"), 2)]


def test_overlapped_experts_with_prediction_need_a_pipeline() -> None:
    """TransformerConfig refuses overlapped experts with multi-token prediction and pp 1."""
    flags = ("--overlap-moe-expert-parallel-comm",)
    rules = Rules.of(tiny_job(4, model=tiny_model(mtp_num_layers=1), performance_flags=flags), device_kind="cuda")

    assert [] == [*pipeline_faults(rules, 2)]
    assert ["--overlap-moe-expert-parallel-comm with multi-token prediction needs pp > 1"] == [
        broken.reason for broken in pipeline_faults(rules, 1)
    ]


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        (Layout(pp=2, layers_per_chunk=(3, 5)), None),
        (
            Layout(pp=2, layers_per_chunk=(4, 4)),
            "a layer takes selected keys from another chunk, or from a layer without keys",
        ),
        (Layout(cp=2), None),
        (Layout(tp=2), "layers of sparse attention with tp > 1 need sequence parallelism"),
    ],
)
def test_layers_share_selected_keys_within_a_chunk(layout: Layout, fault: str | None) -> None:
    """Layers 1, 2, 4, 6 and 8 select keys; keys are gathered over cp, in Megatron's word."""
    sparse = SparseAttention(
        dsa_indexer_n_heads=4,
        dsa_indexer_head_dim=16,
        dsa_indexer_topk=8,
        dsa_indexer_topk_freq=2,
        dsa_indexer_skip_topk_offset=2,
    )
    model = tiny_model(
        num_layers=8, latent_attention=LATENT, sparse_attention=sparse, transformer_impl="transformer_engine"
    )
    flags = ("--cp-comm-type allgather",)
    job = tiny_job(2, model=model, performance_flags=flags, megatron_version="0.20")

    found = broken_rule(Rules.of(job, device_kind="cuda"), layout)
    ring = broken_rule(Rules.of(changed_job(job, performance_flags=()), device_kind="cuda"), Layout(cp=2))

    assert fault == (found.reason if found else None)
    assert ring is not None
    assert "sparse attention can only gather keys over cp" == ring.reason
    # Layer 3 of the pattern takes keys from layer 2, an MLP.
    pattern = replace(HYBRID, pattern="D-D-D-D-")
    mixed = replace(job, model=replace(model, hybrid=pattern))
    between = broken_rule(Rules.of(mixed, device_kind="cuda"), Layout())
    assert between is not None
    assert "from a layer without keys" in between.reason


HYBRID = HybridLayers(pattern="M*M-", mamba_state_dim=16, mamba_head_dim=8, mamba_num_groups=2, mamba_num_heads=16)


@pytest.mark.parametrize(
    ("version", "layout", "fault"),
    [
        ("0.17.1", Layout(tp=4), "tp does not divide mamba_num_groups=2"),
        ("0.16.1", Layout(tp=2), None),
        ("0.16.1", Layout(pp=2, layers_per_chunk=(1, 3)), "equally many layers on each stage"),
        ("0.17.1", Layout(pp=2, layers_per_chunk=(1, 3)), None),
        ("0.17.1", Layout(recompute=Recompute(granularity="full", method="uniform", num_layers=1)), "before 0.18"),
        ("0.17.1", Layout(cp=4), None),
        ("0.17.1", Layout(tp=2, cp=16), "cp does not divide mamba_num_heads=16/tp"),
    ],
)
def test_hybrid_models_have_rules_of_their_own(version: str, layout: Layout, fault: str | None) -> None:
    """TP must divide Mamba groups, CP heads and groups; each release restricts stages and recompute."""
    model = tiny_model(hybrid=HYBRID, transformer_impl="transformer_engine", params_dtype="bf16")
    job = tiny_job(1, model=model, megatron_version=version, batch=Batch(global_batch_size=8))

    found = broken_rule(Rules.of(job, device_kind="cuda"), layout)

    assert found is None if fault is None else found is not None and fault in found.reason


@pytest.mark.parametrize(
    ("pattern", "version", "layout", "fault"),
    [
        ("", "0.18.0", Layout(tp=2, cp=2), None),
        ("", "0.18.0", Layout(cp=8), "cp does not divide linear_num_key_heads=4/tp"),
        ("", "0.17.1", Layout(cp=2), "gated delta networks need cp = 1 before 0.18"),
        ("G-*-", "0.18.0", Layout(tp=4, cp=2), "cp does not divide linear_num_key_heads=4/tp"),
        ("G-*-", "0.18.0", Layout(tp=4), None),
    ],
)
def test_gated_delta_networks_split_their_key_heads(
    pattern: str, version: str, layout: Layout, fault: str | None
) -> None:
    """Without Mamba layers, tp may exceed the default number of Mamba's groups."""
    sizes = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    net = GatedDelta(**sizes, linear_num_key_heads=4, linear_num_value_heads=8)
    kinds = {"hybrid": replace(HYBRID, pattern=pattern)} if pattern else {"linear_layers": (1, 1, 1, 0)}
    model = tiny_model(linear_attention=net, transformer_impl="transformer_engine", params_dtype="bf16", **kinds)
    job = tiny_job(1, model=model, megatron_version=version, batch=Batch(global_batch_size=8))

    found = broken_rule(Rules.of(job, device_kind="cuda"), layout)

    assert found is None if fault is None else found is not None and fault in found.reason


@pytest.mark.parametrize(
    ("words", "faulty"),
    [
        ("--tensor-model-parallel-size 8", True),
        ("--tensor-model-parallel-size 4", False),
        ("--num-experts 8 --expert-model-parallel-size 8", True),
        ("--num-experts 8 --expert-model-parallel-size 4", False),
        ("--tensor-model-parallel-size 8 --data-parallel-sharding-strategy optim", False),
    ],
)
def test_gradients_that_megatron_fsdp_would_add_twice(words: str, faulty: bool) -> None:
    """The rule applies if one rank holds all weights or all experts alone and gradients are sharded."""
    fsdp = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params"
    asked = job("--disable-bias-linear --use-distributed-optimizer", fsdp, words, for_planning=True)
    broken = broken_rule(Rules.of(asked, device_kind="cuda"), asked.own)

    assert faulty == (broken is not None and "adds gradients twice" in broken.reason)
