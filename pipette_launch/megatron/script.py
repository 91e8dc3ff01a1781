"""The user's script: Megatron release, environment variables, and arguments for a trial that leaves no files."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Job, Layout
from pipette_launch.facts.job import OTHER_MODELS
from pipette_launch.megatron.chunks import PATTERN_DESTS, RATIO_DESTS, SPLIT_DESTS
from pipette_launch.megatron.flags import Arguments, flag_table, newest_release
from pipette_launch.megatron.layout import known_dest, read_batch, stacks_of, write_arguments
from pipette_launch.megatron.performance import options_of
from pipette_launch.megatron.tokenizers import NOT_GPT

DESCRIBED, HELPERS = {"gpt", "hybrid", "mamba"}, {"backends", "common"}
"""Packages below `megatron.core.models`: those whose models the formulas describe, and those without a model."""
OTHER_NAMES = re.compile(r"(?<![a-z])(bert|clip|ict|llava|multimodal|t5|vision|vl|vlm)(?![a-z0-9])")
"""Words in the names of scripts whose models are not decoder-only."""
NO_TRAINING = re.compile(r"convert|eval|export|generat|inference|preprocess|prune|ptq|server|(^|/)(tasks|tools)/")
"""Words in the paths of scripts that train nothing."""
_BLACKWELL = 10
"""Compute capability from which on Megatron no longer demands CUDA_DEVICE_MAX_CONNECTIONS=1."""


def version_or_newest(given: str | None, script: str, environ: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the Megatron release by which flags are read, and a note if the release is a guess.

    `given` is the release as the user wrote it, `0.16.1` or a tag such as `core_v0.16.1`. With None, the result is the
    release that the script imports. The script need not exist.
    """
    if given is not None:
        return given.removeprefix("core_").removeprefix("v"), ()
    try:
        return script_version(script, environ), ()
    except MegatronError:
        newest = f"{newest_release()}.0"
        note = f"No Megatron is here: flags and defaults of {newest} are assumed; --megatron-version selects another."
        return newest, (note,)


def script_version(script: str, environ: Mapping[str, str]) -> str:
    """Return the Megatron release, such as `0.16.1`, that a script (or a module of the same name) would import.

    The order is Python's order: beside the script (for a module: in the working directory), on PYTHONPATH, among the
    installed packages. The folders above the script come last, because some of NVIDIA's examples add these folders
    themselves. Raise MegatronError if no folder on this path contains Megatron.
    """
    path = Path(script)
    # If the script is a link, Python puts the folder of the link's target on the path.
    first = path.resolve().parent if path.is_file() else Path.cwd()
    # An empty entry of PYTHONPATH means the working directory.
    entries = [Path(entry).absolute() for entry in environ.get("PYTHONPATH", "").split(os.pathsep)]
    for folder in (first, *entries, None, *path.absolute().parents):
        try:
            found = _checkout_version(folder) if folder else metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            continue
        if found:
            return found
    raise MegatronError(
        f"no Megatron is beside {script}, on PYTHONPATH, or installed; install megatron-core or set PYTHONPATH to a "
        f"checkout of Megatron-LM"
    )


class Foreign(NamedTuple):
    """Model of a script that no formula describes."""

    name: str
    """Words such as `bert`; empty for a decoder-only model."""
    has_one_stack: bool
    """True if embedding, one stack of layers and head follow each other, as in a decoder-only model."""


def foreign_model(script: str, arguments: Arguments) -> Foreign:
    """Return whether a script builds a model that is not decoder-only.

    The packages below `megatron.core.models` that the script imports decide. For a script that is not here, its name
    decides. Tokenizers and flags of other models count for every script. Megatron passes `add_encoder` to
    scripts whose models have several stacks of layers.
    """
    path = Path(script)
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    found = set(re.findall(r"megatron\.core\.models\.(\w+)", text)) - HELPERS
    if not text:
        found = set(OTHER_NAMES.findall(path.name.lower()))
    name = " and ".join(sorted(each.lower() for each in found)) if not found & DESCRIBED else ""
    has_stacks = any(token.words[0].partition("=")[0] in OTHER_MODELS for token in arguments.tokens)
    is_foreign = bool(name) or has_stacks or arguments.get("tokenizer_type") in NOT_GPT
    has_one_stack = bool(name and text) and "add_encoder" not in text and not has_stacks
    return Foreign(name or ("non-GPT" if is_foreign else ""), has_one_stack)


