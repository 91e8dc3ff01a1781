"""Write benchmarks/data/nvidia_recipes.csv: the flat performance recipes of Megatron-Bridge as Megatron's flags.

`python -m benchmarks.make_recipes CHECKOUT` runs each recipe function of a checkout of NVIDIA-NeMo/Megatron-Bridge.
Stand-ins replace torch, megatron-core and the parts of Bridge that build models, so that the functions only record the
values that they set. Recipes of models without a row in model_shapes.csv, or of GPUs without published figures, are
left out.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.stand_ins import Record, StandIns
from benchmarks.validation.nvidia import DEVICES
from benchmarks.validation.options import DATA

TARGET = DATA / "nvidia_recipes.csv"
COLUMNS = ("release", "phase", "model", "system", "gpus", "precision", "gbs", "mbs", "seq", "tp", "pp")
COLUMNS += ("allocator", "flags", "recipe", "published")
HEAD = """\
# NVIDIA's flat performance recipes as Megatron's flags (figures and layouts only; nothing measured).
# Source: NVIDIA-NeMo/Megatron-Bridge {commit}, src/megatron/bridge/perf_recipes (Apache-2.0), by make_recipes.py.
# allocator: PYTORCH_CUDA_ALLOC_CONF of the recipe. published: newest release whose performance summary has this layout.
"""
REAL = ("megatron.bridge.perf_recipes", "megatron.bridge.recipes", "megatron.bridge.training.mixed_precision")
"""Modules of the checkout that run."""
STAND_INS = ("megatron", "torch", "transformers", "transformer_engine", "omegaconf")
"""Packages whose other modules do not run."""
MODELS = {
    "llama3_8b": "LLAMA3-8B",
    "llama3_70b": "LLAMA3-70B",
    "llama31_405b": "LLAMA3.1-405B",
    "gpt_oss_20b": "GPT-OSS-20B",
    "gpt_oss_120b": "GPT-OSS-120B",
    "deepseek_v3": "DeepSeek-V3",
    "kimi_k2": "Kimi-K2",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "qwen3_235b_a22b": "Qwen3-235B-A22B",
    "qwen3_next_80b_a3b": "Qwen3-Next-80B-A3B",
    "nemotronh_56b": "Nemotron-H-56B",
    "nemotron_3_nano": "Nemotron-3-Nano",
    "nemotron_3_5_lightning": "Nemotron-3.5-Lightning",
    "nemotron_3_super": "Nemotron-3-Super",
    "nemotron_3_ultra": "Nemotron-3-Ultra",
}
PRECISIONS = {
    "bf16": "BF16",
    "fp8cs": "FP8-CS",
    "fp8ds": "FP8-DS",
    "fp8sc": "FP8-SC",
    "fp8mx": "MXFP8",
    "nvfp4": "NVFP4",
}
DEFAULTS = {
    **dict.fromkeys(("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"), 1),
    "expert-model-parallel-size": 1,
    "optimizer": "adam",
}
_STATED = ("#-GPUs", "Precision", "GBS", "MBS", "TP", "PP", "CP", "VP", "EP")
LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
SAME = {
    "model": (
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
        "expert_tensor_parallel_size sequence_parallel microbatch_group_size_per_vp_stage cp_comm_type "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split recompute_granularity "
        "fine_grained_activation_offloading activation_offload_fraction min_offloaded_tensor_size moe_router_fusion "
        "fine_grained_offloading_max_inflight_offloads "
        "moe_token_dispatcher_type moe_flex_dispatcher_backend moe_grouped_gemm moe_permute_fusion "
        "moe_shared_expert_overlap moe_router_force_load_balancing moe_router_padding_for_quantization "
        "moe_router_padding_for_fp8 moe_expert_rank_capacity_factor moe_expert_capacity_factor moe_router_dtype "
        "moe_pad_expert_input_to_capacity moe_paged_stash moe_paged_stash_buffer_size_factor_cuda "
        "moe_paged_stash_buffer_size_factor_cpu mtp_num_layers mtp_use_repeated_layer use_transformer_engine_op_fuser "
        "use_fused_weighted_squared_relu fp8_output_proj"
    ),
    "train": "global_batch_size micro_batch_size",
    "ddp": (
        "use_distributed_optimizer overlap_grad_reduce overlap_param_gather use_megatron_fsdp fsdp_double_buffer "
        "suggested_communication_unit_size keep_fp8_transpose_cache"
    ),
    "optimizer": "optimizer use_precision_aware_optimizer",
    "comm_overlap": "overlap_moe_expert_parallel_comm delay_wgrad_compute",
    "mixed_precision": "bf16 first_last_layers_bf16",
}
"""Settings whose flag has the same name, by part of a recipe."""


class Recipe(Record):
    """A recipe: parts that it does not set exist, and are empty."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self).setdefault(name, Record())


