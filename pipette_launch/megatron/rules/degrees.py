"""Rules of the degrees TP, PP, CP, DP, EP and ETP, of chunks and of micro-batches.

Each function gets only the axes that it needs, so that a search can prune one axis after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from pipette_launch.errors import LayoutError
from pipette_launch.facts import HybridLayers
from pipette_launch.facts.co_location import expert_block, tensor_block
from pipette_launch.facts.job import ITERATION, LOCAL, SHARDS_GRADIENTS, flag_of
from pipette_launch.facts.layout import Degrees
from pipette_launch.facts.model import KINDS_WITH_EXPERTS
from pipette_launch.megatron.chunks import FIRST_CUT_PATTERNS
from pipette_launch.megatron.rules.broken import Broken, BrokenRule, Rules

WITHOUT_PIPELINE = ("use_megatron_fsdp", "cpu_offloading_num_layers")
"""Options that need pp = 1.

Megatron validates Megatron-FSDP with a pipeline, but the wrapper then fails. The wrapper asserts that data-parallel
groups, which lie in one stage each, equal the groups of a mesh over all ranks (core_v0.16.0 to v0.19.0,
mcore_fsdp_adapter.py, _get_dp_tp_mesh).
"""
FIRST_SPLIT_DELTA = (0, 18)
"""First release with context parallelism of gated delta networks."""
_SET_PP, _ADD_STAGES = "remove it or set --pipeline-model-parallel-size", "add --num-virtual-stages-per-pipeline-rank"


def tensor_faults(rules: Rules, tp: int) -> Broken:
    """Check that TP divides the widths of the model."""
    model, padded = rules.job.model, rules.options.padded_vocab_size
    widths = (
        ("num_attention_heads", model.num_attention_heads),
        ("ffn_hidden_size", model.ffn_hidden_size if model.has_dense_mlps else 0),
        ("moe_shared_expert_intermediate_size", model.moe_shared_expert_intermediate_size),
        # If TP divides the groups, TP divides the Mamba heads too (mamba_mixer.py of core_v0.17.1).
        ("mamba_num_groups", model.hybrid.mamba_num_groups if model.hybrid and model.hybrid.has_mamba else 0),
        # Each key head has the same number of value heads.
        ("linear_num_key_heads", model.linear_attention.linear_num_key_heads if model.linear_attention else 0),
    )
    for name, width in widths:
        if width % tp:
            yield BrokenRule(f"tp does not divide {name}={width}", ("tp", name))
    if padded % tp:
        yield BrokenRule(f"tp does not divide {flag_of('padded_vocab_size')}={padded}", ("tp", "padded_vocab_size"))
    # megatron-core replicates query groups if there are more tensor ranks than groups.
    groups = model.num_query_groups
    if groups % tp and tp % groups:
        yield BrokenRule(f"tp is not a divisor or multiple of num_query_groups={groups}", ("tp", "num_query_groups"))
    if rules.rooms:
        try:
            tensor_block(rules.options, tp, rules.rooms)
        except LayoutError as error:
            yield BrokenRule(str(error), ("tp",))
    latent = model.latent_attention
    # Transformer Engine's layers project to the latents in full on every rank.
    if latent and model.transformer_impl == "local":
        if (latent.q_lora_rank or 0) % tp:
            yield BrokenRule(f"tp does not divide q_lora_rank={latent.q_lora_rank}", ("tp", "q_lora_rank"))
        if (latent.kv_lora_rank + latent.qk_pos_emb_head_dim) % tp:
            reason = f"tp does not divide kv_lora_rank={latent.kv_lora_rank} + {latent.qk_pos_emb_head_dim}"
            yield BrokenRule(reason, ("tp", "kv_lora_rank", "qk_pos_emb_head_dim"))


def pipeline_faults(rules: Rules, pp: int) -> Broken:
    """Check flags that need pipeline parallelism, or that exclude pipeline parallelism."""
    options = rules.options
    for name in WITHOUT_PIPELINE if pp > 1 else ():
        if getattr(options, name):
            yield BrokenRule(f"{flag_of(name)} needs pp = 1", (name, "pp"), "remove one")
    if rules.job.model.mtp_num_layers and options.overlap_moe_expert_parallel_comm and pp == 1:
        reason = f"{flag_of('overlap_moe_expert_parallel_comm')} with multi-token prediction needs pp > 1"
        yield BrokenRule(reason, ("mtp_num_layers",), _SET_PP)
    if pp == 1 and options.defer_embedding_wgrad_compute:
        yield BrokenRule(f"{flag_of('defer_embedding_wgrad_compute')} needs pp > 1", (), _SET_PP)
    if options.fp8 is None or not options.first_last_layers_bf16:
        return
    # TransformerConfig allows at most num_layers / pp layers in bf16 on the first stage, and on the last stage.
    most = rules.job.model.num_layers // pp
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if getattr(options, name) > most:
            remedy = f"a stage has {most} layers; change one of them"
            yield BrokenRule(f"{flag_of(name)} is more than the layers of a stage", (name, "pp"), remedy)


def context_faults(rules: Rules, tp: int, cp: int) -> Broken:
    """Check that CP divides the sequence, and check the exchange of keys and values between CP ranks."""
    model, options = rules.job.model, rules.options
    if math.prod(options.hierarchical_context_parallel_sizes or (cp,)) != cp:
        name = "hierarchical_context_parallel_sizes"
        yield BrokenRule(f"cp is not the product of {flag_of(name)}", ("cp", name))
    if cp == 1:
        return
    if rules.device_kind == "cpu":
        reason = "context parallelism does not run on CPU"
        yield BrokenRule(reason, ("cp",), "it needs Transformer Engine and so a GPU; use --context-parallel-size 1")
    if model.transformer_impl == "local":
        yield BrokenRule("context parallelism needs Transformer Engine's attention", ("cp", "transformer_impl"))
    elif model.attention_backend == "unfused" and model.params_dtype != "fp32" and not model.sparse_attention:
        # Transformer Engine v2.3 to v2.18 finds no backend for unfused attention with context parallelism
        # (dot_product_attention/utils.py, get_attention_backend).
        reason = "Transformer Engine's unfused attention has no context parallelism"
        yield BrokenRule(reason, ("cp", "attention_backend"), "use --attention-backend auto, flash or fused")
    if model.seq_length % (2 * cp):
        remedy = f"--seq-length must be a multiple of {2 * cp}; change one of them"
        yield BrokenRule(f"2*cp does not divide seq_length={model.seq_length}", ("cp", "seq_length"), remedy)
    if any(model.attention_windows) and not {*options.cp_comm_type} <= {"a2a", "all_gather"}:
        reason = f"with {flag_of('cp_comm_type')} p2p context parallelism has no attention windows"
        yield BrokenRule(reason, ("cp", "window_size", "cp_comm_type"))
    if model.hybrid and model.hybrid.has_mamba:
        yield from _mamba_context_faults(model.hybrid, tp, cp)
    if model.linear_attention:
        yield from _delta_context_faults(rules, model.linear_attention.linear_num_key_heads, tp, cp)
    yield from _exchange_faults(rules, tp, cp)


def _exchange_faults(rules: Rules, tp: int, cp: int) -> Broken:
    """Check the kinds of exchange in `--cp-comm-type`. All-to-all divides the heads over the ranks of the exchange."""
    model, options = rules.job.model, rules.options
    flag, sizes = flag_of("cp_comm_type"), options.hierarchical_context_parallel_sizes
    if model.sparse_attention and not {*options.cp_comm_type} <= {"allgather", "all_gather"}:
        remedy = f"write {flag} allgather"
        yield BrokenRule("sparse attention can only gather keys over cp", ("cp", "cp_comm_type"), remedy)
    # For other kinds, Transformer Engine raises an error at the first forward (context_parallel.py,
    # attn_forward_func_with_cp). Megatron's help names the kind "allgather", which Transformer Engine does not know.
    known = {"p2p", "all_gather", "a2a", "a2a+p2p"} | ({"allgather"} if model.sparse_attention else set())
    for kind in sorted({*options.cp_comm_type} - known):
        remedy = "write p2p, all_gather, a2a or a2a+p2p"
        yield BrokenRule(f"Transformer Engine has no exchange {kind!r}", ("cp", "cp_comm_type"), remedy)
    if len(options.cp_comm_type) not in (1, model.num_layers):
        reason = f"{flag} needs one kind, or one for each of num_layers={model.num_layers}"
        yield BrokenRule(reason, ("cp", "cp_comm_type"))
    heads, groups = model.num_attention_heads // tp, max(1, model.num_query_groups // tp)
    names = ("cp", "tp", "num_attention_heads", "num_query_groups", "hierarchical_context_parallel_sizes")
    first = f"the first of {flag_of('hierarchical_context_parallel_sizes')}"
    for kind, ranks, words in (("a2a", cp, "cp"), ("a2a+p2p", (sizes or (1,))[0], first)):
        if kind in options.cp_comm_type and (heads % ranks or groups % ranks):
            yield BrokenRule(f"{flag} {kind} needs heads/tp and query groups/tp divisible by {words}", names)


def _delta_context_faults(rules: Rules, key_heads: int, tp: int, cp: int) -> Broken:
    """Check that CP divides the key heads of gated delta networks (TransformerConfig of core_v0.18)."""
    if rules.release < FIRST_SPLIT_DELTA:
        yield BrokenRule("gated delta networks need cp = 1 before 0.18", ("cp", "experimental_attention_variant"))
    elif key_heads // tp % cp:
        yield BrokenRule(
            f"cp does not divide linear_num_key_heads={key_heads}/tp", ("cp", "tp", "linear_num_key_heads")
        )


def _mamba_context_faults(mamba: HybridLayers, tp: int, cp: int) -> Broken:
    """Check that CP divides the heads and groups of Mamba layers (mamba_context_parallel.py of core_v0.17.1)."""
    groups = max(1, mamba.mamba_num_groups // tp)
    if mamba.mamba_num_heads // tp % cp:
        reason = f"cp does not divide mamba_num_heads={mamba.mamba_num_heads}/tp"
        yield BrokenRule(reason, ("cp", "tp", "mamba_num_heads"))
    if groups % cp and cp % groups:
        reason = f"cp is neither a divisor nor a multiple of mamba_num_groups={mamba.mamba_num_groups}/tp"
        yield BrokenRule(reason, ("cp", "tp", "mamba_num_groups"))


def replicas_faults(rules: Rules, dp: int, cp: int) -> Broken:
    """Check the replicas of the dense weights against the global batch and the optimizer's instances."""
    yield from _alone_faults(rules, dp * cp)
    name = "num_distributed_optimizer_instances"
    if rules.job.batch.global_batch_size % dp:
        yield _undivided_batch(rules, dp, rules.job.own.micro_batch_size)
    if dp * cp % getattr(rules.options, name):
        yield BrokenRule(f"{flag_of(name)} does not divide dp*cp", (name,), f"use a divisor of dp*cp = {dp * cp}")


