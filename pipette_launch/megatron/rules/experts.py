"""Rules of the experts' grid: EP, ETP and the rank order."""

from __future__ import annotations

from pipette_launch.errors import LayoutError
from pipette_launch.facts.layout import Degrees
from pipette_launch.facts.performance import SHARDS_GRADIENTS, flag_of
from pipette_launch.facts.together import expert_block
from pipette_launch.megatron.rules.broken import Broken, BrokenRule
from pipette_launch.megatron.rules.rules import Rules


def expert_faults(rules: Rules, degrees: Degrees) -> Broken:
    """Check the grid of the experts."""
    instances = rules.options.num_distributed_optimizer_instances
    if degrees.world_size % (degrees.etp * degrees.ep * degrees.pp):
        yield BrokenRule("etp*ep*pp does not divide the ranks", ("etp", "ep", "pp"))
    if _adds_gradients_twice(rules, degrees):
        yield BrokenRule(
            "Megatron-FSDP adds gradients twice that one rank holds alone",
            ("use_megatron_fsdp", "data_parallel_sharding_strategy"),
            "leave several data-parallel ranks, or use --data-parallel-sharding-strategy optim",
            is_refused=False,
        )
    if degrees.expert_dp % instances:
        name = "num_distributed_optimizer_instances"
        yield BrokenRule(f"{flag_of(name)} does not divide dp*cp", (name,))
    if rules.job.model.num_experts:
        yield from _width_faults(rules, degrees)
        yield from _flag_faults(rules, degrees)
    elif degrees.ep > 1:
        yield BrokenRule("expert parallelism needs experts", ("ep",), "remove it, or add --num-experts")
    if degrees.ep > 1 and rules.options.use_torch_fsdp2:
        yield BrokenRule(f"{flag_of('use_torch_fsdp2')} needs ep = 1", ("ep",), "remove one")


def _adds_gradients_twice(rules: Rules, degrees: Degrees) -> bool:
    """Whether Megatron-FSDP would train on other gradients, as nobody shares those of all weights or of the experts.

    A buffer that one rank holds alone is not sharded, and the reduced gradients are added to those that lie in it
    already (param_and_grad_buffer.py:2029, 3253-3257 of megatron_fsdp; so in 0.14 to 0.20, seen with 0.16.1).
    """
    options = rules.options
    is_alone = degrees.dp * degrees.cp == 1 or (bool(rules.job.model.num_experts) and degrees.expert_dp == 1)
    return is_alone and options.use_megatron_fsdp and options.data_parallel_sharding_strategy in SHARDS_GRADIENTS


def _width_faults(rules: Rules, degrees: Degrees) -> Broken:
    model = rules.job.model
    if (model.num_experts or 1) % degrees.ep:
        yield BrokenRule(f"ep does not divide num_experts={model.num_experts}", ("ep", "num_experts"))
    if model.moe_ffn_hidden_size % degrees.etp:
        reason = f"etp does not divide moe_ffn_hidden_size={model.moe_ffn_hidden_size}"
        yield BrokenRule(reason, ("etp", "moe_ffn_hidden_size"))
    # Checked by TransformerConfig from core_v0.15.0 on.
    if model.add_bias_linear and degrees.etp > 1 and rules.job.release >= (0, 15):
        yield BrokenRule(
            "experts with biases need etp = 1 (--disable-bias-linear would free it)",
            ("etp",),
            "use --expert-tensor-parallel-size 1",
        )
    if degrees.use_tp_pp_dp_mapping and degrees.pp > 1 and degrees.expert_dp != degrees.dp:
        yield BrokenRule(
            "--use-tp-pp-dp-mapping needs as many expert replicas as replicas where pp > 1",
            ("tp", "cp", "ep", "etp"),
            f"etp*ep = {degrees.etp * degrees.ep}, tp*cp = {degrees.tp * degrees.cp}; remove the flag",
        )


def _flag_faults(rules: Rules, degrees: Degrees) -> Broken:
    options, group = rules.options, degrees.etp * degrees.ep
    dispatcher = options.moe_token_dispatcher_type
    if dispatcher == "flex" and group == 1:
        yield BrokenRule("the flex dispatcher needs etp*ep > 1", ("moe_token_dispatcher_type",))
    if rules.rooms:
        try:
            expert_block(options, group, rules.rooms)
        except LayoutError as error:
            yield BrokenRule(str(error), ("ep", "etp"))
    if degrees.ep == 1 and options.overlap_moe_expert_parallel_comm:
        reason = f"{flag_of('overlap_moe_expert_parallel_comm')} needs ep > 1"
        yield BrokenRule(reason, (), "remove it or set --expert-model-parallel-size")
    if degrees.ep > 1 and rules.job.own.ep == 1 and options.cuda_graph_impl == "local":
        reason = f"{flag_of('cuda_graph_impl')} local with ep > 1 needs --moe-pad-experts-for-cuda-graph-inference"
        yield BrokenRule(reason, ("ep",))