class _Bridge:
    """Bridge's reader of Hugging Face configurations: its models have the sizes that recipes compare."""

    @classmethod
    def from_hf_pretrained(cls, *_: Any, **__: Any) -> _Bridge:
        return cls()

    def get_model_config(self, **_: Any) -> Record:
        return Record(context_parallel_size=1, tensor_model_parallel_size=1, vocab_size=1, finalize=lambda: None)

    to_megatron_provider = get_model_config


def recipes(checkout: Path) -> Iterator[tuple[str, Callable[[], Recipe]]]:
    """Yield name and function of each flat performance recipe of a checkout."""
    source = checkout / "src"
    classes = {"AutoBridge": _Bridge, "ConfigContainer": Recipe}
    sys.meta_path.insert(0, StandIns(STAND_INS, source=source, real=REAL, classes=classes))
    for file in sorted(source.glob("megatron/bridge/perf_recipes/*/*/*.py")):
        name = ".".join(file.relative_to(source).with_suffix("").parts)
        module = importlib.import_module(name.removesuffix(".__init__"))
        for one, function in vars(module).items():
            if one.endswith("_config") and getattr(function, "__module__", "") == module.__name__ and one[0] != "_":
                yield one, function


def published(checkout: Path) -> dict[tuple[str, ...], str]:
    """Return the newest release whose performance summary has a layout, by model, GPUs, precision and degrees."""
    found: dict[tuple[str, ...], str] = {}
    for name in ("performance-summary.md", "performance-summary-archive.md"):
        release = model = ""
        for line in (checkout / "docs" / name).read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            if line.startswith("#"):
                release = cells[0].split()[1] if "Container" in line else release
                model = line.partition("Model: ")[2]
            elif "#-GPUs" in cells:
                head = cells
            elif model and len(cells) > 1 and not line.startswith("|-"):
                row = dict(zip(head, cells, strict=True))
                wanted = (model, row["System"].removeprefix("DGX-"), *(row[name] for name in _STATED))
                found.setdefault(tuple(map(_plain, wanted)), release)
    return found


def _plain(text: Any) -> str:
    """Return a cell without the spelling that tables and recipes do not share; no value means 1."""
    return (
        str(text or 1)
        .replace("n/a", "1")
        .replace("FP8-CS", "FP8")
        .replace("_", "")
        .replace(" ", "")
        .replace("-", "")
        .lower()
    )


