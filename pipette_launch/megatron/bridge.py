"""The dialect of Megatron-Bridge: a recipe, and overrides such as `model.tensor_model_parallel_size=4`.

A recipe is a Python function. So the words alone do not describe a job, and Bridge's whole configuration is needed
(`ConfigContainer` of Megatron-Bridge 0.6): from a file that Bridge saved, or from the job's script. Most settings have
the name of the destination of Megatron's flag. `settings_of` holds all other rules.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from pipette_launch.defaults import RECIPE_S
from pipette_launch.errors import FileFormatError, MegatronError
from pipette_launch.facts import Job, Layout, files
from pipette_launch.facts.layout import SWITCHES
from pipette_launch.megatron.checkpoint_files import TRACKER_NAME
from pipette_launch.megatron.chunks import ACCOUNTS, ENDS, PATTERN_DESTS, STAGES
from pipette_launch.megatron.flags import Arguments, Flag, flag_table
from pipette_launch.megatron.layout import (
    DEGREES,
    ETP,
    GROUP_SIZE,
    OFFLOAD_DESTS,
    PP,
    RECOMPUTE_DESTS,
    TP,
    write_arguments,
)

Config = Mapping[str, Any]
VPP, DIVISOR = "virtual_pipeline_model_parallel_size", "make_vocab_size_divisible_by"
REMEDY = "give Megatron-LM's own flags, or to pipette the saved configuration of Megatron-Bridge (--bridge-config FILE)"
GBS = "global_batch_size"
FIELDS = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
"""Bridge's name of a setting of the layout, by Megatron's destination, if the names differ."""
SPLIT = (STAGES, *ENDS, *ACCOUNTS, PP)
"""Settings that split layers among stages. Bridge's runner derives settings that the words do not name."""
WRITTEN = (*SPLIT, *PATTERN_DESTS, *DEGREES.values(), GROUP_SIZE, "micro_batch_size", GBS)
WRITTEN += (*SWITCHES, *RECOMPUTE_DESTS[1:], *OFFLOAD_DESTS)
SECTIONS = ("model", "train", "ddp", "optimizer", "comm_overlap", "dist")
"""Sections of a configuration that hold settings of a layout."""
SOME = {
    "train": ("micro_batch_size", GBS, "rampup_batch_size", "train_iters", "train_samples"),
    "dist": ("use_megatron_fsdp", "use_torch_fsdp2", "use_tp_pp_dp_mapping", "use_gloo_process_groups"),
    "dataset": ("dataloader_type", "eod_mask_loss"),
    "logger": ("log_interval",),
}
"""Settings that describe time and memory, of sections that also hold other settings."""
OF_BUCKETS = (
    *("average_in_collective", "bucket_size", "num_buckets", "pad_buckets_for_high_nccl_busbw"),
    *("param_name_patterns_for_fp32_local_accumulation", "reduce_scatter_with_fp32_accumulation"),
)
"""Settings of `ddp` whose flags begin with `--ddp-`."""
NOT_PRICED: Mapping[str, Config] = {
    "model": {
        "activation_func_fp8_input_store": False,
        "cpu_offloading_activations": True,
        "cpu_offloading_double_buffering": False,
        "cpu_offloading_weights": False,
        "cuda_graph_retain_backward_graph": False,
        "deallocate_pipeline_outputs": True,
        "disable_parameter_transpose_cache": False,
        "expert_gtp_weight_remat_size": 1,
        "fp8_dot_product_attention": False,
        "fp8_multi_head_attention": False,
        "fused_single_qkv_rope": False,
        "gtp_weight_remat_size": 1,
        "memory_efficient_layer_norm": False,
        "num_microbatches_with_partial_activation_checkpoints": None,
        "quant_recipe": None,
        "tp_comm_overlap_disable_fc1": False,
        "tp_comm_overlap_disable_qkv": False,
        "use_kitchen": False,
    },
    "optimizer": {"store_param_remainders": True},
}
"""Settings without a flag of Megatron-LM that change time or memory but no prediction, with Megatron-LM's values.

`fp8_dot_product_attention` is not priced, because attention gains less than the FP8 rate promises: with DeepSeek-V3's
heads and 4096 tokens, forward and backward take 1.36 times less time in MXFP8 than in BF16 on GB300, and 1.32 times
less on GB200 (cudnn-frontend a9337ce and 03c5a5d, sdpa_benchmark_training/results/dsv3).
"""
_OF_FORMATS = ("fp8_dot_product_attention", "fp8_multi_head_attention", "disable_parameter_transpose_cache")
"""Settings that have an effect only with FP8 or FP4."""
LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
OVERRIDE = re.compile(r"[+~]*(model|train|ddp|optimizer|scheduler|dataset|comm_overlap|mixed_precision|dist)\.[\w.]+=")
HYDRA = re.compile(
    r"[+~]*(trainer|exp_manager|algorithm|actor_rollout_ref|hydra)\.\w|--config-(name|path|dir)\b|-c[np]\b"
)
"""Words of Hydra that Megatron-Bridge does not have."""
OPTIONS = {"tp": f"model.{TP}", "pp": f"model.{PP}", "vp": f"model.{VPP}", "etp": f"model.{ETP}"}
OPTIONS |= {name: f"model.{DEGREES[name]}" for name in ("cp", "ep")}
OPTIONS |= {"mb": "train.micro_batch_size", "gb": f"train.{GBS}", "sl": "dataset.seq_length", "ms": "train.train_iters"}
"""Overrides that short options of Bridge's runner, such as `-tp`, stand for. Long options have the setting's name."""
SAVES = "`run_recipe.py ... --dry-run` saves ConfigContainer.yaml, and each checkpoint has run_config.yaml"


