"""Peak of the first step under torch before 2.6, whose autotuner copies the tensors that a kernel changes.

At a kernel's first call, inductor times two configurations. Before torch 2.6, each timed run works on copies of the
arguments that the kernel changes, beside 256 MB that triton clears (inductor's `CachingAutotuner.bench`; triton's
`do_bench`). From torch 2.6 on, copies that would raise the peak go to the host. The compiled division in Megatron's
fused cross-entropy names its fp32 logits as two arguments, so inductor copies them twice. The product needs torch 2.6,
so only this benchmark has this rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipette_launch.cost.layers.block import FP32_BYTES, Sizes
from pipette_launch.cost.layers.ends import loss_bytes_per_logit
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.facts import Job

COPIES: dict[tuple[int, ...], int] = {(2, 2): 2, (2, 3): 1, (2, 4): 1, (2, 5): 1}
"""fp32 copies of the logits, by torch release, that the timed division adds to the peak of a later step.

Counted from inductor's generated code, run on fake tensors: 18 bytes per logit with torch 2.2, 14 with 2.3 to 2.5, and
10 in later steps. torch 2.2 writes the quotient to one more tensor.
"""
CLEARED_BYTES = 256e6
MOMENTS = 2 / 3
"""Share of Adam's moments in the optimizer states. Moments do not exist before the end of the first step."""


def copies(torch: tuple[int, ...], args: Mapping[str, Any]) -> int:
    """Return the copies of the logits that the first step of a test adds; 0 if the loss is not compiled."""
    compiles = args.get("cross-entropy-loss-fusion") and args.get("cross-entropy-fusion-impl", "native") == "native"
    return COPIES.get(torch, 0) if compiles else 0


def first_step_bytes(job: Job, peak_bytes: float, number: int) -> float:
    """Return the peak of the first step on the last stage, from the peak of a later step and from the copies."""
    own = job.own
    if not number or not any(loss_bytes_per_logit(job)):
        return 0.0
    logits = Sizes(job, own).tokens * job.model.padded_vocab_size(own.tp) // own.tp
    moments = MOMENTS * peak_memory_bytes(job, own)[-1].optimizer
    return peak_bytes - moments + number * FP32_BYTES * logits + CLEARED_BYTES
