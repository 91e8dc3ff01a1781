"""Training under schedules that Megatron lacks gives the numbers of Megatron's own schedule."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from patches.schedules.cases import CASES, grid
from patches.torchrun import answers

from pipette_launch.cost.pipeline.zero_bubble import named_schedule, schedule_peak_bytes

IS_WHOLE = bool(os.environ.get("PIPETTE_SCHEDULE_GRID"))
"""With PIPETTE_SCHEDULE_GRID in the environment the grid is tried too: half an hour, up to 16 processes."""
pytestmark = [pytest.mark.timeout(7200 if IS_WHOLE else 400), pytest.mark.processes]
AT_ONCE = 12
"""Cases of one set of processes."""
ALL = dict(CASES) | (dict(grid()) if IS_WHOLE else {})


class Found(dict[str, list[dict[str, float]]]):
    """Results of each rank in each case. The first request for a case trains it, together with similar cases."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> list[dict[str, float]]:
        size = world_size(ALL[name])
        alike = [other for other, case in ALL.items() if world_size(case) == size]
        first = alike.index(name) // AT_ONCE * AT_ONCE
        some = alike[first : first + AT_ONCE]
        self.update(zip(some, trained(self.folder, size, [ALL[one] for one in some]), strict=True))
        return self[name]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of each rank in each case."""
    return Found(tmp_path_factory.mktemp("schedules"))


def world_size(case: dict[str, Any]) -> int:
    """Ranks of a case."""
    return int(case["pp"] * case.get("tp", 1) * case.get("dp", 1))


def trained(folder: Path, size: int, cases: list[dict[str, Any]]) -> list[list[dict[str, float]]]:
    """Run cases one after another in one set of processes."""
    words = (folder, json.dumps(cases))
    found = answers("schedules_worker.py", *words, size=size, timeout_s=380, num_lines=len(cases))
    return [one["ranks"] for one in found]


@pytest.mark.parametrize("name", ALL)
def test_losses_and_gradients_are_those_of_stock(found: Found, name: str) -> None:
    """To the last bit over three steps, and the losses of an evaluation after them; on a V within 1e-6.

    There clipping adds up the squares of gradients in another order, as other ranks hold them.
    """
    apart = [rank[figure] for rank in found[name] for figure in ("losses", "gradients")]

    assert max(apart) <= (1e-6 if ALL[name].get("named_weights") else 0.0)


@pytest.mark.parametrize("name", ALL)
def test_as_many_chunks_are_alive_as_simulated(found: Found, name: str) -> None:
    """At the fullest moment of each rank, forwards that wait for their W included."""
    case = ALL[name]
    schedule = named_schedule(case["schedule"]["name"], pp=case["pp"], num_microbatches=case["microbatches"])
    live = schedule_peak_bytes(schedule, [1] * schedule.num_stages)
    each = len(found[name]) // case["pp"]

    # RANK r is pipeline rank r // (tp * dp): pipelines come last in Megatron's order.
    assert [count for count in live for _ in range(each)] == [rank["live"] for rank in found[name]]


@pytest.mark.parametrize(("name", "most"), [("zb-1p with tied", 1.1), ("v-half", 0.8), ("v-min", 0.7)])
def test_tensors_take_no_more_than_live_chunks_say(found: Found, name: str, most: float) -> None:
    """The fullest rank beside stock's of the same chunks; gradients of logits, say, do not wait for a W."""
    ours, stock = (max(rank[figure] for rank in found[name]) for figure in ("bytes", "stock_bytes"))

    assert 0.3 * stock < ours <= most * stock


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.get("named_weights")])
def test_losses_of_a_folded_pipeline_do_not_lie_on_the_senders_gpu(found: Found, name: str) -> None:
    """No rank unpickles a tensor of another rank's GPU, as Megatron adds losses on its own."""
    assert {0} == {rank["foreign"] for rank in found[name]}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.get("checks_first_step")])
def test_a_first_step_that_differs_gives_way_to_megatrons_own(found: Found, name: str) -> None:
    """Every rank finds that a product is missing and leaves the schedule; a correct executor keeps it."""
    assert {rank["follows"] for rank in found[name]} == {not CASES[name].get("is_broken", False)}


def test_steps_were_really_trained(found: Found) -> None:
    """The gradients compared are not all nothing, and the last rank has seen losses."""
    assert all(rank["largest"] > 0 for name in CASES for rank in found[name])
    assert all(found[name][-1]["first_loss"] != found[name][-1]["last_loss"] for name in CASES)
