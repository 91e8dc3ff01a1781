"""Plans of a job after an earlier plan ran out of memory."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from facts_for_tests import memory_need
from launch.test_coordinator_loss import beginning, some, trained
from launch.worlds import choice, records

from pipette_launch.facts import Choice, Layout, Plan, files
from pipette_launch.facts.messages import Decision, Failure
from pipette_launch.facts.plan import Shortage
from pipette_launch.launch.cache import PLAN, SHORTAGE
from pipette_launch.launch.coordinator import Coordinator

SHORT = Failure(cause="out of memory: the host's memory is exhausted", kind="out-of-host-memory", rank=0, exit_code=1)
FULL, LEAN, LEANEST = 800, 700, 600
"""What the candidates are predicted to need of 1000 bytes."""
FIRST = "the plan tp2 pp1 dp3 mbs1 ran out of memory at "


def needing(layout: Layout, need_bytes: int) -> Choice:
    """Return a plan with this predicted need on its first stage."""
    need = (need_bytes, *(1,) * (layout.pp - 1))
    in_order = tuple(range(layout.world_size))
    return replace(choice(layout, in_order), memory=memory_need(need, 920, 1000))


def by_hand(made: Plan, devices: int) -> Plan:
    """Return the plan with three candidates on this number of devices."""
    one, two, three = (Layout(**{name: 2}, dp=devices // 2) for name in ("tp", "pp", "cp"))
    return replace(
        made,
        chosen=needing(one, FULL),
        alternatives=(needing(two, LEAN), needing(three, LEANEST)),
        own=replace(made.own, memory=needing(one, FULL).memory),
        keeps_own=False,
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache with the plan of a job of three nodes, and its fallback plan for two."""
    folder: Path = tmp_path_factory.mktemp("planned")
    one = beginning(folder)
    held = trained(one, 3)
    assert held.plan is not None
    templates = tuple(by_hand(template, 4) for template in held.plan.templates)
    assert ("", 1) == (
        one.planner.cache.save(PLAN, replace(by_hand(held.plan, 6), templates=templates)),
        len(templates),
    )
    return folder / "cache"


@pytest.fixture
def folder(planned: Path, tmp_path: Path) -> Path:
    """Return the folder of such a cache."""
    shutil.copytree(planned, tmp_path / "cache")
    return tmp_path


def job(folder: Path, **changes: Any) -> tuple[Coordinator, Decision]:
    """Return another job with this cache, and its first decision."""
    one = beginning(folder, **changes)
    return one, one.decide(records(3), None)


def ran_out(
    one: Coordinator, held: Decision, *there: int, verdict: str = "before-first-iteration", failure: Failure = SHORT
) -> Decision:
    """Return the decision after the first node ran out of memory under the present plan."""
    first, *others = some(*(there or (0, 1, 2)), verdict=verdict)
    nodes = [replace(first, failure=failure), *others]
    return one.decide([replace(node, attempt=held.attempt) for node in nodes], held)


def words(decision: Decision) -> str:
    """Return the words of the layout that runs."""
    return decision.choice.layout.words() if decision.choice else "own"


def kept(folder: Path) -> list[Path]:
    """Return the files of shortages in the cache."""
    return [*(folder / "cache").rglob(SHORTAGE)]


def keep(folder: Path, need_bytes: int, free_bytes: int) -> Path:
    """Leave a shortage in the cache, as an earlier job would."""
    ran_out(*job(folder))
    (path,) = kept(folder)
    files.write(path, replace(files.read(path, Shortage), need_bytes=need_bytes, free_bytes=free_bytes))
    return path


@pytest.mark.parametrize("verdict", ["before-first-iteration", "after-first-iteration"])
def test_after_a_shortage_no_cached_plan_of_the_smaller_margin_runs(folder: Path, verdict: str) -> None:
    """The running job goes on with the next plan that needs less. Later jobs plan anew, until the file is deleted."""
    one, held = job(folder)
    leaner = ran_out(one, held, verdict=verdict)
    _, again = job(folder)
    (path,) = kept(folder)
    path.unlink()
    _, forgotten = job(folder)

    assert ["tp2 pp1 dp3 mbs1", "tp1 pp2 dp3 mbs1"] == [words(held), words(leaner)]
    assert ("train", "warmup") == (leaner.phase, again.phase)
    assert (words(held), "") == (words(forgotten), forgotten.reason)


def test_a_new_plan_says_what_bounds_it(folder: Path) -> None:
    """The warm-up's cases, the plan and its fallback plans leave more memory free. Later jobs use the cached plan."""
    path = keep(folder, LEANEST, 1000)
    one, _ = job(folder)
    margin = 1 - 0.92 * 0.599
    after = trained(beginning(folder), 3)

    assert margin == pytest.approx(one.planner.options.memory_margin)
    assert after.plan is not None
    limits = [plan.chosen.memory.margin for plan in (after.plan, *after.plan.templates)]
    assert [margin, margin] == pytest.approx(limits)
    (note,) = (note for note in after.plan.advice if "ran out of memory" in note)
    assert note.startswith(FIRST[0].upper() + FIRST[1:])
    assert note.endswith(
        f"(rank 0 ended with exit code 1: {SHORT.cause}), although it was predicted to need only 600 B of 1000 B; "
        f"so plans leave 45% of the memory free instead of 8% (to forget it, delete {path})."
    )
    _, again = job(folder)
    assert (words(after), after.plan.advice) == (words(again), again.plan.advice if again.plan else ())


