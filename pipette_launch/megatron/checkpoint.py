"""Which fields of a layout a checkpoint keeps, by the format of its optimizer and its random state."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipette_launch.errors import FileFormatError, LayoutError, MegatronError
from pipette_launch.facts import Job, Layout, Plan, files
from pipette_launch.megatron.checkpoint_files import (
    RECORD_NAME,
    Saved,
    checkpoint_folder,
    read_saved,
    saved_layout,
    saved_replicas,
)
from pipette_launch.megatron.chunks import Split
from pipette_launch.megatron.flags import Arguments, release_of
from pipette_launch.megatron.pins import OPTIMIZER_FIELDS, Pin

MODEL_FIELDS = ("tp", "pp", *Split._fields, "ep", "etp")
"""What cuts the model into shards."""
IN_BUCKETS = ("dp_reshardable", "fully_sharded_bucket_space")
"""Types of sharding that save each gradient bucket by itself: the run that loads needs buckets of the same size."""
EQUAL_BUCKETS_DP = 40
"""Replicas up to which gradient buckets have the same size; with more they grow (core_v0.16 training.py:1317)."""
REPLICA_ELEMENTS = 1_000_000
"""Elements of a bucket for each replica."""
RNG_OF_EXPERTS = "0.16 loads expert-parallel random state only at the same dp and cp"


def fixes_random_state(arguments: Arguments, ep: int) -> bool:
    """Whether this release loads the random state of experts, and only where dp and cp are as they were."""
    return ep > 1 and release_of(arguments.version) == (0, 16) and not arguments.get("no_load_rng")


def kept_fields(arguments: Arguments, sharding: str | None, *, is_sharded: bool) -> tuple[str, ...]:
    """Return what another layout must keep to load the optimizer's state.

    Args:
        arguments: of the run that loads or saves.
        sharding: how a distributed optimizer was saved; None where the checkpoint does not tell: as its release does.
        is_sharded: whether the optimizer is distributed.

    """
    usual = "fully_sharded_model_space" if release_of(arguments.version) < (0, 15) else "dp_reshardable"
    # The plain optimizer's state follows its parameters.
    if not is_sharded or (sharding or usual) in ("fully_reshardable", "fully_sharded_model_space"):
        return ("use_distributed_optimizer",)
    # Buckets must be equal too, and those depend on whether gradients are reduced early.
    return (*MODEL_FIELDS, *OPTIMIZER_FIELDS)


RANK_FOLDER = re.compile(r"mp_rank_(\d\d)(?:_(\d{3}))?(?:_(\d{3}))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    """What a checkpoint asks of the user's own layout, and of every plan."""

    own: Mapping[str, Any]
    """Layout fields whose values the checkpoint dictates."""
    pins: tuple[Pin, ...] = ()
    notes: tuple[str, ...] = ()
    doubt: str = ""
    """Why the checkpoint may not load on these ranks under any plan; empty without such a reason."""

    def applied(self, own: Layout) -> Layout:
        """The user's own layout as the checkpoint wants it; raises MegatronError if these ranks cannot have it."""
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
    """What the checkpoint at `--load` pins, with the values it was written with.

    The values come from the checkpoint itself where it tells them, then from the plan beside it, then from the flags.

    Raises:
        MegatronError: `--use-mp-args-from-checkpoint-args` is given, but the checkpoint's sizes cannot be read.

    """
    found = checkpoint_folder(arguments)
    if not found:
        return Demands(own={})
    folder, reads_optimizer = found
    if (folder / "metadata.json").is_file():
        return _distributed(arguments, own, folder, reads_optimizer=reads_optimizer, num_layers=num_layers)
    ranks = [match for match in (RANK_FOLDER.fullmatch(path.name) for path in folder.iterdir()) if match]
    record, _ = _recorded(folder)
    if ranks:
        written = saved_layout(read_saved(folder)[0], num_layers, arguments.version)
        return _legacy(own, folder, ranks, record, written, reads_optimizer=reads_optimizer)
    note = f"{folder}: a checkpoint of an unknown format; everything that cuts the model stays"
    return Demands(own={}, pins=(Pin(fields=(*MODEL_FIELDS, "cp", *OPTIMIZER_FIELDS), note=note),))


def unseen_note(arguments: Arguments) -> str:
    """Return a note on a checkpoint that may lie on other machines alone; empty where there is one here, or none."""
    if not arguments.get("load") or checkpoint_folder(arguments):
        return ""
    return (
        f"no checkpoint is at {arguments.shown('load')} here, so nothing is kept for one: on other machines it may fix "
        f"tp, pp and more; --pipette-fix keeps them"
    )


