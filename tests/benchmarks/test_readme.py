"""The weak-scaling table of Megatron-LM's README: what was typed off, and how it is read."""

from __future__ import annotations

import pytest

from benchmarks.validation import readme
from benchmarks.validation.latency import Machines
from benchmarks.validation.options import DEFAULT_FILES
from benchmarks.validation.tables import Row, read_table
from pipette_launch.errors import FactError
from pipette_launch.facts import Job
from pipette_launch.facts.devices import device_named

PATH = DEFAULT_FILES["readme"]
ROWS = read_table(PATH, readme.COLUMNS).rows
H100 = device_named(readme.DEVICE)


def large_is_fast(job: Job, machines: Machines) -> float:
    """Stand for a latency model: the larger the micro-batch, the shorter the step."""
    assert machines.num_hosts * machines.devices_per_host == job.own.world_size
    return 1 / job.own.micro_batch_size


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["model"])
def test_the_columns_agree_with_each_other(row: Row) -> None:
    """MFU is the FLOP/s over 989e12; GPUs and samples are as many as the degrees say."""
    assert row["mfu_pct"] == round(row["tflops_per_gpu"] / 9.89)
    assert row["gpus"] == row["tp"] * row["pp"] * row["dp"]
    assert row["gbs"] == 4 * row["pp"] * row["dp"]


@pytest.mark.parametrize("row", ROWS[1:], ids=lambda row: row["model"])
def test_sizes_come_out_as_named(row: Row) -> None:
    """Plain layers of 12 h^2 + 13 h, two embeddings, positions and a last norm."""
    layers, hidden = row["layers"], row["hidden"]
    ends = (2 * readme.VOCABULARY + readme.SEQUENCE + 2) * hidden
    billions = (layers * (12 * hidden**2 + 13 * hidden) + ends) / 1e9

    assert row["model"] == (f"{billions:.1f}B" if billions < 10 else f"{billions:.0f}B")


def test_step_times_follow_from_the_flops() -> None:
    """177B: 6 FLOPs a sample's token for each weight of a matrix, 12 L h s for scores and context, at 432.8e12/s."""
    row = next(row for row in ROWS if row["model"] == "177B")
    weights = 96 * 12 * 12288**2 + 131072 * 12288
    flops = 1152 * 4096 * (6 * weights + 12 * 96 * 12288 * 4096)

    assert flops / (2304 * 432.8e12) == pytest.approx(readme.measured_s(row), rel=1e-12)


def test_every_model_is_scored_under_each_reading() -> None:
    """Nine models, five of them with a pipeline."""
    found = readme.section(PATH, H100, large_is_fast)

    assert [9, 5] * 3 == [line.scored for line in found.lines]
    assert () == found.skipped


def test_the_fastest_micro_batch_fits() -> None:
    """Four samples of 1.7B do, of 462B one alone."""
    found = readme.section(PATH, H100, large_is_fast)

    chosen = [detail for detail in found.details if "fastest micro-batch" in detail]
    assert 9 == len(chosen)
    assert "1.7B mbs4" in chosen[0]
    assert "462B mbs1" in chosen[-1]


def test_what_a_model_refuses_is_counted() -> None:
    """With its reason, up to the first semicolon."""

    def refuses(job: Job, machines: Machines) -> float:
        raise FactError("no pipelines; try another")

    found = readme.section(PATH, H100, refuses)

    assert (0, 9) == (found.lines[0].scored, found.lines[0].skipped)
    assert {"pipette: no pipelines": 22, "pipette: does not fit": 5} == dict(found.reasons)
