"""Rules of the experts' grid: EP, ETP and the rank order."""

from __future__ import annotations

from pipette_launch.errors import LayoutError
from pipette_launch.facts.co_location import expert_block
from pipette_launch.facts.job import ITERATION, LOCAL, flag_of
from pipette_launch.facts.layout import Degrees
from pipette_launch.megatron.rules.broken import Broken, BrokenRule
from pipette_launch.megatron.rules.degrees import alone_faults, single_faults
from pipette_launch.megatron.rules.rules import Rules


def expert_faults(rules: Rules, degrees: Degrees) -> Broken:
    """Check the grid of the experts."""
    instances = rules.options.num_distributed_optimizer_instances
    if degrees.world_size % (degrees.etp * degrees.ep * degrees.pp):
        yield BrokenRule("etp*ep*pp does not divide the ranks", ("etp", "ep", "pp"))
    if rules.job.model.num_experts:
        yield from alone_faults(rules, degrees.expert_dp)
    if degrees.expert_dp % instances:
        yield BrokenRule(
            f"{flag_of('num_distributed_optimizer_instances')} does not divide the replicas of the experts",
            ("num_distributed_optimizer_instances", "ep", "etp", "pp"),
            f"tp*cp*dp/(ep*etp) = {degrees.expert_dp} must be a multiple of it",
        )
    if degrees.use_tp_pp_dp_mapping and degrees.pp > 1 and degrees.expert_dp != degrees.dp:
        yield BrokenRule(
            "--use-tp-pp-dp-mapping needs as many expert replicas as replicas where pp > 1",
            ("tp", "cp", "ep", "etp"),
            f"etp*ep = {degrees.etp * degrees.ep}, tp*cp = {degrees.tp * degrees.cp}; remove the flag",
        )
    if rules.job.model.num_experts:
        yield from _width_faults(rules, degrees)
        yield from _flag_faults(rules, degrees)
    elif degrees.ep > 1:
        yield BrokenRule("expert parallelism needs experts", ("ep",), "remove it, or add --num-experts")
    yield from single_faults(rules, "ep", degrees.ep)
    if degrees.ep > 1 and rules.job.model.params_dtype == "fp16" and rules.release < (0, 16):
        yield BrokenRule("before 0.16 expert parallelism excludes --fp16", ("ep",), "use --bf16, or remove one")


def _width_faults(rules: Rules, degrees: Degrees) -> Broken:
    model = rules.job.model
    if (model.num_experts or 1) % degrees.ep:
        yield BrokenRule(f"ep does not divide num_experts={model.num_experts}", ("ep", "num_experts"))
    if model.moe_ffn_hidden_size % degrees.etp:
        reason = f"etp does not divide moe_ffn_hidden_size={model.moe_ffn_hidden_size}"
        yield BrokenRule(reason, ("etp", "moe_ffn_hidden_size"))
    # Checked by TransformerConfig from core_v0.15.0 on.
    if model.add_bias_linear and degrees.etp > 1 and rules.release >= (0, 15):
        yield BrokenRule(
            "experts with biases need etp = 1 (--disable-bias-linear would free it)",
            ("etp",),
            "use --expert-tensor-parallel-size 1",
        )


def _flag_faults(rules: Rules, degrees: Degrees) -> Broken:
    options, group = rules.options, degrees.etp * degrees.ep
    dispatcher = options.moe_token_dispatcher_type
    # From 0.17 on HybridEP works without other ranks.
    is_alone = rules.release < (0, 17) or options.moe_enable_deepep or options.moe_flex_dispatcher_backend != "hybridep"
    if dispatcher == "flex" and group == 1 and is_alone:
        remedy = "set --expert-model-parallel-size, or use --moe-token-dispatcher-type alltoall"
        yield BrokenRule("the flex dispatcher needs etp*ep > 1", ("moe_token_dispatcher_type",), remedy)
    if rules.rooms:
        try:
            expert_block(options, group, rules.rooms)
        except LayoutError as error:
            yield BrokenRule(str(error), ("ep", "etp"))
    if degrees.ep == 1 and options.overlap_moe_expert_parallel_comm:
        reason = f"{flag_of('overlap_moe_expert_parallel_comm')} needs ep > 1"
        yield BrokenRule(reason, (), "remove it or set --expert-model-parallel-size")
    needs_padding = (0, 16) <= rules.release < (0, 18) and not options.moe_pad_experts_for_cuda_graph_inference
    if degrees.ep > 1 and needs_padding and options.graphs.impl in (LOCAL, ITERATION):
        reason = "local CUDA graphs with ep > 1 need --moe-pad-experts-for-cuda-graph-inference"
        yield BrokenRule(reason, ("cuda_graph_impl", "ep"), "add it")