def rows(checkout: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each recipe that trains a known model from the start on a known GPU."""
    known = published(checkout)
    for name, function in recipes(checkout):
        found = re.fullmatch(r"(\w+?)_pretrain_(\d+)gpu_([a-z]+\d+)_([a-z0-9]+)_?(\w*)config", name)
        if not found or found[1] not in MODELS or found[3].upper() not in DEVICES:
            continue
        recipe = function()
        if isinstance(recipe.mixed_precision, str):
            named = sys.modules["megatron.bridge.training.mixed_precision"].MIXED_PRECISION_RECIPES
            recipe.mixed_precision = named[recipe.mixed_precision]()
        flags, model = flags_of(recipe), recipe.model
        degrees = (
            model.tensor_model_parallel_size,
            model.pipeline_model_parallel_size,
            model.context_parallel_size,
            model.virtual_pipeline_model_parallel_size,
            model.expert_model_parallel_size,
        )
        batch = (recipe.train.global_batch_size, recipe.train.micro_batch_size)
        wanted = (MODELS[found[1]], found[3], found[2], PRECISIONS[found[4]], *batch, *degrees)
        yield {
            "release": "Bridge v0.6",
            "phase": "pretrain",
            "model": MODELS[found[1]],
            "system": found[3].upper(),
            "gpus": found[2],
            "precision": PRECISIONS[found[4]],
            "gbs": recipe.train.global_batch_size,
            "mbs": recipe.train.micro_batch_size,
            "seq": recipe.model.seq_length or recipe.dataset.seq_length,
            "tp": recipe.model.tensor_model_parallel_size or 1,
            "pp": recipe.model.pipeline_model_parallel_size or 1,
            "allocator": (recipe.env_vars or {}).get("PYTORCH_CUDA_ALLOC_CONF", ""),
            "flags": " ".join(f"--{flag}" if value is True else f"--{flag} {value}" for flag, value in flags.items()),
            "recipe": name,
            "published": known.get(tuple(map(_plain, wanted)), ""),
        }


def flags_of(recipe: Recipe) -> dict[str, Any]:
    """Return the flags that a recipe's settings mean."""
    flags: dict[str, Any] = {}
    for part, names in SAME.items():
        values = vars(getattr(recipe, part) or Record())
        flags |= {name.replace("_", "-"): _words(values.get(name)) for name in names.split()}
    if str(flags["moe-router-dtype"]) not in {"fp32", "fp64"}:
        flags["moe-router-dtype"] = TYPES.get(str(flags["moe-router-dtype"]), "").replace("bf16", "") or None
    flags["overlap-param-gather"] = flags["overlap-param-gather"] and flags["overlap-grad-reduce"]
    model, types = recipe.model, recipe.optimizer
    flags |= _pipeline(model) | _memory_options(model) | _graphs(model) | _precision(recipe) | _sharding(recipe.ddp)
    if types.use_precision_aware_optimizer:
        names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        flags |= {name.replace("_", "-"): TYPES.get(str(getattr(types, name) or "float32")) for name in names}
    # Bridge's models have these defaults.
    flags["cross-entropy-loss-fusion"] = model.cross_entropy_loss_fusion is not False
    flags["moe-grouped-gemm"] = (model.expert_model_parallel_size or 1) > 1 or flags["moe-grouped-gemm"]
    flags["cross-entropy-fusion-impl"] = model.cross_entropy_fusion_impl
    # Bridge gives the buffers of gradients no layout of whole matrices.
    flags["no-use-layer-wise-param-layout"] = "muon" in (types.optimizer or "")
    flags["use-nccl-ub"] = recipe.ddp.nccl_ub
    flags["no-gradient-accumulation-fusion"] = model.gradient_accumulation_fusion is False
    flags["no-check-for-nan-in-loss-and-grad"] = True
    flags["tp-comm-overlap"] = bool(
        recipe.comm_overlap and recipe.comm_overlap.tp_comm_overlap and model.sequence_parallel
    )
    if flags["moe-token-dispatcher-type"] != "flex":
        flags["moe-flex-dispatcher-backend"] = None
    return {name: value for name, value in flags.items() if value not in (None, False, "", DEFAULTS.get(name))}


def _words(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value


def _pipeline(model: Record) -> dict[str, Any]:
    layout, virtual = model.pipeline_model_parallel_layout, model.virtual_pipeline_model_parallel_size
    if isinstance(layout, list):
        layout = "|".join("".join(LETTERS[str(kind)] for kind in stage) for stage in layout)
        layout = re.sub(r"(t+\|)\1{2,}", lambda run: f"({run[1]})*{len(run[0]) // len(run[1])}", layout)
    return {
        "pipeline-model-parallel-layout": layout,
        "num-virtual-stages-per-pipeline-rank": virtual if (virtual or 1) > 1 and not layout else None,
        "decoder-first-pipeline-num-layers": model.num_layers_in_first_pipeline_stage,
        "decoder-last-pipeline-num-layers": model.num_layers_in_last_pipeline_stage,
    }


def _memory_options(model: Record) -> dict[str, Any]:
    granularity = model.recompute_granularity
    return {
        "recompute-modules": _words(model.recompute_modules) if granularity == "selective" else None,
        "recompute-method": model.recompute_method if granularity == "full" else None,
        "recompute-num-layers": model.recompute_num_layers if granularity == "full" else None,
        "offload-modules": _words(model.offload_modules) if model.fine_grained_activation_offloading else None,
        "cpu-offloading-num-layers": model.cpu_offloading_num_layers if model.cpu_offloading else None,
    }


def _graphs(model: Record) -> dict[str, Any]:
    impl = model.cuda_graph_impl
    scopes = model.cuda_graph_modules or model.cuda_graph_scope
    names = [scopes] if isinstance(scopes, str) else list(scopes or ())
    if "full_iteration" in names:
        impl, names = "full_iteration", []
    if impl in (None, "none"):
        return {}
    return {
        "cuda-graph-impl": impl,
        "cuda-graph-modules": " ".join(map(str, names)) if impl != "full_iteration" else "",
    }


def _precision(recipe: Recipe) -> dict[str, Any]:
    """Return the flags of formats; the settings of the gradients in the data-parallel part are those of the run."""
    one, ddp = recipe.mixed_precision, recipe.ddp
    is_kept = one.fp8 and not ddp.use_megatron_fsdp and one.reuse_grad_buf_for_mxfp8_param_ag
    return {
        "grad-reduce-in-bf16": one.grad_reduce_in_fp32 is False,
        "fp8-format": one.fp8,
        "fp8-recipe": one.fp8_recipe if one.fp8 else None,
        "fp8-param-gather": bool(one.fp8 and one.fp8_param_gather),
        "reuse-grad-buf-for-mxfp8-param-ag": is_kept,
        "fp4-format": one.fp4,
        "fp4-recipe": one.fp4_recipe if one.fp4 else None,
        "fp4-param-gather": bool(one.fp4 and one.fp4_param_gather),
        "num-layers-at-start-in-bf16": one.num_layers_at_start_in_bf16 if one.first_last_layers_bf16 else None,
        "num-layers-at-end-in-bf16": one.num_layers_at_end_in_bf16 if one.first_last_layers_bf16 else None,
    }


def _sharding(ddp: Record) -> dict[str, Any]:
    if not ddp.use_megatron_fsdp:
        return {}
    return {
        "ckpt-format": "fsdp_dtensor",
        "data-parallel-sharding-strategy": ddp.data_parallel_sharding_strategy,
        "num-distributed-optimizer-instances": ddp.num_distributed_optimizer_instances,
        "outer-dp-sharding-strategy": ddp.outer_dp_sharding_strategy,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="folder of Megatron-Bridge")
    parser.add_argument("--commit", help="commit of the checkout; the default is what git says there")
    given = parser.parse_args(argv)
    command = ["git", "-C", str(given.checkout), "rev-parse", "--short=10", "HEAD"]
    commit = given.commit or subprocess.check_output(command, text=True).strip()
    found: list[Mapping[str, Any]] = list(rows(given.checkout))
    with TARGET.open("w", newline="", encoding="utf-8") as file:
        file.write(HEAD.format(commit=commit))
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    print(f"{len(found)} recipes in {TARGET}")


if __name__ == "__main__":
    main()
