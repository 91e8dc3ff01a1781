"""The user's own layout, read from the command line and held against the constraints that Megatron enforces."""

from __future__ import annotations

from pipette_launch.errors import LayoutError, MegatronError
from pipette_launch.facts import Layout, ModelSpec, Recompute
from pipette_launch.facts.layout import NO_RECOMPUTE
from pipette_launch.facts.schedules import check_interleaving
from pipette_launch.megatron.chunks import SPLIT_DESTS, hybrid_pattern, read_chunks
from pipette_launch.megatron.flags import Arguments, release_of

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
GROUP_SIZE = "microbatch_group_size_per_vp_stage"
MOST_LAYERS = 1 << 14
SIZE_DESTS = (TP, PP, CP, EP, ETP, GROUP_SIZE, *SPLIT_DESTS)
SIZE_FIELDS = frozenset({"tp", "pp", "dp", "cp", "ep", "etp", "vpp", "layers_per_chunk", "microbatch_group_size"})
"""What `SIZE_DESTS` say of a layout."""
SWITCHES = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "use_tp_pp_dp_mapping")
"""Destinations that are fields of a layout."""
OWN_MODULES_OF_TE = {"layernorm", "moe_act", "mla_up_proj"}
"""Recompute modules that crash without Transformer Engine (seen with megatron-core 0.16.1)."""


def read_recompute(arguments: Arguments) -> Recompute:
    """Activation recompute; selective without modules is core attention, as in Megatron."""
    granularity = "selective" if arguments.get("recompute_activations") else arguments.get("recompute_granularity")
    method, num_layers = arguments.get("recompute_method"), arguments.get("recompute_num_layers")
    # The old word for one more module (transformer_config.py:1255-1266).
    of_experts = ("moe",) if arguments.get("moe_layer_recompute") and granularity != "full" else ()
    if of_experts:
        granularity = "selective"
    if granularity is None:
        return NO_RECOMPUTE
    if granularity == "selective":
        if method is not None or num_layers is not None:
            raise MegatronError(
                "selective recompute takes neither --recompute-method nor --recompute-num-layers; remove them"
            )
        modules = tuple(arguments.get("recompute_modules") or ("core_attn",))
        return Recompute(granularity="selective", modules=(*modules, *(set(of_experts) - set(modules))))
    if granularity != "full" or method not in ("uniform", "block") or num_layers is None:
        raise MegatronError(
            f"{arguments.shown('recompute_granularity')}: full recompute needs --recompute-method uniform or block "
            f"and --recompute-num-layers; got {method} and {num_layers}"
        )
    return Recompute(granularity="full", method=method, num_layers=arguments.size("recompute_num_layers"))


def known_dest(arguments: Arguments, dest: str) -> str:
    """Return the destination that the user's flags fill: the layers' number and the length have old names, too."""
    is_old = arguments.get(dest) is None and arguments.get(f"encoder_{dest}") is not None
    return f"encoder_{dest}" if is_old else dest


def num_layers_of(arguments: Arguments) -> int:
    """Layers of the model; raises MegatronError for more than any model has, as lists hold one entry for each."""
    pattern = hybrid_pattern(arguments)
    # The pattern outranks the number.
    num_layers = len(pattern.layers) if pattern else arguments.size(known_dest(arguments, "num_layers"))
    if num_layers > MOST_LAYERS:
        raise MegatronError(f"--num-layers {num_layers}: more than {MOST_LAYERS}, which no model has")
    return num_layers


