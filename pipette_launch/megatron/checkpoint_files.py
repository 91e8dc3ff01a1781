"""Where a job's checkpoints lie, and what stands beside them."""

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
from pipette_launch.megatron.chunks import SPLIT_DESTS, read_chunks
from pipette_launch.megatron.flags import Arguments, Flag, newest_release, release_of
from pipette_launch.megatron.pins import OPTIMIZER_FIELDS

RECORD_NAME = "pipette-plan.json"
TRACKER_NAME = "latest_checkpointed_iteration.txt"


def record_path(arguments: Sequence[str]) -> Path | None:
    """Where the launcher writes the plan beside the checkpoints that it will make; None without `--save`.

    The record's `chosen` must be what really runs, also after a fallback.
    """
    save = Arguments.parse(arguments, newest_release()).get("save")
    return Path(save) / RECORD_NAME if save else None


def saved_iteration(arguments: Sequence[str]) -> str:
    """The newest iteration that a checkpoint in the job's `--save` was written at, as Megatron notes it, or nothing."""
    path = record_path(arguments)
    return tracked_iteration(path.parent) if path else ""


def tracked_iteration(root: Path) -> str:
    """What Megatron's tracker file in a folder of checkpoints says; empty where it cannot be read."""
    try:
        name = files.read_bytes(root / TRACKER_NAME).decode("ascii").strip()
    except (FileFormatError, UnicodeError):
        return ""
    # Megatron writes nothing else; a path would lead out of the folder.
    return name if name == "release" or re.fullmatch(r"\d{1,15}", name) else ""


def checkpoint_folder(arguments: Arguments) -> tuple[Path, bool] | None:
    """The folder of the checkpoint that Megatron would load, and whether it loads the optimizer; None for a new run."""
    reads_optimizer = not (arguments.get("finetune") or arguments.get("no_load_optim"))
    for dest, optimizer in (("load", reads_optimizer), ("pretrained_checkpoint", False)):
        root, step = arguments.get(dest), arguments.get("ckpt_step")
        name = str(step) if step is not None else tracked_iteration(Path(root)) if root else ""
        folder = Path(root or "") / (f"iter_{int(name):07d}" if name.isdigit() else name)
        if root and name and folder.is_dir():
            # A release has no optimizer state to load.
            return folder, optimizer and name != "release"
    return None


SHARDING_TYPES = (
    "fully_reshardable",
    "dp_reshardable",
    "fully_sharded_model_space",
    "fully_sharded_bucket_space",
    "dp_zero_gather_scatter",
)
"""Ways to save a distributed optimizer (`distrib_optim_sharding_type`)."""
MOST_PICKLED = 64 << 20
"""So many bytes of the arguments are looked through; compressed ones may unpack to far more."""
Saved = Mapping[str, "Plain | list[Plain]"]
Plain = int | float | bool | str | None
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
WORDS = ("BINUNICODE", "SHORT_BINUNICODE")
MEMO = ("BINPUT", "LONG_BINPUT", "MEMOIZE")
FROM_MEMO = ("BINGET", "LONG_BINGET")
KINDS = {
    **dict.fromkeys(CONSTANTS, "value"),
    **dict.fromkeys(NUMBERS, "value"),
    **dict.fromkeys(WORDS, "word"),
    "EMPTY_LIST": "list",
    "MARK": "mark",
    "APPEND": "end",
    "APPENDS": "end",
}
"""Instructions of pickle that plain arguments are made of."""
OTHER = ("other", None)


def read_saved(directory: Path) -> tuple[Saved, str | None]:
    """Arguments by name, as far as they are plain, and how the distributed optimizer was saved, if it was.

    Args:
        directory: `iter_0000010` of a checkpoint in the format torch_dist or torch.

    """
    found = [*_instructions(directory), OTHER, OTHER, OTHER]
    arguments: dict[str, Any] = {}
    for place, (kind, name) in enumerate(found[:-3]):
        of_value, value = found[place + 1]
        if of_value == "list":
            value = _items(found, place + 2)
        if kind == "word" and (of_value in ("value", "word") or (of_value == "list" and value is not None)):
            arguments.setdefault(name, value)
    texts = {value for kind, value in found if kind == "word"}
    kinds = [kind for kind in SHARDING_TYPES if kind in texts]
    if not kinds and isinstance(arguments.get("ckpt_fully_parallel_save"), bool):
        # Runs before 0.13 named no type, and Megatron takes it from this flag (load_checkpoint).
        kinds = ["fully_sharded_model_space" if arguments["ckpt_fully_parallel_save"] else "dp_zero_gather_scatter"]
    return arguments, kinds[0] if len(kinds) == 1 else None


