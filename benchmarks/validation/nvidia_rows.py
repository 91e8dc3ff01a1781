"""A published run of NVIDIA's as Megatron's flags: the shape of its model, its layout, its precision, its recipe."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.validation.shapes import VERSION
from benchmarks.validation.tables import Converter, Row, Table, number, optional, read_table, size, text, whole, word

COMPLETED = Path(__file__).parent.parent / "data" / "nvidia_completed.csv"
RECIPES, CARDS = COMPLETED.with_name("nvidia_recipes.csv"), COMPLETED.with_name("nvidia_cards.csv")
_STATED_BY_RECIPES = ("dispatcher", "ep_overlap", "cuda_graphs", "recompute")
COLUMNS: dict[str, Converter] = {
    **dict.fromkeys(("release", "phase", "model", "system", "precision"), word),
    **dict.fromkeys(("gpus", "gbs", "seq", "tp", "pp"), size),
    **dict.fromkeys(("mbs", "cp", "vp", "ep", "etp"), optional(size)),
    **dict.fromkeys(("fsdp", "mtp"), optional(whole)),
    **dict.fromkeys((*_STATED_BY_RECIPES, "offload", "routing", "pp_layout", "recipe", "note"), text),
    **dict.fromkeys(("step_time_s", "tokens_s_gpu"), optional(number)),
}
_COMPLETED_COLUMNS = {**dict.fromkeys(("release", "model", "system"), word), **dict.fromkeys(_STATED_BY_RECIPES, text)}
_RECIPE_COLUMNS = {name: COLUMNS[name] for name in ("release", "phase", "model", "system", "precision", "recipe")}
_RECIPE_COLUMNS |= {name: COLUMNS[name] for name in ("gpus", "gbs", "mbs", "seq", "tp", "pp")}
_RECIPE_COLUMNS |= {"flags": text, "allocator": text, "published": text}
_CARD_COLUMNS: dict[str, Converter] = dict.fromkeys(
    ("card", "recipe", "model", "system", "precision", "allocator", "flags", "note"), text
)
_CARD_COLUMNS |= dict.fromkeys(("gpus", "seq"), optional(size))
_BLANK = {name: read for name, read in COLUMNS.items() if name not in _RECIPE_COLUMNS}
_LATENT = ("q_lora", "kv_lora", "qk_nope", "qk_rope", "v_dim")
SHAPE_COLUMNS = {
    **dict.fromkeys(("model", "kind", "act", "pos"), word),
    **dict.fromkeys(("layers", "hidden", "heads", "vocab"), size),
    **dict.fromkeys(("kv_heads", "head_dim", *_LATENT, "window", "ffn", "experts", "topk", "moe_ffn"), optional(whole)),
    **dict.fromkeys(("shared_ffn", "moe_latent", "dense_layers", "mtp"), optional(whole)),
    **dict.fromkeys(("glu", "tied"), whole),
    **dict.fromkeys(("mamba_heads", "mamba_head_dim", "mamba_state", "mamba_groups"), optional(whole)),
    **dict.fromkeys(("layer_pattern", "mtp_pattern"), text),
}
LATER_VERSION = "0.19.0"
"""From 0.17 on patterns name the layers of prediction depths, from 0.18 on graphs of whole iterations may hold
overlapped experts, and from 0.19 on FSDP knows Mamba layers."""
RECIPE_VERSION = "0.20.0"
"""The release whose flags recipes are written in."""
MAMBA_FLAGS = {
    "num-heads": "mamba_heads",
    "head-dim": "mamba_head_dim",
    "state-dim": "mamba_state",
    "num-groups": "mamba_groups",
}
ACTIVATIONS = {
    "gelu": {},
    "silu": {"swiglu": True},
    "squared_relu": {"squared-relu": True},
    "clamped quick-geglu": {"quick-geglu": True},
}
POSITIONS = {"learned": "learned_absolute", "rope": "rope", "none": "none"}
PRECISIONS: dict[str, dict[str, Any]] = {
    "BF16": {},
    "FP8": {"fp8-format": "hybrid", "fp8-recipe": "delayed", "fp8-param-gather": True},
    "FP8-DS": {"fp8-format": "hybrid", "fp8-recipe": "delayed", "fp8-param-gather": True},
    "FP8-CS": {"fp8-format": "hybrid", "fp8-recipe": "tensorwise", "fp8-param-gather": True},
    "FP8-SC": {"fp8-format": "e4m3", "fp8-recipe": "blockwise", "fp8-param-gather": True},
    "MXFP8": {
        "fp8-format": "e4m3",
        "fp8-recipe": "mxfp8",
        "fp8-param-gather": True,
        "reuse-grad-buf-for-mxfp8-param-ag": True,
    },
    "NVFP4": {"fp4-format": "e2m1", "fp4-param-gather": True},
}
"""Flags of each precision; where the recipe is not stated, delayed scaling."""
LAYERS_IN_BF16 = {("Nemotron-3-Super", "NVFP4"): 14}
"""Number of last layers that stay in BF16, by model and precision (Megatron-Bridge, mixed_precision.py)."""
DISPATCHERS = {
    "alltoall": {"moe-token-dispatcher-type": "alltoall"},
    "deepep": {"moe-token-dispatcher-type": "flex", "moe-flex-dispatcher-backend": "deepep"},
    "hybridep": {"moe-token-dispatcher-type": "flex", "moe-flex-dispatcher-backend": "hybridep"},
}
_QK_LAYERNORM = ("Qwen3",)
_LAYER_NORM = ("GPT3", "Nemotron-8B", "Nemotron-15B", "Nemotron-22B", "Nemotron-340B")
_BIASES = ("GPT3", "GPT-OSS")
_GROUPED_ROUTERS = {"DeepSeek-V3": (8, 4)}
"""Groups of experts of a router, and the number of groups from which a token's experts come."""
_NEMO = ("NeMo 24", "NeMo 25.02", "NeMo 25.04", "NeMo 25.07")
"""Releases before Megatron-Bridge, whose recipes fuse the cross-entropy by Transformer Engine."""
_FROM_LIBRARY = re.compile("moonlight|_pretrain(_8k)?_config")
"""Recipes of Megatron-Bridge's library, which leave the router unfused."""
ROUNDING = 0.02
"""Largest difference between step time and tokens/s of a row that rounding explains."""
_OTHER_VOCABULARY = {"GPT-OSS-20B": 32000}
"""The card of this row names it."""


