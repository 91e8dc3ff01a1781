"""NVIDIA's tuned BF16 recipes: how rows become jobs, and what is left out."""

from __future__ import annotations

import pytest

from benchmarks.validation import nvidia
from benchmarks.validation.latency import Machines
from benchmarks.validation.options import DEFAULT_FILES
from benchmarks.validation.shapes import job_of
from benchmarks.validation.tables import Row, read_table
from pipette_launch.errors import FactError
from pipette_launch.facts import Job

PATH = DEFAULT_FILES["nvidia"]
ROWS = read_table(PATH, nvidia.COLUMNS).rows


def row_of(model: str, system: str) -> Row:
    """The first row of a model on a system."""
    return next(row for row in ROWS if (row["model"], row["system"]) == (model, system))


def one_second(job: Job, machines: Machines) -> float:
    """Stand for a latency model, and see that job and machines agree."""
    assert machines.num_hosts * machines.devices_per_host == job.own.world_size
    return 1.0


@pytest.mark.parametrize(
    ("model", "billions"), [("Qwen3-8B", 8.2), ("Qwen3-30B-A3B", 30.5), ("GPT-OSS-20B", 20.0), ("GPT-OSS-120B", 116.8)]
)
def test_sizes_come_out_as_named(model: str, billions: float) -> None:
    """Parameters of the published models, biases and sinks left out; GPT-OSS-20B with its smaller vocabulary."""
    row = next(row for row in ROWS if row["model"] == model)
    spec = job_of(nvidia.job_flags(row), world_size=row["gpus"]).model
    attention = 2 * spec.hidden_size * spec.kv_channels * (spec.num_attention_heads + spec.num_query_groups)
    experts = spec.num_experts or 1
    width = spec.moe_ffn_hidden_size if spec.num_experts else spec.ffn_hidden_size
    layers = spec.num_layers * (attention + experts * 3 * spec.hidden_size * width)

    assert billions == pytest.approx((layers + 2 * spec.vocab_size * spec.hidden_size) / 1e9, rel=0.02)


def test_layout_and_recipe_are_read() -> None:
    """GPT-OSS-120B on H100: four stages, experts over 8, norms and activations run again."""
    row = next(row for row in ROWS if row["system"] == "H100" and "layernorm" in row["recompute"])
    job = job_of(nvidia.job_flags(row), world_size=row["gpus"], device_name="H100")

    assert (1, 4, 16, 8) == (job.own.tp, job.own.pp, job.own.dp, job.own.ep)
    assert ("layernorm", "moe_act") == job.own.recompute.modules
    assert job.grad_reduce_in_bf16
    assert 1280 * 4096 / (5993 * 64) == nvidia.measured_s(row)


def test_every_row_is_scored_or_counted() -> None:
    """28 of 56; the others with their reasons, and what a model refuses with its own."""
    found = nvidia.section(PATH, {"ours": one_second})
    lines = {line.group: (line.scored, line.skipped) for line in found.lines}

    assert {"all": (28, 28), "dense": (1, 0), "MoE": (27, 0), "H100": (17, 0), "B200": (5, 0), "GB200": (6, 0)} == lines
    assert 7 == found.reasons["ours: multi-head latent attention"]
    assert 5 == found.reasons["ours: no tokens/s and no step time"]
    assert 5 == found.reasons["ours: no built-in figures of GB300"]

    def refuses(job: Job, machines: Machines) -> float:
        raise FactError("no experts; try another")

    refused = nvidia.section(PATH, {"ours": refuses})
    assert () == refused.lines
    assert 28 == refused.reasons["ours: no experts"]


def test_step_times_as_published_come_first() -> None:
    """A card's own seconds, else tokens/s; 16 GPUs of Qwen3-8B take 25 s for 1,024 samples."""
    assert 25.07032 == nvidia.measured_s(row_of("Qwen3-8B", "H100"))
    assert nvidia.measured_s(row_of("Qwen3-30B-A3B", "B200")) is None
