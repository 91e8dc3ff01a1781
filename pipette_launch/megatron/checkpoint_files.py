"""Folders of a job's checkpoints, the arguments in a checkpoint, and the flags that `--use-checkpoint-args` reads.

A checkpoint contains the arguments of the run that saved the checkpoint, as a pickle of torch: in `common.pt` of the
format torch_dist, or in each file of the format torch. A pickle is a program, so pipette-launch never loads a pickle.
Instead, the pickle's list of instructions is read, and only numbers, texts and lists of numbers or texts are kept.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from pipette_launch.errors import FileFormatError, MegatronError
from pipette_launch.facts import files
from pipette_launch.megatron.flags import Arguments, Flag, newest_release, release_of

RECORD_NAME = "pipette-plan.json"
TRACKER_NAME = "latest_checkpointed_iteration.txt"


def record_path(arguments: Sequence[str]) -> Path | None:
    """Return the path, beside the job's checkpoints, of the file with the plan that really runs.

    Return None without `--save`.
    """
    save = Arguments.cut(arguments, newest_release()).get("save")
    return Path(save) / RECORD_NAME if save else None


def saved_iteration(arguments: Sequence[str]) -> str:
    """Return the iteration of the newest checkpoint in the job's `--save`, or an empty string."""
    path = record_path(arguments)
    return _tracked_iteration(path.parent) if path else ""


def _tracked_iteration(root: Path) -> str:
    """Return the iteration in Megatron's tracker file in a folder of checkpoints.

    The text is empty if the file cannot be read.
    """
    try:
        name = files.read_bytes(root / TRACKER_NAME).decode("ascii").strip()
    except (FileFormatError, UnicodeError):
        return ""
    # Megatron writes only numbers or `release`. Any other text could be a path that leads out of the folder.
    return name if name == "release" or re.fullmatch(r"\d{1,15}", name) else ""


def reads_optimizer(arguments: Arguments) -> bool:
    """Return whether Megatron loads the optimizer of a checkpoint of `--load`."""
    return not (arguments.get("finetune") or arguments.get("no_load_optim"))


def checkpoint_folder(arguments: Arguments) -> tuple[Path, bool] | None:
    """Return the folder that Megatron would load, and True if Megatron also loads the optimizer.

    Return None if there is no checkpoint to load.
    """
    for dest, optimizer in (("load", reads_optimizer(arguments)), ("pretrained_checkpoint", False)):
        root, step = arguments.get(dest), arguments.get("ckpt_step")
        name = str(step) if step is not None else _tracked_iteration(Path(root)) if root else ""
        folder = Path(root or "") / (f"iter_{int(name):07d}" if name.isdigit() else name)
        if root and name and folder.is_dir():
            # A checkpoint named `release` contains no optimizer state.
            return folder, optimizer and name != "release"
    return None


SHARDING_TYPES = (
    "fully_reshardable",
    "dp_reshardable",
    "fully_sharded_model_space",
    "fully_sharded_bucket_space",
    "dp_zero_gather_scatter",
)
"""Formats of a distributed optimizer in a checkpoint (`distrib_optim_sharding_type`)."""
MOST_PICKLED = 64 << 20
"""Largest number of bytes of pickled arguments that are read, because compressed files may unpack to far more bytes."""
Plain = int | float | bool | str | None
Saved = Mapping[str, Plain | list[Plain]]
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
KINDS = {
    **dict.fromkeys((*CONSTANTS, "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), "value"),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE"), "word"),
    "EMPTY_LIST": "list",
    "MARK": "mark",
    "APPEND": "end",
    "APPENDS": "end",
}
"""Pickle instructions that make up plain arguments."""
OTHER = ("other", None)


def read_saved(directory: Path) -> tuple[Saved, str | None]:
    """Return the readable arguments in a checkpoint, and the format of its distributed optimizer (or None).

    `directory` is a folder such as `iter_0000010` of a checkpoint in the format torch_dist or torch.
    """
    found = [*_instructions(directory), OTHER, OTHER, OTHER]
    arguments: dict[str, Any] = {}
    for place, (kind, name) in enumerate(found[:-3]):
        kind_of_value, value = found[place + 1]
        if kind_of_value == "list":
            value = _items(found, place + 2)
        if kind == "word" and (kind_of_value in ("value", "word") or (kind_of_value == "list" and value is not None)):
            arguments.setdefault(name, value)
    texts = {value for kind, value in found if kind == "word"}
    kinds = [kind for kind in SHARDING_TYPES if kind in texts]
    if not kinds and isinstance(arguments.get("ckpt_fully_parallel_save"), bool):
        # Megatron before 0.13 stores no format, and derives the format from this flag (load_checkpoint).
        kinds = ["fully_sharded_model_space" if arguments["ckpt_fully_parallel_save"] else "dp_zero_gather_scatter"]
    return arguments, kinds[0] if len(kinds) == 1 else None


def _items(found: Sequence[tuple[str, Any]], place: int) -> list[Plain] | None:
    """Read a pickled list: one item and an end, or a mark, several items and an end.

    Return None if an item is no number or text.
    """
    if found[place][0] != "mark":
        return [found[place][1]] if found[place + 1][0] == "end" else []
    items = [value for _, value in takewhile(lambda item: item[0] in ("value", "word"), islice(found, place + 1, None))]
    return items if found[place + 1 + len(items)][0] == "end" else None


