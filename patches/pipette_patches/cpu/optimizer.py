"""Save and load the distributed optimizer around torch's Adam, which stands where a fused Adam stands on a GPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from pipette_patches.replacements import Replacement


def _with_first_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give Adam its state before the first step: the original counts the steps in it, even to load a checkpoint."""

    @functools.wraps(original)
    def state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        adam = optimizer.optimizer
        if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)):
            for parameter in (each for group in adam.param_groups for each in group["params"]):
                if not adam.state[parameter]:
                    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    adam.state[parameter] = {"step": torch.tensor(0.0), **moments}
        return original(optimizer, *args, **kwargs)

    return state_dict


def _with_own_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give each parameter a step counter of its own: the original makes one for all, and each advances it."""

    @functools.wraps(original)
    def load_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        done = original(optimizer, *args, **kwargs)
        for state in optimizer.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].detach().clone()
        return done

    return load_state_dict


def _keeping_steps(original: Callable[..., None]) -> Callable[..., None]:
    """Keep the step counter that was loaded with the parameter groups: a shard's state has none, or a stale one."""

    @functools.wraps(original)
    def set_states(optimizer: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = optimizer.model_param_group_index_map[model_param]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
        original(optimizer, model_param, tensors | {"step": state["step"]} if "step" in state else tensors)

    return set_states


_MODULE = "megatron.core.optimizer.distrib_optimizer"
OPTIMIZER = (
    Replacement(module=_MODULE, path="DistributedOptimizer.state_dict", make=_with_first_state),
    Replacement(module=_MODULE, path="DistributedOptimizer.load_state_dict", make=_with_own_steps),
    Replacement(module=_MODULE, path="DistributedOptimizer._set_main_param_and_optimizer_states", make=_keeping_steps),
)
