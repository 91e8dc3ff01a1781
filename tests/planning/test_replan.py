"""The next step of a job after a round, from records alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from facts_for_tests import memory_need, nodes, tiny_cluster

from pipette_launch.facts import Choice, Host, Layout, Plan, Provenance
from pipette_launch.facts.messages import Decision, Failure, NodeRecord, RunTraining, RunTrial, RunWarmup
from pipette_launch.facts.plan import refit
from pipette_launch.planning.replan import Finish, GiveUp, Keep, Measure, Step, TryNext, UseFallback, decide

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
        memory=memory_need((1,), 2),
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
    tokens = tuple(f"token-{host}" for host in hosts)
    return RunTraining(nodes=nodes(*hosts, tokens=tokens, num_slots=2), plan=plan, attempt=attempt)


def test_the_first_round_measures() -> None:
    """Without a plan there is nothing to keep."""
    assert Measure(reason="") == decide([record("a")], ["a"], None)


def test_a_round_that_broke_off_in_warmup_measures_again() -> None:
    """A warm-up does not count as a plan."""
    assert Measure(reason="") == decide([record("a")], ["a"], RunWarmup.of(decision("a"), order=""))


def test_a_restart_keeps_the_plan() -> None:
    """A worker that dies after the first iteration changes nothing."""
    died = record("a", attempt=0, verdict="after-first-iteration", failure=Failure(cause="", rank=0, exit_code=-9))

    held = replace(decision("b", "a"), restarts_left=1)

    why = "rank 0 ended with signal 9; starting again under the same plan"
    assert Keep(proven=True, restarts_left=0, reason=why) == decide([died, record("b")], ["a", "b"], held)


def test_a_plan_that_has_trained_is_kept() -> None:
    """A restart may die at once, for example on a broken device. That proves nothing against the plan."""
    died = record("a", attempt=0, verdict="before-first-iteration", failure=Failure(cause="", rank=0, exit_code=1))
    proven = replace(decision("a"), proven=True, restarts_left=3)

    why = "rank 0 ended with exit code 1; starting again under the same plan"
    assert Keep(proven=True, restarts_left=2, reason=why) == decide([died], ["a"], proven)


def test_one_witness_of_an_iteration_is_enough() -> None:
    """A node that saw an iteration counts more than a node that died earlier."""
    died = record("a", attempt=0, verdict="before-first-iteration", failure=Failure(cause="", rank=0, exit_code=1))
    heard = record("b", attempt=0, verdict="after-first-iteration")

    step = decide([died, heard], ["a", "b"], replace(decision("a", "b"), restarts_left=1))

    assert isinstance(step, Keep)
    assert step.proven


def test_a_plan_that_cannot_start_gives_way() -> None:
    """A death before the first iteration moves on to the next candidate, with the reason."""
    died = record("a", attempt=0, verdict="before-first-iteration", failure=Failure(cause="", rank=0, exit_code=1))

    assert TryNext(attempt=1, reason="rank 0 ended with exit code 1") == decide([died], ["a"], decision("a"))


@pytest.mark.parametrize(("peaks", "expected"), [((9, 9, 10, 8), 3), ((9, 9, 9), 3), ((9, 5), 1)])
def test_a_plan_that_ran_out_of_memory_gives_way_to_one_that_needs_less(peaks: tuple[int, ...], expected: int) -> None:
    """Candidates that need as much are not tried. If no candidate needs less, the user's own configuration is next."""
    held = decision("a")
    assert held.plan is not None
    first, *others = [replace(held.plan.chosen, memory=memory_need((1, peak), 2)) for peak in peaks]
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
    """Return a decision to run one of two candidates with different layouts, after earlier failures."""
    held = decision("a", attempt=attempt)
    assert held.plan is not None
    other = replace(held.plan.chosen, layout=Layout(pp=2))
    return replace(held, plan=replace(held.plan, alternatives=(other,)), failures=failures)


@pytest.mark.parametrize(("peak", "expected"), [(1, 1), (9, None)])
def test_a_plan_that_has_trained_and_ran_out_of_memory_gives_way(peak: int, expected: int | None) -> None:
    """A candidate that needs less runs and costs no restart; without one the same plan costs a restart."""
    held = decision("a")
    assert held.plan is not None
    leaner = replace(held.plan.chosen, memory=memory_need((peak,), 2))
    fuller = replace(held.plan.chosen, memory=memory_need((5,), 2))
    held = replace(held, restarts_left=1, plan=replace(held.plan, chosen=fuller, alternatives=(leaner,)))
    died = record("a", attempt=0, verdict="after-first-iteration", failure=SHORT)

    step = decide([died], ["a"], held)

    if expected is None:
        assert isinstance(step, Keep)
        assert 0 == step.restarts_left
    else:
        assert TryNext(attempt=expected, reason=SHORT.sentence) == step


