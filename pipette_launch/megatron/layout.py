"""Reader of the user's layout from Megatron's flags, and writer of a plan's layout into Megatron's flags."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from pipette_launch.errors import LayoutError, MegatronError
from pipette_launch.facts import Batch, Job, Layout, Recompute
from pipette_launch.facts.job import SHARDED_MUON
from pipette_launch.facts.layout import NO_RECOMPUTE, OVERLAPS, SWITCHES
from pipette_launch.megatron import chunks
from pipette_launch.megatron.checkpoint_files import with_checkpoint_arguments
from pipette_launch.megatron.chunks import Split
from pipette_launch.megatron.flags import Arguments, release_of
from pipette_launch.megatron.tokenizers import read_vocabulary

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
GROUP_SIZE = "microbatch_group_size_per_vp_stage"
MOST_LAYERS = 1 << 14
STACKS = ("num_layers", "encoder_num_layers", "decoder_num_layers")
DEGREES = {"tp": TP, "pp": PP, "cp": CP, "ep": EP, "etp": ETP}
OPTIMIZER_FIELDS = (*OVERLAPS, "use_distributed_optimizer")
RECOMPUTE_DESTS = (
    "recompute_activations",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
OFFLOAD_DESTS = ("fine_grained_activation_offloading", "offload_modules", "activation_offload_fraction")
DESTS_OF: dict[str, tuple[str, ...]] = {
    **{name: (dest,) for name, dest in DEGREES.items()},
    "dp": (),
    "vpp": (*chunks.SPLIT_DESTS[:3], *chunks.PATTERN_DESTS),
    "layers_per_chunk": (*chunks.SPLIT_DESTS, *chunks.PATTERN_DESTS),
    "chunks_after_mtp": (chunks.SPLIT_DESTS[2],),
    "microbatch_group_size": (GROUP_SIZE,),
    "micro_batch_size": ("micro_batch_size",),
    **{name: (name,) for name in SWITCHES},
    "recompute": RECOMPUTE_DESTS[:4],
}
"""Megatron's destinations that set each field of a layout. No flag sets dp, which follows from the number of ranks."""


def read_recompute(arguments: Arguments) -> Recompute:
    """Read recompute and offloading of activations."""
    found, share = _read_recompute(arguments), arguments.get("activation_offload_fraction")
    if not arguments.get("fine_grained_activation_offloading"):
        return found
    modules = tuple(arguments.get("offload_modules") or ())
    return replace(found, offload_modules=modules, offload_share=1.0 if share is None else share)


def _read_recompute(arguments: Arguments) -> Recompute:
    """Read activation recompute. As in Megatron, selective recompute without modules recomputes core attention."""
    granularity = "selective" if arguments.get("recompute_activations") else arguments.get("recompute_granularity")
    method, num_layers = arguments.get("recompute_method"), arguments.get("recompute_num_layers")
    # `--moe-layer-recompute` is an old flag for selective recompute of the module `moe`
    # (transformer_config.py:1255-1266).
    of_experts = ("moe",) if arguments.get("moe_layer_recompute") and granularity != "full" else ()
    if of_experts:
        granularity = "selective"
    if granularity is None:
        return NO_RECOMPUTE
    if granularity == "selective":
        if (method, num_layers) != (None, None):
            flags = "neither --recompute-method nor --recompute-num-layers"
            raise MegatronError(f"selective recompute takes {flags}; remove them")
        modules = tuple(arguments.get("recompute_modules") or ("core_attn",))
        return Recompute(granularity="selective", modules=(*modules, *(set(of_experts) - set(modules))))
    if granularity != "full" or method not in ("uniform", "block") or num_layers is None:
        dests = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        reason = "full recompute needs --recompute-method uniform or block, and --recompute-num-layers N"
        raise arguments.refusal(reason, *filter(arguments.is_given, dests))
    return Recompute(granularity="full", method=method, num_layers=arguments.size("recompute_num_layers"))


