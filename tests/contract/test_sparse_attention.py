"""What Megatron's own sparse attention weighs and saves is what the closed form says."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts_for_tests import tiny_job, tiny_model
from newest import CORE
from packaging.version import Version

from pipette_launch.cost.layers.sparse import Sparse
from pipette_launch.facts import LatentAttention, Layout, SparseAttention

pytestmark = pytest.mark.skipif(Version("0.19") > CORE, reason="sparse attention has a formula from 0.19 on")
TOKENS, HEADS = 64, 4
LATENT = LatentAttention(q_lora_rank=96, kv_lora_rank=32, qk_head_dim=24, qk_pos_emb_head_dim=16, v_head_dim=40)
INDEXER = {"dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 32, "dsa_indexer_topk": 16}
CASES: list[dict[str, Any]] = [
    {},
    {"batch": 2},
    {"dsa_indexer_loss_coeff": 0.01},
    {"dsa_indexer_loss_coeff": 0.01, "batch": 2, "dsa_indexer_use_sparse_loss": True},
    {"qk_layernorm": False},
]
ROW_STATISTICS = 17
"""Bytes that torch's masked softmax keeps for each row of scores: index of the largest score, flag, and two sums."""


def question(case: dict[str, Any]) -> dict[str, Any]:
    """The case in Megatron's words."""
    case = dict(case)
    batch = case.pop("batch", 1)
    sizes = {"hidden_size": 64, "num_attention_heads": HEADS, "qk_layernorm": True, "normalization": "RMSNorm"}
    return {"tokens": TOKENS, "batch": batch, "config": sizes | asdict(LATENT) | INDEXER | case}


def answers(cases: list[dict[str, Any]], layout: Layout) -> list[dict[str, Any]]:
    """What Megatron's modules do."""
    worker = Path(__file__).with_name("sparse_worker.py")
    words = (json.dumps([question(case) for case in cases]), str(layout.tp), str(layout.cp))
    run = subprocess.run([sys.executable, worker, *words], capture_output=True, text=True, timeout=120, check=False)
    assert 0 == run.returncode, run.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return found


def block_of(case: dict[str, Any], layout: Layout) -> Sparse:
    """The same block in our words."""
    options = {name: value for name, value in case.items() if name.startswith("dsa_")}
    model = tiny_model(
        hidden_size=64,
        num_attention_heads=HEADS,
        seq_length=TOKENS,
        qk_layernorm=case.get("qk_layernorm", True),
        add_bias_linear=False,
        normalization="RMSNorm",
        params_dtype="bf16",
        position_embedding_type="rope",
        transformer_impl="transformer_engine",
        latent_attention=LATENT,
        sparse_attention=SparseAttention(**INDEXER, **options),
    )
    return Sparse(tiny_job(model=model), layout)


def test_parameters_and_saved_bytes_are_those_of_the_closed_form() -> None:
    """Torch's core and loss: parameters exactly, bytes but for one statistic of each row."""
    for case, answer in zip(CASES, answers(CASES, Layout()), strict=True):
        batch = case.get("batch", 1)
        block = block_of(case, Layout(micro_batch_size=batch))
        kept = block.activations().total - block.dropout_mask_bytes - block.residual_bytes
        rows = TOKENS * batch * HEADS * ROW_STATISTICS

        assert answer["parameters"] == block.parameters().dense, case
        assert pytest.approx(answer["bytes"] - rows, abs=600) == kept, case


@pytest.mark.parametrize("layout", [Layout(tp=2, sequence_parallel=True), Layout(cp=2)])
@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_exchanges_are_those_of_the_closed_form(layout: Layout, loss: float) -> None:
    """Bytes of each kind of collective in both passes, beside those of column- and row-parallel matrices."""
    case = {"dsa_indexer_loss_coeff": loss}
    (answer,) = answers([case], layout)
    block = block_of(case, layout)
    ours = [*block.exchanges(np.array([1]), np.array([0]))]
    columns, row = (2 * TOKENS * width * (layout.tp > 1) for width in (LATENT.q_lora_rank, 64))

    for name, matrices in (
        ("forward", {"all_gather": columns, "reduce_scatter": row}),
        ("backward", {"all_gather": row + columns, "reduce_scatter": columns}),
    ):
        expected = Counter({kind: size for kind, size in matrices.items() if size})
        for each in ours:
            expected[each.kind] += int(getattr(each, name)[0] * each.size_bytes)
        found: Counter[str] = Counter()
        for kind, size in answer[name]:
            found[kind] += size
        assert found == +expected