@pytest.mark.parametrize("kind", ["out-of-memory", "out-of-host-memory"])
def test_what_the_whole_device_holds_is_compared(kind: Any) -> None:
    """Smaller tensors do not help if communicators need more."""
    held = decision("a")
    assert held.plan is not None
    chosen, other, lean = (
        replace(held.plan.chosen, memory=memory_need((whole,), 92, 100, model_bytes=(tensors,)))
        for tensors, whole in ((50, 60), (40, 70), (45, 55))
    )
    held = replace(held, plan=replace(held.plan, chosen=chosen, alternatives=(other, lean)))

    assert TryNext(attempt=2, reason=SHORT.sentence) == decide([death(replace(SHORT, kind=kind))], ["a"], held)


def test_what_no_plan_can_cause_ends_the_job() -> None:
    """A missing file is missing under every plan, and the sentence says so."""
    why = f"{NO_FILE.sentence}; no other plan is tried: the missing file or module is missing under every plan"

    assert GiveUp(reason=why) == decide([death(TERMINATED), death(NO_FILE)], ["a", "b"], decision("a", "b"))


def test_one_exception_under_two_layouts_ends_the_job() -> None:
    """Its rank and exit code do not matter."""
    held = two_layouts(attempt=1, failures=(replace(ODD_KEY, rank=1, exit_code=3),))

    why = f"{ODD_KEY.sentence}; no other plan is tried: two layouts ended with the same exception"
    assert GiveUp(reason=why) == decide([death(ODD_KEY, 1)], ["a"], held)


def test_an_exception_of_one_layout_goes_on_to_the_next_plan() -> None:
    """The next plan runs the first time, and again if only the placement had changed."""
    assert TryNext(attempt=1, reason=ODD_KEY.sentence) == decide(
        [death(ODD_KEY)], ["a"], two_layouts(attempt=0, failures=())
    )
    again = replace(decision("a", attempt=1), failures=(ODD_KEY,))
    assert TryNext(attempt=2, reason=ODD_KEY.sentence) == decide([death(ODD_KEY, 1)], ["a"], again)


def test_a_node_that_ran_out_of_memory_outweighs_the_others() -> None:
    """The others only report that this node is missing."""
    assert TryNext(attempt=2, reason=NO_FILE.sentence) == decide(
        [death(SHORT), death(NO_FILE)], ["a", "b"], decision("a", "b")
    )


def test_the_users_own_configuration_is_the_last_resort() -> None:
    """Past the last candidate a death is an ordinary failure."""
    died = record("a", attempt=2, verdict="before-first-iteration", failure=Failure(cause="", rank=0, exit_code=1))

    step = decide([died], ["a"], replace(decision("a", attempt=2), restarts_left=1))

    assert isinstance(step, Keep)
    assert (False, 0) == (step.proven, step.restarts_left)


def test_a_stale_verdict_counts_no_more() -> None:
    """The death of an earlier candidate proves nothing about the present one."""
    died = record("a", attempt=0, verdict="before-first-iteration", failure=Failure(cause="x"))

    assert Keep(proven=False) == decide([died], ["a"], decision("a", attempt=1))


def test_other_hosts_are_measured() -> None:
    """A plan is for its hosts; the reason names both sets."""
    step = decide([record("a"), record("c")], ["a", "c"], decision("a", "b"))

    assert Measure(reason="the hosts changed from a, b to a, c") == step


def test_ranks_follow_the_plans_own_host_order() -> None:
    """A plan names hosts, so each host gets its own ranks in any order of the round."""
    made = decision("a", "b")
    turned = replace(made, nodes=made.nodes[::-1])

    assert made.ranks_of("token-a") == turned.ranks_of("token-a") == (3, 2)


def test_own_configuration_takes_torchruns_order() -> None:
    """Past the candidates the ranks are those that torchrun would give."""
    assert (2, 3) == decision("a", "b", attempt=2).ranks_of("token-b")