def _recorded(folder: Path) -> tuple[Layout | None, str]:
    """The layout of the plan beside the checkpoint, and a note where there is a file but no plan in it."""
    path = folder.parent / RECORD_NAME
    if not path.is_file():
        return None, ""
    try:
        return files.read(path, Plan).chosen.layout, ""
    except FileFormatError as error:
        return None, f"the plan beside the checkpoint was not read: {error}"


def _legacy(
    own: Layout,
    folder: Path,
    ranks: list[re.Match[str]],
    record: Layout | None,
    written: Mapping[str, Any],
    *,
    reads_optimizer: bool,
) -> Demands:
    """One file for each model-parallel rank: nothing that cuts the model can change."""
    tp = 1 + max(int(match[1]) for match in ranks)
    seconds, thirds = ({int(match[place]) for match in ranks if match[place]} for place in (2, 3))
    # A single suffix is the pipeline rank, or the expert rank of an unpipelined model.
    is_expert_only = bool(seconds) and not thirds and own.ep > 1 and own.pp == 1
    sizes = {
        "tp": tp,
        "pp": 1 if is_expert_only else len(seconds) or 1,
        "ep": len(seconds) if is_expert_only else len(thirds) or 1,
    }
    base = record or own
    values = {name: getattr(base, name) for name in MODEL_FIELDS} | sizes
    if record is None:
        values["etp"] = tp if own.etp == own.tp else own.etp
        if sizes["pp"] != own.pp:
            values |= Split()._asdict()
    fields = (*MODEL_FIELDS, *(OPTIMIZER_FIELDS if reads_optimizer else ()))
    if written.get("tp") == tp:
        values |= {name: written[name] for name in fields if name in written}
    note = f"{folder} is of the format torch, one file for each rank: {', '.join(fields)} stay as it was written"
    return Demands(own=values, pins=(Pin(fields=fields, note=note),))


def _distributed(arguments: Arguments, own: Layout, folder: Path, *, reads_optimizer: bool, num_layers: int) -> Demands:
    """Weights reshard freely; the distributed optimizer's state only where it was saved so."""
    saved, sharding = read_saved(folder)
    record, problem = _recorded(folder)
    written = saved_layout(saved, num_layers, arguments.version)
    if record and not written:
        written = {name: getattr(record, name) for name in (*MODEL_FIELDS, *OPTIMIZER_FIELDS)}
    source = (
        "the checkpoint" if "tensor_model_parallel_size" in saved else "the plan beside it" if record else "the flags"
    )
    takes_sizes = arguments.get("use_checkpoint_args") and arguments.get("use_mp_args_from_checkpoint_args")
    if takes_sizes and not written:
        raise MegatronError(
            f"--use-mp-args-from-checkpoint-args: the sizes in {folder} cannot be read; give them as flags instead"
        )
    is_sharded = bool(written.get("use_distributed_optimizer", own.use_distributed_optimizer))
    reads_optimizer = reads_optimizer and not saved.get("no_save_optim")
    keeps = kept_fields(arguments, sharding, is_sharded=is_sharded) if reads_optimizer else ()
    # With --use-mp-args-from-checkpoint-args the user's own sizes are the checkpoint's, though a plan may change them.
    values = {name: written[name] for name in (*keeps, *(MODEL_FIELDS if takes_sizes else ())) if name in written}
    doubt = ""
    if len(keeps) > 1 and (sharding is None or sharding in IN_BUCKETS):
        replicas = saved_replicas(saved) or (record.dp * record.cp if record else 0)
        reduces_early = {"overlap_grad_reduce": own.overlap_grad_reduce, **written, **saved}["overlap_grad_reduce"]
        if replicas and reduces_early:
            model_size = values.get("tp", own.tp) * values.get("pp", own.pp)
            doubt = _other_buckets(arguments, saved, folder, replicas, world_size=own.world_size, model_size=model_size)
    pins = []
    if keeps:
        how = sharding or "a type that is taken for dp_reshardable"
        note = (
            f"{folder} holds optimizer state of {how}: {', '.join(keeps)} stay as {source} says "
            f"(--dist-ckpt-optim-fully-reshardable in the run that saves would free them)"
            if len(keeps) > 1
            else f"{folder} holds optimizer state: {keeps[0]} stays as {source} says"
        )
        pins.append(Pin(fields=keeps, note=note))
    if len(keeps) <= 1 and fixes_random_state(arguments, own.ep):
        note = f"{RNG_OF_EXPERTS}: both stay (--no-load-rng frees them)"
        pins.append(Pin(fields=("cp", "dp"), note=note))
    return Demands(own=values, pins=tuple(pins), notes=(problem,) if problem else (), doubt=doubt)


