"""A plan file that the user names: for which machines and jobs the launcher takes it, and what it leaves out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_model
from launch.worlds import plan
from search.worlds import named, on_gpus

from pipette_launch.errors import PlanError
from pipette_launch.facts import Layout, Plan
from pipette_launch.facts.cluster import in_device_order
from pipette_launch.facts.co_location import Domains
from pipette_launch.launch.cache import adopt, check_belongs, kept_together

HOSTS = tiny_cluster().hosts


@pytest.mark.parametrize(
    ("made", "hosts", "expected"),
    [
        (plan(Layout(pp=4)), HOSTS[:1], "the plan is for the hosts node0, node1; this job runs on node0"),
        (plan(Layout(pp=2)), HOSTS, "the plan is for 1 devices a host; this job has 2"),
    ],
)
def test_a_plan_for_other_machines_is_refused(made: object, hosts: tuple[object, ...], expected: str) -> None:
    """Both sides are named."""
    with pytest.raises(PlanError) as caught:
        check_belongs(made, hosts, "mine.json")  # type: ignore[arg-type]

    assert f"mine.json: {expected}" == str(caught.value)


def test_a_plan_of_this_very_job_is_taken_without_a_word() -> None:
    """The key proves that nothing has changed."""
    made = plan(Layout(pp=2, dp=2))

    adopted, note = adopt(made, tiny_job(), "k", "mine.json")

    assert ("", "file") == (note, adopted.provenance.source)
    assert made.candidates() == adopted.candidates()


def test_a_plan_of_another_job_is_taken_with_a_note() -> None:
    """The note says that predictions may not hold, and the outcome is filed under this job."""
    adopted, note = adopt(plan(Layout(pp=2, dp=2), key="../../x"), tiny_job(), "k", "mine.json")

    assert "mine.json was made for another job" in note
    assert "its key is ../../x, this job's is k" in note
    assert (note,) == adopted.advice
    assert "k" == adopted.provenance.key


def test_what_the_job_pins_no_plan_changes() -> None:
    """A chosen layout against a pin is refused, with field, values and reason; an alternative is left out."""
    job = tiny_job(pinned=("dp", "tp"), notes=("samples are shuffled within each replica: dp stays",))

    with pytest.raises(PlanError) as caught:
        adopt(plan(Layout(pp=2, dp=2)), job, "k", "mine.json")
    kept, _ = adopt(plan(Layout(dp=4, micro_batch_size=2), Layout(tp=4)), job, "k", "mine.json")

    assert "mine.json: the plan has dp=2, and this job pins dp=4; pinned are dp, tp, because: samples" in str(
        caught.value
    )
    assert () == kept.alternatives


def test_an_own_configuration_of_another_job_is_a_candidate_here() -> None:
    """The user asked for that plan, so its own configuration becomes one plan among others."""
    made = plan(Layout(tp=2, dp=2), keeps_own=True)

    adopted, _ = adopt(made, tiny_job(), "k", "mine.json")
    same, _ = adopt(plan(Layout(dp=4), keeps_own=True), tiny_job(), "k", "mine.json")

    assert (made.chosen,) == adopted.candidates()
    assert () == same.candidates()


def test_the_last_resort_is_this_jobs_own() -> None:
    """The user's own configuration always comes from the command line and not from the file."""
    job = tiny_job(own=Layout(tp=2, dp=2))

    adopted, _ = adopt(plan(Layout(pp=4)), job, "k", "mine.json")

    assert (job.own, (0, 1, 2, 3)) == (adopted.own.layout, adopted.own.placement)


def swapped(made: Plan, *slots: int) -> Plan:
    """A plan on GPUs; slots of two hosts have exchanged their ranks, and each host takes its GPUs in order."""
    ranks = list(made.chosen.placement)
    for one, other in zip(slots[::2], slots[1::2], strict=True):
        ranks[one], ranks[other] = ranks[other], ranks[one]
    chosen, *others = (
        replace(one, placement=tuple(in_device_order(placement, made.devices_per_host).tolist()))
        for one, placement in ((made.chosen, ranks), *((one, one.placement) for one in made.alternatives))
    )
    return replace(made, device_kind="cuda", chosen=chosen, alternatives=tuple(others))


def test_what_must_lie_together_no_plan_splits() -> None:
    """Userbuffers want tensor-parallel groups inside hosts: plans that split them are refused or left out."""
    job = tiny_job(performance_flags=("--tp-comm-overlap",))
    made = plan(Layout(tp=2, dp=2), Layout(tp=4), Layout(dp=4))

    kept, _ = adopt(swapped(made), job, "k", "mine.json")
    with pytest.raises(PlanError) as caught:
        adopt(swapped(made, 1, 3), job, "k", "mine.json")

    assert [Layout(dp=4)] == [one.layout for one in kept.alternatives]
    assert (
        "mine.json: tp2 pp1 dp2 mbs1 cannot run on these hosts in this order: it splits blocks of 2 tensor-parallel "
        "ranks, and " in str(caught.value)
    )
    assert adopt(swapped(made, 1, 3), tiny_job(), "k", "mine.json")
    assert adopt(replace(swapped(made, 1, 3), device_kind="cpu"), job, "k", "mine.json")


def test_domains_count_where_they_are_known() -> None:
    """Two hosts of two domains cannot hold an expert group of four. Without known domains the plan is taken."""
    flags = ("--moe-flex-dispatcher-backend hybridep", "--moe-token-dispatcher-type flex")
    model = tiny_model(num_experts=4, moe_layer_freq=(1,) * 4)
    job = tiny_job(model=model, own=Layout(dp=4, ep=4), performance_flags=flags)
    made = swapped(plan(Layout(dp=4, ep=4)), 0, 2)
    apart = Domains.of(named(on_gpus(tiny_cluster()), "GB200-NVL72"))

    assert made == kept_together(made, job, Domains(devices_per_host=2), "it")
    with pytest.raises(PlanError, match=r"it: .* splits blocks of 2 expert-parallel ranks"):
        kept_together(swapped(plan(Layout(dp=4, ep=4)), 1, 2), job, apart, "it")
