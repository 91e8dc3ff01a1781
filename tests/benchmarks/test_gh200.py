"""Published steps of Llama 3.1 8B on Alps, whose hosts have four GH200, lie near the predicted steps."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.validation.latency import Machines, pipette
from benchmarks.validation.shapes import job_of
from pipette_launch.facts.devices import KNOWN_DEVICES

LLAMA: dict[str, Any] = {
    "num-layers": 32,
    "hidden-size": 4096,
    "ffn-hidden-size": 14336,
    "num-attention-heads": 32,
    "group-query-attention": True,
    "num-query-groups": 8,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "untie-embeddings-and-output-weights": True,
    "disable-bias-linear": True,
    "attention-dropout": 0,
    "hidden-dropout": 0,
    "vocab-size": 131072,
    "cross-entropy-loss-fusion": True,
    "bf16": True,
    "use-precision-aware-optimizer": True,
    "main-grads-dtype": "bf16",
    "use-distributed-optimizer": True,
    "overlap-grad-reduce": True,
    "overlap-param-gather": True,
}
"""Flags of `submit-llama3-8b.sh` in github.com/swiss-ai/Megatron-LM."""


@pytest.mark.parametrize(
    ("hosts", "seq", "mbs", "tp", "tokens_s_gpu"),
    [
        (64, 8192, 1, 1, 8290),
        (64, 4096, 2, 1, 8840),
        (64, 4096, 4, 2, 8000),
        (32, 4096, 4, 2, 413e12 / 51.5e9),
        (16, 4096, 4, 2, 430e12 / 51.5e9),
    ],
)
def test_steps_on_alps_are_predicted_within_12_percent(
    hosts: int, seq: int, mbs: int, tp: int, tokens_s_gpu: float
) -> None:
    """Pull requests 33 and 29 of that repository, with 2 M tokens a step; TFLOP/s are 51.5 GFLOP a token."""
    flags = {
        **LLAMA,
        "seq-length": seq,
        "max-position-embeddings": seq,
        "micro-batch-size": mbs,
        "global-batch-size": (1 << 21) // seq,
        "tensor-model-parallel-size": tp,
        **({"sequence-parallel": True} if tp > 1 else {}),
    }
    device = KNOWN_DEVICES["GH200-96GB"]
    step_s = pipette(
        job_of(flags, world_size=4 * hosts, device_name=device.name),
        Machines(device=device, num_hosts=hosts, devices_per_host=4),
    )

    assert tokens_s_gpu == pytest.approx((1 << 21) / (4 * hosts) / step_s, rel=0.12)
