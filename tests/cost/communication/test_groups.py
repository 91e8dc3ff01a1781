"""The index arrays agree with the layout's own groups, for both rank orders."""

import numpy as np
import pytest
from facts_for_tests import expert_groups, groups_of

from pipette_launch.cost.communication.groups import Groups, Ranks, group_sizes
from pipette_launch.facts import Layout

LAYOUTS = [
    Layout(tp=2, pp=2, dp=4, cp=2),
    Layout(tp=2, pp=3, dp=2, cp=2, use_tp_pp_dp_mapping=True),
    Layout(tp=2, pp=2, dp=4, ep=4, etp=1),
    Layout(tp=2, pp=2, dp=4, ep=2, etp=2, cp=2),
    Layout(pp=2, dp=4, ep=4, use_tp_pp_dp_mapping=True),
]


def as_sets(groups: Ranks) -> set[tuple[int, ...]]:
    """Groups as a set of tuples."""
    return {tuple(row) for row in groups.tolist()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.words)
def test_groups_are_those_of_the_layout(layout: Layout) -> None:
    """Same members in the same order as `groups_of`."""
    groups = Groups.of(layout)

    assert set(groups_of(layout, "tp")) == as_sets(groups.tp)
    assert set(groups_of(layout, "cp")) == as_sets(groups.cp)
    assert set(groups_of(layout, "dp_cp")) == as_sets(groups.dp_cp)
    assert set(expert_groups(layout)) == as_sets(groups.ep)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.words)
def test_members_are_sorted_by_rank(layout: Layout) -> None:
    """As torch sorts the ranks of every group, rings run upwards."""
    groups = Groups.of(layout)

    for name in ("tp", "cp", "ep", "etp", "ep_etp", "dp_cp", "expert_dp", "embedding"):
        rows = getattr(groups, name)
        assert np.array_equal(np.sort(rows, axis=1), rows), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.words)
def test_expert_groups_cover_every_rank_once(layout: Layout) -> None:
    """Experts have a grid of their own over the same ranks."""
    groups = Groups.of(layout)

    for name in ("ep", "etp", "ep_etp", "expert_dp"):
        assert sorted(getattr(groups, name).ravel().tolist()) == list(range(layout.world_size)), name


def test_expert_data_parallel_groups_by_hand() -> None:
    """With tp 2, dp 4, ep 2, etp 2: each expert slice lies on two ranks, four apart."""
    groups = Groups.of(Layout(tp=2, dp=4, ep=2, etp=2))

    assert groups.expert_dp.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups.ep.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups.etp.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_rows_are_ordered_by_pipeline_rank() -> None:
    """Sizes that differ from stage to stage are laid along the rows."""
    layout = Layout(tp=2, pp=2, dp=2)
    groups = Groups.of(layout)

    assert [[layout.cell_of(rank).pp for rank in row] for row in groups.dp_cp.tolist()] == [[0, 0]] * 2 + [[1, 1]] * 2
    assert groups.forward_hop.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7], [4, 0], [5, 1], [6, 2], [7, 3]]
    assert groups.embedding.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_copies_of_shards_are_consecutive_members() -> None:
    """Two copies over eight replicas, and over the four of the experts."""
    layout = Layout(tp=2, dp=4, cp=2, ep=2, etp=2)
    groups = Groups.of(layout, instances=2)

    assert groups.shard.tolist() == [row for whole in groups.dp_cp.tolist() for row in (whole[:4], whole[4:])]
    assert group_sizes(layout, instances=2)["expert_shard"] == 2
    assert groups.expert_shard.shape == (8, 2)
    assert as_sets(Groups.of(layout).shard) == as_sets(Groups.of(layout).dp_cp)
