"""One optimizer step as Megatron takes it: clipping, master weights and all, on the parameters of a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pipette_launch.facts import Job
from pipette_patches.workload.config import DTYPES
from pipette_patches.workload.layers import Workload, WorkloadError

OPTIMIZERS = ("adam", "sgd")


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """Something to time, and how many parameters it moves."""

    run: Callable[[], None]
    num_parameters: int


def optimizer_step(work: Workload, job: Job) -> OptimizerStep:
    """Wrap the workload's model as a training job does, and give it an optimizer with gradients to step on.

    The distributed optimizer is left off: it does the same on fewer parameters. The model belongs to the optimizer
    afterwards, so this comes last.

    Raises:
        WorkloadError: the job's optimizer is none of Megatron's plain ones.

    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    if job.optimizer not in OPTIMIZERS:
        raise WorkloadError(f"the step of optimizer {job.optimizer!r} is not measured, only {', '.join(OPTIMIZERS)}")
    wrapped = DistributedDataParallel(
        config=work.model.config,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=not job.grad_reduce_in_bf16),
        module=work.model,
    )
    model = job.model
    config = OptimizerConfig(
        optimizer=job.optimizer,
        lr=1e-6,
        bf16=model.params_dtype == "bf16",
        fp16=model.params_dtype == "fp16",
        params_dtype=DTYPES[model.params_dtype],
        # Only fp16 looks for gradients that are not finite before it steps.
        loss_scale=1.0 if model.params_dtype == "fp16" else None,
    )
    optimizer: Any = get_megatron_optimizer(config, [wrapped], use_gloo_process_groups=False)
    parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    for parameter in parameters:
        # Their norm is the root of their number, far above Megatron's limit of 1: clipping is in the time.
        parameter.main_grad.copy_(torch.randn_like(parameter))
    return OptimizerStep(run=optimizer.step, num_parameters=sum(parameter.numel() for parameter in parameters))
