"""The user's own layout, read from the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from pipette_launch.errors import LayoutError, MegatronError
from pipette_launch.facts import Job, Layout, Recompute
from pipette_launch.facts.layout import NO_RECOMPUTE
from pipette_launch.megatron.checkpoint_files import with_checkpoint_arguments
from pipette_launch.megatron.chunks import (
    PATTERN_DESTS,
    Split,
    hybrid_pattern,
    nearly_even,
    read_chunks,
    stated_vpp,
    write_chunks,
)
from pipette_launch.megatron.flags import Arguments, release_of
from pipette_launch.megatron.tokenizers import read_vocabulary

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
GROUP_SIZE = "microbatch_group_size_per_vp_stage"
MOST_LAYERS = 1 << 14
DEGREES = {"tp": TP, "pp": PP, "cp": CP, "ep": EP, "etp": ETP}
"""Destinations of the degrees."""
SPLIT_FIELDS = (*Split._fields, "microbatch_group_size")
SWITCHES = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "use_tp_pp_dp_mapping")
"""Destinations that are fields of a layout."""


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
            f"{_shown(arguments, TP, PP, CP)} needs a multiple of {tp * pp * cp} ranks, but the job has {world_size}; "
            f"change them, or --nnodes and --nproc-per-node"
        )
    if world_size % (etp * ep * pp):
        # Megatron takes TP for experts too where --expert-tensor-parallel-size is not given.
        tensor = ETP if arguments.is_given(ETP) else TP
        raise MegatronError(
            f"{_shown(arguments, tensor, EP, PP)} needs a multiple of {etp * ep * pp} ranks, "
            f"but the job has {world_size}; set --expert-tensor-parallel-size or --expert-model-parallel-size"
        )
    split = read_chunks(arguments, pp=pp, num_layers=num_layers_of(arguments))
    try:
        return Layout(
            tp=tp,
            pp=pp,
            dp=world_size // (tp * pp * cp),
            cp=cp,
            ep=ep,
            etp=etp,
            vpp=split.vpp,
            layers_per_chunk=split.layers_per_chunk,
            chunks_after_mtp=split.chunks_after_mtp,
            microbatch_group_size=arguments.size(GROUP_SIZE, default=0),
            micro_batch_size=arguments.size("micro_batch_size"),
            # Megatron drops the flag in silence at TP 1.
            sequence_parallel=bool(arguments.get("sequence_parallel")) and tp > 1,
            recompute=read_recompute(arguments),
            **{dest: bool(arguments.get(dest)) or dest in _implied(arguments) for dest in SWITCHES},
        )
    except LayoutError as error:
        raise MegatronError(f"the job's own configuration: {error}") from error


def read_stand_in(
    arguments: Arguments, *, world_size: int, fixed: Collection[str], keeps_degrees: bool
) -> tuple[Layout, frozenset[str]] | None:
    """Return a layout for flags that `read_layout` refuses, and its fields that differ from these flags.

    The layers are split anew, as evenly as they can be. Where that is not enough, the degrees of the experts become
    Megatron's defaults, and then all degrees do. Fields that are fixed stay.

    Args:
        arguments: the user's flags.
        world_size: ranks of the job.
        fixed: fields of the layout.
        keeps_degrees: split the layers anew, and change no degree.

    Returns:
        None where no such layout keeps the fixed fields.

    """
    # The ranks of a replica decide dp.
    kept = {*fixed, *(("tp", "pp", "cp") if "dp" in fixed else ())}
    for changed in (set(), {"ep", "etp"}, {"tp", "pp", "cp", "ep", "etp"})[: 1 if keeps_degrees else None]:
        bare = arguments.without(*(DEGREES[name] for name in changed - kept))
        differs = {*changed, *({"dp"} if "tp" in changed else ()), *SPLIT_FIELDS} - kept
        for words in _with_pipelines(bare, world_size, has_choice="pp" in differs and "vpp" in fixed):
            with contextlib.suppress(MegatronError):
                layout = read_layout(_split_anew(words, fixed), world_size=world_size)
                same = {"vpp"} if layout.vpp == stated_vpp(arguments, layout.pp) else set()
                return layout, frozenset(differs - same)
    return None


def _with_pipelines(arguments: Arguments, world_size: int, *, has_choice: bool) -> Iterator[Arguments]:
    """Yield the flags, and with a choice also each longer pipeline, as virtual stages need more than one rank."""
    yield arguments
    for pp in range(2, num_layers_of(arguments) + 1) if has_choice else ():
        if world_size % pp == 0:
            yield arguments.with_flag("--pipeline-model-parallel-size", str(pp))


def _split_anew(arguments: Arguments, fixed: Collection[str]) -> Arguments:
    """Split the layers as evenly as they can be, with the virtual stages that the flags name where there are layers."""
    pp, num_layers = arguments.size(PP), num_layers_of(arguments)
    stated = stated_vpp(arguments, pp)
    if "layers_per_chunk" in fixed or ("vpp" in fixed and stated is None):
        return arguments
    vpp = stated if stated and ("vpp" in fixed or (pp > 1 and pp * stated <= num_layers)) else 1
    if pp * vpp > num_layers:
        return arguments
    bare = arguments if vpp > 1 else arguments.without(GROUP_SIZE)
    return write_chunks(bare, Split(vpp, nearly_even(num_layers, pp * vpp)), pp=pp, num_layers=num_layers)


def _implied(arguments: Arguments) -> tuple[str, ...]:
    """Switches that Megatron turns on itself: Megatron-FSDP's optimizer (from core_v0.18 on, validate_args)."""
    is_implied = arguments.get("use_megatron_fsdp") and release_of(arguments.version) >= (0, 18)
    return ("use_distributed_optimizer",) if is_implied else ()


