"""NVIDIA's published throughput of tuned BF16 recipes: dense and MoE models on H100 and Blackwell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.validation.latency import Machines, StepTime, hosts_of
from benchmarks.validation.lines import Found, Section, step_time_line
from benchmarks.validation.shapes import job_of
from benchmarks.validation.tables import Row, number, optional, read_table, size, text, whole, word
from pipette_launch.errors import PipetteError
from pipette_launch.facts.machines.accelerator import DeviceSpec
from pipette_launch.facts.machines.known_devices import known_devices

DATA = "NVIDIA BF16"
COLUMNS = {
    **dict.fromkeys(("release", "model", "system"), word),
    **dict.fromkeys(("gpus", "gbs", "mbs", "seq", "tp", "pp", "cp"), size),
    **dict.fromkeys(("vp", "ep", "etp"), optional(size)),
    **dict.fromkeys(("fsdp", "mtp"), optional(whole)),
    **dict.fromkeys(("dispatcher", "recompute", "offload"), text),
    **dict.fromkeys(("step_time_s", "tokens_s_gpu"), optional(number)),
}
DEVICES = {"H100": "H100-SXM", "B200": "B200", "GB200": "GB200-NVL72"}
"""Built-in device of each system; the others have no built-in figures."""
_QWEN3 = {"qk-layernorm": True, "disable-bias-linear": True, "vocab-size": 151936, "kv-channels": 128}
_GPT_OSS = {"hidden-size": 2880, "num-attention-heads": 64, "num-query-groups": 8, "kv-channels": 64,
            "moe-router-topk": 4, "moe-ffn-hidden-size": 2880, "ffn-hidden-size": 2880}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-8B": _QWEN3 | {"num-layers": 36, "hidden-size": 4096, "num-attention-heads": 32, "num-query-groups": 8,
                          "ffn-hidden-size": 12288},
    "Qwen3-30B-A3B": _QWEN3 | {"num-layers": 48, "hidden-size": 2048, "num-attention-heads": 32, "num-query-groups": 4,
                               "ffn-hidden-size": 6144, "num-experts": 128, "moe-router-topk": 8,
                               "moe-ffn-hidden-size": 768},
    "GPT-OSS-20B": _GPT_OSS | {"num-layers": 24, "num-experts": 32, "vocab-size": 32000},
    "GPT-OSS-120B": _GPT_OSS | {"num-layers": 36, "num-experts": 128, "vocab-size": 201088},
}  # fmt: skip
"""Models that can be priced, in Megatron's flags (Megatron-LM, examples/post_training/modelopt and
examples/moe_recipes; the one row of GPT-OSS-20B ran with 32,000 tokens)."""
UNPRICED = {
    "Moonlight-16B": "multi-head latent attention",
    "Nemotron-3-Nano": "Mamba layers",
    "Nemotron-3.5-Lightning": "Mamba layers and multi-token prediction",
}
"""Models that are left out, and why."""
NOTES = (
    (
        "Stated there: model, GPUs, layout, batch, and in part dispatcher and recompute. Assumed where blank: "
        "alltoall, no recompute, expert tensor parallelism 1. From the recipes' sources: gradients reduced in bf16, "
        "distributed optimizer with both overlaps, grouped experts, sequence parallelism where tp > 1."
    ),
    (
        "Priced as if: routing is balanced (most rows force it), hybridep is alltoall, every layer of GPT-OSS attends "
        "to all tokens before it (each second one has a window of 128) without a sink. CUDA graphs and all-to-alls "
        "that pass behind compute are not priced. Nothing is fitted; built-in figures of the machines."
    ),
    "Rows of several releases are one recipe measured again; NVIDIA's own figures for one recipe move by up to 8 %.",
)


def section(path: Path, step_times: Mapping[str, StepTime]) -> Section:
    """Score step times of every row that can be priced; groups are dense, MoE, and each system."""
    table = read_table(path, COLUMNS)
    found = Found()
    for name, model in step_times.items():
        found += _scored(table.rows, name, model)
    return found.section(DATA, f"{path.name} ({table.digest})", NOTES)


def measured_s(row: Row) -> float | None:
    """Seconds of one step, as published or by tokens/s; None where only FLOP/s are given: releases count them apart."""
    if row["step_time_s"]:
        seconds: float = row["step_time_s"]
        return seconds
    return row["gbs"] * row["seq"] / (row["tokens_s_gpu"] * row["gpus"]) if row["tokens_s_gpu"] else None


def job_flags(row: Row) -> dict[str, Any]:
    """Return the run in Megatron's flags."""
    shape = SHAPES[row["model"]]
    flags: dict[str, Any] = {
        **shape,
        "group-query-attention": True,
        "swiglu": True,
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "untie-embeddings-and-output-weights": True,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "seq-length": row["seq"],
        "max-position-embeddings": row["seq"],
        "micro-batch-size": row["mbs"],
        "global-batch-size": row["gbs"],
        "tensor-model-parallel-size": row["tp"],
        "sequence-parallel": row["tp"] > 1,
        "pipeline-model-parallel-size": row["pp"],
        "context-parallel-size": row["cp"],
        "bf16": True,
        "grad-reduce-in-bf16": True,
        "use-distributed-optimizer": True,
        "overlap-grad-reduce": True,
        "overlap-param-gather": True,
    }
    if (row["vp"] or 1) > 1:
        flags["num-virtual-stages-per-pipeline-rank"] = row["vp"]
    if "num-experts" in shape:
        flags["expert-model-parallel-size"] = row["ep"] or 1
        flags["expert-tensor-parallel-size"] = row["etp"] or 1
        flags["moe-grouped-gemm"] = True
        flags["moe-token-dispatcher-type"] = "flex" if row["dispatcher"] == "hybridep" else "alltoall"
    if row["recompute"] not in ("", "none"):
        flags["recompute-granularity"] = "selective"
        flags["recompute-modules"] = row["recompute"].replace("+", " ")
    return {name: value for name, value in flags.items() if value is not False}


