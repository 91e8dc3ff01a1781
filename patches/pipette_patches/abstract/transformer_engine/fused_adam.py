"""Fused Adam as Transformer Engine has it: states of each parameter, and no temporaries in a step.

Read in TransformerEngine 2.8, optimizers/fused_adam.py: states are made at the first step. With reduced precisions a
state that is not fp32 is copied to fp32 for the kernel, all of a parameter group at once; 16-bit remainders of the
weights in place of fp32 master weights are read and written as they are.
"""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam whose step is a few kernels over lists of tensors."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **_kernel_options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        super().__init__(params, defaults)
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        if master_weights:
            self.dtypes["master_param"] = master_weight_dtype
        self.use_decoupled_grad = use_decoupled_grad
        self.master_weights = master_weights
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype is torch.float32
        self.overflow = torch.empty(1, dtype=torch.int32, device="cuda")

    def initialize_state(self, parameter: Any, _store_param_remainders: bool = False) -> None:
        """Make the states of one parameter."""
        for name, dtype in self.dtypes.items():
            kept = dtype
            if name == "master_param" and self.store_param_remainders and parameter.dtype is torch.bfloat16:
                kept = torch.int16
            self.state[parameter][name] = torch.empty_like(parameter, dtype=kept)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for parameter in (one for group in self.param_groups for one in group["params"]):
            if self.use_decoupled_grad:
                parameter.decoupled_grad = None
            elif set_to_none:
                parameter.grad = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make states that are not there yet, and the fp32 copies of those that are kept smaller."""
        del closure
        for group in self.param_groups:
            copies = []
            for parameter in group["params"]:
                gradient = parameter.decoupled_grad if self.use_decoupled_grad else parameter.grad
                if gradient is None:
                    continue
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                copies += [
                    torch.empty_like(state, dtype=torch.float32)
                    for state in self.state[parameter].values()
                    if state.dtype not in (torch.float32, torch.int16)
                ]
            del copies


def choose(*, fused: bool) -> None:
    """Let megatron-core build fused optimizers from now on, or torch's, as it does without TE and Apex."""
    from megatron.core import optimizer

    optimizer.USING_PYTORCH_OPTIMIZER = not fused
    optimizer.Adam = FusedAdam if fused else torch.optim.AdamW
    optimizer.SGD = FusedSGD if fused else torch.optim.SGD


class FusedSGD(torch.optim.SGD):
    """Stochastic gradient descent over lists of tensors; its momentum is made at the first step."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, foreach=True)