def trains_nothing(script: str) -> bool:
    """Return True if a script is not here, and its path says that it converts, generates or evaluates."""
    path = Path(script)
    named = "/".join(path.parts[-3:]).lower()
    return not (path.is_file() or re.search("train|tun", path.name.lower())) and bool(NO_TRAINING.search(named))


def _checkout_version(folder: Path) -> str | None:
    """Return the release of the megatron-core sources in a folder, or None. The sources are not imported."""
    try:
        text = (folder / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
    except OSError:
        return None
    parts = [re.search(rf"^{name}\s*=\s*(\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] for part in parts if part) if all(parts) else None


def environment(job: Job, layout: Layout, *, device_kind: str) -> dict[str, str]:
    """Return the environment variables that a worker of this layout needs in addition to torchrun's variables.

    Megatron asserts CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor or context parallelism before Blackwell. On CPU, Megatron
    asserts this variable too, because the CPU backend reports a device without a compute capability. FSDP asserts the
    opposite, and a user of the overlap of expert exchanges may choose (arguments.py:622, 687, 927-953).
    """
    is_blackwell = device_kind == "cuda" and (job.compute_capability or 0) >= _BLACKWELL
    options = job.options
    chooses = options.use_megatron_fsdp or options.overlap_moe_expert_parallel_comm
    is_needed = not (is_blackwell or chooses or layout.tp == layout.cp == 1)
    # Megatron asserts the older offloading of Transformer Engine, which leaves weights on the device.
    needed = {"NVTE_CPU_OFFLOAD_V1": "1"} if layout.recompute.offload_modules else {}
    return needed | ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_needed else {})


WRITERS = (
    # Flags that write checkpoints, or other files into the folder of checkpoints.
    *("save", r"save_\w*interval", "async_save", r"non_persistent_\w+", "use_persistent_ckpt_worker"),
    *("ckpt_pg_tensors_cache_create", "calc_ft_timeouts", "log_progress", "result_rejected_tracker_filename"),
    # Flags of loggers that write to other folders or services.
    *("tensorboard_dir", r"wandb_\w+", "inference_wandb_logging", r"one_logger_\w+", r"otel_\w+"),
    # Flags that write profiles, traces or dumps.
    *("profile", "use_pytorch_profiler", r"pytorch_profiler_\w+", "record_shapes", "record_memory_history"),
    *("config_logger_dir", "dump_param_to_param_group_map", "flight_recorder_dump_path", r"logits_save_\w+"),
    *(r"moe_routing_trace_\w+", "rl_profile", "rl_profile_dir"),
    # The fault tolerance package needs and writes the folder of --save, and connects to a monitor that kills ranks.
    "enable_ft_package",
)
"""Destinations of flags that make a script write files, as regular expressions."""
ENDS = ("adlr_autoresume", "exit_duration_in_mins", "exit_interval", r"exit_signal\w*")
"""Flags by which a script ends itself. A trial runs without these flags, because the launcher ends the trial."""
GROWING = ("rampup_batch_size", "step_batch_size_schedule")
"""Flags of a growing batch size. A trial runs with the final batch size, which takes most of the training's time."""
TAKEN_OUT = re.compile("|".join((*WRITERS, *ENDS, *GROWING)))
REFUSED: tuple[tuple[str, str], ...] = (
    ("ckpt_convert_format", "the script converts a checkpoint and trains nothing"),
    ("moe_use_upcycling", "the script first writes an upcycled checkpoint"),
)
UNPLAYED = (
    # Checkpoints, whose contents change neither time nor memory.
    *("load", "pretrained_checkpoint", "use_checkpoint_args", "use_mp_args_from_checkpoint_args"),
    # Buffers and graphs that need other ranks or the whole step.
    *("optimizer_cuda_graph", "tp_comm_overlap", r"\w*nccl_ub"),
)
"""Flags that a script does not get while it is measured, as regular expressions, besides `TAKEN_OUT`."""
_GRAPH = r"(?!optimizer)\w*cuda_graph\w*"
OF_MANY_LAYERS = (
    *(r"use_\w*fsdp2?", "ckpt_format", "first_last_layers_bf16", "window_attn_skip_freq"),
    *SPLIT_DESTS,
    *PATTERN_DESTS,
    *RATIO_DESTS.values(),
)
"""Flags that a script does not get while single layers are measured, as regular expressions."""
DATA = (r"data_path|\w+_data_path|\w*data_args_path|data_cache_path|split",)
FORCED_BALANCE = "--moe-router-force-load-balancing"
"""Flag by which Megatron's router chooses experts at random, because received tokens of a fake group are garbage."""
PLAYED_STEPS = 10
"""Least number of training steps in the arguments of a played script. A played stage needs fewer steps."""
WARM_UPS = 2
"""Number of first iterations that a trial does not count, because of compilation, new communicators and cold caches."""


DEGREES = (
    *(r"tensor_(model_parallel_size|parallel_degree)", r"pipeline_(model_parallel_size|parallel_degree)"),
    *(r"context_parallel_(size|degree)", r"expert_(model_parallel_size|parallel_degree)"),
)
"""Names of the settings for tp, pp, cp and ep in frameworks on Megatron and in torchtitan, as regular expressions."""


def settings(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return name and value of each setting: `--a-b 2`, `--a-b=2` and `model.a_b=2` are all (`a_b`, `2`)."""
    found = []
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, joined, value = word.partition("=")
        if joined or name.startswith("--"):
            plain = name.lstrip("-+").rpartition(".")[2].replace("-", "_")
            found.append((plain, value if joined or following.startswith("-") else following))
    return found


def stated_layout(words: Sequence[str], world_size: int) -> Layout | None:
    """Return the layout that any script's words state; None if the words state no degree or a doubtful one."""
    given = settings(words)
    found = [{value for name, value in given if re.fullmatch(degree, name)} for degree in DEGREES]
    if not any(found) or any(len(values) > 1 for values in found):
        return None
    try:
        tp, pp, cp, ep = (int(min(values, default="1")) for values in found)
        dp = world_size // max(tp * pp * cp, 1)
        mapping = any(name == "use_tp_pp_dp_mapping" for name, _ in given)
        layout = Layout(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, use_tp_pp_dp_mapping=mapping)
    except ValueError:
        return None
    return layout if layout.world_size == world_size else None


class TrialWords(NamedTuple):
    """Arguments of a script for a trial."""

    words: tuple[str, ...]
    warm_ups: int
    """Number of first iterations whose step times do not count."""


def trial_arguments(arguments: Sequence[str], version: str) -> TrialWords:
    """Change a command line so that a short run prints every iteration and leaves no files.

    The launcher ends a trial after a number of iteration lines. `--train-iters` and all flags that depend on steps
    stay, so learning rate, data and index files are the same as in the training. Raise MegatronError if a short run may
    leave files, or may train nothing.
    """
    given = Arguments.parse(arguments, version)
    unknown = [word for token in given.tokens if token.flag is None for word in token.words if word.startswith("-")]
    if unknown:
        raise MegatronError(
            f"{', '.join(unknown)}: no flag of Megatron {version}, so a short run with it may leave files behind; "
            f"remove it to have plans tried"
        )
    for dest, why in REFUSED:
        if given.is_given(dest):
            raise given.refusal(f"{why}, so a short run would leave results behind", dest)
    dests = {token.dest for token in given.tokens if token.dest}
    tried = given.without(*(dest for dest in dests if TAKEN_OUT.fullmatch(dest)))
    if "step_batch_size_schedule" in dests:
        tried = tried.with_value("global_batch_size", read_batch(given, Layout()).global_batch_size)
    if any(dest.startswith("one_logger_") for dest in dests):
        tried = tried.with_flag("--no-one-logger")
    if tried.get("log_interval") != 1:
        tried = tried.with_flag("--log-interval", "1")
    # CUDA graphs are captured after additional warm-up iterations.
    captures = options_of(given).graphs.impl != "none"
    capture_warm_ups = 1 + (given.get("cuda_graph_warmup_steps") or 0) if captures else 0
    return TrialWords(tried.words, max(WARM_UPS, capture_warm_ups))


def forces_balance(job: Job) -> bool:
    """Return whether Megatron-LM's trainer can choose the experts of this job at random."""
    return bool(job.model.num_experts) and FORCED_BALANCE in flag_table(job.megatron_version)


def played_arguments(
    arguments: Sequence[str], *, job: Job, layout: Layout, mocks_data: bool, single_layers: bool, captures: bool = False
) -> tuple[str, ...]:
    """Change a command line so that a script trains one rank of a layout alone, without data and checkpoint.

    With `single_layers` the script builds one layer of each kind, and `job` has the numbers of layers, experts and
    samples. `mocks_data` is true if the script takes data from Megatron-LM's trainer, which can generate data. If the
    script `captures` CUDA graphs, it does so after its first step.
    """
    given = Arguments.parse(arguments, job.megatron_version)
    # Formats of FSDP's checkpoints are refused without FSDP.
    dests = [each.dest for each in given.tokens if each.dest and (each.dest, each.value) != ("ckpt_format", "torch")]
    some = OF_MANY_LAYERS * single_layers + DATA * mocks_data + (_GRAPH,) * (not captures)
    gone = "|".join((TAKEN_OUT.pattern, *UNPLAYED, *some))
    written = given.without(*(dest for dest in dests if re.fullmatch(gone, dest)))
    if captures:
        written = written.with_value("cuda_graph_warmup_steps", 1)
    if mocks_data:
        written = written.with_flag("--mock-data").with_value("num_workers", 0)
        if (job.train_iters or PLAYED_STEPS) < PLAYED_STEPS and "train_iters" in dests:
            written = written.with_value("train_iters", PLAYED_STEPS)
        if forces_balance(job):
            written = written.with_flag(FORCED_BALANCE)
    if single_layers:
        written = _with_single_layers(written, given, job)
    # No other rank sends data, so the memory for received data holds arbitrary values.
    written = written.with_flag("--no-check-for-nan-in-loss-and-grad")
    return write_arguments(written.words, job=job, layout=layout)


def _with_single_layers(written: Arguments, given: Arguments, job: Job) -> Arguments:
    """Let a script build as few layers as `job` has, with the user's ratio of stacks."""
    model = job.model
    if not model.hybrid or given.is_given(known_dest(written, "num_layers")):
        stacks = stacks_of(given)
        whole = math.gcd(*stacks.values())
        for dest, size in stacks.items():
            written = written.with_value(dest, size // whole * model.num_layers)
    if model.hybrid:
        depth = f"/{model.hybrid.mtp_pattern}" if model.mtp_num_layers else ""
        dest = next(dest for dest in PATTERN_DESTS if written.option(dest) in written.table)
        written = written.with_value(dest, model.hybrid.pattern + depth)
    written = written.with_value("global_batch_size", job.batch.global_batch_size)
    seq_length = known_dest(written, "seq_length")
    if written.get(seq_length) != model.seq_length:
        written = written.with_value(seq_length, model.seq_length)
    if model.mtp_num_layers:
        written = written.with_value("mtp_num_layers", model.mtp_num_layers)
    # Megatron evaluates lists as Python.
    if model.attention_windows:
        written = written.with_value("window_attn_skip_freq", str(model.has_window).replace(" ", ""))
    if model.linear_layers:
        written = written.with_value("linear_attention_freq", str(list(model.linear_layers)).replace(" ", ""))
    if model.num_experts:
        written = written.with_value("num_experts", model.num_experts)
        written = written.with_value("moe_layer_freq", str(list(model.moe_layer_freq)).replace(" ", ""))
    return written
