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
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from benchmarks.stand_ins import Record, StandIns
from benchmarks.validation.nvidia import DEVICES
from benchmarks.validation.options import DATA
from pipette_launch.megatron import bridge, newest_release
from pipette_launch.megatron.bridge import Overrides
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.layout import ETP

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
_STATED = ("#-GPUs", "Precision", "GBS", "MBS", "TP", "PP", "CP", "VP", "EP")
KEPT = (
    "tensor_model_parallel_size pipeline_model_parallel_size pipeline_model_parallel_layout "
    "microbatch_group_size_per_vp_stage context_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size sequence_parallel num_virtual_stages_per_pipeline_rank "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers cp_comm_type "
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split global_batch_size micro_batch_size "
    "recompute_granularity recompute_method recompute_num_layers recompute_modules cpu_offloading_num_layers "
    "fine_grained_activation_offloading offload_modules activation_offload_fraction min_offloaded_tensor_size "
    "fine_grained_offloading_max_inflight_offloads moe_router_fusion moe_token_dispatcher_type "
    "moe_flex_dispatcher_backend moe_grouped_gemm moe_permute_fusion moe_shared_expert_overlap moe_router_dtype "
    "moe_router_force_load_balancing moe_router_padding_for_quantization moe_router_padding_for_fp8 "
    "moe_expert_rank_capacity_factor moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_paged_stash "
    "moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu mtp_num_layers "
    "mtp_use_repeated_layer use_transformer_engine_op_fuser use_fused_weighted_squared_relu "
    "use_distributed_optimizer overlap_grad_reduce overlap_param_gather use_megatron_fsdp fsdp_double_buffer "
    "ckpt_format data_parallel_sharding_strategy outer_dp_sharding_strategy num_distributed_optimizer_instances "
    "suggested_communication_unit_size keep_fp8_transpose_cache nccl_ub gradient_accumulation_fusion optimizer "
    "use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype "
    "overlap_moe_expert_parallel_comm delay_wgrad_compute tp_comm_overlap use_layer_wise_param_layout bf16 "
    "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 grad_reduce_in_bf16 fp8 "
    "fp8_recipe fp8_param_gather fp8_output_proj reuse_grad_buf_for_mxfp8_param_ag fp4 fp4_recipe fp4_param_gather "
    "cuda_graph_impl cuda_graph_modules cross_entropy_loss_fusion cross_entropy_fusion_impl "
    "check_for_nan_in_loss_and_grad"
).split()
"""Destinations of the flags in the table. Other tables have the shapes of the models."""


class Recipe(Record):
    """A recipe: parts that it does not set exist, and are empty."""

    mixed_precision: Any

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
        model = recipe.model
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
            "flags": " ".join(flags_of(recipe)),
            "recipe": name,
            "published": known.get(tuple(map(_plain, wanted)), ""),
        }


def flags_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the flags that a recipe's settings mean, with defaults of Bridge's models that change time or memory."""
    config = {name: _values(part) for name, part in vars(recipe).items()}
    model = config.setdefault("model", {})
    model.setdefault("cross_entropy_loss_fusion", True)
    model.setdefault("num_moe_experts", model.get(ETP))
    model["moe_grouped_gemm"] = (model.get("expert_model_parallel_size") or 1) > 1 or model.get("moe_grouped_gemm")
    tokens = Arguments.parse(Overrides((), config).flags(newest_release()), newest_release()).tokens
    # One word for each value, as the table's other columns and readers have them.
    return tuple(part for token in tokens if token.dest in KEPT for word in token.words for part in word.split("=", 1))


def _values(value: Any) -> Any:
    """Return the settings of a part, without stand-ins."""
    if isinstance(value, Record) or is_dataclass(value):
        return {name: _values(one) for name, one in vars(value).items()}
    if isinstance(value, (list, tuple)):
        return [_values(one) for one in value]
    return bridge.TYPES.get(str(value), str(value)) if isinstance(value, str) else value


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
