"""What a checkpoint that is about to be loaded does not let a plan change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipette_launch.errors import FileFormatError, LayoutError, MegatronError
from pipette_launch.facts import Layout, Plan, files
from pipette_launch.megatron.checkpoint.folders import RECORD_NAME, checkpoint_folder
from pipette_launch.megatron.checkpoint.kept_fields import (
    EQUAL_BUCKETS_DP,
    IN_BUCKETS,
    MODEL_FIELDS,
    REPLICA_ELEMENTS,
    RNG_OF_EXPERTS,
    fixes_random_state,
    kept_fields,
)
from pipette_launch.megatron.checkpoint.written import Saved, read_saved, saved_layout, saved_replicas
from pipette_launch.megatron.chunks import Split
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.pins import OPTIMIZER_FIELDS, Pin

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
