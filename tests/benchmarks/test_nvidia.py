"""NVIDIA's tuned recipes: how rows become jobs, and what is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.validation import nvidia
from benchmarks.validation.latency import Machines
from benchmarks.validation.nvidia_rows import (
    COLUMNS,
    LATER_VERSION,
    is_hybrid,
    job_flags,
    measured_s,
    model_flags,
    pipeline_layout,
    read_rows,
    read_shapes,
    version_of,
)
from benchmarks.validation.options import DEFAULT_FILES
from benchmarks.validation.shapes import VERSION, job_of
from benchmarks.validation.tables import Row, read_table
from pipette_launch.errors import FactError
from pipette_launch.facts import Job, ModelSpec

PATH = DEFAULT_FILES["nvidia"]
ROWS = read_table(PATH, COLUMNS).rows
SHAPES = read_shapes(nvidia.SHAPES)
IN_BILLIONS = {
    "LLAMA2-7B": 6.7,
    "LLAMA3-8B": 8.0,
    "GPT3-175B": 175,
    "Nemotron-15B": 15.6,
    "Qwen3-8B": 8.2,
    "Qwen3-30B-A3B": 30.5,
    "Mixtral-8x7B": 46.7,
    "Mixtral-8x22B": 140.6,
    "GPT-OSS-20B": 20.0,
    "GPT-OSS-120B": 116.8,
    "Moonlight-16B": 16.0,
    "DeepSeek-V3": 684.5,
    "Kimi-K2": 1026,
    "Nemotron-H-8B": 8.1,
    "Nemotron-H-47B": 46.8,
    "Nemotron-H-56B": 56.3,
    "Nemotron-3-Nano": 31.6,
    "Qwen3-Next-80B-A3B": 81.3,
}
"""As their makers count them; DeepSeek-V3 with its 14 billion of multi-token prediction."""


def job(row: Row, device_name: str = "") -> Job:
    """The job of a row."""
    shape = SHAPES[row["model"]]
    version = version_of(row, shape)
    return job_of(job_flags(row, shape), world_size=row["gpus"], device_name=device_name, version=version)


def spec(model: str) -> ModelSpec:
    """The model of a shape."""
    flags = {**model_flags(SHAPES[model]), "seq-length": 4096, "max-position-embeddings": 4096, "micro-batch-size": 1}
    named = {name: value for name, value in flags.items() if value is not False}
    version = LATER_VERSION if is_hybrid(SHAPES[model]) else VERSION
    return job_of({**named, "bf16": True}, world_size=1, version=version).model


def row_of(model: str, system: str, precision: str = "BF16") -> Row:
    """The first row of a model on a system."""
    return next(row for row in ROWS if (row["model"], row["system"], row["precision"]) == (model, system, precision))


def with_cells(row: Row, **cells: Any) -> Row:
    """A row with other cells."""
    return replace(row, values={**row.values, **cells})


def one_second(_job: Job, machines: Machines) -> float:
    """Stand for a latency model, and see that job and machines agree."""
    assert machines.num_hosts * machines.devices_per_host == _job.own.world_size
    return 1.0


@pytest.mark.parametrize("model", sorted(IN_BILLIONS))
def test_sizes_come_out_as_named(model: str) -> None:
    """Parameters of the published models, within 2 %: GPT-OSS-20B with the smaller vocabulary of its one row."""
    from facts_for_tests import tiny_job

    from pipette_launch.cost.layers.parameters import chunk_parameters
    from pipette_launch.facts import Layout

    (whole,) = chunk_parameters(tiny_job(model=spec(model)), Layout())

    assert IN_BILLIONS[model] == pytest.approx(whole.count / 1e9, rel=0.02)


def test_layout_and_recipe_are_read() -> None:
    """GPT-OSS-120B on H100: four stages, experts over 8, norms and activations run again."""
    row = next(row for row in ROWS if row["system"] == "H100" and "layernorm" in row["recompute"])
    found = job(row, "H100")

    assert (1, 4, 16, 8) == (found.own.tp, found.own.pp, found.own.dp, found.own.ep)
    assert ("layernorm", "moe_act") == found.own.recompute.modules
    assert found.grad_reduce_in_bf16
    assert 1280 * 4096 / (5993 * 64) == measured_s(row)


@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        ("BF16", ()),
        ("FP8-DS", ("--fp8-format hybrid", "--fp8-param-gather", "--fp8-recipe delayed")),
        ("FP8-CS", ("--fp8-format hybrid", "--fp8-param-gather", "--fp8-recipe tensorwise")),
        ("MXFP8", ("--fp8-format e4m3", "--fp8-param-gather", "--fp8-recipe mxfp8")),
        ("NVFP4", ("--fp4-format e2m1",)),
    ],
)
def test_precision_becomes_flags(precision: str, flags: tuple[str, ...]) -> None:
    """As the sources name it."""
    row = with_cells(row_of("LLAMA3-8B", "B200", "MXFP8"), precision=precision)

    assert flags == tuple(flag for flag in job(row).performance_flags if flag.startswith(("--fp8", "--fp4")))


def test_a_recipe_keeps_last_layers_in_bf16() -> None:
    """Nemotron-3-Super in NVFP4 computes its last 14 layers in BF16."""
    row = with_cells(row_of("Nemotron-3-Nano", "B300", "MXFP8"), model="Nemotron-3-Super", precision="NVFP4")
    wanted = {"--first-last-layers-bf16", "--num-layers-at-start-in-bf16 0", "--num-layers-at-end-in-bf16 14"}

    assert wanted <= set(job(row).performance_flags)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"precision": "INT8"}, "the flags of precision INT8 are not known"),
        ({"step_time_s": 27.58858, "tokens_s_gpu": 2969.345}, "step time and tokens/s contradict the batch"),
        ({"step_time_s": 4.4, "tokens_s_gpu": 16 * 8192 / 4.4 * 1.01}, ""),
    ],
    ids=["unknown precision", "another sequence length", "rounded tokens/s"],
)
def test_a_row_without_a_meaning_is_refused_with_its_reason(cells: dict[str, Any], reason: str) -> None:
    """An unknown precision and figures for another number of tokens are refused, and rounded figures are not."""
    row = with_cells(row_of("LLAMA3-8B", "B200", "MXFP8"), gpus=8, gbs=128, seq=8192, **cells)

    assert reason == nvidia.refusal(row, SHAPES)


def test_recipes_fill_blank_settings_only() -> None:
    """The recipe of DeepSeek-V3 on H100 names dispatcher and recompute, which no row states; stated settings stay."""
    before, after = ROWS, read_rows(PATH).rows
    filled = [row for row, full in zip(before, after, strict=True) if row != full]
    found = next(row for row in after if (row["model"], row["system"], row["gpus"]) == ("DeepSeek-V3", "H100", 1024))

    assert ("deepep", "mla_up_proj+mlp") == (found["dispatcher"], found["recompute"])
    assert filled
    for row, full in zip(before, after, strict=True):
        assert all(full[name] == cell for name, cell in row.values.items() if cell)


def test_dispatcher_and_graphs_become_flags() -> None:
    """HybridEP is a backend of flex; a graph of the whole iteration is Megatron's own."""
    row = next(row for row in ROWS if row["cuda_graphs"] == "full_iteration" and row["dispatcher"] == "hybridep")
    flags = job(row).performance_flags

    assert {
        "--moe-token-dispatcher-type flex",
        "--moe-flex-dispatcher-backend hybridep",
        "--cuda-graph-impl local",
        "--cuda-graph-scope full_iteration",
        "--overlap-moe-expert-parallel-comm",
    } <= set(flags)