def known_dest(arguments: Arguments, dest: str) -> str:
    """Return the destination that the user's flags set: `num_layers` and `seq_length` have old names, `encoder_...`."""
    has_old = dest in ("num_layers", "seq_length")
    is_old = has_old and arguments.get(dest) is None and arguments.get(f"encoder_{dest}") is not None
    return f"encoder_{dest}" if is_old else dest


def stacks_of(arguments: Arguments) -> dict[str, int]:
    """Return the number of layers of each stack, by the destination of its flag."""
    given = [dest for dest in STACKS if arguments.get(dest) is not None] or STACKS[:1]
    return {dest: arguments.size(dest) for dest in given}


def num_layers_of(arguments: Arguments) -> int:
    """Return the number of layers of the model. Raise MegatronError above MOST_LAYERS, which would fill the memory."""
    pattern = chunks.hybrid_pattern(arguments)
    # A hybrid model's pattern overrides `--num-layers`.
    num_layers = len(pattern.layers) if pattern else sum(stacks_of(arguments).values())
    if num_layers > MOST_LAYERS:
        raise MegatronError(f"--num-layers {num_layers}: more than {MOST_LAYERS}, which no model has")
    return num_layers


def read_layout(arguments: Arguments, *, world_size: int) -> Layout:
    """Read the layout that torchrun would run on `world_size` ranks.

    Raise MegatronError if two flags contradict each other, or if the degrees do not divide the ranks.
    """
    tp, pp, cp, ep = (arguments.size(dest) for dest in (TP, PP, CP, EP))
    etp = arguments.size(ETP, default=tp)
    # Without --expert-tensor-parallel-size, the experts have the tensor parallel size of the model.
    tensor = ETP if arguments.is_given(ETP) else TP
    for size, dests, remedy in (
        (tp * pp * cp, (TP, PP, CP), "change them, or --nnodes and --nproc-per-node"),
        (etp * ep * pp, (tensor, EP, PP), "set --expert-tensor-parallel-size or --expert-model-parallel-size"),
    ):
        if world_size % size:
            given = " with ".join(arguments.shown(dest) for dest in dests if arguments.is_given(dest))
            flags = given or "the parallel sizes"
            raise MegatronError(f"{flags} needs a multiple of {size} ranks, but the job has {world_size}; {remedy}")
    split = chunks.read_chunks(arguments, pp=pp, num_layers=num_layers_of(arguments))
    switches: dict[str, Any] = {name: bool(arguments.get(name)) for name in SWITCHES}
    # Megatron silently ignores sequence parallelism at TP 1. From 0.18 on, Megatron-FSDP turns the distributed
    # optimizer on (validate_args). `dist_muon` shards whole matrices without the flag.
    switches["sequence_parallel"] &= tp > 1
    has_fsdp = arguments.get("use_megatron_fsdp") and release_of(arguments.version) >= (0, 18)
    switches["use_distributed_optimizer"] |= bool(has_fsdp) or arguments.get("optimizer") == SHARDED_MUON
    if arguments.get("freeze_all_layers"):
        switches |= dict.fromkeys(("use_distributed_optimizer", "overlap_param_gather"), False)
    try:
        return Layout(
            tp=tp,
            pp=pp,
            dp=world_size // (tp * pp * cp),
            cp=cp,
            ep=ep,
            etp=etp,
            **split._asdict(),
            microbatch_group_size=arguments.size(GROUP_SIZE, default=0),
            micro_batch_size=arguments.size("micro_batch_size"),
            recompute=read_recompute(arguments),
            **switches,
        )
    except LayoutError as error:
        raise MegatronError(f"the job's own configuration: {error}") from error


