"""A played stage holds the bytes that the same rank holds in the real job of all ranks.

`python -m benchmarks.bench_stage_peaks` compares the stages of 20 layouts with NVIDIA's scripts.
"""

import pytest
from patches.findings import findings_of
from patches.stage_peaks import Peaks


@pytest.mark.processes
@pytest.mark.timeout(150)
def test_a_played_stage_holds_what_its_rank_holds_in_the_job() -> None:
    """Two interleaved stages of the example trainer, with four micro-batches in flight; at most 0.5 % apart."""
    found = {pp_rank: Peaks(**each) for pp_rank, each in findings_of("stage_peaks.py", timeout_s=140).items()}

    assert ["0", "1"] == sorted(found)
    assert [0, 0] == pytest.approx([peaks.difference for peaks in found.values()], abs=0.005), found
