"""megatron-core's own tables against ours: borrowed ground is checked, not copied."""

import pytest

from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedule import num_warmup, schedule_of, schedule_table

schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules", reason="needs megatron-core")

CASES = [(2, 2, 4, 2), (2, 3, 6, 3), (4, 2, 8, 4), (4, 2, 14, 5), (3, 4, 9, 6), (2, 2, 2, 2)]


@pytest.mark.parametrize(("pp", "vpp", "microbatches", "group_size"), CASES)
def test_the_schedule_table_is_megatrons(pp: int, vpp: int, microbatches: int, group_size: int) -> None:
    """Which chunk runs which micro-batch, in which order."""
    expected = schedules.get_schedule_table(microbatches, vpp, group_size)

    microbatch_N, chunk_N = schedule_table(vpp, microbatches, group_size)

    assert [tuple(entry) for entry in expected] == list(zip(microbatch_N.tolist(), chunk_N.tolist(), strict=True))


@pytest.mark.parametrize(("pp", "vpp", "microbatches", "group_size"), CASES)
def test_the_warmup_is_megatrons(
    monkeypatch: pytest.MonkeyPatch, pp: int, vpp: int, microbatches: int, group_size: int
) -> None:
    """How many forwards each rank runs before its first backward."""
    state, layout = schedules.parallel_state, Layout(pp=pp, vpp=vpp, microbatch_group_size=group_size)
    monkeypatch.setattr(state, "get_pipeline_model_parallel_world_size", lambda: pp)
    monkeypatch.setattr(state, "get_virtual_pipeline_model_parallel_world_size", lambda: vpp)
    for rank, actions in enumerate(schedule_of(layout, microbatches).ranks):
        monkeypatch.setattr(state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
        total, _, expected, _ = schedules.get_pp_rank_microbatches(microbatches, vpp, group_size)
        first_backward = [action.kind for action in actions].index("B")

        # One more forward precedes the first backward, unless all of them ran ahead.
        assert min(expected + 1, total) == first_backward
        assert expected == min(num_warmup(pp, vpp, group_size, rank), total)