def _refusal(row: Row) -> str:
    """Why a row cannot be priced; blank where it can."""
    if row["model"] not in SHAPES:
        return UNPRICED.get(row["model"], f"the shape of {row['model']} is not known")
    if row["system"] not in DEVICES:
        return f"no built-in figures of {row['system']}"
    if row["fsdp"]:
        return "FSDP"
    if row["mtp"]:
        return "multi-token prediction"
    if row["offload"]:
        return "activation offloading"
    return "" if measured_s(row) else "no tokens/s and no step time"


def _scored(rows: Sequence[Row], name: str, model: StepTime) -> Found:
    groups: dict[str, list[tuple[float, float]]] = {}
    details, skipped = [], []
    for row in rows:
        measured, refused = measured_s(row), _refusal(row)
        try:
            seconds = 0.0 if refused else model(*_run(row))
        except PipetteError as error:
            refused = str(error).split(";")[0][:100]
        if refused or measured is None:
            skipped.append((f"{name}: {refused}", f"line {row.line}, {row['model']} on {row['system']}"))
            continue
        kind = "MoE" if "num-experts" in SHAPES[row["model"]] else "dense"
        for group in ("all", kind, row["system"]):
            groups.setdefault(group, []).append((seconds, measured))
        details.append(
            f"{name}: line {row.line} {row['model']} on {row['gpus']} {row['system']}, {row['release']}: "
            f"{seconds:.3f} s predicted, {measured:.3f} s measured ({seconds / measured - 1:+.1%})"
        )
    lines = [
        step_time_line(DATA, group, name, pairs, skipped=len(skipped) if group == "all" else 0)
        for group, pairs in groups.items()
    ]
    return Found(lines=tuple(lines), skipped=tuple(skipped), details=tuple(details))


def _run(row: Row) -> tuple[Any, Machines]:
    """The job of a row and the machines that ran it."""
    device: DeviceSpec = known_devices()[DEVICES[row["system"]]]
    num_hosts, per_host = hosts_of(row["gpus"], device.devices_per_host)
    job = job_of(job_flags(row), world_size=row["gpus"], device_name=device.name)
    return job, Machines(device=device, num_hosts=num_hosts, devices_per_host=per_host)