@dataclass(frozen=True, slots=True)
class Overrides:
    """Words of a job of Megatron-Bridge, with the configuration that the words give."""

    words: tuple[str, ...]
    config: Config
    is_translated: ClassVar[bool] = True
    """True if `flags` stand for settings of another trainer, which has its own checks."""

    def flags(self, version: str) -> tuple[str, ...]:
        """Return Megatron's flags that describe the same job. Raise MegatronError for jobs that no flags describe."""
        table = flag_table(version)
        options: dict[str, list[Flag]] = {}
        for flag in table.values():
            if flag.option.startswith("--"):
                options.setdefault(flag.dest, []).append(flag)
        found = settings_of(self.config)
        return tuple(word for dest, value in found.items() for word in _flag_words(options.get(dest, ()), value))

    @property
    def notes(self) -> tuple[str, ...]:
        """Note on settings that change time or memory but no prediction, besides the note on flags."""
        shown, start = unpriced_settings(self.config), "not priced, so time and memory are predicted as without these"
        return (f"{start} settings of Megatron-Bridge: {', '.join(shown)}",) if shown else ()

    def written(self, job: Job, layout: Layout) -> tuple[str, ...]:
        """Return the words with the overrides of a layout. Overrides that the user wrote for it are replaced."""
        flags = self.flags(job.megatron_version)
        given = Arguments.parse(flags, job.megatron_version)
        new = Arguments.parse(write_arguments(flags, job=job, layout=layout), job.megatron_version)
        changes = {FIELDS.get(dest, dest): new.get(dest) for dest in WRITTEN if new.get(dest) != given.get(dest)}
        if layout.tp == 1 and given.get("sequence_parallel"):
            # Unlike Megatron-LM, Bridge refuses sequence parallelism at TP 1.
            changes["sequence_parallel"] = False
        if layout.vpp != job.own.vpp or any(FIELDS.get(dest, dest) in changes for dest in SPLIT):
            changes |= {FIELDS.get(dest, dest): new.get(dest) for dest in SPLIT if self._paths(FIELDS.get(dest, dest))}
            changes[VPP] = layout.vpp if layout.vpp > 1 else None
        if not any(word.startswith(f"train.{GBS}=") for word in self.words):
            # Bridge's runner scales the batch of a benchmark with DP unless the words name the batch.
            changes[GBS] = job.batch.global_batch_size
        if new.is_given("padded_vocab_size") and not given.is_given("padded_vocab_size"):
            changes[DIVISOR] = new.get("padded_vocab_size") // layout.tp
        overrides = {
            path: value
            for name, value in changes.items()
            for path in (*self._paths(name),) or (f"{'train' if name.endswith('batch_size') else 'model'}.{name}",)
        }
        kept = [word for word in self.words if word.lstrip("+~").partition("=")[0] not in overrides]
        return (*kept, *(f"{path}={_hydra(value)}" for path, value in overrides.items()))

    def _paths(self, name: str) -> list[str]:
        """Return the paths of a setting in the configuration. Bridge demands that all of them agree."""
        places = {section: self.config.get(section) for section in SECTIONS}
        places["model.transformer"] = _section(places["model"]).get("transformer")
        return [f"{place}.{name}" for place, values in places.items() if name in _section(values)]