def _shown(arguments: Arguments, *dests: str) -> str:
    """The flags among these that the user gave, in his words."""
    given = [arguments.shown(dest) for dest in dests if arguments.is_given(dest)]
    return " with ".join(given) or "the parallel sizes"


SIZES = (
    ("tp", TP, "--tensor-model-parallel-size"),
    ("pp", PP, "--pipeline-model-parallel-size"),
    ("cp", CP, "--context-parallel-size"),
    ("ep", EP, "--expert-model-parallel-size"),
    ("micro_batch_size", "micro_batch_size", "--micro-batch-size"),
)
SWITCH_FLAGS = (
    ("sequence_parallel", "--sequence-parallel"),
    ("use_distributed_optimizer", "--use-distributed-optimizer"),
    ("overlap_grad_reduce", "--overlap-grad-reduce"),
    ("overlap_param_gather", "--overlap-param-gather"),
    ("use_tp_pp_dp_mapping", "--use-tp-pp-dp-mapping"),
)
RECOMPUTE_DESTS = (
    "recompute_activations",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)


def write_arguments(arguments: Sequence[str], *, job: Job, layout: Layout) -> tuple[str, ...]:
    """Put a layout into a command line, for a script that then runs exactly it.

    The global batch size is pinned, and the padded vocabulary where tensor parallelism would change it. Read back on as
    many ranks, the result gives the layout. A dense model takes no expert sizes: its `etp` is Megatron's default, `tp`.

    Raises:
        MegatronError: `--local-rank` is given, which would override the launcher's choice of devices.

    """
    given = Arguments.parse(arguments, job.megatron_version)
    if given.is_given("local_rank"):
        raise MegatronError(f"{given.shown('local_rank')}: a rank's device is the launcher's to choose; remove it")
    written = given.without("use_mp_args_from_checkpoint_args")
    for name, dest, option in SIZES:
        if written.size(dest) != getattr(layout, name):
            written = written.with_flag(option, str(getattr(layout, name)))
    if written.size(ETP, default=layout.tp) != layout.etp:
        is_default = layout.etp == layout.tp or not job.model.num_experts
        etp = str(layout.etp)
        written = written.without(ETP) if is_default else written.with_flag("--expert-tensor-parallel-size", etp)
    written = _chunks(written, layout, job.model.num_layers)
    for name, option in SWITCH_FLAGS:
        is_on = getattr(layout, name)
        # Megatron ignores --sequence-parallel at TP 1, so that it may stay there.
        if bool(written.get(name)) != is_on and (layout.tp > 1 or name != "sequence_parallel"):
            written = written.with_flag(option) if is_on else written.without(name)
    written = _recompute(written, layout.recompute)
    # Its padding takes part in the softmax, so the embedding stays as large as the user's own flags make it.
    rows = job.model.padded_vocab_size(given.size(TP))
    is_kept = rows == job.model.padded_vocab_size(layout.tp)
    if not is_kept and rows % layout.tp == 0 and read_vocabulary(given).is_certain:
        written = written.with_flag("--padded-vocab-size", str(rows))
    if not written.is_given("global_batch_size"):
        written = written.with_flag("--global-batch-size", str(job.batch.global_batch_size))
    return written.words


def _chunks(written: Arguments, layout: Layout, num_layers: int) -> Arguments:
    wanted = Split(layout.vpp, layout.layers_per_chunk, layout.chunks_after_mtp)
    cut = _with_saved_pattern(written)
    try:
        said = read_chunks(cut, pp=layout.pp, num_layers=num_layers)
    except MegatronError:
        said = None  # the user's flags suit another pipeline size
    if said != wanted:
        written = write_chunks(cut, wanted, pp=layout.pp, num_layers=num_layers)
    size = layout.microbatch_group_size
    if written.size(GROUP_SIZE, default=0) == size:
        return written
    if size == 0:
        return written.without(GROUP_SIZE)
    return written.with_flag("--microbatch-group-size-per-virtual-pipeline-stage", str(size))


def _with_saved_pattern(written: Arguments) -> Arguments:
    """Give a hybrid model's layers as a flag where a checkpoint names them: the flag also says where stages begin."""
    whole, _ = with_checkpoint_arguments(written)
    for dest in PATTERN_DESTS:
        if whole.get(dest) and not written.get(dest):
            return written.with_flag(f"--{dest.replace('_', '-')}", whole.get(dest))
    return written


def _recompute(written: Arguments, wanted: Recompute) -> Arguments:
    if read_recompute(written) == wanted:
        return written
    written = written.without(*RECOMPUTE_DESTS)
    if wanted.granularity == "none":
        return written
    written = written.with_flag("--recompute-granularity", wanted.granularity)
    if wanted.granularity == "full":
        written = written.with_flag("--recompute-method", wanted.method)
        return written.with_flag("--recompute-num-layers", str(wanted.num_layers))
    return written.with_flag("--recompute-modules", *wanted.modules) if wanted.modules else written
