"""Tests of rates, fallback plans and memory shortages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import memory_need, tiny_cluster, tiny_job
from hypothesis import given
from hypothesis import strategies as st
from launch.worlds import choice, plan

from pipette_launch.cost.memory.overhead import allowed_bytes
from pipette_launch.errors import FactError
from pipette_launch.facts import Choice, Cluster, Layout, Plan, files
from pipette_launch.facts.plan import (
    MOST_CHARACTERS,
    Rate,
    Shortage,
    fallback_plans,
    from_candidate,
    in_order_of,
    lower,
    refit,
)


def named(name: str) -> Cluster:
    """Return two hosts of two devices with this name."""
    cluster = tiny_cluster(2, 2)
    hosts = tuple(
        replace(host, devices=tuple(replace(device, name=name) for device in host.devices)) for host in cluster.hosts
    )
    return replace(cluster, hosts=hosts)


def test_a_rate_is_of_all_tokens_and_of_each_ranks_flops() -> None:
    """8 sequences of 32 tokens in 0.5 s are 512 tokens/s. Four ranks share the FLOPs."""
    job = tiny_job(4)
    rate = Rate.of(job, Layout(dp=4), 0.5, named("NVIDIA A100-SXM4-80GB"), dtype="fp32")
    flops_per_s = job.model.step_flops(8, tp=1) / 0.5 / 4

    assert Rate(tokens_per_s=512, flops_per_s=flops_per_s, mfu=flops_per_s / 19.5e12, peak_dtype="fp32") == rate
    assert rate.times(2) == Rate.of(job, Layout(dp=4), 0.25, named("NVIDIA A100-SXM4-80GB"), dtype="fp32")


def mixed() -> Cluster:
    """Return one host with A100 and one with H200."""
    first, second = named("NVIDIA A100-SXM4-80GB").hosts[0], named("NVIDIA H200").hosts[1]
    return replace(tiny_cluster(2, 2), hosts=(first, second))


@pytest.mark.parametrize("cluster", [mixed(), named("AMD EPYC 9000")])
def test_without_a_known_peak_there_are_flops_alone(cluster: Cluster) -> None:
    """The devices have several types, or an unknown type."""
    rate = Rate.of(tiny_job(4), Layout(dp=4), 0.5, cluster, dtype="fp32")

    assert rate is not None
    assert rate.mfu is None
    assert rate.times(2).mfu is None


def test_the_peak_is_that_of_the_format_in_which_layers_multiply() -> None:
    """An H20 has twice the peak in FP8, so the same step has half the MFU."""
    wide, narrow = (
        Rate.of(tiny_job(4), Layout(dp=4), 0.5, named("NVIDIA H20"), dtype=name) for name in ("bf16", "fp8")
    )

    assert wide is not None
    assert narrow is not None
    assert wide.mfu is not None
    assert (wide.mfu / 2, "fp8") == (narrow.mfu, narrow.peak_dtype)


def test_no_time_has_no_rate() -> None:
    """A step of 0 s gives no rate."""
    assert Rate.of(tiny_job(4), Layout(dp=4), 0.0, tiny_cluster(2, 2), dtype="fp32") is None


def test_ranks_take_the_gpus_of_a_host_in_order() -> None:
    """NCCL may return wrong slices with permuted GPUs. Hosts may exchange ranks, and gloo has no such fault."""
    permuted = (0, 2, 1, 3, 4, 6, 5, 7)
    made = replace(plan(Layout(dp=8), hosts=("a", "b")), devices_per_host=4)
    exchanged = replace(made.chosen, placement=(4, 5, 6, 7, 0, 1, 2, 3))
    made = replace(made, chosen=replace(made.chosen, placement=permuted))

    assert replace(made, device_kind="cuda", chosen=exchanged)
    with pytest.raises(FactError, match=r"a GPU with a higher number needs a higher rank, got placement \(0, 2, 1"):
        replace(made, device_kind="cuda")


NAMES = "abcdefg"


def planned(hosts: str, *, spares: str = "", templates: tuple[int, ...] = ()) -> Plan:
    """Return a plan for two devices per host, with fallback plans for these numbers of hosts."""
    made = plan(Layout(dp=2 * len(hosts)), hosts=tuple(hosts))
    smaller = [plan(Layout(pp=2, dp=size), hosts=tuple(hosts)[:size]) for size in templates]
    whole = replace(made, templates=fallback_plans(smaller), other_hosts=tuple(spares))
    return files.loads(Plan, files.dumps(whole), "plan")


@st.composite
def situations(draw: st.DrawFn) -> tuple[Plan, list[str]]:
    """Draw a plan with fallback plans and spares, and some of its hosts in any order."""
    count = draw(st.integers(2, 5))
    spares = NAMES[count : count + draw(st.integers(0, 2))]
    sizes = draw(st.sets(st.integers(1, count - 1)))
    there = draw(st.permutations(NAMES[:count] + spares))
    made = planned(NAMES[:count], spares=spares, templates=tuple(sizes))
    return made, [*there][: draw(st.integers(0, len(there)))]


@given(situations())
def test_the_largest_plan_that_fits_is_fitted(situation: tuple[Plan, list[str]]) -> None:
    """Each place has a present host, present hosts of the plan keep their places, and all hosts stay known."""
    made, there = situation
    sizes = [len(one.hosts) for one in (made, *made.templates)]
    fitted = refit(made, there)

    if fitted is None:
        assert len(there) < min(sizes)
        return
    taken = next(one for one in (made, *made.templates) if len(one.hosts) == len(fitted.hosts))
    assert max(size for size in sizes if size <= len(there)) == len(fitted.hosts)
    assert len(set(fitted.hosts)) == len(fitted.hosts)
    assert set(fitted.hosts) <= set(there)
    assert all(new == old for new, old in zip(fitted.hosts, taken.hosts, strict=True) if old in there)
    assert taken.chosen == fitted.chosen
    assert sorted(sizes) == sorted(len(one.hosts) for one in (fitted, *fitted.templates))
    assert set(made.known_hosts) == set(fitted.known_hosts)


def test_the_quickest_plan_that_fits_is_fitted() -> None:
    """A plan for fewer hosts is taken if its step is shorter."""
    made = planned("abcde", templates=(4, 3))
    four, three = made.templates
    quick = replace(three, chosen=replace(three.chosen, step_time_s=four.chosen.step_time_s / 2))
    fitted = refit(replace(made, templates=(four, quick)), [*"abcd"])

    assert fitted is not None
    assert ("a", "b", "c") == fitted.hosts
    assert ("d", "e") == fitted.other_hosts


@given(situations())
def test_all_hosts_bring_the_first_plan_back(situation: tuple[Plan, list[str]]) -> None:
    """After any losses, all hosts together run the first plan again. Fitting twice gives the same result."""
    made, there = situation
    fitted = refit(made, there)
    if fitted is None:
        return
    back = refit(fitted, made.known_hosts)

    assert fitted == refit(fitted, there)
    assert back is not None
    assert (len(made.hosts), made.chosen, {*made.known_hosts}) == (len(back.hosts), back.chosen, {*back.known_hosts})
    assert [len(one.hosts) for one in made.templates] == [len(one.hosts) for one in back.templates]


def test_an_unknown_host_is_not_fitted() -> None:
    """An unknown host was not measured."""
    assert refit(planned("abc", templates=(2,)), ["a", "b", "x"]) is None


def test_who_trained_before_comes_before_a_spare() -> None:
    """A spare may be on standby because it is sick."""
    made = planned("abcd", spares="s", templates=(2,))
    fitted = refit(made, ["s", "d", "a"])

    assert fitted is not None
    assert ("a", "d") == fitted.hosts


def test_candidates_that_could_not_start_are_left_out() -> None:
    """The result begins with the candidate that ran, or has only the user's own configuration."""
    made = plan(Layout(pp=4), Layout(tp=2, dp=2), Layout(tp=4), Layout(pp=2, dp=2))
    made = replace(made, num_in_line=2)
    words = [[one.layout.words() for one in from_candidate(made, attempt).candidates()] for attempt in range(4)]

    whole = ["tp1 pp4 dp1 mbs1", "tp2 pp1 dp2 mbs1", "tp4 pp1 dp1 mbs1"]
    assert [whole, whole[1:], whole[2:], []] == words
    assert (True, made.own) == (from_candidate(made, 3).keeps_own, from_candidate(made, 3).chosen)