def read_shapes(path: Path) -> dict[str, Row]:
    """Return the shape of every model, by name."""
    return {row["model"]: row for row in read_table(path, SHAPE_COLUMNS).rows}


def read_rows(path: Path) -> Table:
    """Read published rows. The recipe of the same release, model and system fills settings that a row leaves blank."""
    if path == CARDS:
        return read_table(path, _CARD_COLUMNS)
    if path == RECIPES:
        table, blank = read_table(path, _RECIPE_COLUMNS), {name: read("") for name, read in _BLANK.items()}
        return replace(table, rows=tuple(replace(row, values={**blank, **row.values}) for row in table.rows))
    table = read_table(path, COLUMNS)
    known = {_key(row): row for row in read_table(COMPLETED, _COMPLETED_COLUMNS).rows}
    rows = []
    for row in table.rows:
        recipe = known.get(_key(row), row)
        filled = {name: row[name] or recipe[name] for name in _STATED_BY_RECIPES}
        rows.append(replace(row, values={**row.values, **filled}))
    return replace(table, rows=tuple(rows))


def _key(row: Row) -> tuple[str, ...]:
    return row["release"], row["model"], row["system"]


def measured_s(row: Row) -> float | None:
    """Seconds of one step, as published or by tokens/s; None where only FLOP/s are given: releases count them apart."""
    if row["step_time_s"]:
        seconds: float = row["step_time_s"]
        return seconds
    return row["gbs"] * row["seq"] / (row["tokens_s_gpu"] * row["gpus"]) if row["tokens_s_gpu"] else None


def is_contradictory(row: Row) -> bool:
    """True if a row's step time and tokens/s belong to another number of tokens than its batch has."""
    if not (row["step_time_s"] and row["tokens_s_gpu"]):
        return False
    tokens = row["tokens_s_gpu"] * row["gpus"] * row["step_time_s"]
    return not math.isclose(tokens, row["gbs"] * row["seq"], rel_tol=ROUNDING)


