"""Flags of the jobs that the check launches; imports no torch."""

from __future__ import annotations

import importlib.util
from typing import Literal

from pipette_launch.facts import Recompute

DeviceKind = Literal["cpu", "cuda"]
FULL = Recompute(granularity="full", method="uniform", num_layers=1)
WITHOUT_KERNELS = (
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
)
"""Flags without which Megatron wants Transformer Engine or Apex."""
LOCAL_WORDS = ("--transformer-impl", "local", *WITHOUT_KERNELS)
ENGINE_WORDS = ("--transformer-impl", "transformer_engine")
GRADIENT_KERNELS = "fused_weight_gradient_mlp_cuda"
"""Module of Apex. Megatron's output layer wants it even where all other layers are Transformer Engine's."""
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


def kernel_flags(*, has_te: bool) -> tuple[str, ...]:
    """Flags that switch off the kernels which this machine lacks."""
    if not has_te:
        return WITHOUT_KERNELS
    return () if importlib.util.find_spec(GRADIENT_KERNELS) else ("--no-gradient-accumulation-fusion",)