def _alone_faults(rules: Rules, replicas: int) -> Broken:
    """Check that under Megatron-FSDP several ranks share all weights and experts.

    With a single rank, gradients would be wrong. Megatron-FSDP does not shard the buffer of a single rank, and adds
    reduced gradients to the old contents of this buffer (param_and_grad_buffer.py:2029, 3253-3257 of megatron_fsdp).
    The fault is in 0.16 to 0.20, and was seen with 0.16.1.
    """
    options = rules.options
    if replicas == 1 and options.use_megatron_fsdp and options.data_parallel_sharding_strategy in SHARDS_GRADIENTS:
        yield BrokenRule(
            "Megatron-FSDP adds gradients twice if one rank holds them alone",
            ("use_megatron_fsdp", "data_parallel_sharding_strategy"),
            "leave several data-parallel ranks, or use --data-parallel-sharding-strategy optim",
            is_refused=False,
        )


def _undivided_batch(rules: Rules, dp: int, micro_batch_size: int) -> BrokenRule:
    batch_size = rules.job.batch.global_batch_size
    reason = f"micro_batch_size*dp does not divide global_batch_size={batch_size}"
    if rules.options.decrease_batch_size_if_needed:
        reason += ", and a decreased batch is not modelled"
    remedy = f"on {dp} data-parallel ranks it must be a multiple of {micro_batch_size * dp}; change one of them"
    return BrokenRule(reason, ("global_batch_size", "micro_batch_size"), remedy)


