"""Passes are found in what torch's profiler leaves of a rank, and nothing else is taken for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipette_launch.errors import FileFormatError, MegatronError
from pipette_launch.launch.training.profile import profiled_rank, read_profile

SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"


def call(
    name: str, start_us: float, length_us: float, category: str = "python_function", **about: Any
) -> dict[str, Any]:
    """An event as the profiler writes it."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 7,
        "tid": 7,
        "ts": start_us,
        "dur": length_us,
        "args": about,
    }


def trace(*events: Any, rank: Any = 1, world_size: Any = 2) -> dict[str, Any]:
    """A trace of one rank."""
    return {"distributedInfo": {"rank": rank, "world_size": world_size}, "traceEvents": list(events)}


STEP = (
    call(f"{SCHEDULES}(311): forward_step", 1000.0, 500.0),
    call("pretrain_gpt.py(166): forward_step", 1100.0, 300.0),
    call(f"/opt/megatron-lm/{SCHEDULES}(446): backward_step", 2000.0, 700.0),
    call(f"{SCHEDULES}(218): forward_step_calc_loss", 1400.0, 10.0),
    {"ph": "M", "name": "process_name"},
)


def test_passes_are_calls_of_megatrons_schedules() -> None:
    """Not those of the script, nor functions whose names begin alike; in the order of time."""
    found = profiled_rank(trace(*reversed(STEP)))

    assert (1, 2, ("F", "B")) == (found.rank, found.world_size, found.kind_A)
    assert pytest.approx((1e-3, 2e-3)) == found.start_s_A
    assert pytest.approx((1.5e-3, 2.7e-3)) == found.end_s_A


def test_on_a_gpu_a_pass_lasts_as_long_as_its_kernels() -> None:
    """From the first to the last one that was launched in it, and never into the next pass."""
    launched = [
        call("cudaLaunchKernel", start_us, 5.0, "cuda_runtime", correlation=number)
        for number, start_us in enumerate((1010.0, 1490.0, 2010.0, 2690.0, 5000.0))
    ]
    kernels = [
        call("gemm", start_us, length_us, "kernel", correlation=number)
        for number, (start_us, length_us) in enumerate(
            ((1600.0, 100.0), (2100.0, 900.0), (2900.0, 50.0), (3900.0, 100.0), (9000.0, 1.0))
        )
    ]
    found = profiled_rank(trace(*STEP, *launched, *kernels))

    assert pytest.approx((1.6e-3, 2.9e-3)) == found.start_s_A
    assert pytest.approx((2.9e-3, 4.0e-3)) == found.end_s_A


@pytest.mark.parametrize(
    "whole",
    [
        [],
        {},
        trace(),
        trace(STEP[1]),
        trace(*STEP, rank=None),
        trace(*STEP, rank=True),
        {"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": 3},
        trace({**STEP[0], "dur": -1.0}),
        trace({**STEP[0], "ts": float("nan")}),
        trace({**STEP[0], "ts": "now"}),
        trace({**STEP[0], "name": 3}),
        trace(3, None, "x"),
    ],
)
def test_what_is_no_trace_of_a_rank_is_refused(whole: Any, tmp_path: Path) -> None:
    """One sentence names the file."""
    (tmp_path / "a.pt.trace.json").write_text(json.dumps(whole))

    with pytest.raises(FileFormatError, match=r"a\.pt\.trace\.json: cannot be read as a trace of torch's profiler"):
        read_profile(tmp_path)


def test_what_is_not_json_is_refused(tmp_path: Path) -> None:
    """Cut off, or nested without end."""
    for text in ('{"traceEvents": [', "[" * 100_000):
        (tmp_path / "a.pt.trace.json").write_text(text)
        with pytest.raises(FileFormatError):
            read_profile(tmp_path)


def test_a_folder_has_a_trace_for_each_rank(tmp_path: Path) -> None:
    """In the order of ranks; without any, the sentence says how they are made."""
    with pytest.raises(MegatronError, match="name the --tensorboard-dir of a job that ran with --profile"):
        read_profile(tmp_path)
    for name, rank in (("b", 0), ("a", 1)):
        (tmp_path / f"{name}.pt.trace.json").write_text(json.dumps(trace(*STEP, rank=rank)))

    assert [0, 1] == [one.rank for one in read_profile(tmp_path)]
