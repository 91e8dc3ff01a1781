"""Rules of sequence parallelism, the distributed optimizer, overlap, recompute and CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

from pipette_launch.facts import Recompute
from pipette_launch.facts.job import ENGINE, ITERATION, SHARDED_MUON, CudaGraphs, flag_of
from pipette_launch.facts.layout import MemoryOptions
from pipette_launch.megatron.rules.broken import Broken, BrokenRule, Rules

ONLY_ADAM_SHARDS = "the distributed optimizer shards only Adam"
NEEDS_DISTRIBUTED_OPTIMIZER = (
    "use_megatron_fsdp",
    "fp8_param_gather",
    "use_precision_aware_optimizer",
    "overlap_param_gather_with_optimizer_step",
)
OWN_MODULES_OF_TE = {"layernorm", "moe_act", "mla_up_proj"}
"""Recompute modules that crash without Transformer Engine (seen with megatron-core 0.16.1)."""
_ADD_OPTIMIZER = "add --use-distributed-optimizer or remove it"


def state_faults(rules: Rules, tp: int, cp: int, options: MemoryOptions) -> Broken:
    """Check sequence parallelism, the distributed optimizer and the overlap of its communication."""
    yield from _sequence_faults(rules, tp, cp, options)
    yield from _optimizer_faults(rules, options)
    yield from _overlap_faults(rules, options)


def _sequence_faults(rules: Rules, tp: int, cp: int, options: MemoryOptions) -> Broken:
    model = rules.job.model
    if not options.sequence_parallel:
        needy = "experts" if model.num_experts else "layers of sparse attention" if model.sparse_attention else ""
        if needy and tp > 1:
            remedy = "add --sequence-parallel or use --tensor-model-parallel-size 1"
            yield BrokenRule(f"{needy} with tp > 1 need sequence parallelism", ("tp",), remedy)
        if rules.options.tp_comm_overlap:
            remedy = "add --sequence-parallel with --tensor-model-parallel-size above 1, or remove it"
            yield BrokenRule(f"{flag_of('tp_comm_overlap')} needs sequence parallelism", ("tp",), remedy)
        return
    if tp == 1:
        yield BrokenRule("sequence parallelism needs tp > 1", ("sequence_parallel",), "remove it")
    if rules.device_kind == "cpu":
        yield BrokenRule("sequence parallelism does not run on CPU", ("sequence_parallel",), "remove it on CPU")
    if model.seq_length // cp % tp:
        reason = f"tp does not divide seq_length={model.seq_length}/cp for sequence parallelism"
        yield BrokenRule(reason, ("sequence_parallel", "tp", "cp", "seq_length"))


def _optimizer_faults(rules: Rules, options: MemoryOptions) -> Broken:
    sharded = options.use_distributed_optimizer
    needs_sharding = [name for name in NEEDS_DISTRIBUTED_OPTIMIZER if getattr(rules.options, name)]
    # From 0.18 on optimizers other than Adam and SGD shard too, and each rank gets whole layers.
    is_whole = rules.job.optimizer == SHARDED_MUON or rules.release >= (0, 18)
    if sharded and rules.job.optimizer != "adam" and (not is_whole or rules.job.optimizer == "sgd"):
        yield BrokenRule(ONLY_ADAM_SHARDS, ("use_distributed_optimizer", "optimizer"), "remove one")
    if needs_sharding and not sharded:
        flags = "/".join(map(flag_of, needs_sharding))
        yield BrokenRule(f"{flags} needs the distributed optimizer", (), _ADD_OPTIMIZER)
    if rules.options.num_distributed_optimizer_instances > 1 and not sharded:
        reason = f"{flag_of('num_distributed_optimizer_instances')} needs the distributed optimizer"
        yield BrokenRule(reason, ("num_distributed_optimizer_instances",), _ADD_OPTIMIZER)


def _overlap_faults(rules: Rules, options: MemoryOptions) -> Broken:
    optimizer, release = rules.job.optimizer, rules.release
    is_muon = optimizer == "muon" or (optimizer == SHARDED_MUON and release < (0, 17))
    if is_muon and release < (0, 18) and (options.overlap_grad_reduce or options.overlap_param_gather):
        names = ("optimizer", "overlap_grad_reduce", "overlap_param_gather")
        yield BrokenRule("before 0.18 Muon excludes overlap_grad_reduce and overlap_param_gather", names, "remove one")
    if options.overlap_param_gather and not (options.use_distributed_optimizer and options.overlap_grad_reduce):
        reason = "overlap_param_gather needs the distributed optimizer and overlap_grad_reduce"
        remedy = "add --use-distributed-optimizer and --overlap-grad-reduce, or remove it"
        yield BrokenRule(reason, ("overlap_param_gather",), remedy)
    if rules.options.overlap_param_gather_with_optimizer_step and not options.overlap_param_gather:
        reason = f"{flag_of('overlap_param_gather_with_optimizer_step')} needs overlap_param_gather"
        yield BrokenRule(reason, (), "add --overlap-param-gather or remove it")


def recompute_faults(rules: Rules, tp: int, layers: frozenset[int], options: MemoryOptions) -> Broken:
    """Check recompute against other flags, and against the number of layers in each chunk."""
    recompute, overlaps_experts = options.recompute, rules.options.overlap_moe_expert_parallel_comm
    is_full = recompute.granularity == "full"
    yield from _unit_faults(rules, recompute, layers)
    yield from _module_faults(rules, recompute)
    if is_full and rules.job.model.hybrid and rules.release < (0, 18):
        yield BrokenRule("before 0.18 hybrid models have no full recompute", ("recompute",), "remove it")
    names = ("overlap_moe_expert_parallel_comm", "recompute", "recompute_modules")
    if is_full and overlaps_experts:
        yield BrokenRule("MoE overlap excludes full recompute", names, "remove one")
    if "moe" in recompute.modules and overlaps_experts and rules.release >= (0, 17):
        yield BrokenRule("MoE overlap excludes recompute of moe", names, "remove one")
    yield from _graph_faults(rules, recompute)
    if recompute.granularity != "none" and rules.options.cpu_offloading_num_layers:
        yield BrokenRule(f"{flag_of('cpu_offloading_num_layers')} excludes recompute", ("recompute",), "remove one")
    if rules.options.distribute_saved_activations and not (is_full and tp > 1 and not options.sequence_parallel):
        flag = flag_of("distribute_saved_activations")
        reason = f"{flag} needs full recompute and tp > 1 without sequence parallelism"
        yield BrokenRule(reason, ("tp", "sequence_parallel", "recompute"), "remove it")


def _unit_faults(rules: Rules, recompute: Recompute, layers: frozenset[int]) -> Broken:
    if recompute.method != "uniform":
        return
    # Megatron runs whole units of layers, even past the chunk's end (transformer_block.py:536-547 of 0.16.1). From 0.17
    # on, the chunk's last unit is shorter instead.
    if rules.release < (0, 17) and any(size % recompute.num_layers for size in layers):
        reason = "before 0.17 uniform recompute takes units that divide every chunk's layers"
        yield BrokenRule(reason, ("recompute",), f"chunks have {' or '.join(map(str, sorted(layers)))} layers")
    if rules.job.model.mtp_num_layers and recompute.num_layers > 1:
        reason = "uniform recompute with multi-token prediction takes units of one layer"
        yield BrokenRule(reason, ("recompute",), "use --recompute-num-layers 1")


def _module_faults(rules: Rules, recompute: Recompute) -> Broken:
    """Check the modules of selective recompute."""
    if recompute.granularity != "selective":
        return
    names, remedy = ("recompute_modules",), "remove the module"
    if "mlp" in recompute.modules and rules.job.model.add_bias_linear:
        # With biases, recompute of `mlp` makes the backward hang (seen with megatron-core 0.16.1).
        reason = "recompute of mlp hangs if layers have biases"
        yield BrokenRule(reason, names, remedy, is_refused=False)
    for reason in _refused_modules(rules, {*(recompute.modules or ("core_attn",))}):
        yield BrokenRule(reason, names, remedy)


def _refused_modules(rules: Rules, modules: set[str]) -> Iterator[str]:
    model, options = rules.job.model, rules.options
    if model.transformer_impl == "local" and modules & OWN_MODULES_OF_TE:
        yield "recompute of layernorm, moe_act and mla_up_proj needs Transformer Engine"
    if "moe_act" in modules and not options.moe_grouped_gemm:
        yield f"recompute of moe_act needs {flag_of('moe_grouped_gemm')}"
    if "mla_up_proj" in modules and model.latent_attention is None:
        yield "recompute of mla_up_proj needs multi-latent attention"
    if "shared_experts" in modules and options.moe_shared_expert_overlap:
        yield f"{flag_of('moe_shared_expert_overlap')} excludes recompute of shared_experts"
    if options.fp8 is not None and options.fp8_recipe == "delayed" and modules & {"layernorm", "moe_act"}:
        yield "delayed scaling of FP8 excludes recompute of layernorm and moe_act"
    offloads = options.fine_grained_activation_offloading and {"moe_act", "expert_fc1", "fused_group_mlp"}
    if "moe" in modules and offloads and rules.release >= (0, 19) and offloads & {*options.offload_modules}:
        yield f"{flag_of('offload_modules')} within experts excludes recompute of moe"


def _graph_faults(rules: Rules, recompute: Recompute) -> Broken:
    """Check recompute against CUDA graphs (TransformerConfig)."""
    graphs = rules.options.graphs
    if graphs.impl == "none" or recompute.granularity == "none":
        return
    names = ("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules", "recompute", "recompute_modules")
    if recompute.granularity == "full":
        if graphs.impl != ITERATION:
            yield BrokenRule("CUDA graphs exclude full recompute", names, "remove one")
        return
    for module, reason in _graph_excludes(rules, graphs):
        if module in (recompute.modules or ("core_attn",)):
            yield BrokenRule(f"CUDA graphs exclude recompute of {module}{reason}", names, "remove one")


def _graph_excludes(rules: Rules, graphs: CudaGraphs) -> Iterator[tuple[str, str]]:
    """Yield modules that must not be recomputed, with reasons. Graphs with recompute cannot use random numbers."""
    model = rules.job.model
    if graphs.impl == ENGINE and "moe_router" in graphs.modules:
        yield "moe", " beside a graph of moe_router"
    is_random = {
        "core_attn": ("attn", model.attention_dropout > 0, "attention dropout"),
        "mlp": ("mlp", model.hidden_dropout > 0, "hidden dropout"),
        "moe": ("moe", model.hidden_dropout > 0, "hidden dropout"),
    }
    for module, (graph, draws, words) in is_random.items():
        if draws and (not graphs.modules or graph in graphs.modules):
            yield module, f" with {words}"
    if rules.options.moe_input_jitter_eps is not None and (not graphs.modules or "moe" in graphs.modules):
        yield "moe", " with jitter"
