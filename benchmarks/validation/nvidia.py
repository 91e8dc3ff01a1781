"""NVIDIA's published throughput of tuned recipes: dense and MoE models, 16 bits and 8, on H100 and Blackwell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.validation.latency import METHOD, Machines, StepTime, hosts_of
from benchmarks.validation.lines import Found, Section, step_time_line
from benchmarks.validation.nvidia_rows import (
    PRECISIONS,
    is_contradictory,
    is_hybrid,
    job_flags,
    measured_s,
    read_rows,
    read_shapes,
    version_of,
)
from benchmarks.validation.shapes import job_of
from benchmarks.validation.tables import Row
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Job
from pipette_launch.facts.devices import KNOWN_DEVICES, DeviceSpec

DATA = "NVIDIA"
SHAPES = Path(__file__).parent.parent / "data" / "model_shapes.csv"
DEVICES = {"H100": "H100-SXM", "B200": "B200", "GB200": "GB200-NVL72", "B300": "B300", "GB300": "GB300-NVL72"}
NOTES = (
    (
        "Stated there: model, GPUs, layout, batch, precision, and in part dispatcher and recompute. Assumed where "
        "blank: alltoall, no recompute, expert tensor parallelism 1, no CUDA graphs; where only FP8 is said, delayed "
        "scaling; layers that stages do not divide: one less on the last stages. From the recipes' sources: gradients "
        "reduced and experts' moments kept in bf16, weights gathered in FP8, cross-entropy by Transformer Engine from "
        "25.09 on, distributed optimizer with both overlaps, grouped experts, permute fused, sequence "
        "parallelism where tp > 1, and there --tp-comm-overlap of dense models; where FSDP is stated, Megatron's, of "
        "parameters, gradients and states."
    ),
    (
        "Priced as if: routing is balanced (most rows force it), the softmax of GPT-OSS has no sink, attention's "
        "products and the output layer run in 16 bits (some recipes of DeepSeek-V3 and GPT-OSS run both in FP8, but "
        "few rows state it). Built-in figures of the machines, four constants of experts fitted to the MoE rows "
        "together (docs/validation.md)."
    ),
    "Rows of several releases are one recipe measured again; NVIDIA's own figures for one recipe move by up to 8 %.",
)


def section(path: Path, step_time: StepTime) -> Section:
    """Score step times of every row that can be priced; groups are dense, MoE, hybrid, each precision and system."""
    table = read_rows(path)
    shapes = read_shapes(SHAPES)
    return _scored(table.rows, shapes, step_time).section(DATA, f"{path.name} ({table.digest})", NOTES)


def refusal(row: Row, shapes: Mapping[str, Row], *, needs_time: bool = True) -> str:
    """Why a row cannot be priced, and with `needs_time` compared; blank where it can."""
    reasons = {
        f"the shape of {row['model']} is not known": row["model"] not in shapes,
        f"the flags of precision {row['precision']} are not known": row["precision"] not in PRECISIONS,
        "layers of several kinds of attention": _mixes_layers(shapes.get(row["model"])),
        "packed sequences and adapters": row["phase"] != "pretrain",
        "activation offloading": row["offload"],
        "tokens are dropped": row["routing"] == "tokendrop",
        "no micro-batch size": row["mbs"] is None,
        "no tokens/s and no step time": needs_time and measured_s(row) is None,
        "step time and tokens/s contradict the batch": needs_time and is_contradictory(row),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _mixes_layers(shape: Row | None) -> bool:
    """True if a pattern names layers that differ in other ways than layers of hybrid models."""
    return shape is not None and bool(shape["layer_pattern"]) and not is_hybrid(shape)


def kind_of(shape: Row) -> str:
    """Return the kind of a model: dense, experts or hybrid."""
    return "hybrid" if is_hybrid(shape) else "experts" if shape["experts"] else "dense"


def _scored(rows: Sequence[Row], shapes: Mapping[str, Row], step_time: StepTime) -> Found:
    groups: dict[str, list[tuple[float, float]]] = {}
    details, skipped = [], []
    for row in rows:
        measured, refused = measured_s(row), refusal(row, shapes)
        try:
            seconds = 0.0 if refused else step_time(*run_of(row, shapes[row["model"]]))
        except PipetteError as error:
            refused = str(error).split(";")[0][:100]
        if refused or measured is None:
            skipped.append((f"{METHOD}: {refused}", f"line {row.line}, {row['model']} on {row['system']}"))
            continue
        kind = kind_of(shapes[row["model"]]).replace("experts", "MoE")
        for group in ("all", kind, f"{kind}, {row['precision']}", f"{kind}, {row['system']}"):
            groups.setdefault(group, []).append((seconds, measured))
        tokens = row["gbs"] * row["seq"] / row["gpus"]
        details.append(
            f"{METHOD}: line {row.line} {row['model']} on {row['gpus']} {row['system']}, {row['precision']}, "
            f"{row['release']}: {seconds:.3f} s predicted, {measured:.3f} s measured ({seconds / measured - 1:+.1%}); "
            f"{tokens / seconds:.0f} and {tokens / measured:.0f} tokens/s a GPU"
        )
    lines = [
        step_time_line(DATA, group, METHOD, pairs, skipped=len(skipped) if group == "all" else 0)
        for group, pairs in sorted(groups.items())
    ]
    return Found(lines=tuple(lines), skipped=tuple(skipped), details=tuple(details))


def run_of(row: Row, shape: Row | None) -> tuple[Job, Machines]:
    """The job of a row and the machines that ran it."""
    device: DeviceSpec = KNOWN_DEVICES[DEVICES[row["system"]]]
    num_hosts, per_host = hosts_of(row["gpus"], device.devices_per_host)
    version = version_of(row, shape)
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": row.values.get("allocator", "")}
    flags = job_flags(row, shape)
    job = job_of(flags, world_size=row["gpus"], device_name=device.name, version=version, environment=allocator)
    return job, Machines(device=device, num_hosts=num_hosts, devices_per_host=per_host)
