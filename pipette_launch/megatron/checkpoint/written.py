"""Arguments of the run that wrote a checkpoint.

`common.pt` of the format torch_dist, and each file of the format torch, hold that run's arguments, pickled by torch. A
pickle is a program, so it is never loaded: numbers, words and lists of them are read from its list of instructions.
"""

from __future__ import annotations

import pickletools
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from pipette_launch.megatron.chunks import SPLIT_DESTS, read_chunks
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.pins import OPTIMIZER_FIELDS

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