def test_where_nothing_fits_any_more_it_is_said_why(folder: Path) -> None:
    """The user's own configuration trains, as if no plan fits."""
    path = keep(folder, 1 << 10, 8 << 30)
    after = trained(beginning(folder), 3)

    assert ("train", None) == (after.phase, after.plan)
    assert after.reason.startswith("no layout fits in memory: ")
    assert f"; {FIRST}" in after.reason
    assert f"delete {path}" in after.reason


def test_a_lost_node_brings_no_plan_that_needs_as_much(folder: Path) -> None:
    """The rule holds in the same job, and if another node without a cache decides."""
    one, held = job(folder)
    leaner = ran_out(one, held, verdict="after-first-iteration")
    stranger = beginning(folder / "other", cache=None)

    assert leaner.shortage is not None
    for who in (one, stranger):
        after = who.decide(some(0, 2), leaner)
        assert ("train", True, False) == (after.phase, after.is_refitted, after.proven)
        assert (words(after), leaner.shortage) == ("tp1 pp2 dp2 mbs1", after.shortage)
        assert "going on with 2 of 3 nodes: tp1 pp2 dp2 mbs1, " in after.reason


def test_where_no_template_needs_less_a_plan_is_made_of_what_is_known(folder: Path) -> None:
    """There is no warm-up, and the lower limit holds. Memory may run out when a node is lost."""
    one, held = job(folder)
    assert held.plan is not None
    (template,) = held.plan.templates
    held = replace(held, plan=replace(held.plan, templates=(replace(template, alternatives=()),)))
    after = ran_out(one, held, 0, 2, verdict="after-first-iteration")

    assert ("train", False) == (after.phase, after.is_refitted)
    assert "the fallback plan cannot be used: it needs as much memory as a plan that ran out of it" in after.reason
    assert "nothing is measured again" in after.reason
    assert after.plan is not None
    assert 1 - 0.92 * 0.799 == pytest.approx(after.plan.chosen.memory.margin)


@pytest.mark.parametrize(
    ("device_kind", "kind", "teaches"),
    [
        ("cpu", "out-of-host-memory", True),
        ("cuda", "out-of-host-memory", False),
        ("cuda", "out-of-memory", True),
        ("cpu", "other", False),
    ],
)
def test_only_the_memory_that_was_predicted_counts(folder: Path, device_kind: Any, kind: Any, teaches: bool) -> None:
    """A full host is no evidence about GPUs, and another failure is no evidence about memory."""
    one, held = job(folder)
    assert held.plan is not None
    held = replace(held, plan=replace(held.plan, device_kind=device_kind))
    after = ran_out(one, held, failure=replace(SHORT, kind=kind))

    assert (teaches, teaches) == (after.shortage is not None, bool(kept(folder)))


def test_the_users_own_configuration_teaches_too(folder: Path) -> None:
    """If it was the plan, the next job searches another plan."""
    one, held = job(folder)
    assert held.plan is not None
    one.planner.cache.save(PLAN, replace(held.plan, keeps_own=True, alternatives=(), chosen=held.plan.own))
    one, own = job(folder)
    ran_out(one, own)

    assert (None, "warmup") == (own.choice, job(folder)[1].phase)
    assert held.plan.own.layout == files.read(kept(folder)[0], Shortage).layout


def test_a_plan_that_the_user_named_runs_all_the_same(folder: Path) -> None:
    """A note says so. Its prediction may be for other machines, so nothing is learned from it."""
    one, held = job(folder)
    assert held.plan is not None
    files.write(folder / "mine.json", held.plan)
    untaught, named = job(folder, plan=folder / "mine.json")
    ran_out(untaught, named)
    before = kept(folder)
    ran_out(one, held)
    _, warned = job(folder, plan=folder / "mine.json")

    assert [] == before
    assert words(held) == words(named) == words(warned)
    assert named.plan is not None
    assert warned.plan is not None
    *_, note = warned.plan.advice
    assert note.startswith(f"This plan runs because you named it, though it needs as much memory: {FIRST}")


def test_what_was_learned_earlier_stays_where_it_is_lower(folder: Path) -> None:
    """A plan that needs more never replaces a leaner plan that ran out of memory; the kept plan stays."""
    one, held = job(folder)
    leaner = ran_out(one, held)
    ran_out(one, leaner)
    known = files.read(kept(folder)[0], Shortage)
    after = ran_out(one, held)
    path = one.planner.cache.path(PLAN)

    assert known == after.shortage == files.read(kept(folder)[0], Shortage)
    assert LEAN == known.need_bytes
    assert path is not None
    assert held.plan is not None
    assert held.plan.candidates() == files.read(path, Plan).candidates()
