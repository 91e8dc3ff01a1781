"""A layout, written into the user's command line: what it does not change stays word for word."""

from __future__ import annotations

from collections.abc import Sequence

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Job, Layout, ModelSpec
from pipette_launch.megatron.chunks import read_chunks, write_chunks
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.layout import CP, EP, ETP, GROUP_SIZE, PP, TP, read_recompute
from pipette_launch.megatron.vocabulary import read_vocabulary

SIZES = (
    ("tp", TP, "--tensor-model-parallel-size"),
    ("pp", PP, "--pipeline-model-parallel-size"),
    ("cp", CP, "--context-parallel-size"),
    ("ep", EP, "--expert-model-parallel-size"),
    ("micro_batch_size", "micro_batch_size", "--micro-batch-size"),
)
SWITCHES = (
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
    written = _expert_tensor_size(written, layout, has_experts=bool(job.model.num_experts))
    written = _chunks(written, layout, job.model.num_layers)
    written = _switches(written, layout)
    written = _recompute(written, layout)
    written = _vocabulary(written, given, job.model, layout)
    if not written.is_given("global_batch_size"):
        written = written.with_flag("--global-batch-size", str(job.batch.global_batch_size))
    return written.words


def _expert_tensor_size(written: Arguments, layout: Layout, *, has_experts: bool) -> Arguments:
    if written.size(ETP, default=layout.tp) == layout.etp:
        return written
    if layout.etp == layout.tp or not has_experts:
        return written.without(ETP)
    return written.with_flag("--expert-tensor-parallel-size", str(layout.etp))


def _chunks(written: Arguments, layout: Layout, num_layers: int) -> Arguments:
    try:
        said = read_chunks(written, pp=layout.pp, num_layers=num_layers)
    except MegatronError:
        said = None  # the user's flags suit another pipeline size
    if said != (layout.vpp, layout.layers_per_chunk):
        written = write_chunks(
            written, pp=layout.pp, vpp=layout.vpp, chunks=layout.layers_per_chunk, num_layers=num_layers
        )
    if written.size(GROUP_SIZE, default=0) == layout.microbatch_group_size:
        return written
    if layout.microbatch_group_size == 0:
        return written.without(GROUP_SIZE)
    return written.with_flag("--microbatch-group-size-per-virtual-pipeline-stage", str(layout.microbatch_group_size))


def _switches(written: Arguments, layout: Layout) -> Arguments:
    # Megatron ignores the flag at TP 1, so that it may stay there.
    if layout.tp > 1 and bool(written.get("sequence_parallel")) != layout.sequence_parallel:
        written = _switched(written, "sequence_parallel", "--sequence-parallel", on=layout.sequence_parallel)
    for name, option in SWITCHES:
        if bool(written.get(name)) != getattr(layout, name):
            written = _switched(written, name, option, on=getattr(layout, name))
    return written


def _switched(written: Arguments, dest: str, option: str, *, on: bool) -> Arguments:
    return written.with_flag(option) if on else written.without(dest)


def _recompute(written: Arguments, layout: Layout) -> Arguments:
    wanted = layout.recompute
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


def _vocabulary(written: Arguments, given: Arguments, model: ModelSpec, layout: Layout) -> Arguments:
    """Keep the embedding as large as the user's own flags make it: its padding takes part in the softmax."""
    rows = model.padded_vocab_size(given.size(TP))
    is_certain = read_vocabulary(given).is_certain
    if not is_certain or rows == model.padded_vocab_size(layout.tp) or rows % layout.tp:
        return written
    return written.with_flag("--padded-vocab-size", str(rows))