def test_a_plan_outlives_hosts_that_stood_by() -> None:
    """It is kept while its own hosts are there and no new host is. A host on standby may leave."""
    held = RunTraining.of(decision("a", "b", "c").leaving_out(["b"]), plan=None)

    assert isinstance(decide([record(name) for name in "abc"], [*"abc"], held), Keep)
    assert isinstance(decide([record(name) for name in "ac"], [*"ac"], held), Keep)
    for hosts in ("ab", "abcd", "acd"):
        step = decide([record(name) for name in hosts], [*hosts], held)
        assert Measure(reason=f"the hosts changed from a, b, c to {', '.join(hosts)}") == step


# -- every state that a job is in, and everything that may happen to it --------------------------------------------

PLAN = decision("a", "b", "c").plan
SMALLER = decision("a", "b").plan
assert PLAN is not None
assert SMALLER is not None
WITH_TEMPLATE = replace(PLAN, templates=(SMALLER,), other_hosts=("s",))
"""Three hosts of four train, and the fourth is a spare; there is a plan for two."""
ON_TEMPLATE = refit(WITH_TEMPLATE, ["a", "c"])
assert ON_TEMPLATE is not None
TRAINS = replace(decision("a", "b", "c"), plan=WITH_TEMPLATE, standby=nodes("s", tokens=("token-s",)))
STATES: dict[str, Decision | None] = {
    "no plan held": None,
    "warm-up": RunWarmup.of(TRAINS, order=""),
    "trial": RunTrial.of(TRAINS, plan=WITH_TEMPLATE, trial=0, iterations=1),
    "unproven": replace(TRAINS, restarts_left=1),
    "proven": replace(TRAINS, proven=True, restarts_left=1),
    "no restarts left": replace(TRAINS, proven=True),
    "second candidate": replace(TRAINS, attempt=1, proven=True, restarts_left=1),
    "on template": replace(decision("a", "c"), plan=ON_TEMPLATE, proven=True, restarts_left=1),
}
STRANGE = Failure(cause="it went wrong", rank=1, exit_code=1)
EVENTS: dict[str, tuple[str, str, Any, Failure | None]] = {
    # Hosts that are there where three train; where two train; how the attempt ended on each; why on the first of them.
    "nothing": ("abcs", "ac", "none", None),
    "done": ("abcs", "ac", "done", None),
    "died early": ("abcs", "ac", "before-first-iteration", STRANGE),
    "died later": ("abcs", "ac", "after-first-iteration", STRANGE),
    "out of memory": ("abcs", "ac", "before-first-iteration", SHORT),
    "spare lost": ("abc", "ac", "none", None),
    "host lost, spare there": ("acs", "acs", "after-first-iteration", STRANGE),
    "host lost, no spare": ("ac", "as", "before-first-iteration", STRANGE),
    "host came back": ("abcs", "abc", "none", None),
    "too few": ("a", "a", "after-first-iteration", STRANGE),
    "unknown": ("abx", "ax", "after-first-iteration", STRANGE),
}
EXPECTED: dict[str, dict[str, type[Step]]] = {
    "no plan held": {**dict.fromkeys(EVENTS, Measure), "too few": GiveUp},
    "warm-up": {**dict.fromkeys(EVENTS, Measure), "too few": GiveUp},
    "trial": {**dict.fromkeys(EVENTS, Measure), "too few": GiveUp},
}
TRAINING: dict[str, type[Step]] = {
    "nothing": Keep,
    "done": Finish,
    "died early": Keep,
    "died later": Keep,
    "out of memory": Keep,
    "spare lost": Keep,
    "host lost, spare there": UseFallback,
    "host lost, no spare": UseFallback,
    "host came back": Keep,
    "too few": GiveUp,
    "unknown": Measure,
}
EXPECTED["proven"] = EXPECTED["second candidate"] = TRAINING
EXPECTED["unproven"] = {**TRAINING, "died early": TryNext, "out of memory": TryNext}
EXPECTED["no restarts left"] = {**TRAINING, **dict.fromkeys(("died early", "died later", "out of memory"), GiveUp)}
EXPECTED["on template"] = {**TRAINING, "host came back": UseFallback}


def test_too_few_nodes_are_left_at_the_first_meeting() -> None:
    """One was lost between torch's rendezvous and the first decision."""
    step = decide([record("a"), record("b")], ["a", "b"], None, least_nodes=3)

    assert GiveUp(reason="2 nodes are left, and --nnodes needs 3") == step