def expert_faults(rules: Rules, degrees: Degrees) -> Broken:
    """Check the experts' degrees, the rank order and flags of experts."""
    instances, model = rules.options.num_distributed_optimizer_instances, rules.job.model
    if degrees.world_size % (degrees.etp * degrees.ep * degrees.pp):
        yield BrokenRule("etp*ep*pp does not divide the ranks", ("etp", "ep", "pp"))
    if model.num_experts:
        yield from _alone_faults(rules, degrees.expert_dp)
    if degrees.expert_dp % instances:
        yield BrokenRule(
            f"{flag_of('num_distributed_optimizer_instances')} does not divide the replicas of the experts",
            ("num_distributed_optimizer_instances", "ep", "etp", "pp"),
            f"tp*cp*dp/(ep*etp) = {degrees.expert_dp} must be a multiple of it",
        )
    if degrees.use_tp_pp_dp_mapping and degrees.pp > 1 and degrees.expert_dp != degrees.dp:
        yield BrokenRule(
            "--use-tp-pp-dp-mapping with pp > 1 needs equal numbers of replicas and of expert replicas",
            ("tp", "cp", "ep", "etp"),
            f"etp*ep = {degrees.etp * degrees.ep}, tp*cp = {degrees.tp * degrees.cp}; remove the flag",
        )
    if model.num_experts:
        yield from _width_faults(rules, degrees)
        yield from _expert_flag_faults(rules, degrees)
    elif degrees.ep > 1:
        yield BrokenRule("expert parallelism needs experts", ("ep",), "remove it, or add --num-experts")