def is_bridge(words: Sequence[str], script: str) -> bool:
    """Return whether a job's words are overrides of a recipe, or its script imports Megatron-Bridge.

    Raise MegatronError for words of NeMo 1 or another trainer with Hydra, whose `model.NAME=VALUE` look alike.
    """
    foreign = next((word for word in words if HYDRA.match(word)), "")
    if foreign and any(map(OVERRIDE.match, words)):
        reason = "a setting of NeMo 1 or another trainer with Hydra, whose configuration file is not read"
        raise MegatronError(f"{foreign}: {reason}; {REMEDY}")
    if any(OVERRIDE.match(word) for word in words):
        return True
    path = Path(script)
    return path.is_file() and "megatron.bridge" in path.read_text(encoding="utf-8", errors="replace")


def read_saved(path: Path, words: Sequence[str]) -> Overrides:
    """Read a configuration that Bridge saved (YAML or JSON), and apply the overrides among the words."""
    config = _configuration(files.read_bytes(path).decode("utf-8", errors="replace"), str(path))
    for key, value in _overrides(words):
        *sections, name = key.split(".")
        place: Any = config
        for section in sections:
            place = place.get(section) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place[name] = _value(value)
    return Overrides(tuple(words), config)


def from_script(script: str, words: Sequence[str], *, world_size: int) -> Overrides:
    """Run a script or module up to Bridge's `pretrain`, as rank 0 of `world_size`, and take its configuration.

    Raise MegatronError if Bridge is not installed, or if the script does not reach `pretrain`.
    """
    if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
        needs = "needs megatron-bridge here, or its saved configuration (--bridge-config FILE)"
        shown = " ".join([script, *words[:2], *(["..."] if len(words) > len(words[:2]) else [])])
        raise MegatronError(f"{shown}: a recipe of Megatron-Bridge {needs}; {SAVES}")
    program = (script,) if Path(script).is_file() else ("-m", script)
    command = (sys.executable, "-m", "pipette_patches.bridge", str(world_size), *program, *words)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or "." for entry in sys.path)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RECIPE_S, check=False, env=environment)
    except subprocess.TimeoutExpired as error:
        raise MegatronError(f"{script}: made no configuration within {RECIPE_S:.0f} s") from error
    if done.returncode:
        last = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")
        raise MegatronError(f"{script}: its configuration of Megatron-Bridge cannot be read: {last}")
    return Overrides(tuple(words), _configuration(done.stdout, script))