def happened(state: str, event: str) -> Step:
    """Return the step after an event in a state; at least two nodes must train."""
    held = STATES[state]
    three, two, verdict, failure = EVENTS[event]
    hosts = [*(two if state == "on template" else three)]
    attempt = held.attempt if isinstance(held, RunTraining) else -1 if held else 0
    nodes = [
        record(host, attempt=attempt, verdict=verdict, failure=None if index else failure)
        for index, host in enumerate(hosts)
    ]
    return decide(nodes, hosts, held, lost={"b": "its agent is gone"}, least_nodes=2)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STATES)
def test_every_event_in_every_state(state: str, event: str) -> None:
    """Each event in each state has one kind of step. A loss costs no restart, and a failure costs one."""
    held, step = STATES[state], happened(state, event)

    assert EXPECTED[state][event] is type(step)
    if isinstance(step, Keep):
        assert held is not None
        failed = EVENTS[event][3] is not None
        assert held.restarts_left - failed == step.restarts_left
        assert failed == bool(step.reason)
    if isinstance(step, UseFallback):
        there = [*EVENTS[event][state == "on template"]]
        assert {*step.plan.hosts} <= {*there}
        assert 2 <= len(step.plan.hosts)


def test_a_spare_takes_the_place_of_a_lost_host() -> None:
    """The plan and its candidate stay. The sentence names the lost host, the reason, and the next step."""
    step = happened("second candidate", "host lost, spare there")

    assert isinstance(step, UseFallback)
    assert (("a", "s", "c"), True) == (step.plan.hosts, step.proven)
    assert PLAN is not None
    assert (PLAN.alternatives[0], ()) == (step.plan.chosen, step.plan.alternatives)
    assert (
        "b is lost (its agent is gone), s takes its place; going on with 3 of 4 nodes: tp1 pp1 dp6 mbs1, 1.00 s a step "
        "predicted"
    ) == step.reason


def test_without_a_spare_fewer_hosts_go_on() -> None:
    """The fallback plan has not trained yet, and begins with its first candidate."""
    step = happened("second candidate", "host lost, no spare")

    assert isinstance(step, UseFallback)
    assert (("a", "c"), False) == (step.plan.hosts, step.proven)
    assert step.reason.startswith("b is lost (its agent is gone), s is lost; going on with 2 of 4 nodes: ")


def test_a_host_that_comes_back_brings_the_larger_plan_back() -> None:
    """The earlier plan is a fallback plan of the present one."""
    step = happened("on template", "host came back")

    assert isinstance(step, UseFallback)
    assert {"a", "b", "c"} == {*step.plan.hosts}
    assert step.reason.startswith("b is back; going on with 3 of 4 nodes: ")


def test_a_known_host_that_nobody_needs_stands_by() -> None:
    """If no plan is for more hosts, its return changes nothing."""
    held = replace(decision("a", "c"), plan=replace(ON_TEMPLATE, templates=()), proven=True)

    assert Keep(proven=True) == decide([record(name) for name in "acs"], [*"acs"], held)


def test_a_host_that_was_left_out_stays_out() -> None:
    """A sick host on standby is unknown to the plan. It neither trains nor hinders the others."""
    held = replace(TRAINS, standby=nodes("s", "z", tokens=("token-s", "token-z")))
    step = decide([record(name) for name in "acsz"], [*"acsz"], held)

    assert isinstance(step, UseFallback)
    assert {"a", "c", "s"} == {*step.plan.hosts}


def test_too_few_hosts_end_the_job_with_who_is_lost() -> None:
    """MIN of --nnodes is the least number of nodes."""
    step = happened("proven", "too few")

    assert isinstance(step, GiveUp)
    assert "b is lost (its agent is gone), c is lost, s is lost; 1 node is left, and --nnodes needs 2" == step.reason


def test_a_slowdown_measures_all_machines_again() -> None:
    """The reason is reported. A lost host counts more."""
    held = decision("a", "b")
    slowed = [record("a", attempt=0, slowed="steps take 1.5 times as long"), record("b", attempt=0)]

    assert Measure(reason="steps take 1.5 times as long", anew=True) == decide(slowed, ["a", "b"], held)
    lost = decide(slowed[:1], ["a"], held, lost={"b": "silent for 8 s"})
    assert isinstance(lost, Measure)
    assert "b is lost (silent for 8 s)" in lost.reason
