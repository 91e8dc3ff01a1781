"""Flags that change time, memory or legality and have no field of their own in a job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any, get_args, get_origin, get_type_hints

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Job
from pipette_launch.facts.job import PerformanceOptions
from pipette_launch.megatron.flags import Arguments, releases

_NAMES = tuple(option.name for option in fields(PerformanceOptions))
_ELEMENT_TYPES = {
    name: get_args(hint)[0] for name, hint in get_type_hints(PerformanceOptions).items() if get_origin(hint) is tuple
}
DESTS = {
    *_NAMES,
    # No rule and no price here reads these, but jobs that differ in them do not share plans and measurements.
    "attention_output_gate",
    "bias_dropout_fusion",
    "bias_gelu_fusion",
    "calculate_per_token_loss",
    "check_for_nan_in_loss_and_grad",
    "ddp_average_in_collective",
    "ddp_bucket_size",
    "ddp_num_buckets",
    "ddp_reduce_scatter_with_fp32_accumulation",
    "delay_wgrad_compute",
    "deterministic_mode",
    "fp4_param",
    "high_priority_stream_groups",
    "main_grads_dtype",
    "mlp_chunks_for_training",
    "moe_apply_probs_on_input",
    "moe_layer_recompute",
    "moe_router_enable_expert_bias",
    "moe_router_group_topk",
    "moe_router_num_groups",
    "moe_router_topk_scaling_factor",
    "moe_token_drop_policy",
    "no_persist_layer_norm",
    "overlap_cpu_optimizer_d2h_h2d",
    "qk_layernorm",
    "reset_attention_mask",
    "reset_position_ids",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "rope_type",
    "softmax_type",
    "symmetric_ar_type",
    "use_flash_attn",
    "use_ring_exchange_p2p",
    "window_size",
}
"""Destinations of the flags that are kept as a job's performance flags."""


def performance_flags(arguments: Arguments) -> tuple[str, ...]:
    """Each such flag as `--flag value`, as it counts (the last of several), sorted."""
    last = {
        token.flag.dest: " ".join((*token.words[0].split("=", 1), *token.words[1:]))
        for token in arguments.tokens
        if token.flag and token.flag.dest in DESTS
    }
    return tuple(sorted(last.values()))


def performance_options(job: Job) -> PerformanceOptions:
    """Read a job's performance flags as the options that they set, the others at the defaults of its release.

    No command line of a release before 0.14 is read, but jobs of older published measurements are priced: by 0.14.
    """
    return _options(job.performance_flags, job.megatron_version)


@lru_cache(maxsize=64)
def _options(flags: tuple[str, ...], version: str) -> PerformanceOptions:
    words = [word for flag in flags for word in flag.split()]
    try:
        arguments = Arguments.parse(words, version)
    except MegatronError:
        arguments = Arguments.parse(words, releases()[0])
    values: dict[str, Any] = {}
    for name in _NAMES:
        value = arguments.get(name)
        if name in _ELEMENT_TYPES and value is not None:
            # A release may take one value only where others take several, or text where they take numbers.
            value = tuple(_ELEMENT_TYPES[name](item) for item in (value if isinstance(value, list) else [value]))
        # None is a release that does not know the option, or one that says nothing: the record's default.
        values |= {} if value is None else {name: value}
    return PerformanceOptions(**values)


VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch takes the first that is set, even if it is empty; ROCm alone knows the second, and 2.9 and later the third."""
EXPANDABLE = "expandable_segments"
_OUTSIDE_LISTS = re.compile(r",(?![^\[]*\])")


def allocator_config(environment: Mapping[str, str]) -> str:
    """Return the options in effect without white space, which torch skips; empty where none is set.

    Raises:
        MegatronError: torch itself refuses the options when it is imported.

    """
    name = next((variable for variable in VARIABLES if variable in environment), VARIABLES[0])
    config = "".join(environment.get(name, "").split())
    options = allocator_options(config)
    for option in options:
        if "=" in option:
            raise MegatronError(f"{name}={config}: torch refuses {option}; write NAME:VALUE, as {EXPANDABLE}:True")
    value = options.get(EXPANDABLE, "False")
    if value not in {"True", "False"}:
        raise MegatronError(
            f"{name}={config}: torch refuses {EXPANDABLE}:{value}; write {EXPANDABLE}:True or {EXPANDABLE}:False"
        )
    return config


def allocator_options(config: str) -> dict[str, str]:
    """Split `a:1,b:[64:8,>:1]` into names and values; the last of several counts."""
    items = (item.partition(":") for item in _OUTSIDE_LISTS.split(config))
    return {name: value for name, _, value in items if name}