def test_the_sharding_group_becomes_flags() -> None:
    """Eight ranks share everything; a group of half the replicas is one of two instances."""
    row = next(row for row in ROWS if row["fsdp"] and row["model"] == "LLAMA3-8B")
    flags = job(row).performance_flags
    halved = job(Row(line=row.line, values={**row.values, "fsdp": 4})).performance_flags

    assert {"--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params"} <= set(flags)
    assert "--num-distributed-optimizer-instances 2" in halved


def test_layers_that_stages_do_not_divide_are_cut_by_hand() -> None:
    """61 layers of Kimi-K2 on 16 stages: fifteen of four, and one on the stage of the head; a row may state more."""
    found = job(next(row for row in ROWS if row["model"] == "Kimi-K2"))

    assert (4, 4) == (found.own.pp, found.own.vpp)
    assert (*(4,) * 15, 1) == found.own.layers_per_chunk
    assert "E" + "t|" + "tt|" * 30 + "mL" == pipeline_layout(SHAPES["DeepSeek-V3"], 32)


def test_every_row_is_scored_or_counted() -> None:
    """212 of 279; the others with their reasons, and what a model refuses with its own."""
    found = nvidia.section(PATH, one_second)
    lines = {line.group: (line.scored, line.skipped) for line in found.lines}

    assert {
        "all": (212, 67),
        "dense": (58, 0),
        "MoE": (125, 0),
        "hybrid": (29, 0),
        "dense, FP8-DS": (37, 0),
    }.items() <= lines.items()
    assert 15 == found.reasons["pipette: packed sequences and adapters"]
    assert 17 == found.reasons["pipette: no tokens/s and no step time"]

    def refuses(_job: Job, machines: Machines) -> float:
        raise FactError("no experts; try another")

    refused = nvidia.section(PATH, refuses)
    assert () == refused.lines
    assert 212 == refused.reasons["pipette: no experts"]


def test_step_times_as_published_come_first() -> None:
    """A card's own seconds, else tokens/s; 16 GPUs of Qwen3-8B take 25 s for 1,024 samples."""
    assert 25.07032 == measured_s(row_of("Qwen3-8B", "H100"))
    assert measured_s(row_of("Qwen3-30B-A3B", "B200")) is None