def _instructions(directory: Path) -> Iterator[tuple[str, Any]]:
    """Yield kind and value of each pickle instruction of the arguments, up to the first damaged instruction."""
    memo: dict[int, tuple[str, Any]] = {}
    last: tuple[str, Any] = OTHER
    try:
        for opcode, value, _ in pickletools.genops(_pickled(directory)):
            if opcode.name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if value is None else int(value)] = last if last[0] == "word" else OTHER
            elif opcode.name in ("BINGET", "LONG_BINGET"):
                last = memo.get(int(value or 0), OTHER)
                yield last
            else:
                last = (KINDS.get(opcode.name, "other"), CONSTANTS.get(opcode.name, value))
                yield last
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError):
        pass  # keep values before the damage; zipfile: RuntimeError for unknown compression


def _pickled(directory: Path) -> bytes:
    path = directory / "common.pt"
    if not path.is_file():
        # The format torch stores the arguments with the first rank's weights.
        path = min(directory.glob("mp_rank_00*/model_optim_rng.pt"), default=path)
    with zipfile.ZipFile(path) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if name is None:
            raise zipfile.BadZipFile
        with archive.open(name) as stream:
            return stream.read(MOST_PICKLED)


# Flags that `--use-checkpoint-args` takes from a checkpoint (load_args_from_checkpoint in checkpointing.py).

CHECKPOINT_ARGUMENTS = files.table("pipette_launch.megatron", "checkpoint_arguments")
"""Destinations that Megatron reads from the checkpoint: always, instead of the user's own value, or only if neither the
user nor a default gives a value; with the first release that does so, and the first one that no longer does so."""
WHERE_MISSING = tuple(row["destination"] for row in CHECKPOINT_ARGUMENTS if row["taken"] == "if missing")
TYPES: dict[str | None, tuple[type, ...]] = {"int": (int,), "float": (int, float), None: (str,)}


def with_checkpoint_arguments(arguments: Arguments) -> tuple[Arguments, str]:
    """Return the flags with the values that `--use-checkpoint-args` reads from the checkpoint, and a note for the user.

    Without `--use-checkpoint-args` the flags are unchanged. Raise MegatronError if no flag names a folder to read.
    """
    if not arguments.get("use_checkpoint_args"):
        return arguments, ""
    roots = [arguments.shown(dest) for dest in ("load", "pretrained_checkpoint") if arguments.get(dest)]
    if not roots:
        raise MegatronError("--use-checkpoint-args needs --load or --pretrained-checkpoint; add one")
    found = checkpoint_folder(arguments)
    saved = read_saved(found[0])[0] if found else {}
    if not found or "num_layers" not in saved:
        where = f"can read no arguments in {found[0]}" if found else f"finds no checkpoint at {roots[0]} here"
        return arguments, f"--use-checkpoint-args {where}, so the flags alone describe the model"
    mine = arguments
    for dest, value in _taken(arguments, saved):
        arguments = _with_value(arguments, dest, value)
    overruled = dict.fromkeys(
        " ".join(token.words)
        for token in mine.tokens
        if token.dest and mine.get(token.dest) != arguments.get(token.dest) and token not in arguments.tokens
    )
    instead = f", instead of your {', '.join(overruled)}" if overruled else ""
    return arguments, f"--use-checkpoint-args: {found[0]} describes the model{instead}"


def always_taken(release: tuple[int, int]) -> list[str]:
    """Return the destinations that this release always reads from the checkpoint, instead of the user's own values."""

    def has(row: Mapping[str, str]) -> bool:
        first, end = row["first_release"], row["end_release"]
        return (not first or release >= release_of(first)) and (not end or release < release_of(end))

    return [row["destination"] for row in CHECKPOINT_ARGUMENTS if row["taken"] == "always" and has(row)]


def _taken(arguments: Arguments, saved: Saved) -> Iterator[tuple[str, Any]]:
    """Yield destinations and values that Megatron reads from the checkpoint, in Megatron's order."""
    release = release_of(arguments.version)
    always = always_taken(release)
    if arguments.get("use_tokenizer_model_from_checkpoint_args"):
        always += ["tokenizer_model", "tokenizer_type"]
    older_pattern = saved.get("hybrid_override_pattern") if release >= (0, 17) else None
    values = {**saved, **({"hybrid_layer_pattern": older_pattern, "num_layers": None} if older_pattern else {})}
    if saved.get("num_experts") is None:
        values.pop("moe_ffn_hidden_size", None)
    for dest in (*WHERE_MISSING, *always):
        if values.get(dest) is not None and (dest in always or arguments.get(dest) is None):
            yield dest, values[dest]


def _with_value(arguments: Arguments, dest: str, value: Any) -> Arguments:
    """Store a value as Megatron's parser would. A value that no flag of this release can store is ignored."""
    if arguments.get(dest) == value:
        return arguments
    bare = arguments.without(dest)
    if bare.get(dest) == value:
        return bare
    for flag in arguments.table.values():
        if flag.dest == dest and _suits(flag, value):
            items = [] if flag.nargs == 0 else value if flag.nargs else [value]
            words = (str(item).replace(", ", ",") if isinstance(item, list) else str(item) for item in items)
            return bare.with_flag(flag.option, *words)
    return arguments


def _suits(flag: Flag, value: Any) -> bool:
    if flag.nargs == 0:
        return type(value) is bool and flag.constant == value
    if flag.dest == "moe_layer_freq":
        # On the command line the value is a text, which Megatron's parser converts to a number or a list.
        return type(value) in (int, list)
    return type(value) in ((list,) if flag.nargs else TYPES.get(flag.kind, ()))
