"""Which release of Megatron a job runs: the one that its script would import, or the one that the user names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Layout
from pipette_launch.facts.accelerators import compute_capability
from pipette_launch.megatron.flags import Arguments, newest_release


def version_or_newest(given: str | None, script: str, environ: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the Megatron whose flags are read, and a note where it had to be guessed.

    Args:
        given: as the user wrote it, `0.16.1` or the name of a tag, `core_v0.16.1`; None = that of the script.
        script: the training script; it need not exist.
        environ: of the job's workers.

    """
    if given is not None:
        return given.removeprefix("core_").removeprefix("v"), ()
    try:
        return script_version(script, environ), ()
    except MegatronError:
        newest = f"{newest_release()}.0"
        return newest, (
            f"No Megatron is here: flags and defaults of {newest} are assumed; --megatron-version names another.",
        )


def script_version(script: str, environ: Mapping[str, str]) -> str:
    """The Megatron that `script` (or a module of that name) would import, as `0.16.1`; nothing is imported.

    Looked for as Python does: beside the script (in the working directory for a module), on PYTHONPATH, then among the
    installed packages; at last in the folders above the script, which some of NVIDIA's examples add themselves.
    """
    path = Path(script)
    # Python puts the real folder of a linked script on its path.
    first = path.resolve().parent if path.is_file() else Path.cwd()
    # An empty entry is the working directory.
    entries = [Path(entry).absolute() for entry in environ.get("PYTHONPATH", "").split(os.pathsep)]
    for folder in (first, *entries):
        found = _checkout_version(folder)
        if found:
            return found
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        pass
    for folder in path.absolute().parents:
        found = _checkout_version(folder)
        if found:
            return found
    raise MegatronError(
        f"no Megatron is beside {script}, on PYTHONPATH, or installed; install megatron-core or set PYTHONPATH to a "
        f"checkout of Megatron-LM"
    )


def _checkout_version(folder: Path) -> str | None:
    """Version in the sources of megatron-core that lie in a folder, read as text."""
    try:
        text = (folder / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
    except OSError:
        return None
    parts = [re.search(rf"^{name}\s*=\s*(\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] for part in parts if part) if all(parts) else None


_BLACKWELL = 10
"""From this capability on, Megatron no longer asks for a single connection."""


def environment(layout: Layout, *, device_kind: str, device_name: str) -> dict[str, str]:
    """Variables that a worker of this layout must have, beyond those of torchrun.

    Megatron asserts CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor or context parallelism before Blackwell, and on CPU too,
    where the CPU backend shows it a device without a capability of its own.
    """
    if layout.tp == 1 and layout.cp == 1:
        return {}
    if device_kind == "cuda" and (compute_capability(device_name) or 0) >= _BLACKWELL:
        return {}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


WRITERS = (
    # Checkpoints, and what goes into their folder.
    *("save", r"save_\w*interval", "async_save", r"non_persistent_\w+", "use_persistent_ckpt_worker"),
    *("ckpt_pg_tensors_cache_create", "calc_ft_timeouts", "log_progress", "result_rejected_tracker_filename"),
    # Loggers that write elsewhere.
    *("tensorboard_dir", r"wandb_\w+", "inference_wandb_logging", r"one_logger_\w+", r"otel_\w+"),
    # Profiles, traces, dumps.
    *("profile", "use_pytorch_profiler", r"pytorch_profiler_\w+", "record_shapes", "record_memory_history"),
    *("config_logger_dir", "dump_param_to_param_group_map", "flight_recorder_dump_path", r"logits_save_\w+"),
    *(r"moe_routing_trace_\w+", "rl_profile", "rl_profile_dir"),
    # Writes to the folder of --save, asks for one, and connects to a monitor that kills ranks.
    "enable_ft_package",
)
"""Where Megatron stores the flags that make a script leave something behind, as regular expressions."""
ENDS = ("adlr_autoresume", "exit_duration_in_mins", "exit_interval", r"exit_signal\w*")
"""Flags by which a script decides itself when to end: a trial is ended from outside."""
GROWING = ("rampup_batch_size",)
"""A training that begins with small batches is tried with the batches on which it will spend its time."""
TAKEN_OUT = re.compile("|".join((*WRITERS, *ENDS, *GROWING)))
REFUSED: tuple[tuple[str, str], ...] = (
    ("ckpt_convert_format", "the script converts a checkpoint and trains nothing"),
    ("moe_use_upcycling", "the script first writes an upcycled checkpoint"),
)
WARM_UPS = 2
"""The first iterations carry compilation, lazy communicators, cold caches and the optimizer's first states."""


class TrialWords(NamedTuple):
    """A command line to try."""

    words: tuple[str, ...]
    warm_ups: int
    """So many iterations at the start do not count."""


def trial_arguments(arguments: Sequence[str], version: str) -> TrialWords:
    """Take out of a command line what would leave something behind, and let it print every iteration.

    Args:
        arguments: the words behind the script's name, with the layout to try.
        version: the release whose flags the script takes, as `0.16.1`.

    Raises:
        MegatronError: a short run may leave something behind, or train nothing.

    """
    given = Arguments.parse(arguments, version)
    unknown = [word for token in given.tokens if token.flag is None for word in token.words if word.startswith("-")]
    if unknown:
        raise MegatronError(
            f"{', '.join(unknown)}: no flag of Megatron {version}, so nobody can say what a short run with it leaves "
            f"behind; remove it to have plans tried"
        )
    for dest, why in REFUSED:
        if given.is_given(dest):
            raise MegatronError(f"{given.shown(dest)}: {why}, so that a short run would not be thrown away")
    dests = {token.dest for token in given.tokens if token.dest}
    tried = given.without(*(dest for dest in dests if TAKEN_OUT.fullmatch(dest)))
    if any(dest.startswith("one_logger_") for dest in dests):
        tried = tried.with_flag("--no-one-logger")
    if tried.get("log_interval") != 1:
        tried = tried.with_flag("--log-interval", "1")
    # CUDA graphs are captured after iterations of their own.
    captures = given.get("enable_cuda_graph") or given.get("external_cuda_graph")
    captures = captures or given.get("cuda_graph_impl") not in (None, "none")
    capture_warm_ups = 1 + (given.get("cuda_graph_warmup_steps") or 0) if captures else 0
    return TrialWords(tried.words, max(WARM_UPS, capture_warm_ups))
