"""NVIDIA's own pretrain_gpt.py under pipette-launch, with only the launcher's name changed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from end_to_end.jobs import pipette, torchrun

from pipette_launch.facts import Measurements, files

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

FINE_GRAINED = (
    *ARGUMENTS,
    *(
        "--ffn-hidden-size 128 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
        "--untie-embeddings-and-output-weights --qk-layernorm --attention-dropout 0 --hidden-dropout 0 "
        "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
        "--v-head-dim 16 --mtp-num-layers 1 --num-experts 4 --moe-layer-freq ([0]+[1]*3) --moe-router-topk 2 "
        "--moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
    ).split(),
)
"""DeepSeek-V3 in small: latent attention, a dense layer first, experts and a shared one, a depth of prediction."""
PREDICTED = re.compile(r"mtp_1 loss: (\S+)")


def test_nvidias_script_is_measured_planned_and_trained(tmp_path: Path) -> None:
    """The unmodified script trains on CPU under a plan, and its loss moves."""
    script = Path(CHECKOUT) / "pretrain_gpt.py"

    done = pipette(tmp_path, "--nproc-per-node=2", "--pipette-budget=20", script, *ARGUMENTS)

    assert 0 == done.code, done.err
    assert [1, 2, 3, 4] == [iteration for iteration, _ in done.losses]
    assert 4 == len({loss for _, loss in done.losses})
    assert "Chosen" in done.err
    assert "cannot start" not in done.err


def test_a_fine_grained_model_is_measured_planned_and_trained(tmp_path: Path) -> None:
    """Its own layers are timed, the plan is another one than the user's, and both of its losses move."""
    script = Path(CHECKOUT) / "pretrain_gpt.py"

    done = pipette(tmp_path, "--nproc-per-node=2", "--pipette-budget=10", script, *FINE_GRAINED)

    assert 0 == done.code, done.err
    assert [1, 2, 3, 4] == [iteration for iteration, _ in done.losses]
    assert 4 == len({loss for _, loss in done.losses}) == len(set(PREDICTED.findall(done.out)))
    assert "Chosen" in done.err
    measured = files.read(next(tmp_path.glob("cache/pipette-launch/*/cluster.json")), Measurements)
    assert {"layer", "moe_layer", "embedding", "head", "core_attention", "prediction"} == {
        time.part for time in measured.compute if time.source == "measured"
    }
    assert "cannot start" not in done.err


def test_a_fine_grained_model_learns_what_it_learns_under_torchrun(tmp_path: Path) -> None:
    """Under the layout that it is given, losses are the same to the last digit, with the depth on the last stage."""
    script = Path(CHECKOUT) / "pretrain_gpt.py"
    arguments = (script, *FINE_GRAINED, "--pipeline-model-parallel-size", "2")
    wrapper = ("-m", "pipette_patches.run", "--patch", "cpu_backend", "--")

    stock = torchrun(tmp_path, "--standalone", "--nproc-per-node=2", *wrapper, *arguments)
    ours = pipette(tmp_path, "--nproc-per-node=2", "--pipette-budget=10", "--pipette-fix=all", *arguments)

    assert (0, 0) == (stock.code, ours.code), ours.err
    assert 4 == len(stock.losses)
    assert stock.losses == ours.losses
    assert PREDICTED.findall(stock.out) == PREDICTED.findall(ours.out)
    assert "bubble" in ours.err


def test_a_sharded_model_learns_what_it_learns_under_torchrun(tmp_path: Path) -> None:
    """Under Megatron-FSDP it is measured, and its losses under its own layout are torchrun's to the last digit."""
    script = Path(CHECKOUT) / "pretrain_gpt.py"
    sharded = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor"
    arguments = (script, *ARGUMENTS, *sharded.split(), "--overlap-param-gather", "--no-gradient-accumulation-fusion")
    wrapper = ("-m", "pipette_patches.run", "--patch", "cpu_backend", "--")

    stock = torchrun(tmp_path, "--standalone", "--nproc-per-node=2", *wrapper, *arguments)
    ours = pipette(tmp_path, "--nproc-per-node=2", "--pipette-budget=10", "--pipette-fix=all", *arguments)

    assert (0, 0) == (stock.code, ours.code), stock.err + ours.err
    assert 4 == len(stock.losses)
    assert stock.losses == ours.losses
    assert "Measured" in ours.err
