"""The step of the user's optimizer on the parameters of a workload."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from pipette_launch.facts import Job
from pipette_patches.workload.config import DTYPES
from pipette_patches.workload.layers import Workload, WorkloadError

_OPTIMIZERS = ("adam", "sgd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """One optimizer step as Megatron takes it, clipping, master weights and all."""

    run: Callable[[], None]
    run_on_single_elements: Callable[[], None]
    """The same with as many tensors, of one element each."""
    num_parameters: int
    gradient_bytes: int


def optimizer_step(work: Workload, job: Job) -> OptimizerStep:
    """Wrap the workload's model as a training job does, and give it an optimizer with gradients to step on.

    The distributed optimizer is left off: it does the same on fewer parameters. The model belongs to the optimizer
    afterwards, so this comes last.

    Raises:
        WorkloadError: the job's optimizer is none of Megatron's plain ones.

    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    if job.optimizer not in _OPTIMIZERS:
        raise WorkloadError(f"the step of optimizer {job.optimizer!r} is not measured, only {', '.join(_OPTIMIZERS)}")
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

    def step_of(module: torch.nn.Module) -> Callable[[], None]:
        wrapped = DistributedDataParallel(
            config=work.model.config,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=not job.grad_reduce_in_bf16),
            module=module,
        )
        optimizer: Any = get_megatron_optimizer(config, [wrapped], use_gloo_process_groups=False)
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                # Their norm is the root of their number, above Megatron's limit of 1: clipping is in the time.
                parameter.main_grad.copy_(torch.randn_like(parameter))
        step: Callable[[], None] = optimizer.step
        return step

    parameters: list[Any] = [each for each in work.model.parameters() if each.requires_grad]
    single = torch.nn.Module()
    single.elements = torch.nn.ParameterList(each.detach().flatten()[:1].clone() for each in parameters)
    return OptimizerStep(
        run=step_of(work.model),
        run_on_single_elements=step_of(single),
        num_parameters=sum(each.numel() for each in parameters),
        gradient_bytes=sum(each.main_grad.numel() * each.main_grad.element_size() for each in parameters),
    )
