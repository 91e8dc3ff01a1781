"""What a new round does with the plan of the round before, decided from records alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from facts_for_tests import tiny_cluster

from pipette_launch.facts import Choice, Host, Layout, Plan, Provenance
from pipette_launch.facts.messages.failure import Failure
from pipette_launch.facts.messages.round import Decision, NodeRecord
from pipette_launch.replan import GiveUp, Keep, Measure, TryNext, decide

SHORT = Failure(cause="out of memory: NCCL's buffers", kind="out-of-memory", rank=0, exit_code=1)


def record(name: str, address: str = "10.0.0.1", **changes: Any) -> NodeRecord:
    """An agent that has not trained yet."""
    host: Host = replace(tiny_cluster().hosts[0], name=name, address=address)
    plain = NodeRecord(
        token=f"token-{name}-{address}",
        host=host,
        trouble="",
        num_slots=2,
        node_rank=-1,
        script_digest="",
        versions={},
        attempt=-1,
        verdict="none",
        failure=None,
        has_plan=False,
    )
    return replace(plain, **changes)


def decision(*hosts: str, attempt: int = 0, phase: Any = "train") -> Decision:
    """A decision to run one of two candidates on hosts of two slots."""
    slots = 2 * len(hosts)
    choice = Choice(
        layout=Layout(dp=slots),
        placement=tuple(range(slots))[::-1],
        schedule="1f1b",
        step_time_s=1.0,
        breakdown_s={},
        peak_memory_bytes=(1,),
        memory_limit_bytes=2,
        bound_s=1.0,
    )
    plan = Plan(
        hosts=hosts,
        devices_per_host=2,
        device_kind="cpu",
        chosen=choice,
        alternatives=(choice,),
        own=choice,
        keeps_own=False,
        reasons=(),
        notes=(),
        num_layouts=1,
        dropped={},
        solve_s=0.0,
        provenance=Provenance(key="k", made_at="", versions={}, source="measured"),
    )
    return Decision(
        phase=phase,
        tokens=tuple(f"token-{host}" for host in hosts),
        hosts=hosts,
        num_slots=(2,) * len(hosts),
        plan=plan,
        attempt=attempt,
    )


def test_the_first_round_measures() -> None:
    """Without a plan there is nothing to keep."""
    assert Measure(reason="") == decide([record("a")], ["a"], None)


def test_a_round_that_broke_off_in_warmup_measures_again() -> None:
    """A warm-up is no plan."""
    assert Measure(reason="") == decide([record("a")], ["a"], decision("a", phase="warmup"))


def test_a_restart_keeps_the_plan() -> None:
    """A worker that dies after the first iteration changes nothing."""
    died = record("a", attempt=0, verdict="after-first-iteration", failure=Failure(cause="", rank=0, exit_code=-9))

    assert Keep(proven=True) == decide([died, record("b")], ["a", "b"], decision("b", "a"))


def test_a_plan_that_has_trained_is_kept() -> None:
    """A restart that dies at once, on a broken device for one, proves nothing against the plan."""
    died = record("a", attempt=0, verdict="before-first-iteration", failure=Failure(cause="", rank=0, exit_code=1))
    proven = replace(decision("a"), proven=True)

    assert Keep(proven=True) == decide([died], ["a"], proven)


def test_one_witness_of_an_iteration_is_enough() -> None:
    """A node that heard of an iteration outweighs one that died before it heard of it."""
    died = record("a", attempt=0, verdict="before-first-iteration", failure=Failure(cause="", rank=0, exit_code=1))
    heard = record("b", attempt=0, verdict="after-first-iteration")

    assert Keep(proven=True) == decide([died, heard], ["a", "b"], decision("a", "b"))


def test_a_plan_that_cannot_start_gives_way() -> None:
    """A death before the first iteration moves on to the next candidate, with the reason."""
    died = record("a", attempt=0, verdict="before-first-iteration", failure=Failure(cause="", rank=0, exit_code=1))

    assert TryNext(attempt=1, reason="rank 0 ended with exit code 1") == decide([died], ["a"], decision("a"))


@pytest.mark.parametrize(("peaks", "expected"), [((9, 9, 10, 8), 3), ((9, 9, 9), 3), ((9, 5), 1)])
def test_a_plan_that_ran_out_of_memory_gives_way_to_one_that_needs_less(peaks: tuple[int, ...], expected: int) -> None:
    """Candidates that need as much are not tried; where none needs less the user's own configuration is next."""
    held = decision("a")
    assert held.plan is not None
    first, *others = [replace(held.plan.chosen, peak_memory_bytes=(1, peak)) for peak in peaks]
    held = replace(held, plan=replace(held.plan, chosen=first, alternatives=tuple(others)))
    died = record("a", attempt=0, verdict="before-first-iteration", failure=SHORT)

    assert TryNext(attempt=expected, reason=SHORT.sentence) == decide([died], ["a"], held)


