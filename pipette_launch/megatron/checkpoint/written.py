"""What a checkpoint of format torch_dist says of the run that wrote it.

`common.pt` holds that run's arguments, pickled by torch. A pickle is a program, so it is never loaded: the few numbers
and words that are wanted are read from its list of instructions.
"""

from __future__ import annotations

import pickletools
import zipfile
import zlib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipette_launch.megatron.chunks import SPLIT_DESTS, read_chunks
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.pins import OPTIMIZER_FIELDS

SHARDING_TYPES = ("fully_reshardable", "dp_reshardable", "fully_sharded_model_space", "fully_sharded_bucket_space")
"""How a distributed optimizer was saved (`distrib_optim_sharding_type`)."""
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


def saved_layout(saved: Saved, num_layers: int, version: str) -> dict[str, Any]:
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
