"""Tests of what the warm-up is asked for."""

from dataclasses import replace
from pathlib import Path

import pytest
from facts_for_tests import tiny_job, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.errors import UsageError
from pipette_launch.facts import ComputeCase
from pipette_launch.launch.options import Options
from pipette_launch.launch.warmup_orders import SIZE_LIMITS_BYTES, message_sizes_bytes, probe_options


def test_sizes_of_a_gpt_by_hand() -> None:
    """4096 tokens of 4096 bf16 numbers are 32 MiB; eight tensor ranks send an eighth each."""
    model = tiny_model(seq_length=4096, hidden_size=4096, params_dtype="bf16")
    cases = [ComputeCase(tp=tp, cp=1, micro_batch_size=1) for tp in (1, 8)]

    assert (8, 4 << 20, 16 << 20, 32 << 20) == message_sizes_bytes(replace(tiny_job(8), model=model), cases, "cuda")


@given(
    tp=st.sampled_from((1, 2, 4)),
    size=st.sampled_from((1, 2, 16)),
    hidden=st.sampled_from((8, 512, 16384)),
    kind=st.sampled_from(("cpu", "cuda")),
)
def test_sizes_stay_within_limits(tp: int, size: int, hidden: int, kind: str) -> None:
    """Four sizes, ascending, the tiny one apart, whatever the model."""
    job = replace(tiny_job(1), model=tiny_model(hidden_size=hidden))
    found = message_sizes_bytes(job, [ComputeCase(tp=tp, cp=1, micro_batch_size=size)], kind)  # type: ignore[arg-type]
    least, most = SIZE_LIMITS_BYTES[kind]

    assert 4 == len(set(found))
    assert list(found) == sorted(found)
    assert least <= found[1]
    assert found[-1] <= most


def test_a_file_that_cannot_be_written_stops_before_the_warm_up() -> None:
    """What a minute of measuring found would be lost."""
    options = Options(
        script="train.py", script_arguments=(), runs_python=True, is_module=False, probe_to=Path("/dev/null/x")
    )

    with pytest.raises(UsageError, match="--pipette-probe /dev/null/x: cannot be written"):
        probe_options(tiny_job(1), (), options=options, folder=Path())
