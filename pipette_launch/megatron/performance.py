"""Options besides the layout that affect time, memory or legality, from Megatron's flags and torch's allocator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_origin, get_type_hints

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Job
from pipette_launch.facts.job import (
    ALLOCATOR_VARIABLES,
    EXPANDABLE,
    SCRIPT_ONLY,
    PerformanceOptions,
    allocator_options,
)
from pipette_launch.megatron.chunks import HYBRID_SPECS, PATTERN_DESTS
from pipette_launch.megatron.flags import EFFECTS, Arguments, flag_defaults, release_of, releases
from pipette_launch.megatron.model import FIRST_ABSORBED, GATED_DELTA_NETS

_OPTIONS = {
    name: get_origin(hint) is tuple
    for name, hint in get_type_hints(PerformanceOptions).items()
    if name in {option.name for option in fields(PerformanceOptions)}
}
"""For each option, True if it has several values."""
_READ_ELSEWHERE = "calculate_per_token_loss moe_layer_recompute qk_layernorm reset_attention_mask window_size".split()
NOT_PRICED = [dest for dest, effect in EFFECTS.items() if effect == "not priced"]
DESTS = {*_OPTIONS, *_READ_ELSEWHERE, *NOT_PRICED, *(dest for dest in EFFECTS if EFFECTS[dest] == "small")}
"""Destinations of the flags that `Job.performance_flags` contains.

Jobs that differ in one of these flags must not share plans or measurements.
"""
_FIRST_OFFLOAD_SHARE = (0, 19)


def performance_flags(arguments: Arguments, *, every: bool = False) -> tuple[str, ...]:
    """Return the flags in `DESTS` and those that `unmodelled` finds, or every flag, as sorted texts `--flag value`."""
    last = {
        token.flag.dest: " ".join((*token.words[0].split("=", 1), *token.words[1:]))
        for token in arguments.tokens
        if token.flag and (every or token.flag.dest in DESTS or token.flag.dest in unmodelled(arguments))
    }
    return tuple(sorted(last.values()))


def unpriced_note(arguments: Arguments) -> str:
    """Return a note on given flags that change time or memory, but no prediction; an empty text without such flags."""
    defaults = flag_defaults(arguments.version)
    shown = [arguments.shown(dest) for dest in NOT_PRICED if arguments.get(dest) != defaults.get(dest)]
    if arguments.get("experimental_attention_variant") in GATED_DELTA_NETS and arguments.get("deterministic_mode"):
        # PyTorch's gated delta rule launches thousands of kernels.
        shown.append("--deterministic-mode (except for memory)")
    return f"not priced, so time and memory are predicted as without these flags: {', '.join(shown)}" if shown else ""


def unmodelled(arguments: Arguments) -> list[str]:
    """Return the destinations of given flags that select layers without a formula, such as layers of an own module."""
    dests = [option[2:].replace("-", "_") for option in SCRIPT_ONLY]
    values = {dest: arguments.get(dest) for dest in dests if arguments.is_given(dest)}
    has_sparse = release_of(arguments.version) >= FIRST_ABSORBED
    given = {dest: value for dest, value in values.items() if value not in (None, [], ["local"], False)}
    return [
        dest
        for dest, value in given.items()
        if not (dest == "spec" and value[-1] in HYBRID_SPECS)
        and not (dest in PATTERN_DESTS and (has_sparse or "D" not in value))
        and value not in (*GATED_DELTA_NETS, *(("dsa",) if has_sparse else ()))
    ]


def plannable_offload(job: Job) -> list[tuple[str, ...]]:
    """Return sets of modules whose activations a plan may offload, smallest first.

    The result is empty if the release cannot offload a share, if a flag decides on offloading or may exclude it, or if
    no module of the model is known to be offloaded.
    """
    options, model = job.options, job.model
    decides = options.fine_grained_activation_offloading or options.cpu_offloading_num_layers
    excludes = (
        *(options.graphs.impl != "none", options.overlap_moe_expert_parallel_comm, options.moe_paged_stash),
        *(options.use_megatron_fsdp, model.hybrid, model.foreign, model.linear_attention),
    )
    is_old = job.release < _FIRST_OFFLOAD_SHARE or model.transformer_impl != "transformer_engine"
    if decides or any(excludes) or is_old or "recompute" in job.pinned:
        return []
    experts = ("expert_fc1", "moe_act") if model.num_experts and options.moe_grouped_gemm else ()
    attention = () if model.attention_backend in ("unfused", "local") else ("qkv_linear", "core_attn", "attn_proj")
    return [modules for modules in dict.fromkeys((experts, experts + attention)) if modules]


def options_of_flags(flags: Sequence[str], version: str) -> PerformanceOptions:
    """Return the options that texts such as `--flag value` set, and the defaults of a release for other options.

    Published measurements contain jobs of older releases, whose flags are read as flags of the oldest one in the table.
    """
    return options_of(_arguments(flags, version))


def given_options(job: Job) -> dict[str, Any]:
    """Return the values of the job's performance flags by Megatron's destination, without defaults."""
    arguments = _arguments(job.performance_flags, job.megatron_version)
    return {token.dest: token.value for token in arguments.tokens if token.dest}


def _arguments(flags: Sequence[str], version: str) -> Arguments:
    # With `=` a single value may begin with a minus, such as in `--window-size=-1,0`.
    words = [word for flag in flags for word in (flag.replace(" ", "=") if flag.count(" ") == 1 else flag).split()]
    try:
        return Arguments.parse(words, version)
    except MegatronError:
        return Arguments.parse(words, releases()[0])


def options_of(arguments: Arguments) -> PerformanceOptions:
    """Return the options of a command line. An option that the release lacks has `PerformanceOptions`' default."""
    values: dict[str, Any] = {}
    if arguments.get("fp4_param"):  # The destination of --fp4-param-gather until 0.17.
        values["fp4_param_gather"] = True
    for name, has_items in _OPTIONS.items():
        value = arguments.get(name)
        if has_items and value is not None:
            # The default of an option with several values may be a single value.
            value = tuple(value) if isinstance(value, list) else (value,)
        if value is not None:
            values[name] = value
    return PerformanceOptions(**values)


def allocator_config(environment: Mapping[str, str]) -> str:
    """Return the allocator options of an environment, without white space.

    The result is empty if no variable sets options. Raise MegatronError if torch would refuse the options at import.
    """
    name = next((variable for variable in ALLOCATOR_VARIABLES if variable in environment), ALLOCATOR_VARIABLES[0])
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
