"""The ranked list has the best layout of each set of degrees, and nothing listed beats the front."""

from __future__ import annotations

from itertools import pairwise

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements
from search.legal import legal_layouts
from search.worlds import SLOW_BYTES_PER_S, planned

from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import Plan
from pipette_launch.search.choose import DEGREES


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan for two hosts of two slots, with the list of all sets of degrees."""
    return planned(tiny_job(4), num_ranked=20)


def test_the_list_begins_with_the_chosen_layout(plan: Plan) -> None:
    """The other sets of degrees follow by step time, each set once."""
    assert plan.chosen.layout == plan.ranked[0].layout
    assert plan.chosen.step_time_s == plan.ranked[0].step_time_s
    assert all(one.step_time_s <= other.step_time_s for one, other in pairwise(plan.ranked[1:]))
    assert len(plan.ranked) == len({DEGREES(one.layout) for one in plan.ranked}) > 2


def test_listed_layouts_are_legal_and_no_placement_beats_their_bounds(plan: Plan) -> None:
    """Each figure is the prediction of the layout itself."""
    job = tiny_job(4)
    measurements = tiny_measurements(tiny_cluster(bandwidth_bytes_per_s=SLOW_BYTES_PER_S))
    predictor = Predictor(job, measurements)
    legal = set(legal_layouts(job, world_size=4, device_kind="cpu", devices_per_host=2))

    for one in (*plan.ranked, *plan.front):
        assert one.layout in legal
        assert predictor.bound_s(one.layout) <= one.step_time_s * (1 + 1e-9)
        assert one.step_time_s <= predictor.step_time(one.layout, tuple(range(4))).total_s * (1 + 1e-9)
    for one in plan.ranked:
        assert sum(one.breakdown_s.values()) == pytest.approx(one.step_time_s)


def test_no_listed_layout_beats_the_front(plan: Plan) -> None:
    """The front needs more memory for each shorter step, and holds the fastest layout."""
    assert all(one.need_bytes <= other.need_bytes for one, other in pairwise(plan.front))
    assert all(one.step_time_s > other.step_time_s for one, other in pairwise(plan.front))
    for one in plan.ranked:
        assert any(other.need_bytes <= one.need_bytes and other.step_time_s <= one.step_time_s for other in plan.front)


def test_the_list_changes_no_choice() -> None:
    """A search with and without the list chooses the same plan; without, the list and the front are empty."""
    without, with_list = (planned(tiny_job(4), num_ranked=count) for count in (0, 3))

    assert (without.chosen, without.alternatives, without.reasons) == (
        with_list.chosen,
        with_list.alternatives,
        with_list.reasons,
    )
    assert ((), ()) == (without.ranked, without.front)
    assert 3 == len(with_list.ranked)