def read_stand_in(
    arguments: Arguments, *, world_size: int, fixed: Collection[str], keeps_degrees: bool
) -> tuple[Layout, frozenset[str]] | None:
    """Return a layout that replaces a refused layout, and the names of fields that differ from the flags.

    The first attempt only splits the layers anew, as evenly as possible. The second attempt also sets the degrees of
    experts to Megatron's defaults. The last attempt sets all degrees to Megatron's defaults. With `keeps_degrees` the
    function only splits the layers anew. Return None if every replacement would change a field in `fixed`.
    """
    # A fixed dp also fixes tp, pp and cp, because tp, pp and cp decide dp.
    kept = {*fixed, *(("tp", "pp", "cp") if "dp" in fixed else ())}
    for changed in (set(), {"ep", "etp"}, {*DEGREES})[: 1 if keeps_degrees else None]:
        bare = arguments.without(*(DEGREES[name] for name in changed - kept))
        differs = {*changed, *({"dp"} if "tp" in changed else ()), *Split._fields, "microbatch_group_size"} - kept
        # Virtual stages need at least two pipeline ranks, so also try pipelines with more ranks.
        has_choice = "pp" in differs and "vpp" in fixed
        pipelines = range(2, num_layers_of(bare) + 1) if has_choice else ()
        longer = (bare.with_value(PP, pp) for pp in pipelines if world_size % pp == 0)
        for words in (bare, *longer):
            with contextlib.suppress(MegatronError):
                layout = read_layout(_split_anew(words, fixed), world_size=world_size)
                same = {"vpp"} if layout.vpp == chunks.stated_vpp(arguments, layout.pp) else set()
                return layout, frozenset(differs - same)
    return None


def _split_anew(arguments: Arguments, fixed: Collection[str]) -> Arguments:
    """Split the layers as evenly as possible, with the stated virtual stages if there are enough layers."""
    pp, num_layers = arguments.size(PP), num_layers_of(arguments)
    stated = chunks.stated_vpp(arguments, pp)
    if "layers_per_chunk" in fixed or ("vpp" in fixed and stated is None):
        return arguments
    vpp = stated if stated and ("vpp" in fixed or (pp > 1 and pp * stated <= num_layers)) else 1
    if pp * vpp > num_layers:
        return arguments
    bare = arguments if vpp > 1 else arguments.without(GROUP_SIZE)
    return chunks.write_chunks(bare, Split(vpp, chunks.nearly_even(num_layers, pp * vpp)), pp=pp, num_layers=num_layers)


def read_batch(given: Arguments, own: Layout) -> Batch:
    """Return the batch size.

    As in Megatron, the default is one micro-batch on each replica of the user's own layout.
    """
    schedule = given.get("step_batch_size_schedule")
    if not schedule:
        return Batch(global_batch_size=given.size("global_batch_size", default=own.micro_batch_size * own.dp))
    # The text `0:384 200B:768` has pairs of a threshold and a batch size (StepBatchsizeNumMicroBatchesCalculator).
    try:
        pairs = (pair.split(":", 1) for pair in schedule.upper().replace(",", " ").split())
        steps = sorted((_number(threshold), _number(size)) for threshold, size in pairs)
    except (ValueError, OverflowError):
        steps = []
    if not steps or steps[0][0] or len(dict(steps)) < len(steps) or min(size for _, size in steps) < 1:
        reason = "not a list such as 0:384 200B:768, different thresholds from 0 on with batch sizes"
        raise given.refusal(reason, "step_batch_size_schedule")
    *earlier, last = (size for _, size in steps)
    return Batch(global_batch_size=last, earlier_sizes=tuple(earlier))


def _number(text: str) -> int:
    value = text.removesuffix(unit) if (unit := text[-1:]) in {*"KMBT"} else text
    return int(float(value) * 1000 ** ("KMBT".find(unit) + 1))