def read_layout(arguments: Arguments, *, world_size: int) -> Layout:
    """Read what torchrun would have run on this many ranks.

    Raises:
        MegatronError: the flags contradict each other or the number of ranks.

    """
    tp, pp, cp = (arguments.size(dest) for dest in (TP, PP, CP))
    ep, etp = arguments.size(EP), arguments.size(ETP, default=tp)
    if world_size % (tp * pp * cp):
        raise MegatronError(
            f"{_shown(arguments, TP, PP, CP)} need a multiple of {tp * pp * cp} ranks, but the job has {world_size}; "
            f"change them, or --nnodes and --nproc-per-node"
        )
    if world_size % (etp * ep * pp):
        raise MegatronError(
            f"{_shown(arguments, ETP, EP, PP)} need a multiple of {etp * ep * pp} ranks, but the job has {world_size}; "
            f"set --expert-tensor-parallel-size or --expert-model-parallel-size"
        )
    vpp, chunks = read_chunks(arguments, pp=pp, num_layers=num_layers_of(arguments))
    try:
        return Layout(
            tp=tp,
            pp=pp,
            dp=world_size // (tp * pp * cp),
            cp=cp,
            ep=ep,
            etp=etp,
            vpp=vpp,
            microbatch_group_size=arguments.size(GROUP_SIZE, default=0),
            layers_per_chunk=chunks,
            micro_batch_size=arguments.size("micro_batch_size"),
            # Megatron drops the flag in silence at TP 1.
            sequence_parallel=bool(arguments.get("sequence_parallel")) and tp > 1,
            recompute=read_recompute(arguments),
            **{dest: bool(arguments.get(dest)) or dest in _implied(arguments) for dest in SWITCHES},
        )
    except LayoutError as error:
        raise MegatronError(f"the job's own configuration: {error}") from error


def _implied(arguments: Arguments) -> tuple[str, ...]:
    """Switches that Megatron turns on itself: Megatron-FSDP's optimizer (from core_v0.18 on, validate_args)."""
    is_implied = arguments.get("use_megatron_fsdp") and release_of(arguments.version) >= (0, 18)
    return ("use_distributed_optimizer",) if is_implied else ()


def check_layout(
    layout: Layout, model: ModelSpec, arguments: Arguments, *, device_kind: str, global_batch_size: int
) -> None:
    """Raise MegatronError where Megatron itself would refuse this configuration, naming flag, value and remedy.

    Args:
        layout: what would run.
        model: what is trained.
        arguments: the user's flags, for the words of the error.
        device_kind: `cuda` or `cpu`.
        global_batch_size: samples of one step.

    """
    if device_kind == "cpu":
        _check_cpu(layout)
    _check_widths(layout, model, arguments)
    _check_experts(layout, model, arguments)
    _check_sharding(layout, arguments)
    _check_batch(layout, arguments, global_batch_size)
    if layout.overlap_param_gather and not (layout.use_distributed_optimizer and layout.overlap_grad_reduce):
        raise MegatronError(
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce; add them or remove it"
        )


def _shown(arguments: Arguments, *dests: str) -> str:
    """The flags among these that the user gave, in his words."""
    given = [arguments.shown(dest) for dest in dests if arguments.is_given(dest)]
    return " with ".join(given) or "the parallel sizes"


def _check_cpu(layout: Layout) -> None:
    """Raise MegatronError for what needs Transformer Engine, and so a GPU."""
    if layout.cp > 1:
        raise MegatronError(
            f"--context-parallel-size {layout.cp}: context parallelism needs Transformer Engine and so a GPU; "
            f"use --context-parallel-size 1 on CPU"
        )
    modules = sorted(OWN_MODULES_OF_TE & set(layout.recompute.modules))
    if modules:
        raise MegatronError(
            f"--recompute-modules {' '.join(modules)}: needs Transformer Engine and so a GPU; remove it on CPU"
        )


