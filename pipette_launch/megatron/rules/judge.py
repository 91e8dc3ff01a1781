"""Judges a whole layout, and the user's own one with the words of his flags."""

from __future__ import annotations

from itertools import chain

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Job, Layout
from pipette_launch.facts.layout import Degrees, MemoryOptions
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.rules import cuts, degrees, experts, memory_options
from pipette_launch.megatron.rules.broken import Broken, BrokenRule
from pipette_launch.megatron.rules.flags import flag_faults
from pipette_launch.megatron.rules.rules import Rules


def broken_rule(rules: Rules, layout: Layout) -> BrokenRule | None:
    """Return the first rule that a layout breaks, or None for a legal one."""
    return next(broken_rules(rules, layout), None)


def broken_rules(rules: Rules, layout: Layout) -> Broken:
    """Return every rule that a layout breaks."""
    options, job = MemoryOptions.of(layout), rules.job
    samples = layout.micro_batch_size * layout.dp
    layers = frozenset(layout.layers_per_chunk or (job.model.num_layers // layout.num_chunks,))
    return chain(
        degrees.tensor_faults(rules, layout.tp),
        degrees.pipeline_faults(rules, layout.pp),
        degrees.context_faults(rules, layout.tp, layout.cp),
        degrees.replicas_faults(rules, layout.dp, layout.cp),
        experts.expert_faults(rules, Degrees.of(layout)),
        cuts.chunks_faults(rules, layout.pp, layout.vpp, layout.layers_per_chunk),
        cuts.batch_faults(rules, layout.dp, layout.micro_batch_size),
        cuts.schedule_faults(rules, layout.pp, layout.vpp, layout.microbatch_group_size, samples),
        memory_options.state_faults(rules, layout.tp, layout.cp, options),
        memory_options.recompute_faults(rules, layout.tp, layers, options),
    )


def check_flags(arguments: Arguments, own: Layout) -> None:
    """Raise MegatronError where flags contradict each other under every layout."""
    broken = next(flag_faults(arguments), None)
    if broken:
        raise MegatronError(broken.sentence(arguments, own))


def check_own(job: Job, arguments: Arguments, *, device_kind: str) -> tuple[str, ...]:
    """Return sentences on rules that the user's own layout breaks, though Megatron starts with it.

    Raises:
        MegatronError: Megatron refuses the layout; the error has flags, values and a remedy.

    """
    found = [*broken_rules(Rules.of(job, device_kind=device_kind), job.own)]
    for broken in found:
        if broken.is_refused:
            raise MegatronError(broken.sentence(arguments, job.own))
    return tuple(f"{broken.sentence(arguments, job.own)}; Megatron itself does not stop" for broken in found)
