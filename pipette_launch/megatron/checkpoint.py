"""Layout fields that a plan must keep because of checkpoints that the job loads, or will save and load again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipette_launch.errors import FileFormatError, LayoutError, MegatronError
from pipette_launch.facts import Job, Layout, Plan, files
from pipette_launch.megatron.checkpoint_files import RECORD_NAME, Saved, checkpoint_folder, read_saved, reads_optimizer
from pipette_launch.megatron.chunks import LAYERS_PER_CHUNK, SPLIT_DESTS, STAGES, VPP, Split, read_chunks
from pipette_launch.megatron.flags import Arguments, release_of
from pipette_launch.megatron.layout import DEGREES, OPTIMIZER_FIELDS, PP, TP
from pipette_launch.megatron.pins import Pin

MODEL_FIELDS = ("tp", "pp", *Split._fields, "ep", "etp")
"""Layout fields that divide the model into shards."""
IN_BUCKETS = ("dp_reshardable", "fully_sharded_bucket_space")
"""Optimizer formats that save each gradient bucket separately.

The run that loads the optimizer needs buckets of the same sizes.
"""
EQUAL_BUCKETS_DP = 40
"""Gradient buckets have a fixed size up to this number of replicas, and then grow (core_v0.16 training.py:1317)."""
REPLICA_ELEMENTS = 1_000_000
"""Elements that each replica adds to a gradient bucket, if buckets grow with the number of replicas."""
RNG_OF_EXPERTS = "0.16 loads expert-parallel random state only at the same dp and cp"
RANK_FOLDER = re.compile(r"mp_rank_(\d\d)(?:_(\d{3}))?(?:_(\d{3}))?")


def _fixes_random_state(arguments: Arguments, ep: int) -> bool:
    """Return True for Megatron releases that load the random state of experts only if dp and cp have not changed."""
    return ep > 1 and release_of(arguments.version) == (0, 16) and not arguments.get("no_load_rng")


def _kept_fields(sharding: str | None, *, is_sharded: bool) -> tuple[str, ...]:
    """Return the fields that another layout must keep to load the optimizer's state.

    `sharding` is the format in which the distributed optimizer is saved. With None, the format is Megatron's default.
    """
    # The state of a non-distributed optimizer is sharded like the parameters.
    if not is_sharded or (sharding or "dp_reshardable") in ("fully_reshardable", "fully_sharded_model_space"):
        return ("use_distributed_optimizer",)
    # The other formats also need equal gradient buckets, whose sizes depend on whether gradients are reduced early.
    return (*MODEL_FIELDS, *OPTIMIZER_FIELDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    """Layout fields that a checkpoint fixes, for the user's own layout and for every plan."""

    own: Mapping[str, Any]
    """Values that the checkpoint sets in the user's own layout."""
    pins: tuple[Pin, ...] = ()
    notes: tuple[str, ...] = ()
    doubt: str = ""
    """Reason why the checkpoint may fail to load under any plan on this number of ranks.

    The text is empty if no reason is known.
    """

    def applied(self, own: Layout) -> Layout:
        """Return the user's own layout with the checkpoint's values.

        Raise MegatronError if the number of ranks does not allow the values.
        """
        fields = dict(self.own)
        if not fields:
            return own
        sizes = {name: fields.get(name, getattr(own, name)) for name in ("tp", "pp", "cp")}
        model_size = sizes["tp"] * sizes["pp"] * sizes["cp"]
        wanted = " ".join(f"{name}={value}" for name, value in fields.items())
        if own.world_size % model_size:
            raise MegatronError(
                f"the checkpoint was written with {wanted} and cannot be loaded otherwise, which needs a multiple of "
                f"{model_size} ranks; the job has {own.world_size}"
            )
        try:
            return replace(own, **fields, dp=own.world_size // model_size)
        except LayoutError as error:
            raise MegatronError(
                f"the checkpoint was written with {wanted}, which does not suit this job: {error}"
            ) from error


def demands(arguments: Arguments, own: Layout, *, num_layers: int) -> Demands:
    """Return the layout fields that the checkpoint at `--load` fixes.

    Values come from the checkpoint if possible, otherwise from the plan file beside the checkpoint, otherwise from the
    flags. Raise MegatronError if `--use-mp-args-from-checkpoint-args` is given, but the checkpoint's sizes cannot be
    read.
    """
    found = checkpoint_folder(arguments)
    if not found:
        return Demands(own={})
    folder, has_optimizer = found
    if (folder / "metadata.json").is_file():
        return _of_torch_dist(arguments, own, folder, reads_optimizer=has_optimizer, num_layers=num_layers)
    ranks = [match for match in (RANK_FOLDER.fullmatch(path.name) for path in folder.iterdir()) if match]
    if ranks:
        written = _saved_layout(read_saved(folder)[0], num_layers, arguments.version)
        return _of_torch(own, folder, ranks, written, reads_optimizer=has_optimizer)
    note = f"{folder}: a checkpoint of an unknown format; every field that divides the model stays"
    return Demands(own={}, pins=(Pin((*MODEL_FIELDS, "cp", *OPTIMIZER_FIELDS), note),))


def unseen_note(arguments: Arguments) -> str:
    """Return a note on a checkpoint that may exist only on other machines, or an empty text."""
    if not arguments.get("load") or checkpoint_folder(arguments):
        return ""
    return (
        f"this machine has no checkpoint at {arguments.shown('load')}, so no checkpoint fixes layout fields here: on "
        f"other machines a checkpoint may fix tp, pp and other fields; --pipette-fix keeps them"
    )


def _recorded(folder: Path) -> tuple[Layout | None, str]:
    """Return the layout of the plan file beside the checkpoint, and a note if the file contains no plan."""
    path = folder.parent / RECORD_NAME
    if not path.is_file():
        return None, ""
    try:
        return files.read(path, Plan).chosen.layout, ""
    except FileFormatError as error:
        return None, f"the plan beside the checkpoint was not read: {error}"


def _of_torch(
    own: Layout, folder: Path, ranks: list[re.Match[str]], written: Mapping[str, Any], *, reads_optimizer: bool
) -> Demands:
    """Return the fields that a checkpoint in the format torch fixes.

    Each rank has one file, so no field that divides the model may change.
    """
    tp = 1 + max(int(match[1]) for match in ranks)
    seconds, thirds = ({int(match[place]) for match in ranks if match[place]} for place in (2, 3))
    # A single suffix of a folder name is the pipeline rank, or the expert rank of a model without a pipeline.
    is_expert_only = bool(seconds) and not thirds and own.ep > 1 and own.pp == 1
    sizes = {
        "tp": tp,
        "pp": 1 if is_expert_only else len(seconds) or 1,
        "ep": len(seconds) if is_expert_only else len(thirds) or 1,
    }
    record, _ = _recorded(folder)
    base = record or own
    values = {name: getattr(base, name) for name in MODEL_FIELDS} | sizes
    if record is None:
        values["etp"] = tp if own.etp == own.tp else own.etp
        if sizes["pp"] != own.pp:
            values |= Split()._asdict()
    fields = (*MODEL_FIELDS, *(OPTIMIZER_FIELDS if reads_optimizer else ()))
    if written.get("tp") == tp:
        values |= {name: written[name] for name in fields if name in written}
    note = f"{folder} has the format torch, one file for each rank: {', '.join(fields)} stay as in the checkpoint"
    return Demands(own=values, pins=(Pin(fields, note),))


def _of_torch_dist(
    arguments: Arguments, own: Layout, folder: Path, *, reads_optimizer: bool, num_layers: int
) -> Demands:
    """Return the fields that a torch_dist checkpoint fixes.

    Weights load under every layout, but optimizers only in some formats.
    """
    saved, sharding = read_saved(folder)
    record, problem = _recorded(folder)
    written = _saved_layout(saved, num_layers, arguments.version)
    if record and not written:
        written = {name: getattr(record, name) for name in (*MODEL_FIELDS, *OPTIMIZER_FIELDS)}
    takes_sizes = arguments.get("use_checkpoint_args") and arguments.get("use_mp_args_from_checkpoint_args")
    if takes_sizes and not written:
        raise MegatronError(
            f"--use-mp-args-from-checkpoint-args: the sizes in {folder} cannot be read; give them as flags instead"
        )
    is_sharded = bool(written.get("use_distributed_optimizer", own.use_distributed_optimizer))
    reads_optimizer = reads_optimizer and not saved.get("no_save_optim")
    keeps = _kept_fields(sharding, is_sharded=is_sharded) if reads_optimizer else ()
    # With --use-mp-args-from-checkpoint-args the user's own layout has the checkpoint's sizes, but a plan may change
    # the sizes.
    values = {name: written[name] for name in (*keeps, *(MODEL_FIELDS if takes_sizes else ())) if name in written}
    doubt = ""
    if len(keeps) > 1 and (sharding is None or sharding in IN_BUCKETS):
        replicas = _saved_replicas(saved) or (record.dp * record.cp if record else 0)
        reduces_early = {"overlap_grad_reduce": own.overlap_grad_reduce, **written, **saved}["overlap_grad_reduce"]
        if replicas and reduces_early:
            model_size = values.get("tp", own.tp) * values.get("pp", own.pp)
            doubt = _doubt_of_buckets(
                arguments, saved, folder, replicas, world_size=own.world_size, model_size=model_size
            )
    pins = []
    source = "the checkpoint" if saved.get(TP) else "the plan beside it" if record else "the flags"
    if len(keeps) > 1:
        note = (
            f"{folder} holds optimizer state of {sharding or 'a type that is taken for dp_reshardable'}: "
            f"{', '.join(keeps)} stay as in {source} "
            f"(--dist-ckpt-optim-fully-reshardable in the run that saves would free them)"
        )
        pins.append(Pin(keeps, note))
    elif keeps:
        pins.append(Pin(keeps, f"{folder} holds optimizer state: {keeps[0]} stays as in {source}"))
    if len(keeps) <= 1 and _fixes_random_state(arguments, own.ep):
        pins.append(Pin(("cp", "dp"), f"{RNG_OF_EXPERTS}: both stay (--no-load-rng frees them)"))
    return Demands(own=values, pins=tuple(pins), notes=(problem,) if problem else (), doubt=doubt)


def _doubt_of_buckets(
    arguments: Arguments, saved: Saved, folder: Path, replicas: int, *, world_size: int, model_size: int
) -> str:
    """Return a sentence if gradient buckets have other sizes than in the run that saved the optimizer's state.

    `replicas` is DP times CP in the run that saved the checkpoint. `model_size` is TP times PP, which is equal in both
    runs. If single weights are larger than a bucket, both runs may still have the same buckets.
    """
    if saved.get("ddp_num_buckets") or arguments.get("ddp_num_buckets"):
        return ""
    now = world_size // model_size
    before = saved.get("ddp_bucket_size") or max(replicas, EQUAL_BUCKETS_DP) * REPLICA_ELEMENTS
    after = arguments.get("ddp_bucket_size") or max(now, EQUAL_BUCKETS_DP) * REPLICA_ELEMENTS
    if before == after:
        return ""
    ranks = f"{'' if replicas > EQUAL_BUCKETS_DP else 'at most '}{max(replicas, EQUAL_BUCKETS_DP) * model_size}"
    return (
        f"{folder} holds optimizer state in gradient buckets of {replicas} data-parallel ranks (dp*cp), and "
        f"{world_size} ranks make {now}, whose buckets may differ: use {ranks} ranks, add --ddp-bucket-size {before}, "
        f"or leave the state out with --no-load-optim"
    )


def _saved_layout(saved: Saved, num_layers: int, version: str) -> dict[str, Any]:
    """Return layout fields of the run that saved the checkpoint.

    The result is empty if the checkpoint lacks the run's TP and PP.
    """
    sizes = {name: _saved_size(saved, dest) for name, dest in DEGREES.items() if name != "cp"}
    if not sizes["tp"] or not sizes["pp"]:
        return {}
    words: list[str] = []
    for dest in (*SPLIT_DESTS, "mtp_num_layers"):
        value = saved.get(dest)
        if value not in (None, False) and dest not in (LAYERS_PER_CHUNK, VPP):
            words += [f"--{dest.replace('_', '-')}", *([] if value is True else [str(value)])]
    vpp = _saved_size(saved, "virtual_pipeline_model_parallel_size")
    if vpp and not saved.get(STAGES):
        words += ["--num-virtual-stages-per-pipeline-rank", str(vpp)]
    split = read_chunks(Arguments.parse(words, version), pp=sizes["pp"], num_layers=num_layers)
    found = {**sizes, **split._asdict(), "ep": sizes["ep"] or 1, "etp": sizes["etp"] or sizes["tp"]}
    return found | {name: saved[name] for name in OPTIMIZER_FIELDS if isinstance(saved.get(name), bool)}


def _saved_replicas(saved: Saved) -> int | None:
    """Return the number of ranks that shared the saved optimizer's state, or None for an unknown number."""
    ranks, dp = _saved_size(saved, "world_size"), _saved_size(saved, "data_parallel_size")
    if dp:
        return dp * (_saved_size(saved, DEGREES["cp"]) or 1)
    tp, pp = _saved_size(saved, TP), _saved_size(saved, PP)
    return ranks // (tp * pp) if ranks and tp and pp else None


def _saved_size(saved: Saved, name: str) -> int | None:
    """Return a size from the flags of the run that saved the checkpoint.

    Return None if the value is missing or not a possible size.
    """
    value = saved.get(name)
    return value if type(value) is int and 0 < value < 1 << 20 else None


FREEING_FLAG = {
    "dp_reshardable": "--dist-ckpt-optim-fully-reshardable",
    "dp_zero_gather_scatter": "a save without --no-ckpt-fully-parallel-save",
}
"""Flag for the run that saves a checkpoint, by optimizer format. With this flag, later plans may change every field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """Layout fields that a restart on fewer hosts must keep, because the restart loads the job's own checkpoints."""

    kept: tuple[str, ...] = ()
    """Layout fields that must be equal in the run that saves a checkpoint and the run that loads it."""
    bucket_dp: int = 0
    """Number of replicas up to which gradient buckets have a fixed size. 0 = the sizes of buckets do not matter."""
    note: str = ""
    """Sentence on the cost of losing hosts, or on the flag that would free the kept fields.

    The sentence is empty if there is nothing to say.
    """

    def can_load(self, before: Layout, after: Layout) -> bool:
        """Return True if a job under one layout can load the checkpoints of a job under another layout."""
        buckets = [max(self.bucket_dp, layout.dp * layout.cp) if self.bucket_dp else 0 for layout in (before, after)]
        return buckets[0] == buckets[1] and all(getattr(before, name) == getattr(after, name) for name in self.kept)


def continuation(words: Sequence[str], job: Job, layout: Layout) -> Continuation:
    """Return the fields that another layout must keep to load checkpoints that a job saves under the given layout.

    The fields depend on the checkpoint format and on the format in which the run saves the distributed optimizer.
    `words` are the user's own words after the script's name.
    """
    arguments = Arguments.parse(words, job.megatron_version)
    save, load = arguments.get("save"), arguments.get("load")
    if not save:
        return Continuation(note="--save is not given: after the loss of a host the job starts over from iteration 0")
    if not load or Path(load) != Path(save):
        again = f"from the checkpoint of {arguments.shown('load')}" if load else "from iteration 0"
        note = f"--load does not name the folder of --save: after the loss of a host the job starts over {again}"
        return Continuation(note=f"{note}; give --load {save}")
    has_optimizer = reads_optimizer(arguments) and not arguments.get("no_save_optim")
    is_sharded = layout.use_distributed_optimizer
    ckpt_format = arguments.get("ckpt_format")
    if ckpt_format != "torch_dist":
        fields = (*MODEL_FIELDS, *(OPTIMIZER_FIELDS if has_optimizer else ()))
        also = f" with {FREEING_FLAG['dp_reshardable']}" if has_optimizer and is_sharded else ""
        note = f"--ckpt-format {ckpt_format} fixes {', '.join(fields)}; --ckpt-format torch_dist{also} lets them change"
        return Continuation(kept=fields, note=note)
    sharding = _sharding_of_saves(arguments)
    kept = _kept_fields(sharding, is_sharded=is_sharded) if has_optimizer else ()
    if len(kept) > 1:
        is_sized = any(map(arguments.get, ("ddp_bucket_size", "ddp_num_buckets")))
        # Without overlap of gradient reduction and backward, all gradients lie in one bucket, so replicas do not
        # matter.
        counts_replicas = layout.overlap_grad_reduce and not is_sized and sharding in IN_BUCKETS
        note = (
            f"the distributed optimizer saves its state as {sharding}, which fixes {', '.join(kept)}; "
            f"{FREEING_FLAG.get(sharding, '')} lets all of them change"
        )
        return Continuation(kept=kept, bucket_dp=EQUAL_BUCKETS_DP if counts_replicas else 0, note=note)
    if _fixes_random_state(arguments, layout.ep):
        return Continuation(kept=(*kept, "cp", "dp"), note=f"{RNG_OF_EXPERTS}: both stay; --no-load-rng frees them")
    return Continuation(kept=kept)


def _sharding_of_saves(arguments: Arguments) -> str:
    """Return the format in which a distributed optimizer will be saved (`distrib_optim_sharding_type`)."""
    if arguments.get("dist_ckpt_optim_fully_reshardable"):
        return "fully_reshardable"
    if not arguments.get("dist_ckpt_save_pre_mcore_014"):
        return "dp_reshardable"
    is_parallel = arguments.get("ckpt_fully_parallel_save") is not False
    return "fully_sharded_model_space" if is_parallel else "dp_zero_gather_scatter"