def _items(found: Sequence[tuple[str, Any]], place: int) -> list[Plain] | None:
    """Items of a list: one and an end, or a mark, several and an end; None if not all are plain."""
    if found[place][0] != "mark":
        return [found[place][1]] if found[place + 1][0] == "end" else []
    items = [value for _, value in takewhile(lambda item: item[0] in ("value", "word"), islice(found, place + 1, None))]
    return items if found[place + 1 + len(items)][0] == "end" else None


def _instructions(directory: Path) -> Iterator[tuple[str, Any]]:
    """Kind and value of each instruction that pickles the arguments, up to the first that is damaged."""
    memo: dict[int, tuple[str, Any]] = {}
    last: tuple[str, Any] = OTHER
    try:
        for opcode, value, _ in pickletools.genops(_pickled(directory)):
            if opcode.name in MEMO:
                memo[len(memo) if value is None else int(value)] = last if last[0] == "word" else OTHER
            elif opcode.name in FROM_MEMO:
                last = memo.get(int(value or 0), OTHER)
                yield last
            else:
                last = (KINDS.get(opcode.name, "other"), CONSTANTS.get(opcode.name, value))
                yield last
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError):
        pass  # values before the damage count; RuntimeError: encrypted, or a compression that zipfile lacks


def _pickled(directory: Path) -> bytes:
    path = directory / "common.pt"
    if not path.is_file():
        # The format torch keeps the arguments with the first rank's weights.
        path = min(directory.glob("mp_rank_00*/model_optim_rng.pt"), default=path)
    with zipfile.ZipFile(path) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if name is None:
            raise zipfile.BadZipFile
        with archive.open(name) as stream:
            return stream.read(MOST_PICKLED)


def saved_layout(saved: Saved, num_layers: int, version: str) -> dict[str, Any]:
    """Layout fields of the run that wrote the checkpoint; empty where it does not tell its tensor parallel size."""
    tp, pp = _size(saved, "tensor_model_parallel_size"), _size(saved, "pipeline_model_parallel_size")
    if not tp or not pp:
        return {}
    words: list[str] = []
    for dest in (*SPLIT_DESTS[2:], "mtp_num_layers"):
        value = saved.get(dest)
        if value not in (None, False):
            words += [f"--{dest.replace('_', '-')}", *([] if value is True else [str(value)])]
    vpp = _size(saved, "virtual_pipeline_model_parallel_size")
    if vpp and "--pipeline-model-parallel-layout" not in words:
        words += ["--num-virtual-stages-per-pipeline-rank", str(vpp)]
    split = read_chunks(Arguments.parse(words, version), pp=pp, num_layers=num_layers)
    found = {
        "tp": tp,
        "pp": pp,
        **split._asdict(),
        "ep": _size(saved, "expert_model_parallel_size") or 1,
        "etp": _size(saved, "expert_tensor_parallel_size") or tp,
    }
    return found | {name: saved[name] for name in OPTIMIZER_FIELDS if isinstance(saved.get(name), bool)}


def saved_replicas(saved: Saved) -> int | None:
    """Ranks that shared the optimizer's state in the run that wrote the checkpoint; None where it does not tell."""
    ranks, dp = _size(saved, "world_size"), _size(saved, "data_parallel_size")
    if dp:
        return dp * (_size(saved, "context_parallel_size") or 1)
    tp, pp = _size(saved, "tensor_model_parallel_size"), _size(saved, "pipeline_model_parallel_size")
    return ranks // (tp * pp) if ranks and tp and pp else None


def _size(saved: Saved, name: str) -> int | None:
    """A degree of the run that wrote the checkpoint; None where there is none that a run can have."""
    value = saved.get(name)
    return value if type(value) is int and 0 < value < 1 << 20 else None


