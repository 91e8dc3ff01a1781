"""NVIDIA's own pretrain_gpt.py under pipette-launch, with only the launcher's name changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from end_to_end.jobs import pipette

CHECKOUT = os.environ.get("MEGATRON_LM_DIR", "")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.processes,
    pytest.mark.skipif(not CHECKOUT, reason="needs a checkout of Megatron-LM, named by MEGATRON_LM_DIR"),
]
# A command for GPUs: nothing in it knows of the CPU.
ARGUMENTS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --log-interval 1 --lr 1e-3 --bf16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 255 --split 90,5,5 --eval-iters 1 --eval-interval 100 "
    "--transformer-impl transformer_engine --use-distributed-optimizer --overlap-grad-reduce"
).split()


def test_nvidias_script_is_measured_planned_and_trained(tmp_path: Path) -> None:
    """The unmodified script trains on CPU under a plan, and its loss moves."""
    script = Path(CHECKOUT) / "pretrain_gpt.py"

    done = pipette(tmp_path, "--nproc-per-node=2", "--pipette-budget=20", script, *ARGUMENTS)

    assert 0 == done.code, done.err
    assert [1, 2, 3, 4] == [iteration for iteration, _ in done.losses]
    assert 4 == len({loss for _, loss in done.losses})
    assert "Chosen" in done.err
    assert "cannot start" not in done.err