def _overrides(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return paths and values of options and overrides. Overrides come last, because the runner prefers them."""
    names = {f"-{short}": path for short, path in OPTIONS.items()}
    names |= {f"--{path.rpartition('.')[2]}": path for path in OPTIONS.values()}
    pairs = [word.partition("=")[::2] for word in words]
    followed = zip(pairs, (*words[1:], ""), strict=False)
    options = [(names[name], value or following) for (name, value), following in followed if name in names]
    return options + [(name.lstrip("+~"), value) for name, value in pairs if OVERRIDE.match(f"{name}=")]


def _configuration(text: str, source: str) -> dict[str, Any]:
    """Read a configuration in JSON or YAML. `source` names the configuration in errors."""
    config: Any = None
    try:
        config = json.loads(text)
    except ValueError:
        try:
            import yaml  # type: ignore[import-untyped]
        except ModuleNotFoundError as error:
            raise MegatronError(f"{source}: YAML needs PyYAML; pip install pyyaml, or save as JSON") from error
        try:
            config = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise FileFormatError(f"{source}: neither JSON nor YAML ({error})") from error
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise FileFormatError(f"{source}: no configuration of Megatron-Bridge, which has a section `model`; {SAVES}")
    return config


def _value(text: str) -> Any:
    """Read the value of an override, in the part of Hydra's grammar that settings of jobs use."""
    plain = text.strip()
    if plain[:1] == "[" and plain[-1:] == "]":
        return [_value(item) for item in plain[1:-1].split(",") if item.strip()]
    if plain[:1] in {"'", '"'} and plain[-1:] == plain[:1]:
        return plain[1:-1]
    try:
        return json.loads(plain.lower())
    except ValueError:
        return plain


def _hydra(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_hydra, value))}]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./-]+", value) else f"'{value}'"
    return json.dumps(value)


def _section(values: Any) -> Config:
    return values if isinstance(values, dict) else {}


def _plain(value: Any) -> Any:
    """Return a setting without Bridge's notation of enumerations, types and functions."""
    if isinstance(value, dict):
        name = value.get("_name_") or str(value.get("_target_", "")).rpartition(".")[2]
        return TYPES.get(name, name) or None
    return value


def _flag_words(flags: Sequence[Flag], value: Any) -> list[str]:
    """Return the words that set a destination. Return no words for the default, and for unknown destinations."""
    if value is None or not flags or value == flags[0].default:
        return []
    for flag in flags:
        if flag.nargs == 0 and isinstance(value, bool) and flag.constant == value:
            return [flag.option]
        if flag.nargs is None and not isinstance(value, bool):
            text = str(int(value)) if flag.kind == "int" and not isinstance(value, (str, list)) else str(value)
            return [f"{flag.option}={text.replace(' ', '')}"]
        if flag.nargs not in (0, None):
            items = value if isinstance(value, list) else [value]
            return [flag.option, *map(str, items)] if items else []
    return []