def _width_faults(rules: Rules, degrees: Degrees) -> Broken:
    model = rules.job.model
    if (model.num_experts or 1) % degrees.ep:
        yield BrokenRule(f"ep does not divide num_experts={model.num_experts}", ("ep", "num_experts"))
    if model.moe_ffn_hidden_size % degrees.etp:
        reason = f"etp does not divide moe_ffn_hidden_size={model.moe_ffn_hidden_size}"
        yield BrokenRule(reason, ("etp", "moe_ffn_hidden_size"))
    if model.add_bias_linear and degrees.etp > 1:
        reason = "experts with biases need etp = 1 (--disable-bias-linear would free it)"
        yield BrokenRule(reason, ("etp",), "use --expert-tensor-parallel-size 1")
    if degrees.ep == 1 and degrees.etp != degrees.tp and rules.release < (0, 19):
        # Parameters are marked as an expert's only for ep > 1 (tensor_parallel/layers.py; seen with 0.16.1).
        reason = "before 0.19 expert gradients are not summed over tp if ep = 1 and etp is not tp"
        yield BrokenRule(reason, ("tp", "ep", "etp"), "use ep > 1 or equal sizes", is_refused=False)


def _expert_flag_faults(rules: Rules, degrees: Degrees) -> Broken:
    options, group = rules.options, degrees.etp * degrees.ep
    # From 0.17 on HybridEP works with an expert group of one rank.
    is_alone = rules.release < (0, 17) or options.moe_enable_deepep or options.moe_flex_dispatcher_backend != "hybridep"
    dispatcher = options.moe_token_dispatcher_type
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
    needs_padding = rules.release < (0, 18) and not options.moe_pad_experts_for_cuda_graph_inference
    if degrees.ep > 1 and needs_padding and options.graphs.impl in (LOCAL, ITERATION):
        reason = "local CUDA graphs with ep > 1 need --moe-pad-experts-for-cuda-graph-inference"
        yield BrokenRule(reason, ("cuda_graph_impl", "ep"), "add it")


