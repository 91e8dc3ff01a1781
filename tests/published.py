"""Published runs of others: two Megatron logs, and the sixteen hosts of the Pipette paper."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
from facts_for_tests import tiny_cluster, tiny_job, tiny_model
from numpy.typing import NDArray

from pipette_launch.facts import Batch, Cluster, Job, Layout, Links

LINKS = Path(__file__).parent / "data" / "pipette_links_time0.csv"

LLAMA_LAYOUT = Layout(pp=4, dp=2, use_distributed_optimizer=True)
GPT_65B_LAYOUT = Layout(tp=4, pp=8)


def llama_7b() -> Job:
    """Llama-2-7B on 8 RTX 4090: TP1 PP4 DP2, 128 samples a step."""
    model = tiny_model(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=11008,
        num_attention_heads=32,
        num_query_groups=32,
        kv_channels=128,
        seq_length=4096,
        vocab_size=32000,
        gated_linear_unit=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        transformer_impl="transformer_engine",
        attention_backend="flash",
        params_dtype="bf16",
    )
    return tiny_job(8, model=model, own=LLAMA_LAYOUT, batch=Batch(global_batch_size=128))


def gpt_65b() -> Job:
    """GPT of 64.69B on 32 GPUs: TP4 PP8 DP1, 512 samples a step, 32,001 tokens."""
    model = tiny_model(
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=32768,
        num_attention_heads=64,
        num_query_groups=64,
        kv_channels=128,
        seq_length=4096,
        vocab_size=32001,
        params_dtype="bf16",
    )
    return tiny_job(32, model=model, own=GPT_65B_LAYOUT, batch=Batch(global_batch_size=512))


def pipette_cluster() -> Cluster:
    """Sixteen hosts of eight GPUs: what each sent (key 0), directed, in host order."""
    with LINKS.open(newline="") as file:
        next(file)  # attribution
        rows = [row for row in csv.DictReader(file) if row["key"] == "0"]
    rate: NDArray[np.float64] = np.zeros((16, 16))
    for row in rows:
        if row["diagonal"] == "0":
            rate[int(row["src_index"]), int(row["dst_index"])] = float(row["bandwidth_MBps"]) * 1e6
    links = Links(
        latency_s=tuple((0.0,) * 16 for _ in range(16)),
        bandwidth_bytes_per_s=tuple(tuple(line) for line in rate.tolist()),
    )
    return replace(tiny_cluster(16, 8, bandwidth_bytes_per_s=6e10), between_hosts=links)
