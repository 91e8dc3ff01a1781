"""What a checkpoint that is about to be loaded does not let a plan change.

`common.pt` of a torch_dist checkpoint holds the arguments of the run that wrote it, pickled by torch. A pickle is a
program, so it is never loaded: the few numbers and words that are wanted are read from its list of instructions.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipette_launch.errors import FileFormatError, LayoutError, MegatronError
from pipette_launch.facts import Job, Layout, Plan, files
from pipette_launch.megatron.chunks import SPLIT_DESTS, read_chunks
from pipette_launch.megatron.flags import Arguments, newest_release, release_of
from pipette_launch.megatron.pins import OPTIMIZER_FIELDS, Pin

RECORD_NAME = "pipette-plan.json"
TRACKER_NAME = "latest_checkpointed_iteration.txt"
MODEL_FIELDS = ("tp", "pp", "vpp", "layers_per_chunk", "ep", "etp")
"""What cuts the model into shards."""
RANK_FOLDER = re.compile(r"mp_rank_(\d\d)(?:_(\d{3}))?(?:_(\d{3}))?")
SHARDING_TYPES = ("fully_reshardable", "dp_reshardable", "fully_sharded_model_space", "fully_sharded_bucket_space")
"""How a distributed optimizer was saved (`distrib_optim_sharding_type`)."""
FREEING_FLAG = {
    "dp_reshardable": "--dist-ckpt-optim-fully-reshardable",
    "fully_sharded_bucket_space": "a save without --no-ckpt-fully-parallel-save",
}
"""By how a distributed optimizer is saved, what the run that saves has to do for a plan to change everything."""
EQUAL_BUCKETS_DP = 40
"""Up to so many replicas gradient buckets are equally large, 40 million elements."""
RNG_OF_EXPERTS = "0.16 loads expert-parallel random state only at the same dp and cp"
NAMES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
)
MOST_PICKLED = 64 << 20
"""So many bytes of the arguments are looked through; compressed ones may unpack to far more."""
Saved = Mapping[str, "int | bool | str | None"]
MEMO = ("BINPUT", "LONG_BINPUT", "MEMOIZE")
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
PLAIN = ("BININT", "BININT1", "BININT2", "BINUNICODE")
"""Instructions of pickle's protocol 2: what only numbers a value, what stands for one, and what has it behind it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    """What a checkpoint asks of the user's own layout, and of every plan."""

    own: Mapping[str, Any]
    """Layout fields whose values the checkpoint dictates."""
    pins: tuple[Pin, ...] = ()
    notes: tuple[str, ...] = ()

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


def record_path(arguments: Sequence[str]) -> Path | None:
    """Where the launcher writes the plan beside the checkpoints that it will make; None without `--save`.

    The record's `chosen` must be what really runs, also after a fallback.
    """
    save = Arguments.parse(arguments, newest_release()).get("save")
    return Path(save) / RECORD_NAME if save else None


def saved_iteration(arguments: Sequence[str]) -> str:
    """The newest iteration that a checkpoint in the job's `--save` was written at, as Megatron notes it, or nothing."""
    path = record_path(arguments)
    return _tracked(path.parent) if path else ""


def _tracked(root: Path) -> str:
    """What Megatron's tracker file in a folder of checkpoints says; empty where it cannot be read."""
    try:
        name = files.read_bytes(root / TRACKER_NAME).decode("ascii").strip()
    except (FileFormatError, UnicodeError):
        return ""
    # Megatron writes nothing else; a path would lead out of the folder.
    return name if name == "release" or re.fullmatch(r"\d{1,15}", name) else ""


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
    kept = _kept_fields(arguments, sharding, is_sharded=is_sharded) if has_optimizer else ()
    if len(kept) > 1:
        # core_v0.16 training.py:1317: larger buckets from 41 replicas on, and none without overlap.
        counts_replicas = layout.overlap_grad_reduce and arguments.get("ddp_bucket_size") is None
        note = (
            f"the distributed optimizer saves its state as {sharding}, which fixes {', '.join(kept)}; "
            f"{FREEING_FLAG.get(sharding, '')} lets all of it change"
        )
        return Continuation(kept=kept, bucket_dp=EQUAL_BUCKETS_DP if counts_replicas else 0, note=note)
    if _fixes_random_state(arguments, layout.ep):
        return Continuation(kept=(*kept, "cp", "dp"), note=f"{RNG_OF_EXPERTS}: both stay; --no-load-rng frees them")
    return Continuation(kept=kept)


def _sharding_of_saves(arguments: Arguments) -> str:
    """How the distributed optimizer's state will be saved (`distrib_optim_sharding_type`)."""
    if arguments.get("dist_ckpt_optim_fully_reshardable"):
        return "fully_reshardable"
    if release_of(arguments.version) >= (0, 15) and not arguments.get("dist_ckpt_save_pre_mcore_014"):
        return "dp_reshardable"
    is_parallel = arguments.get("ckpt_fully_parallel_save") is not False
    return "fully_sharded_model_space" if is_parallel else "fully_sharded_bucket_space"