def _other_buckets(
    arguments: Arguments, saved: Saved, folder: Path, replicas: int, *, world_size: int, model_size: int
) -> str:
    """Return a sentence if gradient buckets are sized otherwise than in the run that saved its optimizer's state.

    Where single weights are larger than a bucket, both runs may still make the same buckets.

    Args:
        arguments: of the run that loads.
        saved: arguments of the run that saved.
        folder: of the checkpoint.
        replicas: data-parallel ranks (times CP) of the run that saved.
        world_size: ranks of the run that loads.
        model_size: TP times PP of both.

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


FREEING_FLAG = {
    "dp_reshardable": "--dist-ckpt-optim-fully-reshardable",
    "dp_zero_gather_scatter": "a save without --no-ckpt-fully-parallel-save",
}
"""By how a distributed optimizer is saved, what the run that saves has to do for a plan to change everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """What a start after the loss of hosts goes on from, and what that lets another layout change."""

    kept: tuple[str, ...] = ()
    """Fields of the layout that wrote the checkpoints which another layout must keep to load them."""
    bucket_dp: int = 0
    """Replicas up to which gradient buckets are equally large; 0 where their size does not matter."""
    note: str = ""
    """What a loss would cost, or which flag would free what is kept; empty where neither is worth a word."""

    def can_load(self, before: Layout, after: Layout) -> bool:
        """Whether a job under one layout can load what another has written."""
        buckets = [max(self.bucket_dp, layout.dp * layout.cp) if self.bucket_dp else 0 for layout in (before, after)]
        return buckets[0] == buckets[1] and all(getattr(before, name) == getattr(after, name) for name in self.kept)


def continuation(words: Sequence[str], job: Job, layout: Layout) -> Continuation:
    """Say what another layout must keep to go on from the checkpoints that a job writes under this one.

    The run that saves decides: its format, and for the distributed optimizer how its state is sharded.

    Args:
        words: the user's own, behind the script's name.
        job: as they were read.
        layout: what the job runs under.

    """
    arguments = Arguments.parse(words, job.megatron_version)
    save, load = arguments.get("save"), arguments.get("load")
    if not save:
        return Continuation(note="--save is not given: after the loss of a host the job starts over from iteration 0")
    if not load or Path(load) != Path(save):
        again = f"from what {arguments.shown('load')} holds" if load else "from iteration 0"
        return Continuation(
            note=f"--load does not name the folder of --save: after the loss of a host the job starts over {again}; "
            f"give --load {save}"
        )
    has_optimizer = not any(map(arguments.get, ("no_save_optim", "no_load_optim", "finetune")))
    is_sharded = layout.use_distributed_optimizer
    ckpt_format = arguments.get("ckpt_format")
    if ckpt_format != "torch_dist":
        fields = (*MODEL_FIELDS, *(OPTIMIZER_FIELDS if has_optimizer else ()))
        also = f" with {FREEING_FLAG['dp_reshardable']}" if has_optimizer and is_sharded else ""
        note = f"--ckpt-format {ckpt_format} fixes {', '.join(fields)}; --ckpt-format torch_dist{also} lets them change"
        return Continuation(kept=fields, note=note)
    sharding = _sharding_of_saves(arguments)
    kept = kept_fields(arguments, sharding, is_sharded=is_sharded) if has_optimizer else ()
    if len(kept) > 1:
        is_sized = any(map(arguments.get, ("ddp_bucket_size", "ddp_num_buckets")))
        # Without overlap all gradients lie in one bucket.
        counts_replicas = layout.overlap_grad_reduce and not is_sized and sharding in IN_BUCKETS
        note = (
            f"the distributed optimizer saves its state as {sharding}, which fixes {', '.join(kept)}; "
            f"{FREEING_FLAG.get(sharding, '')} lets all of it change"
        )
        return Continuation(kept=kept, bucket_dp=EQUAL_BUCKETS_DP if counts_replicas else 0, note=note)
    if fixes_random_state(arguments, layout.ep):
        return Continuation(kept=(*kept, "cp", "dp"), note=f"{RNG_OF_EXPERTS}: both stay; --no-load-rng frees them")
    return Continuation(kept=kept)


def _sharding_of_saves(arguments: Arguments) -> str:
    """How the distributed optimizer's state will be saved (`distrib_optim_sharding_type`)."""
    if arguments.get("dist_ckpt_optim_fully_reshardable"):
        return "fully_reshardable"
    if release_of(arguments.version) >= (0, 15) and not arguments.get("dist_ckpt_save_pre_mcore_014"):
        return "dp_reshardable"
    is_parallel = arguments.get("ckpt_fully_parallel_save") is not False
    return "fully_sharded_model_space" if is_parallel else "dp_zero_gather_scatter"
