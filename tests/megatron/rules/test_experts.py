"""What Megatron asks of the experts' grid."""

from __future__ import annotations

import pytest
from megatron_lines import job

from pipette_launch.megatron.rules.judge import broken_rule
from pipette_launch.megatron.rules.rules import Rules


@pytest.mark.parametrize(
    ("words", "faulty"),
    [
        ("--tensor-model-parallel-size 8", True),
        ("--tensor-model-parallel-size 4", False),
        ("--num-experts 8 --expert-model-parallel-size 8", True),
        ("--num-experts 8 --expert-model-parallel-size 4", False),
        ("--tensor-model-parallel-size 8 --data-parallel-sharding-strategy optim", False),
    ],
)
def test_gradients_that_megatron_fsdp_would_add_twice(words: str, faulty: bool) -> None:
    """Where one rank holds all weights or all experts alone, and gradients are sharded."""
    fsdp = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params"
    asked = job("--disable-bias-linear --use-distributed-optimizer", fsdp, words, for_planning=True)
    broken = broken_rule(Rules.of(asked, device_kind="cuda"), asked.own)

    assert faulty == (broken is not None and "adds gradients twice" in broken.reason)