def _check_widths(layout: Layout, model: ModelSpec, arguments: Arguments) -> None:
    shown = arguments.shown(TP)
    if model.num_attention_heads % layout.tp:
        raise MegatronError(f"{shown}: does not divide --num-attention-heads {model.num_attention_heads}")
    groups = model.num_query_groups
    if groups % layout.tp and (layout.tp % groups or arguments.version.startswith(("0.14", "0.15"))):
        raise MegatronError(f"{shown}: does not divide --num-query-groups {groups}")
    if model.ffn_hidden_size % layout.tp:
        raise MegatronError(f"{shown}: does not divide the feed-forward width {model.ffn_hidden_size}")
    if model.hybrid and model.hybrid.mamba_num_groups % layout.tp:
        raise MegatronError(f"{shown}: does not divide --mamba-num-groups {model.hybrid.mamba_num_groups}")
    if layout.cp > 1 and model.seq_length % (2 * layout.cp):
        raise MegatronError(
            f"{arguments.shown(CP)}: --seq-length {model.seq_length} is no multiple of 2*{layout.cp}; change one"
        )
    if layout.sequence_parallel and model.seq_length // layout.cp % layout.tp:
        raise MegatronError(
            f"--sequence-parallel: --seq-length {model.seq_length} over {layout.cp} context-parallel ranks is no "
            f"multiple of {shown}"
        )


def _check_experts(layout: Layout, model: ModelSpec, arguments: Arguments) -> None:
    if layout.ep > 1 and not model.num_experts:
        raise MegatronError(f"{arguments.shown(EP)}: needs --num-experts; remove it for a dense model")
    if model.num_experts and model.num_experts % layout.ep:
        raise MegatronError(f"{arguments.shown(EP)}: does not divide --num-experts {model.num_experts}")
    if model.num_experts and layout.tp > 1 and not layout.sequence_parallel:
        raise MegatronError(
            f"{arguments.shown(TP)}: experts with tensor parallelism train only with --sequence-parallel; "
            f"add it or use --tensor-model-parallel-size 1"
        )
    if layout.use_tp_pp_dp_mapping and layout.pp > 1 and layout.etp * layout.ep != layout.tp * layout.cp:
        raise MegatronError(
            "--use-tp-pp-dp-mapping with pipeline stages needs expert and dense data-parallel sizes to be equal: "
            f"etp*ep = {layout.etp * layout.ep}, tp*cp = {layout.tp * layout.cp}; remove the flag"
        )


def _check_sharding(layout: Layout, arguments: Arguments) -> None:
    """Check FSDP: Megatron's own builds a mesh over all ranks, which holds no pipeline (mcore_fsdp_adapter.py)."""
    for dest in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if arguments.get(dest) and layout.pp > 1:
            raise MegatronError(f"{arguments.shown(dest)}: does not run with {arguments.shown(PP)}; remove one")
    if arguments.get("use_megatron_fsdp") and not layout.use_distributed_optimizer:
        raise MegatronError(f"{arguments.shown('use_megatron_fsdp')}: needs --use-distributed-optimizer; add it")
    if arguments.get("use_torch_fsdp2") and (layout.use_distributed_optimizer or layout.ep > 1):
        raise MegatronError(
            f"{arguments.shown('use_torch_fsdp2')}: runs neither with --use-distributed-optimizer nor with "
            f"--expert-model-parallel-size above 1; remove them"
        )


def _check_batch(layout: Layout, arguments: Arguments, global_batch_size: int) -> None:
    try:
        micro_batches = layout.num_microbatches(global_batch_size)
    except LayoutError as error:
        raise MegatronError(
            f"--global-batch-size {global_batch_size}: {error}; with {arguments.shown('micro_batch_size')} on "
            f"{layout.dp} data-parallel ranks it must be a multiple of {layout.micro_batch_size * layout.dp}"
        ) from error
    if layout.vpp == 1:
        return
    if layout.pp == 2 and arguments.get("overlap_p2p_comm") is False:
        raise MegatronError("--no-overlap-p2p-communication with virtual stages needs a pipeline of more than 2 ranks")
    group = layout.microbatch_group_size or layout.pp
    try:
        check_interleaving(pp=layout.pp, vpp=layout.vpp, microbatches=micro_batches, group_size=group)
    except LayoutError as error:
        raise MegatronError(
            f"{micro_batches} micro-batches do not interleave over {layout.pp} pipeline ranks in groups of {group}: "
            f"they must be a multiple of {group}: change --global-batch-size {global_batch_size} or "
            f"{arguments.shown('micro_batch_size')}, or give up virtual stages"
        ) from error
