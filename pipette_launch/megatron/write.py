"""A layout, written into the user's command line: what it does not change stays word for word."""

from __future__ import annotations

from collections.abc import Sequence

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Job, Layout, Recompute
from pipette_launch.megatron.checkpoint import with_checkpoint_arguments
from pipette_launch.megatron.chunks import PATTERN_DESTS, Split, read_chunks, write_chunks
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.layout import CP, EP, ETP, GROUP_SIZE, PP, TP, read_recompute
from pipette_launch.megatron.tokenizers import read_vocabulary

SIZES = (
    ("tp", TP, "--tensor-model-parallel-size"),
    ("pp", PP, "--pipeline-model-parallel-size"),
    ("cp", CP, "--context-parallel-size"),
    ("ep", EP, "--expert-model-parallel-size"),
    ("micro_batch_size", "micro_batch_size", "--micro-batch-size"),
)
SWITCHES = (
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
    for name, option in SWITCHES:
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
