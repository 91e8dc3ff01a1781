"""Log lines become jobs by what they and their notes say; what they do not say is a reason, not a guess."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from facts_for_tests import tiny_job

from benchmarks.validation import korthikanti, logs
from benchmarks.validation.latency import device_of, hosts_of, pipette
from benchmarks.validation.options import DEFAULT_FILES
from benchmarks.validation.tables import DataError
from pipette_launch.cost.memory.peak import MemoryParts
from pipette_launch.facts.devices import device_named

ROW = {
    "source": "page",
    "hardware": "8 x H100 80GB",
    "code": "Megatron-LM",
    "model": "GPT 1B",
    **dict.fromkeys(("gpus", "tp", "pp", "dp", "ep"), "1"),
    "layers": "4",
    "hidden": "256",
    "ffn": "1024",
    "heads": "4",
    "seq": "128",
    "mbs": "1",
    "gbs": "8",
    "recompute": "none",
    "distopt": "no",
    "rank": "0",
    "stage": "0",
    "when": "iter1",
    "allocated_MB": "100",
    "max_allocated_MB": "200",
    "max_reserved_MB": "220",
    "iter_ms": "",
    "notes": "",
}


def file(folder: Path, *rows: dict[str, str]) -> Path:
    """A log table; each row is ROW with changes."""
    lines = [",".join(logs.COLUMNS), *(",".join((ROW | row)[name] for name in logs.COLUMNS) for row in rows)]
    (folder / "logs.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "logs.csv"


def flags(folder: Path, row: dict[str, str]) -> dict[str, object]:
    """Flags that are read from one row."""
    table = logs.read_table(file(folder, row), logs.COLUMNS)
    return logs.job_flags(table.rows[0])


def test_what_a_row_says_is_taken(tmp_path: Path) -> None:
    """Implementation, vocabulary, recompute and the kind of feed-forward layer."""
    plain = flags(tmp_path, {"code": "--transformer-impl local", "recompute": "full block 3", "notes": "vocab 32000"})
    gated = flags(tmp_path, {"model": "Llama-3-8B", "ffn": "896", "notes": "sequence parallelism"})

    assert ("local", 32000, "block", 3) == tuple(
        plain[name] for name in ("transformer-impl", "vocab-size", "recompute-method", "recompute-num-layers")
    )
    assert "swiglu" not in plain
    assert (True, "RMSNorm", True, 128256, 8) == tuple(
        gated[name] for name in ("swiglu", "normalization", "sequence-parallel", "vocab-size", "num-query-groups")
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"tp": "2"}, "tp x pp x dp is not the number of GPUs"),
        ({"stage": "1"}, "there is no such stage"),
        ({"recompute": "some"}, "recompute 'some' is not understood"),
        ({"ep": "2", "gpus": "2", "dp": "2"}, "the number of experts is not stated"),
    ],
)
def test_what_a_row_does_not_say_is_a_reason(tmp_path: Path, row: dict[str, str], reason: str) -> None:
    """Counted, never guessed."""
    found = logs.section(file(tmp_path, row), {}, pipette)

    assert [(reason, "line 2: GPT 1B")] == list(found.skipped)


def test_a_release_that_is_named_counts() -> None:
    """What newer releases keep is not charged to an old one; without a name the job stays as it was read."""
    job = tiny_job()

    assert "0.10.0" == logs.of_release(job, "Megatron-LM core_r0.10.0").megatron_version
    assert job == logs.of_release(job, "Megatron-LM main 2026-03")


def test_a_bad_number_is_an_error(tmp_path: Path) -> None:
    """With file, line and column."""
    with pytest.raises(DataError, match="line 2, column gbs: '-8' is not a number"):
        logs.section(file(tmp_path, {"gbs": "-8"}), {}, pipette)


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        ("RTX 4090-48G x8", "RTX-4090-48GB"),
        ("8 x NVIDIA H100 80GB", "H100-SXM"),
        ("DGX A100 80GB", "A100-80GB"),
        ("p5.48xlarge of AWS, 8 H100", "AWS-P5-H100"),
        ("GeForce RTX 2080", None),
        ("AWS g7e.48xlarge x4 (32 GPUs of 96 GB)", None),
    ],
)
def test_devices_are_found_in_descriptions(hardware: str, name: str | None) -> None:
    """The type whose name matches best, or none."""
    found = device_of(hardware)

    assert name == (found.name if found else None)


def test_the_first_iteration_has_no_moments_in_its_passes() -> None:
    """12 bytes of optimizer state hold 8 of moments; the optimizer step itself has them."""
    nothing = MemoryParts(**dict.fromkeys((field.name for field in fields(MemoryParts)), 0))
    rank = replace(nothing, weights=2, gradients=4, optimizer=12, optimizer_step=6)
    (asked,) = [
        logs.job_of(logs.job_flags(logs.read_table(DEFAULT_FILES["logs"], logs.COLUMNS).rows[-1]), world_size=8)
    ]

    assert 18 + 100 - 8 == logs.first_iteration_peak(replace(rank, activations=100), asked)
    assert 18 + 6 == logs.first_iteration_peak(replace(rank, activations=5), asked)


def test_every_stage_and_each_run_are_scored() -> None:
    """The development data: nine lines of two runs, one of which prints its time, on hardware that we know."""
    found = logs.section(DEFAULT_FILES["logs"], {"ours": logs.closed_form}, pipette)
    lines = {(line.group, line.quantity): line.scored for line in found.lines}

    assert (9, 9, 1) == (
        lines["all stages", "peak"],
        lines["all stages", "static"],
        lines["iteration time", "step time"],
    )


def test_the_paper_of_korthikanti_is_scored() -> None:
    """Four models, with both kinds of recompute, and the formula values beside them."""
    found = korthikanti.section(DEFAULT_FILES["korthikanti"], device_named("A100-80GB"), pipette)

    assert [4] * 5 == [line.scored for line in found.lines]
    assert () == found.skipped


def test_hosts_hold_eight() -> None:
    """A small job has one small host."""
    assert [(1, 4), (1, 8), (3, 8)] == [hosts_of(size, 8) for size in (4, 8, 24)]
