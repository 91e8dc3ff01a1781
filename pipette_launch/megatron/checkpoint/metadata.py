"""What a torch_dist checkpoint says about the run that wrote it, read from its bytes.

`common.pt` holds that run's arguments, pickled by torch. A pickle is a program, so it is never loaded: the few numbers
and words that are wanted are looked up as the bytes by which pickle's protocol 2 writes them.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

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
Saved = Mapping[str, "int | bool | str | None"]


def read_saved(directory: Path) -> tuple[Saved, str | None]:
    """Arguments by name, as far as they are found, and how the distributed optimizer was saved, if it was.

    Args:
        directory: `iter_0000010` of a torch_dist checkpoint.

    """
    data = _pickle_of(directory / "common.pt")
    arguments = {name: value for name in NAMES for value in _values(data, name)}
    kinds = [kind for kind in SHARDING_TYPES if _word(kind) in data]
    return arguments, kinds[0] if len(kinds) == 1 else None


def _pickle_of(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            return archive.read(name)
    except (OSError, zipfile.BadZipFile, StopIteration):
        return b""


def _word(text: str) -> bytes:
    """A string as pickle writes it the first time: BINUNICODE, its length, its bytes."""
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _values(data: bytes, name: str) -> tuple[int | bool | str | None, ...]:
    """The value behind a name, in a tuple; empty where the name or a value of a known kind is not found."""
    memo = rb"(?:q.|r....)?"
    found = re.search(
        re.escape(_word(name)) + memo + rb"(?:K(.)|M(..)|J(....)|(N)|(\x88)|(\x89)|X(....))", data, re.DOTALL
    )
    if not found:
        return ()
    for group, code in ((1, "<B"), (2, "<H"), (3, "<i")):
        if found[group] is not None:
            return (struct.unpack(code, found[group])[0],)
    if found[7] is not None:
        start, (size,) = found.end(), struct.unpack("<I", found[7])
        return (data[start : start + size].decode(errors="replace"),)
    return (None if found[4] is not None else found[5] is not None,)