WHERE_MISSING = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "seq_length",
    "num_attention_heads",
    "kv_channels",
    "max_position_embeddings",
    "moe_token_dispatcher_type",
    "hybrid_layer_pattern",
    "padded_vocab_size",
)
"""Taken where neither the user nor Megatron's parser gives a value."""
ALWAYS = (
    "num_query_groups",
    "group_query_attention",
    "position_embedding_type",
    "add_position_embedding",
    "use_rotary_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "add_bias_linear",
    "add_qkv_bias",
    "squared_relu",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "apply_layernorm_1p",
    "normalization",
    "apply_query_key_layer_scaling",
    "attention_dropout",
    "hidden_dropout",
    "spec",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_grouped_gemm",
    "moe_shared_expert_intermediate_size",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "tiktoken_pattern",
)
"""Taken in the place of the user's own."""
ALWAYS_SINCE = {
    (0, 16): (
        "moe_router_score_function",
        "moe_router_enable_expert_bias",
        "moe_router_topk_scaling_factor",
        "moe_latent_size",
    ),
    (0, 17): ("mtp_hybrid_override_pattern", "mtp_num_layers", "mtp_use_repeated_layer"),
    (0, 18): ("moe_single_grouped_weight", "moe_single_grouped_bias"),
    (0, 20): ("gdp_num_householder",),
}
ALWAYS_BEFORE = {
    (0, 15): ("moe_token_dispatcher_type",),
    (0, 17): ("hybrid_override_pattern", "is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio"),
}
"""The same of releases from one on, or before one."""
TYPES: dict[str | None, tuple[type, ...]] = {"int": (int,), "float": (int, float), None: (str,)}
PATTERNS = ("moe_layer_freq",)
"""Text on the command line that Megatron's parser turns into a number or a list."""


def with_checkpoint_arguments(arguments: Arguments) -> tuple[Arguments, str]:
    """Return the flags, with the checkpoint's values where Megatron takes them, and a note for the user.

    Without `--use-checkpoint-args` they are unchanged.

    Raises:
        MegatronError: the flag is given, and no folder that it could read.

    """
    if not arguments.get("use_checkpoint_args"):
        return arguments, ""
    roots = [arguments.shown(dest) for dest in ("load", "pretrained_checkpoint") if arguments.get(dest)]
    if not roots:
        raise MegatronError("--use-checkpoint-args needs --load or --pretrained-checkpoint; add one")
    found = checkpoint_folder(arguments)
    saved = read_saved(found[0])[0] if found else {}
    if "num_layers" not in saved:
        where = f"can read no arguments in {found[0]}" if found else f"finds no checkpoint at {roots[0]} here"
        return arguments, f"--use-checkpoint-args {where}, so the flags alone describe the model"
    mine = arguments
    for dest, value in _taken(arguments, saved):
        arguments = _with_value(arguments, dest, value)
    overruled = [
        token.words
        for token in mine.tokens
        if token.dest and mine.get(token.dest) != arguments.get(token.dest) and token not in arguments.tokens
    ]
    note = f"--use-checkpoint-args: the model is that of {found[0] if found else ''}"
    in_place_of = ", ".join(dict.fromkeys(" ".join(words) for words in overruled))
    return arguments, note + (f", in place of your {in_place_of}" if overruled else "")


def always_taken(release: tuple[int, int]) -> list[str]:
    """Destinations that this release takes in the place of the user's own."""
    since = (dest for first, dests in ALWAYS_SINCE.items() if release >= first for dest in dests)
    before = (dest for end, dests in ALWAYS_BEFORE.items() if release < end for dest in dests)
    return [*ALWAYS, *since, *before]


def _taken(arguments: Arguments, saved: Saved) -> Iterator[tuple[str, Any]]:
    """Destinations and values that Megatron takes, in its order."""
    release = release_of(arguments.version)
    always = always_taken(release)
    if arguments.get("use_tokenizer_model_from_checkpoint_args"):
        always += ["tokenizer_model", "tokenizer_type"]
    elif release < (0, 15):
        always.append("tokenizer_type")
    older_pattern = saved.get("hybrid_override_pattern") if release >= (0, 17) else None
    values = {**saved, **({"hybrid_layer_pattern": older_pattern, "num_layers": None} if older_pattern else {})}
    if saved.get("num_experts") is None:
        values.pop("moe_ffn_hidden_size", None)
    for dest in (*WHERE_MISSING, *always):
        if values.get(dest) is not None and (dest in always or arguments.get(dest) is None):
            yield dest, values[dest]


def _with_value(arguments: Arguments, dest: str, value: Any) -> Arguments:
    """Store a value as the parser would; what this release does not have, or is of another type, stays."""
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
    if flag.dest in PATTERNS:
        return type(value) in (int, list)
    return type(value) in ((list,) if flag.nargs else TYPES.get(flag.kind, ()))
