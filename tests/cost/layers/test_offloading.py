"""What leaves for the host is what autograd saves within the named modules, tensor by tensor."""

from dataclasses import replace
from typing import Any

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.layers.activations import kept_bytes
from pipette_launch.cost.layers.offloading import Offloaded, offloaded
from pipette_launch.facts import Job, LatentAttention, Layout, Recompute

# Tokens 1024 = n, rows of experts 2048 = M.
LATENT = LatentAttention(q_lora_rank=96, kv_lora_rank=64, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=24)
HIDDEN = 2 * 1024 * 128
ALL = "attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act"


def job(modules: str, *flags: str, **changes: Any) -> Job:
    """A bf16 model of experts, 4 heads of 32 channels and 2 query groups, that offloads tensors of any size."""
    shape = {
        "params_dtype": "bf16",
        "transformer_impl": "transformer_engine",
        "attention_backend": "fused",
        "hidden_size": 128,
        "kv_channels": 32,
        "num_query_groups": 2,
        "seq_length": 1024,
        "gated_linear_unit": True,
        "num_experts": 4,
        "moe_layer_freq": (1,) * 4,
        "moe_ffn_hidden_size": 64,
    }
    offloading = ("--fine-grained-activation-offloading", f"--offload-modules {modules}", "--moe-grouped-gemm")
    given = flags or ("--min-offloaded-tensor-size 1",)
    return tiny_job(1, model=tiny_model(**(shape | changes)), performance_flags=(*offloading, *given))


def of(this: Job, *, moe: bool = True, recomputed: tuple[str, ...] = ()) -> Offloaded:
    """What one layer offloads without parallelism."""
    return offloaded(this, Layout(), moe=moe, recomputed=recomputed)


@pytest.mark.parametrize(
    ("modules", "changes", "expected"),
    [
        # The norm is part of the matrix: its input and its output.
        ("qkv_linear", {}, (2 * HIDDEN, 0, 2 * HIDDEN)),
        # 4 query heads, 2 of key and 2 of value; the output stays for the projection, and is copied all the same.
        ("core_attn", {}, (2 * HIDDEN, 0, 3 * HIDDEN)),
        ("core_attn attn_proj", {}, (3 * HIDDEN, 0, 4 * HIDDEN)),
        # Transformer Engine has no norm of its own there.
        ("attn_norm", {}, (0, 0, 0)),
        ("attn_norm", {"latent_attention": LATENT}, (HIDDEN, 0, HIDDEN)),
        ("mlp_norm", {}, (0, HIDDEN, HIDDEN)),
        # The norm's output, and the latents of query and of key and value.
        ("qkv_linear", {"latent_attention": LATENT}, (HIDDEN + 2 * 1024 * (96 + 80), 0, HIDDEN + 2 * 1024 * (96 + 80))),
        ("core_attn", {"latent_attention": LATENT}, (2 * 1024 * 4 * 120, 0, 2 * 1024 * 4 * 144)),
        ("expert_fc1", {}, (0, 2 * 2048 * 128, 2 * 2048 * 128)),
        ("moe_act", {}, (0, 2 * 2048 * 128, 2 * 2048 * 128)),
    ],
)
def test_what_leaves_by_module(modules: str, changes: dict[str, Any], expected: tuple[int, int, int]) -> None:
    """Bytes that attention and MLP no longer keep, and bytes copied."""
    found = of(job(modules, **changes))

    assert expected == (found.attention, found.mlp, found.moved)


def test_small_tensors_stay() -> None:
    """A query of 2^17 elements leaves, keys and values of half as many do not; Megatron's default is 2^20."""
    assert of(job("core_attn", "--min-offloaded-tensor-size 131072")).attention == HIDDEN
    assert of(job("core_attn", "--moe-permute-fusion")) == Offloaded()


def test_only_named_modules_of_transformer_engine_leave() -> None:
    """Nothing without the flag, nothing of Megatron's own layers, nothing of a dense MLP."""
    plain = replace(job(ALL), performance_flags=("--offload-modules core_attn", "--min-offloaded-tensor-size 1"))

    assert of(plain) == Offloaded()
    assert of(job(ALL, transformer_impl="local")) == Offloaded()
    assert of(job(ALL), moe=False).mlp == 0


def test_what_runs_again_is_counted_once() -> None:
    """A recomputed activation leaves its input alone, recomputed experts and attention cores leave nothing."""
    unfused = job("moe_act", "--min-offloaded-tensor-size 1", "--no-bias-swiglu-fusion")

    assert of(unfused).mlp > of(unfused, recomputed=("moe_act",)).mlp == 2 * 2048 * 128
    assert of(job("core_attn"), recomputed=("core_attn",)) == Offloaded()
    assert of(job("expert_fc1 moe_act"), recomputed=("moe",)) == Offloaded()


def test_a_layer_keeps_what_does_not_leave() -> None:
    """The bytes that it keeps for one micro-batch are fewer by what left."""
    selective = Layout(recompute=Recompute(granularity="selective", modules=("moe_act",)))
    for layout in (Layout(), selective):
        away, there = (kept_bytes(job(modules), layout, moe=True) for modules in (ALL, "attn_norm"))
        recomputed = layout.recompute.modules or ()

        assert there - away == offloaded(job(ALL), layout, moe=True, recomputed=recomputed).left


def test_unfused_cores_bring_their_probabilities_back_twice() -> None:
    """Softmax and product save one tensor without dropout; and a forward beside them makes scores of its own."""
    scores = 2 * 4 * 1024 * 1024
    found = of(job("core_attn", attention_backend="unfused"))

    assert (2 * HIDDEN + scores, 2 * HIDDEN + 2 * scores) == (found.attention, found.moved)
    assert found.in_forward == found.left + found.moved + scores
    assert (
        of(job("core_attn", attention_backend="unfused", attention_dropout=0.1)).moved == 2 * HIDDEN + 5 * scores // 2
    )