def settings_of(config: Config) -> dict[str, Any]:
    """Return Megatron's settings, by destination, that mean the same as a configuration of Bridge.

    Raise MegatronError if the configuration describes a job that no flags describe.
    """
    model = dict(_section(config.get("model")))
    model |= _section(model.pop("transformer", None))
    ddp, optimizer = _section(config.get("ddp")), _section(config.get("optimizer"))
    dataset, precision = _section(config.get("dataset")), config.get("mixed_precision")
    _check(config, model)
    if isinstance(precision, str):
        precision = _named_precision(precision)
    precision = {"grad_reduce_in_fp32": ddp.get("grad_reduce_in_fp32"), **model, **_section(precision)}
    found = {name: _section(config.get(part)).get(name) for part, names in SOME.items() for name in names}
    length = dataset.get("seq_length") or dataset.get("sequence_length") or model.get("seq_length")
    found |= {**ddp, **optimizer, **model, "seq_length": length, "max_position_embeddings": length}
    found = {name: _plain(value) for name, value in found.items()}
    for name in ("use_distributed_optimizer", "overlap_param_gather"):
        found[name] = bool(ddp.get(name) or optimizer.get(name))
    fsdp = _section(config.get("dist")).get("use_megatron_fsdp") or ddp.get("use_megatron_fsdp")
    found |= _shape(model) | _vocabulary(config, model)
    found |= pipeline(model) | memory_options(model) | graphs(model) | precision_flags(precision, fsdp=bool(fsdp))
    found |= sharding(ddp, fsdp=bool(fsdp)) | _overlaps(config, found)
    if not found["grad_reduce_in_bf16"]:
        # Bridge passes `grad_reduce_in_fp32` on to the buffers of gradients, whatever the optimizer's type is.
        found["main_grads_dtype"] = None
    found |= {f"ddp_{name}": ddp.get(name) for name in OF_BUCKETS}
    found["sft"] = not str(dataset.get("_target_", "GPTDatasetConfig")).endswith("GPTDatasetConfig")
    # Bridge drops the mask unless the data set asks for it.
    found["create_attention_mask_in_dataloader"] = dataset.get("skip_getting_attention_mask_from_dataset") is False
    # Bridge gives the buffers of gradients no layout of whole matrices.
    found["use_layer_wise_param_layout"] = "muon" not in str(optimizer.get("optimizer"))
    checks = (
        ddp.get("check_for_nan_in_grad"),
        _section(config.get("rerun_state_machine")).get("check_for_nan_in_loss"),
    )
    found["check_for_nan_in_loss_and_grad"] = all(checks)
    if found.get("moe_token_dispatcher_type") != "flex":
        found["moe_flex_dispatcher_backend"] = None
    if found.get("moe_router_dtype") not in {"fp32", "fp64"}:
        found["moe_router_dtype"] = None
    # Bridge accepts the second overlap without the first, and Megatron-LM does not.
    found["overlap_param_gather"] = bool(found["overlap_param_gather"] and found.get("overlap_grad_reduce"))
    return found


def unpriced_settings(config: Config) -> tuple[str, ...]:
    """Return the settings of `NOT_PRICED` with other values than Megatron-LM's, as texts `model.NAME=VALUE`."""
    model = dict(_section(config.get("model")))
    model |= _section(model.pop("transformer", None))
    precision = _section(config.get("mixed_precision"))
    # Bridge copies the settings of mixed precision into the model.
    model |= {name: precision[name] for name in (*_OF_FORMATS, "fp8", "fp4") if name in precision}
    sections = {"model": model, "optimizer": _section(config.get("optimizer"))}
    unused = () if model.get("fp8") or model.get("fp4") else _OF_FORMATS
    return tuple(
        f"{section}.{name}={_hydra(_plain(sections[section][name]))}"
        for section, usual in NOT_PRICED.items()
        for name, value in usual.items()
        if name not in unused and sections[section].get(name) not in (None, value)
    )


def _check(config: Config, model: Config) -> None:
    if _section(config.get("peft")):
        remedy = "keep the recipe's own layout, or plan the recipe that trains all weights (--mode sft)"
        raise MegatronError(f"peft: memory and time of frozen weights with adapters are not modelled; {remedy}")
    for name, value in model.items():
        if value and re.match(r"vision_(config|transformer)|audio_config|thinker|diffusion", name):
            raise MegatronError(f"model.{name}: no formula describes a model with several towers")
    load = _section(config.get("checkpoint")).get("load")
    if load and (Path(load) / TRACKER_NAME).is_file():
        raise MegatronError(
            f"checkpoint.load={load}: continuing a checkpoint of Bridge in another layout is not checked"
        )


def _named_precision(name: str) -> dict[str, Any]:
    plain = name.replace("-", "_")
    if plain not in {"bf16_mixed", "fp16_mixed"}:
        reason = "only Bridge knows the settings of this name; state them in the configuration, or run Bridge here"
        raise MegatronError(f"mixed_precision={name}: {reason}")
    return {"bf16": plain[0] == "b", "fp16": plain[0] == "f", "grad_reduce_in_fp32": plain[0] == "b"}