NO_FILE = Failure(cause="FileNotFoundError: '/no/such/data'", kind="missing", rank=0, exit_code=1)
ODD_KEY = Failure(cause="KeyError: 'text_document'", kind="exception", rank=0, exit_code=1)
TERMINATED = Failure(cause="", rank=0, exit_code=-15)


def death(failure: Failure, attempt: int = 0) -> NodeRecord:
    """An agent whose worker died before its first iteration."""
    return record("a", attempt=attempt, verdict="before-first-iteration", failure=failure)


def two_layouts(*, attempt: int, failures: tuple[Failure, ...]) -> Decision:
    """A decision to run one of two candidates with unlike layouts, after what became of those before it."""
    held = decision("a", attempt=attempt)
    assert held.plan is not None
    other = replace(held.plan.chosen, layout=Layout(pp=2))
    return replace(held, plan=replace(held.plan, alternatives=(other,)), failures=failures)


def test_what_no_plan_can_cause_ends_the_job() -> None:
    """A missing file is missing under every plan; the sentence says so."""
    why = f"{NO_FILE.sentence}; no other plan is tried: what is missing is missing under every plan"

    assert GiveUp(reason=why) == decide([death(TERMINATED), death(NO_FILE)], ["a"], decision("a"))


def test_one_exception_under_two_layouts_ends_the_job() -> None:
    """Whichever rank and exit code it came from."""
    held = two_layouts(attempt=1, failures=(replace(ODD_KEY, rank=1, exit_code=3),))

    why = f"{ODD_KEY.sentence}; no other plan is tried: it is the same under two layouts"
    assert GiveUp(reason=why) == decide([death(ODD_KEY, 1)], ["a"], held)


def test_an_exception_of_one_layout_goes_on_to_the_next_plan() -> None:
    """The first time, and again where only the placement had changed."""
    assert TryNext(attempt=1, reason=ODD_KEY.sentence) == decide(
        [death(ODD_KEY)], ["a"], two_layouts(attempt=0, failures=())
    )
    again = replace(decision("a", attempt=1), failures=(ODD_KEY,))
    assert TryNext(attempt=2, reason=ODD_KEY.sentence) == decide([death(ODD_KEY, 1)], ["a"], again)


def test_a_node_that_ran_out_of_memory_outweighs_the_others() -> None:
    """What the others say is what they miss of it."""
    assert TryNext(attempt=2, reason=NO_FILE.sentence) == decide([death(SHORT), death(NO_FILE)], ["a"], decision("a"))


def test_the_users_own_configuration_is_the_last_resort() -> None:
    """Past the last candidate a death is an ordinary failure."""
    died = record("a", attempt=2, verdict="before-first-iteration", failure=Failure(cause="", rank=0, exit_code=1))

    assert Keep(proven=False) == decide([died], ["a"], decision("a", attempt=2))


def test_a_stale_verdict_counts_no_more() -> None:
    """The death of an earlier candidate says nothing of the one that runs now."""
    died = record("a", attempt=0, verdict="before-first-iteration", failure=Failure(cause="x"))

    assert Keep(proven=False) == decide([died], ["a"], decision("a", attempt=1))


def test_other_hosts_are_measured() -> None:
    """A plan is for its hosts; the reason names both sets."""
    step = decide([record("a"), record("c")], ["a", "c"], decision("a", "b"))

    assert Measure(reason="the hosts changed from a, b to a, c") == step


def test_ranks_follow_the_plans_own_host_order() -> None:
    """A plan names hosts: in a round that lists them otherwise each still gets its own ranks."""
    made = decision("a", "b")
    turned = replace(made, hosts=("b", "a"), tokens=("token-b", "token-a"))

    assert made.ranks_of("token-a") == turned.ranks_of("token-a") == (3, 2)


def test_own_configuration_takes_torchruns_order() -> None:
    """Past the candidates the ranks are those that torchrun would give."""
    assert (2, 3) == decision("a", "b", attempt=2).ranks_of("token-b")


def test_a_plan_outlives_hosts_that_stood_by() -> None:
    """It is kept while its own hosts are there and nobody new is; one on standby may go."""
    held = decision("a", "b", "c").leaving_out(["b"])
    held = replace(held, plan=None)

    assert isinstance(decide([record(name) for name in "abc"], [*"abc"], held), Keep)
    assert isinstance(decide([record(name) for name in "ac"], [*"ac"], held), Keep)
    for hosts in ("ab", "abcd", "acd"):
        step = decide([record(name) for name in hosts], [*hosts], held)
        assert Measure(reason=f"the hosts changed from a, b, c to {', '.join(hosts)}") == step