def write_arguments(arguments: Sequence[str], *, job: Job, layout: Layout) -> tuple[str, ...]:
    """Write a layout into a command line, so that the script runs exactly the given layout.

    The result states the global batch size, and the padded vocabulary size if the new TP would change the padding.
    `read_layout` of the result returns the same layout. A dense model gets no flags for experts, because its `etp` is
    Megatron's default, `tp`. Raise MegatronError for `--local-rank`, which would override the launcher's choice of
    devices.
    """
    given = Arguments.parse(arguments, job.megatron_version)
    if given.is_given("local_rank"):
        raise given.refusal("the launcher chooses the device of a rank; remove it", "local_rank")
    written = given.without("use_mp_args_from_checkpoint_args")
    for name in ("tp", "pp", "cp", "ep", "micro_batch_size"):
        (dest,), size = DESTS_OF[name], getattr(layout, name)
        if written.size(dest) != size:
            written = written.with_value(dest, size)
    if written.size(ETP, default=layout.tp) != layout.etp:
        is_default = layout.etp == layout.tp or not job.model.num_experts
        written = written.without(ETP) if is_default else written.with_value(ETP, layout.etp)
    written = _with_chunks(written, layout, job.model.num_layers)
    for name in SWITCHES:
        is_on = getattr(layout, name)
        if name == "use_distributed_optimizer" and job.optimizer == SHARDED_MUON:
            continue
        # --sequence-parallel may stay at TP 1, because Megatron then ignores the flag.
        if bool(written.get(name)) != is_on and (layout.tp > 1 or name != "sequence_parallel"):
            written = written.with_value(name) if is_on else written.without(name)
    written = _with_recompute(written, layout.recompute)
    # The softmax includes the padding. So the padded vocabulary keeps the size that follows from the user's own flags.
    rows = job.model.padded_vocab_size(given.size(TP))
    is_kept = rows == job.model.padded_vocab_size(layout.tp)
    if not is_kept and rows % layout.tp == 0 and not read_vocabulary(given).note:
        written = written.with_value("padded_vocab_size", rows)
    if not (written.is_given("global_batch_size") or written.is_given("step_batch_size_schedule")):
        written = written.with_value("global_batch_size", job.batch.global_batch_size)
    return written.words


def _with_chunks(written: Arguments, layout: Layout, num_layers: int) -> Arguments:
    wanted = Split(layout.vpp, layout.layers_per_chunk, layout.chunks_after_mtp)
    # A hybrid model's layers from a checkpoint become a flag, because the flag also states where stages begin.
    cut, (whole, _) = written, with_checkpoint_arguments(written)
    saved = next((dest for dest in chunks.PATTERN_DESTS if whole.get(dest) and not written.get(dest)), None)
    if saved:
        cut = written.with_value(saved, whole.get(saved))
    try:
        said = chunks.read_chunks(cut, pp=layout.pp, num_layers=num_layers)
    except MegatronError:
        said = None  # the flags suit another pipeline size
    if said != wanted:
        written = chunks.write_chunks(cut, wanted, pp=layout.pp, num_layers=num_layers)
    size = layout.microbatch_group_size
    if written.size(GROUP_SIZE, default=0) == size:
        return written
    return written.with_value(GROUP_SIZE, size) if size else written.without(GROUP_SIZE)


def _with_recompute(written: Arguments, wanted: Recompute) -> Arguments:
    if read_recompute(written) == wanted:
        return written
    written = written.without(*RECOMPUTE_DESTS, *OFFLOAD_DESTS)
    if wanted.offload_modules:
        written = written.with_value("fine_grained_activation_offloading")
        written = written.with_value("offload_modules", *wanted.offload_modules)
        written = written.with_value("activation_offload_fraction", wanted.offload_share)
    if wanted.granularity == "none":
        return written
    written = written.with_value("recompute_granularity", wanted.granularity)
    if wanted.granularity == "full":
        written = written.with_value("recompute_method", wanted.method)
        return written.with_value("recompute_num_layers", wanted.num_layers)
    return written.with_value("recompute_modules", *wanted.modules) if wanted.modules else written