def _shape(model: Config) -> dict[str, Any]:
    heads, groups = model.get("num_attention_heads"), model.get("num_query_groups")
    activation = str(_plain(model.get("activation_func")))
    is_gated, is_quick = bool(model.get("gated_linear_unit")), "quick_gelu" in activation
    windows, base, pattern = (model.get(name) for name in ("window_size", "rotary_base", "interleaved_attn_pattern"))
    windows = [windows - 1, 0] if isinstance(windows, int) else windows
    return {
        "num_experts": model.get("num_moe_experts"),
        ETP: model.get(ETP) if model.get("num_moe_experts") else None,
        "group_query_attention": groups not in (None, heads),
        "swiglu": is_gated and not is_quick,
        "quick_geglu": is_gated and is_quick,
        "squared_relu": "squared_relu" in activation,
        "untie_embeddings_and_output_weights": model.get("share_embeddings_and_output_weights") is False,
        "bias_swiglu_fusion" if is_gated else "bias_gelu_fusion": model.get("bias_activation_fusion"),
        # Gemma's layers with a window have another base, which changes no time.
        "rotary_base": base[-1] if isinstance(base, list) else base,
        "window_size": windows and ",".join(map(str, windows)),
        "window_attn_skip_freq": sum(pattern) if pattern else model.get("window_attn_skip_freq"),
    }


def _vocabulary(config: Config, model: Config) -> dict[str, Any]:
    """Return the vocabulary: the tokenizer's vocabulary is padded, and the model's own size is not padded."""
    tokenizer = _section(config.get("tokenizer"))
    if model.get("vocab_size") and not tokenizer.get("use_tokenizer_vocab_size"):
        is_padded = model.get("should_pad_vocab")
        return {"vocab_size": model["vocab_size"], "padded_vocab_size": None if is_padded else model["vocab_size"]}
    size = tokenizer.get("vocab_size")
    named = {name: None if size else tokenizer.get(name) for name in ("tokenizer_type", "tokenizer_model")}
    return {"vocab_size": size, **named}


def pipeline(model: Config) -> dict[str, Any]:
    """Return the flags that split layers among stages."""
    stages, virtual = model.get("pipeline_model_parallel_layout"), model.get(VPP)
    if isinstance(stages, list):
        stages = "|".join("".join(LETTERS[str(kind)] for kind in stage) for stage in stages)
        stages = re.sub(r"(t+\|)\1{2,}", lambda run: f"({run[1]})*{len(run[0]) // len(run[1])}", stages)
    is_split = stages or any("|" in str(model.get(name)) for name in PATTERN_DESTS)
    return {
        STAGES: stages,
        "num_virtual_stages_per_pipeline_rank": virtual if (virtual or 1) > 1 and not is_split else None,
        # Bridge saves the default: one group for all stages.
        GROUP_SIZE: None if model.get(GROUP_SIZE) == model.get(PP) else model.get(GROUP_SIZE),
        **{dest: model.get(name) for dest, name in FIELDS.items()},
    }


def memory_options(model: Config) -> dict[str, Any]:
    """Return the flags of recompute and offloading. Bridge ignores the values of options that are off.

    Selective recompute of an empty list of modules recomputes nothing, but Megatron's command line has no words for it.
    """
    granularity = model.get("recompute_granularity")
    used = {
        "recompute_granularity": granularity != "selective" or model.get("recompute_modules") != [],
        "recompute_modules": granularity == "selective",
        "recompute_method": granularity == "full",
        "recompute_num_layers": granularity == "full",
        "offload_modules": model.get("fine_grained_activation_offloading"),
        "cpu_offloading_num_layers": model.get("cpu_offloading"),
    }
    return {name: model.get(name) if is_used else None for name, is_used in used.items()}


def graphs(model: Config) -> dict[str, Any]:
    """Return the flags of CUDA graphs, with both names of the flag for modules. A release has one of the names."""
    impl, modules = model.get("cuda_graph_impl"), model.get("cuda_graph_modules") or model.get("cuda_graph_scope")
    names = modules.split(",") if isinstance(modules, str) else [str(_plain(each)) for each in modules or ()]
    named = [name for name in names if name != "full"] or None
    impl = None if impl == "none" else impl
    return {"cuda_graph_impl": impl, "cuda_graph_modules": named, "cuda_graph_scope": named}