def test_hosts_take_their_ranks_along() -> None:
    """Each host keeps its ranks if the plan lists its hosts in another order."""
    made = planned("abc")
    turned = in_order_of(made, ["c", "a", "b"])

    for host in "abc":
        before, after = made.hosts.index(host), turned.hosts.index(host)
        assert made.chosen.placement[2 * before : 2 * before + 2] == turned.chosen.placement[2 * after : 2 * after + 2]
    assert made.own == turned.own


@pytest.mark.parametrize("sizes", [(3,), (2, 2)])
def test_there_is_one_plan_for_each_number_of_hosts(sizes: tuple[int, ...]) -> None:
    """Two plans for the same number of hosts would be ambiguous."""
    with pytest.raises(FactError, match="different numbers of hosts"):
        planned("abc", templates=sizes)


FREE = 1000
AT = "2026-11-24T00:00:00+00:00"
DP, PP, TP = Layout(dp=4), Layout(pp=2, dp=2), Layout(tp=2, dp=2)


def needing(layout: Layout, need_bytes: int, *, free_bytes: int = FREE, limit_bytes: int = 920) -> Choice:
    """Return a choice with this predicted need on its first stage."""
    peaks = (need_bytes, *(1,) * (layout.pp - 1))
    return replace(choice(layout), memory=memory_need(peaks, limit_bytes, free_bytes))


def shortage(need_bytes: int = 600, free_bytes: int = FREE) -> Shortage:
    """Return a shortage of the plan DP."""
    return Shortage(layout=DP, need_bytes=need_bytes, free_bytes=free_bytes, cause="out of memory", noticed_at=AT)