def job_flags(row: Row, shape: Row | None) -> dict[str, Any]:
    """Return the run in Megatron's flags, `True` for a bare one."""
    if row.values.get("flags"):
        return _recipe_flags(row, shape)
    assert shape
    flags: dict[str, Any] = {
        **model_flags(shape),
        "seq-length": row["seq"],
        "max-position-embeddings": row["seq"],
        "no-create-attention-mask-in-dataloader": True,
        "micro-batch-size": row["mbs"],
        "global-batch-size": row["gbs"],
        "tensor-model-parallel-size": row["tp"],
        "sequence-parallel": row["tp"] > 1,
        "tp-comm-overlap": row["tp"] > 1 and not shape["experts"],
        "pipeline-model-parallel-size": row["pp"],
        "context-parallel-size": row["cp"] or 1,
        "bf16": True,
        "grad-reduce-in-bf16": True,
        "use-distributed-optimizer": True,
        "overlap-grad-reduce": True,
        "overlap-param-gather": True,
        "cross-entropy-loss-fusion": not row["release"].startswith(_NEMO),
        "cross-entropy-fusion-impl": "native" if row["release"].startswith(_NEMO) else "te",
        **precision_flags(row["model"], row["precision"]),
        **_graph_flags(row["cuda_graphs"]),
        **_sharding_flags(row),
    }
    if row["mtp"] is not None:
        flags["mtp-num-layers"] = row["mtp"] or False
        if is_hybrid(shape):
            flags["hybrid-layer-pattern"] = hybrid_pattern(shape, row["mtp"])
    if row["pp_layout"] or shape["layers"] % (row["pp"] * (row["vp"] or 1)):
        stages = row["pp"] * (row["vp"] or 1)
        flags["pipeline-model-parallel-layout"] = row["pp_layout"] or pipeline_layout(shape, stages)
    elif (row["vp"] or 1) > 1:
        flags["num-virtual-stages-per-pipeline-rank"] = row["vp"]
    if shape["experts"]:
        flags |= _expert_flags(row)
    if row["recompute"] == "full":
        flags |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    elif row["recompute"] not in ("", "none"):
        flags["recompute-granularity"] = "selective"
        flags["recompute-modules"] = row["recompute"].replace("+", " ")
    return {name: value for name, value in flags.items() if value is not False}


def precision_flags(model: str, precision: str) -> dict[str, Any]:
    """Return the flags of a precision of PRECISIONS, and of the layers that a model's recipe keeps in BF16."""
    last = LAYERS_IN_BF16.get((model, precision), 0)
    kept = {"num-layers-at-start-in-bf16": 0, "num-layers-at-end-in-bf16": last} if last else {}
    return {**PRECISIONS[precision], "first-last-layers-bf16": last > 0, **kept}


def _recipe_flags(row: Row, shape: Row | None) -> dict[str, Any]:
    """Return the flags that a recipe states, beside those of its model. Without a shape they state the model too."""
    stated = {name: " ".join(words) or True for name, *words in (part.split() for part in row["flags"].split("--")[1:])}
    model = model_flags(shape) if shape else {}
    flags = {**model, "mtp-num-layers": False, "seq-length": row["seq"], **stated}
    if shape and is_hybrid(shape):
        flags["hybrid-layer-pattern"] = hybrid_pattern(shape, int(stated.get("mtp-num-layers", 0)))
    flags |= {"max-position-embeddings": row["seq"], "no-create-attention-mask-in-dataloader": True}
    return {name: value for name, value in flags.items() if value is not False}