def precision_flags(one: Config, *, fsdp: bool) -> dict[str, Any]:
    """Return the flags of formats."""
    edges = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    is_kept = bool(one.get("fp8") and not fsdp and one.get("reuse_grad_buf_for_mxfp8_param_ag"))
    found = {name: one.get(name) for name in ("bf16", "fp16", "first_last_layers_bf16", "fp8", "fp4")}
    found |= {name: one.get(name) if one.get("first_last_layers_bf16") else None for name in edges}
    for kind in ("fp8", "fp4"):
        is_on = bool(one.get(kind))
        found[f"{kind}_recipe"] = one.get(f"{kind}_recipe") if is_on else None
        found[f"{kind}_param_gather"] = is_on and bool(one.get(f"{kind}_param_gather") or one.get(f"{kind}_param"))
    is_reduced = one.get("grad_reduce_in_fp32") is False and bool(one.get("bf16"))
    return {**found, "grad_reduce_in_bf16": is_reduced, "reuse_grad_buf_for_mxfp8_param_ag": is_kept}


def sharding(ddp: Config, *, fsdp: bool) -> dict[str, Any]:
    """Return the flags of Megatron-FSDP."""
    names = ("data_parallel_sharding_strategy", "outer_dp_sharding_strategy")
    values = {name: ddp.get(name) if fsdp else None for name in names}
    return {"use_megatron_fsdp": fsdp, "ckpt_format": "fsdp_dtensor" if fsdp else None, **values}


def _overlaps(config: Config, found: Config) -> dict[str, Any]:
    """Return the flags of overlaps, as Bridge's `comm_overlap` sets them. Bridge chooses None as Megatron-LM does."""
    wanted = config.get("comm_overlap")
    if not isinstance(wanted, dict):
        return {}
    usual: dict[str, Any] = {"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False}
    usual |= {"defer_embedding_wgrad_compute": False, "wgrad_deferral_limit": 0}
    if found["use_distributed_optimizer"]:
        usual |= {"overlap_grad_reduce": True, "overlap_param_gather": True}
        usual["overlap_param_gather_with_optimizer_step"] = False
    is_sharded = (found.get(TP) or 1) > 1 and bool(found.get("sequence_parallel"))
    chosen = {name: value if wanted.get(name) is None else wanted[name] for name, value in usual.items()}
    chosen |= {"overlap_p2p_comm": None, "align_param_gather": None}
    return {**chosen, "tp_comm_overlap": bool(wanted.get("tp_comm_overlap") and is_sharded)}


# -- dialects: the words by which a job's script takes its settings


@dataclass(frozen=True, slots=True)
class Flags:
    """Megatron's own flags."""

    words: tuple[str, ...]
    is_translated: ClassVar[bool] = False
    notes: ClassVar[tuple[str, ...]] = ()
    """Empty, because `unpriced_note` finds the flags that no prediction uses."""

    def flags(self, version: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the words themselves."""
        return self.words

    def written(self, job: Job, layout: Layout) -> tuple[str, ...]:
        """Return the words with the flags of a layout."""
        return write_arguments(self.words, job=job, layout=layout)


Dialect: TypeAlias = Flags | Overrides
"""Reader and writer of the words of a job's script."""


def dialect_of(words: Sequence[str], *, script: str, world_size: int, saved: Path | None = None) -> Dialect:
    """Return the dialect of a job's words.

    `saved` is a configuration that Megatron-Bridge saved. Without this file, a script of Megatron-Bridge runs up to its
    training as one of `world_size` ranks. Raise PipetteError if the configuration cannot be read.
    """
    if saved is not None:
        return read_saved(saved, words)
    if is_bridge(words, script):
        return from_script(script, words, world_size=world_size)
    return Flags(tuple(words))
