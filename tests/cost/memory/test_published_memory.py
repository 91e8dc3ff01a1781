"""The closed form against figures that others published: formulas to the digit, measurements within a stated error."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model
from published import LLAMA_LAYOUT, llama_7b

from pipette_launch.cost.memory.overhead import workspace_bytes
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.facts import Batch, Layout, Recompute
from pipette_launch.text import MIB

SELECTIVE = Recompute(granularity="selective", modules=("core_attn",))


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "micro_batch_size", "layout", "full_gib", "selective_gib"),
    [
        (48, 6144, 64, 4, Layout(tp=8), 59.25, 9.5625),
        (96, 12288, 96, 1, Layout(tp=8, pp=8, vpp=3), 66.84375, 12.3515625),
        (105, 20480, 128, 1, Layout(tp=8, pp=35, vpp=3), 114.0234375, 23.076171875),
        (128, 25600, 160, 1, Layout(tp=8, pp=64), 131.25, 26.5625),
    ],
    ids=["22B", "175B", "530B", "1T"],
)
def test_activations_of_korthikanti(
    layers: int,
    hidden: int,
    heads: int,
    micro_batch_size: int,
    layout: Layout,
    full_gib: float,
    selective_gib: float,
) -> None:
    """Figure 1 of Korthikanti et al. 2022, first stage: none, and sequence parallelism with selective recompute.

    Source: arXiv 2205.05198 as transcribed in calculon-ai/calculon (Apache-2.0).
    """
    model = tiny_model(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        seq_length=2048,
        max_position_embeddings=2048,
        params_dtype="fp16",
        transformer_impl="transformer_engine",
        attention_backend="unfused",
        attention_dropout=0.1,
        hidden_dropout=0.1,
    )
    job = tiny_job(model=model, batch=Batch(global_batch_size=64 * layout.pp))
    plain = replace(layout, micro_batch_size=micro_batch_size)
    frugal = replace(plain, sequence_parallel=True, recompute=SELECTIVE)

    first, frugal_first = (peak_memory_bytes(job, each)[0].activations for each in (plain, frugal))

    assert full_gib * 1024 * MIB == first
    assert selective_gib * 1024 * MIB == frugal_first


@pytest.mark.parametrize(
    ("stage", "allocated_mib", "peak_mib"),
    [(0, 20034.75, 30227.65), (1, 18598.75, 25079.27), (2, 18598.75, 20931.01), (3, 20115.05, 20115.08)],
)
def test_every_stage_of_llama_7b(stage: int, allocated_mib: float, peak_mib: float) -> None:
    """Within 0.4 % on 8 RTX 4090 (TP1 PP4 DP2), where the peak is of before the first step: no Adam moments yet.

    Source: Infinigence, "NVIDIA 4090/4090D training best practice", log after one iteration.
    """
    job, layout = llama_7b(), LLAMA_LAYOUT
    # The log is of Megatron core_r0.10, whose matrices have no dummy gradients.
    parts = replace(peak_memory_bytes(job, layout)[stage], dummy_gradients=0)
    workspaces = workspace_bytes(job, capability=8)
    moments = parts.optimizer * 8 // 12

    allocated = parts.static + workspaces
    peak = max(replace(parts, optimizer=parts.optimizer - moments).total + workspaces, allocated)

    assert pytest.approx(allocated_mib, rel=0.004) == allocated / MIB
    assert pytest.approx(peak_mib, rel=0.004) == peak / MIB