def chunks_faults(rules: Rules, pp: int, vpp: int, layers_per_chunk: tuple[int, ...]) -> Broken:
    """Check the split of the layers into stages and virtual stages."""
    model, options = rules.job.model, rules.options
    if vpp > 1 and pp == 1:
        yield BrokenRule("virtual stages need pp > 1", ("pp", "vpp"))
    if layers_per_chunk:
        divides = len(layers_per_chunk) == pp * vpp and sum(layers_per_chunk) == model.num_layers
    else:
        divides = model.num_layers % (pp * vpp) == 0
    if not divides:
        yield BrokenRule(f"pp*vpp does not divide num_layers={model.num_layers}", ("pp", "layers_per_chunk"))
    else:
        yield from _kinds_faults(rules, pp, layers_per_chunk or (model.num_layers // (pp * vpp),) * pp * vpp)
    if model.hybrid and rules.release < FIRST_CUT_PATTERNS and (vpp > 1 or layers_per_chunk):
        reason = "before 0.17 hybrid models have no virtual stages, and equally many layers on each stage"
        yield BrokenRule(reason, ("pp", "layers_per_chunk"))
    if vpp > 1 and pp == 2 and not options.overlap_p2p_comm:
        reason = f"{flag_of('overlap_p2p_comm')} allows virtual stages only with pp > 2"
        yield BrokenRule(reason, ("pp", "vpp"), "use a pipeline of more than 2 ranks, or remove one of them")
    if vpp == 1 and pp > 1 and options.overlap_moe_expert_parallel_comm:
        reason = f"{flag_of('overlap_moe_expert_parallel_comm')} with pp > 1 needs virtual stages"
        yield BrokenRule(reason, ("pp",), f"remove it, or {_ADD_STAGES}")
    if options.overlap_p2p_comm_warmup_flush and (vpp == 1 or not options.overlap_p2p_comm):
        # Without virtual stages validate_args turns overlapped messages off, and then ModelParallelConfig refuses the
        # overlap of warm-up and flush.
        reason = f"{flag_of('overlap_p2p_comm_warmup_flush')} needs virtual stages and overlapped messages"
        yield BrokenRule(reason, ("pp", "overlap_p2p_comm"), f"remove it, or {_ADD_STAGES}")
    if vpp == 1 and options.overlap_param_gather_with_optimizer_step:
        reason = f"{flag_of('overlap_param_gather_with_optimizer_step')} needs virtual stages"
        yield BrokenRule(reason, (), f"remove it, or {_ADD_STAGES}")


def _kinds_faults(rules: Rules, pp: int, layers_per_chunk: tuple[int, ...]) -> Broken:
    """Check the kinds of layers in each chunk."""
    sparse, kinds = rules.job.model.sparse_attention, rules.job.model.layer_kinds
    if sparse and sparse.dsa_indexer_topk_freq > 1:
        # Megatron makes the same check (_validate_dsa_index_share_pipeline_split of core_v0.19).
        ends = zip(accumulate(layers_per_chunk), layers_per_chunk, strict=True)
        layers = ((end - size, number) for end, size in ends for number in range(end - size + 1, end + 1))
        sources = [(start, sparse.source(number)) for start, number in layers if "sparse" in kinds[number - 1]]
        if any(source <= start or "sparse" not in kinds[source - 1] for start, source in sources):
            names = ("pp", "layers_per_chunk", "dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset")
            yield BrokenRule("a layer takes selected keys from another chunk, or from a layer without keys", names)
    if not _reports_losses(rules, pp, layers_per_chunk):
        reason = "before 0.17, auxiliary losses with multi-token prediction need experts on each pipeline rank"
        yield BrokenRule(reason, ("pp", "layers_per_chunk", "mtp_num_layers"), is_refused=False)


def _reports_losses(rules: Rules, pp: int, layers_per_chunk: tuple[int, ...]) -> bool:
    """Return False if Megatron hangs when it adds up the auxiliary losses of experts for its log.

    Until 0.16 a pipeline rank without experts makes a table without the prediction layers, and so all ranks sum tables
    of different lengths (moe_utils.py, track_moe_metrics; seen with 0.16.1).
    """
    model, options = rules.job.model, rules.options
    has_losses = any(options.moe_aux_loss_coeff) or options.moe_z_loss_coeff is not None
    if rules.release >= (0, 17) or not (has_losses and model.num_experts and model.mtp_num_layers):
        return True
    chunks = zip(layers_per_chunk, accumulate(layers_per_chunk), strict=True)
    kinds = [{*model.layer_kinds[end - size : end]} for size, end in chunks]
    kinds[-1] |= {*model.prediction_kinds}
    return not any(set().union(*kinds[rank::pp]).isdisjoint(KINDS_WITH_EXPERTS) for rank in range(pp))


def batch_faults(rules: Rules, dp: int, micro_batch_size: int) -> Broken:
    """Check the micro-batches of one step against the global batch and its ramp-up."""
    batch_size, samples, options = rules.job.batch.global_batch_size, micro_batch_size * dp, rules.options
    if batch_size % samples:
        yield _undivided_batch(rules, dp, micro_batch_size)
    if rules.ramps_up and any(size % samples for size in options.rampup_batch_size[:2]):
        reason = f"micro_batch_size*dp does not divide every {flag_of('rampup_batch_size')}"
        names = ("rampup_batch_size", "micro_batch_size")
        yield BrokenRule(reason, names, f"both sizes must be multiples of {samples}")
    if 0 in rules.earlier_counts(samples):
        reason = "micro_batch_size*dp does not divide every batch size of --step-batch-size-schedule"
        yield BrokenRule(reason, ("step_batch_size_schedule", "micro_batch_size"), f"{samples} must divide all sizes")
    # From core_v0.18.0 on evaluation has its own batch sizes. The defaults are the batch sizes of the training.
    evaluated = options.eval_global_batch_size or batch_size
    at_once = options.eval_micro_batch_size or micro_batch_size
    if evaluated % (at_once * dp):
        reason = f"dp does not divide the micro-batches of {flag_of('eval_global_batch_size')}"
        remedy = f"it must be a multiple of {at_once * dp}"
        yield BrokenRule(reason, ("eval_global_batch_size", "eval_micro_batch_size"), remedy)


def schedule_faults(rules: Rules, pp: int, vpp: int, group_size: int, samples: int) -> Broken:
    """Check that every step has enough micro-batches for interleaving (schedules.py:996-1019).

    `group_size` micro-batches run through a chunk at a time (0 = `pp`). `samples` is micro_batch_size*dp.
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
    grown: Sequence[int] = rules.earlier_counts(samples)
    if rules.ramps_up:
        # While the batch grows, check only the first `group` batch sizes. After them, remainders modulo `group` repeat.
        first, step = (size // samples for size in rules.options.rampup_batch_size[:2])
        grown = range(first, last, max(1, step))[:group]
    for count in (last, *grown):
        if group > count:
            reason = "interleaving needs at least pp micro-batches"
        elif 0 < count % group < pp:
            reason = "interleaving needs micro-batches in multiples of pp"
        else:
            continue
        grows = "rampup_batch_size" if rules.ramps_up else "step_batch_size_schedule"
        ramp = () if count == last else (grows,)
        remedy = f"{count} micro-batches do not fill groups of {group}; change one, or give up virtual stages"
        yield BrokenRule(reason, (*names, *ramp, "global_batch_size", "micro_batch_size"), remedy)
        return
