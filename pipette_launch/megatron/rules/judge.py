"""Check one layout against all rules, and report broken rules of the user's own layout in the user's flags."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Job, Layout
from pipette_launch.facts.layout import Degrees, MemoryOptions
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.rules import degrees, memory_options
from pipette_launch.megatron.rules.broken import Broken, BrokenRule, Rules
from pipette_launch.megatron.rules.flags import flag_faults

FP8_SINCE, FP4_SINCE = 8.9, 10.0
FP8_RECIPES_SINCE = {"blockwise": 9.0, "mxfp8": 10.0}
"""Compute capability that a value of `--fp8-recipe` needs. Other values need FP8_SINCE."""


def broken_rule(rules: Rules, layout: Layout) -> BrokenRule | None:
    """Return the first rule that a layout breaks, or None for a legal layout."""
    return next(_broken_rules(rules, layout), None)


def _broken_rules(rules: Rules, layout: Layout) -> Broken:
    job, options = rules.job, MemoryOptions(*attrgetter(*MemoryOptions._fields)(layout))
    samples = layout.micro_batch_size * layout.dp
    layers = frozenset(layout.layers_per_chunk or (job.model.num_layers // layout.num_chunks,))
    return chain(
        degrees.tensor_faults(rules, layout.tp),
        degrees.pipeline_faults(rules, layout.pp),
        degrees.context_faults(rules, layout.tp, layout.cp),
        degrees.replicas_faults(rules, layout.dp, layout.cp),
        degrees.expert_faults(rules, Degrees(*attrgetter(*Degrees._fields)(layout))),
        degrees.chunks_faults(rules, layout.pp, layout.vpp, layout.layers_per_chunk),
        degrees.batch_faults(rules, layout.dp, layout.micro_batch_size),
        degrees.schedule_faults(rules, layout.pp, layout.vpp, layout.microbatch_group_size, samples),
        memory_options.state_faults(rules, layout.tp, layout.cp, options),
        memory_options.recompute_faults(rules, layout.tp, layers, options),
    )


def rule_faults(arguments: Arguments) -> Iterator[MegatronError]:
    """Yield an error for each rule that flags break under every layout, except rules on flags with a wrong value."""
    faulty = arguments.faulty_dests
    try:
        for broken in flag_faults(arguments):
            if not faulty.intersection(broken.names):
                yield MegatronError(broken.sentence(arguments, Layout()))
    except MegatronError as error:
        # The flags of recompute contradict each other, which the rules on flags need.
        if not faulty & {"recompute_granularity", "recompute_method", "recompute_num_layers"}:
            yield error


def check_own(job: Job, arguments: Arguments, *, device_kind: str) -> tuple[str, ...]:
    """Return sentences on rules that the user's own layout breaks, although Megatron starts with this layout.

    MegatronError, with flags, values and a remedy, if Megatron refuses the layout.
    """
    found = [*_broken_rules(Rules.of(job, device_kind=device_kind), job.own)]
    for broken in found:
        if broken.is_refused:
            raise MegatronError(broken.sentence(arguments, job.own))
    return tuple(f"{broken.sentence(arguments, job.own)}; Megatron itself does not stop" for broken in found)


def check_formats(arguments: Arguments, own: Layout, *, device_name: str, capability: float | None) -> None:
    """Raise MegatronError if flags demand a number format that the GPUs are known to lack.

    Transformer Engine would stop at the first step (quantization.py). `device_name` is the name from the driver or from
    `--gpu`. `capability` is the GPUs' compute capability, such as 8.9, or None if unknown.
    """
    names: tuple[str, ...]
    recipe = str(arguments.get("fp8_recipe"))
    if arguments.get("fp4"):
        kind, since, names = "FP4", FP4_SINCE, ("fp4",)
    elif arguments.get("fp8") and recipe in FP8_RECIPES_SINCE:
        kind, since, names = f"FP8 ({recipe})", FP8_RECIPES_SINCE[recipe], ("fp8", "fp8_recipe")
    elif arguments.get("fp8"):
        kind, since, names = "FP8", FP8_SINCE, ("fp8",)
    else:
        return
    if capability is not None and capability < since:
        reason = f"{device_name or 'the GPU'} does not compute in {kind}, which needs compute capability {since}"
        remedy = "remove the format or take another GPU"
        raise MegatronError(BrokenRule(reason, names, remedy).sentence(arguments, own))