def pipeline_layout(shape: Row, stages: int) -> str:
    """Cut layers that no number of stages divides, as NVIDIA's recipes do: the last stage, with the head, has least."""
    most = -(-shape["layers"] // stages)
    last = shape["layers"] - (stages - 1) * most
    cut = ["t" * most] * (stages - 1) + ["t" * max(last, 0)]
    cut[0] = cut[0][: most + min(last, 0)]
    return "|".join(["E" + cut[0], *cut[1:-1], cut[-1] + "m" * (shape["mtp"] or 0) + "L"])


def model_flags(shape: Row) -> dict[str, Any]:
    """Return a model in Megatron's flags, but for its sequence."""
    name: str = shape["model"]
    flags: dict[str, Any] = {
        "num-layers": shape["layers"],
        "hidden-size": shape["hidden"],
        "num-attention-heads": shape["heads"],
        "ffn-hidden-size": shape["ffn"] or shape["moe_ffn"],
        "normalization": "LayerNorm" if name.startswith(_LAYER_NORM) else "RMSNorm",
        "qk-layernorm": name.startswith(_QK_LAYERNORM),
        "disable-bias-linear": not name.startswith(_BIASES),
        "no-bias-dropout-fusion": bool(name.startswith(_BIASES) and shape["experts"]),
        "position-embedding-type": POSITIONS[shape["pos"]],
        "untie-embeddings-and-output-weights": not shape["tied"],
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "vocab-size": _OTHER_VOCABULARY.get(name, shape["vocab"]),
        "mtp-num-layers": shape["mtp"] or False,
        **ACTIVATIONS[shape["act"]],
    }
    if shape["kv_lora"]:
        flags |= {
            "multi-latent-attention": True,
            "q-lora-rank": shape["q_lora"] or False,
            "kv-lora-rank": shape["kv_lora"],
            "qk-head-dim": shape["qk_nope"],
            "qk-pos-emb-head-dim": shape["qk_rope"],
            "v-head-dim": shape["v_dim"],
        }
    else:
        flags["kv-channels"] = shape["head_dim"]
        if shape["kv_heads"] != shape["heads"]:
            flags |= {"group-query-attention": True, "num-query-groups": shape["kv_heads"]}
    if shape["window"]:
        flags |= {"window-size": f"{shape['window'] - 1},0", "window-attn-skip-freq": 2}
    if shape["experts"]:
        dense = shape["dense_layers"] or 0
        flags |= {
            "num-experts": shape["experts"],
            "moe-router-topk": shape["topk"],
            "moe-router-pre-softmax": shape["topk"] == 1,
            "moe-ffn-hidden-size": shape["moe_ffn"],
            "moe-shared-expert-intermediate-size": shape["shared_ffn"] or False,
            "moe-layer-freq": f"([0]*{dense}+[1]*{shape['layers'] - dense})",
            "moe-latent-size": shape["moe_latent"] or False,
        }
    if shape["kind"].startswith("gdn"):
        # Qwen3-Next, in three of four layers. All sizes are Megatron's defaults.
        flags |= {"experimental-attention-variant": "gated_delta_net", "linear-attention-freq": 4}
        flags |= {"attention-output-gate": True, "moe-shared-expert-gate": bool(shape["shared_ffn"])}
    if name in _GROUPED_ROUTERS:
        groups, chosen = _GROUPED_ROUTERS[name]
        flags |= {"moe-router-num-groups": groups, "moe-router-group-topk": chosen}
    if is_hybrid(shape):
        flags |= {f"mamba-{flag}": shape[column] for flag, column in MAMBA_FLAGS.items()}
        flags["hybrid-layer-pattern"] = hybrid_pattern(shape, shape["mtp"] or 0)
        flags["mtp-use-repeated-layer"] = "shared weights" in shape["mtp_pattern"]
    return flags


def version_of(row: Row, shape: Row | None) -> str:
    """Return a release that takes the flags of a row."""
    if row.values.get("flags") or shape is None:
        return RECIPE_VERSION
    return LATER_VERSION if is_hybrid(shape) or row["cuda_graphs"] == "full_iteration" else VERSION


def is_hybrid(shape: Row) -> bool:
    """True if each layer is only Mamba, attention, MLP or experts. Words describe other patterns."""
    return bool(shape["kind"].startswith("mamba"))


def hybrid_pattern(shape: Row, depths: int) -> str:
    """Name the layers of a hybrid model. The column lists the layers of each prediction depth first."""
    return "/".join((shape["layer_pattern"], *[shape["mtp_pattern"].split()[0] for _ in range(depths)]))


def _expert_flags(row: Row) -> Mapping[str, Any]:
    return {
        "expert-model-parallel-size": row["ep"] or 1,
        "expert-tensor-parallel-size": row["etp"] or 1,
        "moe-grouped-gemm": True,
        "use-precision-aware-optimizer": True,
        "exp-avg-dtype": "bf16",
        "exp-avg-sq-dtype": "bf16",
        "moe-permute-fusion": "permute fusion off" not in row["note"],
        "moe-router-fusion": not row["release"].startswith(_NEMO) and not _FROM_LIBRARY.search(row["recipe"]),
        **DISPATCHERS[row["dispatcher"] or "alltoall"],
        "overlap-moe-expert-parallel-comm": row["ep_overlap"] == "1",
        "moe-router-force-load-balancing": row["routing"] != "natural",
    }


def _sharding_flags(row: Row) -> Mapping[str, Any]:
    """Read the number of ranks over which everything is sharded; further ranks hold copies of the shards."""
    if not row["fsdp"]:
        return {}
    replicas = row["gpus"] // (row["tp"] * row["pp"])
    return {
        "use-megatron-fsdp": True,
        "ckpt-format": "fsdp_dtensor",
        "data-parallel-sharding-strategy": "optim_grads_params",
        "num-distributed-optimizer-instances": replicas // row["fsdp"],
    }


def _graph_flags(cuda_graphs: str) -> Mapping[str, Any]:
    """Read `transformer_engine:attn+moe_router`: who captures, and what; whole iterations are captured by Megatron."""
    if cuda_graphs in ("", "none"):
        return {}
    by, _, what = cuda_graphs.partition(":")
    if by == "full_iteration":
        by, what = "local", "full_iteration"
    # Megatron-LM demands the last flag; these runs were started by Megatron-Bridge.
    is_whole = what == "full_iteration"
    scope = what.replace("+", " ")
    return {"cuda-graph-impl": by, "cuda-graph-scope": scope, "no-check-for-nan-in-loss-and-grad": is_whole}
