"""Rules of chunks, micro-batches and the schedules that run them."""

from __future__ import annotations

from pipette_launch.facts.job import flag_of
from pipette_launch.megatron.chunks import FIRST_CUT_PATTERNS
from pipette_launch.megatron.rules.broken import Broken, BrokenRule
from pipette_launch.megatron.rules.degrees import not_divided_batch
from pipette_launch.megatron.rules.rules import Rules


def chunks_faults(rules: Rules, pp: int, vpp: int, layers_per_chunk: tuple[int, ...]) -> Broken:
    """Check how the layers are cut into stages and virtual stages."""
    layers, options = rules.job.model.num_layers, rules.options
    if vpp > 1 and pp == 1:
        yield BrokenRule("virtual stages need pp > 1", ("pp", "vpp"))
    if layers_per_chunk:
        divides = len(layers_per_chunk) == pp * vpp and sum(layers_per_chunk) == layers
    else:
        divides = layers % (pp * vpp) == 0
    names_stages = rules.release >= FIRST_CUT_PATTERNS
    if rules.job.model.hybrid and not names_stages and (vpp > 1 or layers_per_chunk):
        reason = "before 0.17 hybrid models have no virtual stages, and as many layers on each stage"
        yield BrokenRule(reason, ("pp", "layers_per_chunk"))
    if not divides:
        yield BrokenRule(f"pp*vpp does not divide num_layers={layers}", ("pp", "layers_per_chunk"))
    if vpp > 1 and pp == 2 and not options.overlap_p2p_comm:
        reason = f"{flag_of('overlap_p2p_comm')} allows virtual stages only with pp > 2"
        yield BrokenRule(reason, ("pp", "vpp"), "use a pipeline of more than 2 ranks, or remove one of them")
    if vpp == 1 and pp > 1 and options.overlap_moe_expert_parallel_comm:
        reason = f"{flag_of('overlap_moe_expert_parallel_comm')} needs virtual stages where pp > 1"
        yield BrokenRule(reason, ("pp",), "remove it, or add --num-virtual-stages-per-pipeline-rank")
    if options.overlap_p2p_comm_warmup_flush and (vpp == 1 or not options.overlap_p2p_comm):
        # Without virtual stages validate_args turns the overlap off, and ModelParallelConfig refuses the flag then.
        reason = f"{flag_of('overlap_p2p_comm_warmup_flush')} needs virtual stages and overlapped messages"
        yield BrokenRule(reason, ("pp", "overlap_p2p_comm"), "remove it, or add --num-virtual-stages-per-pipeline-rank")
    if vpp == 1 and options.overlap_param_gather_with_optimizer_step:
        reason = f"{flag_of('overlap_param_gather_with_optimizer_step')} needs virtual stages"
        yield BrokenRule(reason, (), "remove it, or add --num-virtual-stages-per-pipeline-rank")


def batch_faults(rules: Rules, dp: int, micro_batch_size: int) -> Broken:
    """Check the micro-batches of one step against the global batch and its ramp-up."""
    batch_size, samples, options = rules.job.batch.global_batch_size, micro_batch_size * dp, rules.options
    if batch_size % samples:
        yield not_divided_batch(rules, dp, micro_batch_size)
    if rules.ramps_up and any(size % samples for size in options.rampup_batch_size[:2]):
        yield BrokenRule(
            f"micro_batch_size*dp does not divide every {flag_of('rampup_batch_size')}",
            ("rampup_batch_size", "micro_batch_size"),
            f"both sizes must be multiples of {samples}",
        )
    # From core_v0.18.0 on; without their flags both are as in training.
    evaluated = options.eval_global_batch_size or batch_size
    at_once = options.eval_micro_batch_size or micro_batch_size
    if evaluated % (at_once * dp):
        reason = f"dp does not divide the micro-batches of {flag_of('eval_global_batch_size')}"
        remedy = f"it must be a multiple of {at_once * dp}"
        yield BrokenRule(reason, ("eval_global_batch_size", "eval_micro_batch_size"), remedy)


def schedule_faults(rules: Rules, pp: int, vpp: int, group_size: int, samples: int) -> Broken:
    """Check that every step has enough micro-batches for interleaving (schedules.py:996-1019).

    Args:
        rules: of the job.
        pp: pipeline ranks.
        vpp: chunks of each.
        group_size: micro-batches that run through a chunk at a time; 0 = one for each pipeline rank.
        samples: micro_batch_size*dp, the samples of one micro-batch on all replicas.

    """
    if vpp == 1:
        return
    group = group_size or pp
    names = ("pp", "vpp", "microbatch_group_size")
    if group < pp:
        reason = "interleaving needs groups of at least pp micro-batches"
        yield BrokenRule(reason, names, f"groups of {group} are too small; change one, or give up virtual stages")
        return
    last = rules.job.batch.global_batch_size // samples
    for count in (last, *_grown_counts(rules, samples, last, group)):
        if group > count:
            reason = "interleaving needs at least pp micro-batches"
        elif 0 < count % group < pp:
            reason = "interleaving needs micro-batches in multiples of pp"
        else:
            continue
        ramp = () if count == last else ("rampup_batch_size",)
        remedy = f"{count} micro-batches do not fill groups of {group}; change one, or give up virtual stages"
        yield BrokenRule(reason, (*names, *ramp, "global_batch_size", "micro_batch_size"), remedy)
        return


def _grown_counts(rules: Rules, samples: int, last: int, group: int) -> range:
    """Return the numbers of micro-batches during the batch's ramp-up; after one group their remainders repeat."""
    if not rules.ramps_up:
        return range(0)
    first, step = (size // samples for size in rules.options.rampup_batch_size[:2])
    return range(first, last, max(1, step))[:group]