def of_needs(chosen: int, *others: int, own: int = 900) -> Plan:
    """Return a plan whose candidates have these predicted needs and different layouts."""
    made = plan(PP, *(TP, Layout(tp=4), Layout(pp=4))[: len(others)])
    alternatives = tuple(needing(one.layout, need) for one, need in zip(made.alternatives, others, strict=True))
    return replace(made, chosen=needing(PP, chosen), alternatives=alternatives, own=needing(DP, own))


def test_the_fullest_device_counts() -> None:
    """The shortage has the need of the fullest device, with overhead, and its free memory."""
    found = Shortage.of(needing(PP, 600), cause="x" * 2 * MOST_CHARACTERS, noticed_at=AT)

    assert found is not None
    assert (PP, 600, FREE, MOST_CHARACTERS) == (found.layout, found.need_bytes, found.free_bytes, len(found.cause))


def test_what_was_not_predicted_to_fit_teaches_nothing() -> None:
    """The margin was right about this plan."""
    assert Shortage.of(needing(PP, 950), cause="", noticed_at=AT) is None


def test_a_plan_that_was_to_need_little_was_not_to_blame() -> None:
    """Another process or a memory limit caused the shortage."""
    assert Shortage.of(needing(PP, 499), cause="", noticed_at=AT) is None
    assert Shortage.of(needing(PP, 500), cause="", noticed_at=AT) is not None


def test_predictions_are_taken_to_be_too_low() -> None:
    """600 of 1000 bytes were not enough: a new plan may need 92 % of 600, or twice as much with 2000 free bytes."""
    margin = shortage().margin(0.08)

    assert 0.92 * 0.599 == pytest.approx(1 - margin)
    assert (551, 1102) == (allowed_bytes(1000, memory_margin=margin), allowed_bytes(2000, memory_margin=margin))


@given(free=st.integers(1, 1 << 40), part=st.floats(0, 1), memory_margin=st.sampled_from([0.0, 0.08, 0.995]))
def test_the_plan_that_ran_out_of_memory_never_fits_again(free: int, part: float, memory_margin: float) -> None:
    """Each shortage lowers the limit, so the attempts end. The margin never becomes smaller."""
    need = max(int(part * free), 1)
    margin = shortage(need, free).margin(memory_margin)

    assert memory_margin <= margin < 1
    assert allowed_bytes(free, memory_margin=margin) < need


def test_a_plan_is_ruled_out_by_its_part_of_what_is_free() -> None:
    """If twice as much memory is free, a plan may need twice as much. Plans without figures are not ruled out."""
    known = shortage()

    assert [False, True, True] == [known.rules_out(needing(PP, need)) for need in (599, 600, 601)]
    assert [False, True] == [known.rules_out(needing(PP, need, free_bytes=2 * FREE)) for need in (1199, 1200)]
    assert not known.rules_out(choice(PP))


def test_the_first_candidate_with_a_smaller_need_is_chosen() -> None:
    """Candidates before it are removed. Without such a candidate there is no plan."""
    leaner = shortage().leaner(of_needs(800, 500, 700, 400))

    assert leaner is not None
    assert [500, 700, 400] == [max(one.memory.need_bytes) for one in leaner.candidates()]
    assert shortage().leaner(of_needs(800, 600)) is None


def test_a_plan_whose_candidates_all_need_less_stays() -> None:
    """The user's own configuration as the last resort may need more. Later alternatives stay."""
    kept = of_needs(500, 400)
    settled = replace(of_needs(500, 400, 700), num_in_line=1)

    assert kept == shortage().leaner(kept)
    assert settled == shortage().leaner(settled)


def test_the_users_own_configuration_is_judged_where_it_is_the_plan() -> None:
    """It is then the only candidate."""
    own = replace(of_needs(500, own=700), keeps_own=True)

    assert shortage().leaner(own) is None
    assert own == shortage(800).leaner(own)


def test_the_lower_of_two_counts() -> None:
    """The lower share counts; the first shortage if both are equal."""
    one, other = shortage(600), shortage(800, 2 * FREE)

    assert other == lower(one, other) == lower(other, one)
    assert one == lower(one, None) == lower(None, one)
    assert one is lower(one, replace(one, cause="again"))
    assert lower(None, None) is None


def test_says_which_plan_when_how_and_how_much() -> None:
    """One sentence has all of it."""
    assert (
        "the plan tp1 pp1 dp4 mbs1 ran out of memory at 2026-11-24T00:00:00+00:00 (out of memory), although it "
        "was predicted to need only 600 B of 1000 B"
    ) == shortage().sentence


@pytest.mark.parametrize(
    "changes", [{"need_bytes": 0}, {"need_bytes": FREE + 1}, {"cause": "x" * 1001}, {"noticed_at": "x" * 1001}]
)
def test_a_file_that_nobody_wrote_is_refused(changes: dict[str, object]) -> None:
    """A need of 0, a need above the free memory, and a very long text are errors."""
    with pytest.raises(FactError):
        replace(shortage(), **changes)  # type: ignore[arg-type]
