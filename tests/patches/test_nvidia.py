"""NVIDIA's own pretrain_gpt.py trains on CPUs with the command line of a GPU machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = (
    "--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64",
    "--max-position-embeddings", "64", "--bf16", "--attention-dropout", "0", "--hidden-dropout", "0",
    "--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "6",
    "--lr", "1e-3", "--lr-decay-iters", "20", "--lr-warmup-iters", "1",
    "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255",
    "--log-interval", "1", "--eval-iters", "1", "--eval-interval", "3",
    "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable",
)  # fmt: skip
ITERATION = re.compile(r"iteration +(\d+)/ +6 .*elapsed time per iteration \(ms\): [\d.]+ .*lm loss: ([\d.E+-]+)")


def train(*flags: str) -> dict[int, float]:
    """Train with two processes under plain torchrun; the loss of each iteration."""
    folder = os.environ.get("MEGATRON_LM_DIR")
    if folder is None:
        pytest.skip("MEGATRON_LM_DIR does not name a checkout of Megatron-LM")
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'patches'}", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    wrapper = ["-m", "pipette_patches.run", "--patch", "cpu_backend", "--"]
    command = [*launcher, *wrapper, "pretrain_gpt.py", *MODEL, *flags]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    assert "validation loss at iteration" in done.stdout
    return {int(iteration): float(loss) for iteration, loss in ITERATION.findall(done.stdout)}


@pytest.mark.processes
@pytest.mark.timeout(420)
def test_it_trains_saves_and_goes_on_in_another_layout(tmp_path: Path) -> None:
    """Two interleaved stages learn and save; two tensor-parallel ranks load that and go on from the same loss."""
    first = train(
        "--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1",
        "--save", str(tmp_path), "--save-interval", "3",
    )  # fmt: skip
    second = train(
        "--tensor-model-parallel-size", "2", "--sequence-parallel",
        "--load", str(tmp_path), "--ckpt-step", "3", "--no-load-rng",
    )  # fmt: skip

    assert list(first) == [1, 2, 3, 4, 5, 6]
    assert first[6] < first[1] - 0.2
    assert list(second) == [4, 5, 6]
    assert second[4] == pytest.approx(first[4], abs=2e-3)