def checkpoint_folder(arguments: Arguments) -> tuple[Path, bool] | None:
    """The folder of the checkpoint that Megatron would load, and whether it loads the optimizer; None for a new run."""
    reads_optimizer = not (arguments.get("finetune") or arguments.get("no_load_optim"))
    for dest, optimizer in (("load", reads_optimizer), ("pretrained_checkpoint", False)):
        root, step = arguments.get(dest), arguments.get("ckpt_step")
        name = str(step) if step is not None else _tracked(Path(root)) if root else ""
        folder = Path(root or "") / (f"iter_{int(name):07d}" if name.isdigit() else name)
        if root and name and folder.is_dir():
            return folder, optimizer
    return None


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
        return _legacy(own, folder, ranks, record, reads_optimizer=reads_optimizer)
    note = f"{folder}: a checkpoint of an unknown format; everything that cuts the model stays"
    return Demands(own={}, pins=(Pin(fields=(*MODEL_FIELDS, "cp", *OPTIMIZER_FIELDS), note=note),))


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
    own: Layout, folder: Path, ranks: list[re.Match[str]], record: Layout | None, *, reads_optimizer: bool
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
            values |= {"vpp": 1, "layers_per_chunk": ()}
    fields = (*MODEL_FIELDS, *(OPTIMIZER_FIELDS if reads_optimizer else ()))
    note = f"{folder} is of the format torch, one file for each rank: {', '.join(fields)} stay as it was written"
    return Demands(own=values, pins=(Pin(fields=fields, note=note),))


def _distributed(arguments: Arguments, own: Layout, folder: Path, *, reads_optimizer: bool, num_layers: int) -> Demands:
    """Weights reshard freely; the distributed optimizer's state only where it was saved so."""
    saved, sharding = read_saved(folder)
    record, problem = _recorded(folder)
    written = _saved_layout(saved, num_layers, arguments.version)
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
    keeps = _kept_fields(arguments, sharding, is_sharded=is_sharded) if reads_optimizer else ()
    # With --use-mp-args-from-checkpoint-args the user's own sizes are the checkpoint's, though a plan may change them.
    values = {name: written[name] for name in (MODEL_FIELDS if takes_sizes else keeps) if name in written}
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
    if len(keeps) <= 1 and _fixes_random_state(arguments, own.ep):
        note = f"{RNG_OF_EXPERTS}: both stay (--no-load-rng frees them)"
        pins.append(Pin(fields=("cp", "dp"), note=note))
    return Demands(own=values, pins=tuple(pins), notes=(problem,) if problem else ())


def _fixes_random_state(arguments: Arguments, ep: int) -> bool:
    """Whether this release loads the random state of experts, and only where dp and cp are as they were."""
    return ep > 1 and release_of(arguments.version) == (0, 16) and not arguments.get("no_load_rng")


def _kept_fields(arguments: Arguments, sharding: str | None, *, is_sharded: bool) -> tuple[str, ...]:
    usual = "fully_sharded_model_space" if release_of(arguments.version) < (0, 15) else "dp_reshardable"
    # The plain optimizer's state follows its parameters.
    if not is_sharded or (sharding or usual) in ("fully_reshardable", "fully_sharded_model_space"):
        return ("use_distributed_optimizer",)
    # Buckets must be equal too, and those depend on whether gradients are reduced early.
    return (*MODEL_FIELDS, *OPTIMIZER_FIELDS)


def _saved_layout(saved: Saved, num_layers: int, version: str) -> dict[str, Any]:
    """Layout fields of the run that wrote the checkpoint; empty where it does not tell its tensor parallel size."""
    tp, pp = _size(saved, "tensor_model_parallel_size"), _size(saved, "pipeline_model_parallel_size")
    if not tp or not pp:
        return {}
    words: list[str] = []
    for dest in SPLIT_DESTS[2:]:
        value = saved.get(dest)
        if value not in (None, False):
            words += [f"--{dest.replace('_', '-')}", *([] if value is True else [str(value)])]
    vpp = _size(saved, "virtual_pipeline_model_parallel_size")
    if vpp and "--pipeline-model-parallel-layout" not in words:
        words += ["--num-virtual-stages-per-pipeline-rank", str(vpp)]
    virtual, chunks = read_chunks(Arguments.parse(words, version), pp=pp, num_layers=num_layers)
    found = {
        "tp": tp,
        "pp": pp,
        "vpp": virtual,
        "layers_per_chunk": chunks,
        "ep": _size(saved, "expert_model_parallel_size") or 1,
        "etp": _size(saved, "expert_tensor_parallel_size") or tp,
    }
    return found | {name: saved[name] for name in OPTIMIZER_FIELDS if isinstance(saved.get(name), bool)}


def _size(saved: Saved, name: str) -> int | None:
    """A degree of the run that wrote the checkpoint; None where there is none that a run can have."""
    value = saved.get(name)
    return value if type(value) is int and 0 < value < 1 << 20 else None


def read_saved(directory: Path) -> tuple[Saved, str | None]:
    """Arguments by name, as far as they are found, and how the distributed optimizer was saved, if it was.

    Args:
        directory: `iter_0000010` of a torch_dist checkpoint.

    """
    found: list[tuple[str, Any]] = []
    try:
        with zipfile.ZipFile(directory / "common.pt") as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as stream:
                data = stream.read(MOST_PICKLED)
        for opcode, value, _ in pickletools.genops(data):
            if opcode.name not in MEMO:
                found.append((opcode.name, CONSTANTS.get(opcode.name, value)))
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, StopIteration, ValueError, RuntimeError):
        pass  # what was found counts; RuntimeError: encrypted, or compressed in a way that zipfile lacks
    arguments: dict[str, int | bool | str | None] = {}
    for (_, name), (opcode_name, value) in pairwise(found):
        if name in NAMES and (opcode_name in CONSTANTS or opcode_name in PLAIN):
            arguments.setdefault(name, value)
    texts = {value for opcode_name, value in found if opcode_name == "BINUNICODE"}
    kinds = [kind for kind in SHARDING_TYPES if kind in texts]
    return arguments, kinds[0] if len(kinds) == 1 else None
