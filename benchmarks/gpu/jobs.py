"""Flags of the jobs that the check launches; imports no torch."""

from __future__ import annotations

from typing import Literal

from pipette_launch.facts import Recompute

DeviceKind = Literal["cpu", "cuda"]
BACKENDS: dict[DeviceKind, str] = {"cuda": "nccl", "cpu": "gloo"}
FULL = Recompute(granularity="full", method="uniform", num_layers=1)
WITHOUT_KERNELS = (
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
)
"""What needs Transformer Engine or Apex."""
LOCAL_WORDS = ("--transformer-impl", "local", *WITHOUT_KERNELS)
ENGINE_WORDS = ("--transformer-impl", "transformer_engine")
_COMMON = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--lr 3e-4 --log-interval 1 --eval-iters 0 --micro-batch-size 1"
)
COMMON_WORDS: dict[DeviceKind, tuple[str, ...]] = {
    "cuda": (*_COMMON.split(), "--bf16"),
    # A CPU without instructions for bf16 emulates it, several times slower than fp32.
    "cpu": (*_COMMON.split(),),
}
