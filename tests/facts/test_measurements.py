"""Tests of measurements, their links, and subsets of their hosts."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from facts_for_tests import (
    changed_job,
    drawn_cluster,
    memory_need,
    tiny_cluster,
    tiny_job,
    tiny_measurements,
    tiny_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pipette_launch.errors import FactError, FileFormatError
from pipette_launch.facts import Batch, ComputeCase, ComputeTime, Layout, Measurements, Samples, StageReading, files
from pipette_launch.facts.health import DeviceCondition, Verdict
from pipette_launch.facts.measurements import (
    CollectiveTime,
    DeviceOverhead,
    LinkSurvey,
    MemoryReading,
    RailRates,
    memory_digest,
    without_hosts,
)

TIMED = "combinations of tp, cp and micro-batch timed"
CASES = tuple(ComputeCase(tp=1, cp=1, micro_batch_size=size) for size in range(1, 6))


@pytest.mark.parametrize(
    ("num_timed", "num_modelled", "expected"),
    [
        (5, 0, f"5 of 5 {TIMED}"),
        (3, 2, f"3 of 5 {TIMED}"),
        (2, 1, f"2 of 5 {TIMED}, fewer than half: the plan rests on a device model"),
    ],
)
def test_timed_cases_are_counted(num_timed: int, num_modelled: int, expected: str) -> None:
    """Modelled and unreached cases count as wanted but not as timed. Fewer than half timed is a warning."""
    known = CASES[: num_timed + num_modelled]
    measured = tiny_measurements(tiny_cluster(1, 1), known)
    compute = tuple(
        replace(time, source="modelled") if time.case in known[num_timed:] else time for time in measured.compute
    )

    assert expected == replace(measured, compute=compute, unmeasured=CASES[num_timed:]).coverage().words()


def test_a_communicator_takes_its_share_of_what_they_added() -> None:
    """Four communicators add 600 bytes: 150 each."""
    overhead = DeviceOverhead(alone_bytes=500, together_bytes=1100, num_communicators=4, workspace_bytes=70)

    assert 150 == overhead.communicator_bytes


def test_no_communicator_takes_nothing() -> None:
    """A single slot has no communicator, and a driver that released memory does not make the size negative."""
    assert (
        0 == DeviceOverhead(alone_bytes=5, together_bytes=5, num_communicators=0, workspace_bytes=0).communicator_bytes
    )
    assert (
        0 == DeviceOverhead(alone_bytes=5, together_bytes=4, num_communicators=1, workspace_bytes=0).communicator_bytes
    )


@pytest.mark.parametrize(
    ("need", "least", "expected"),
    [
        ((92, 90), (80, 80), "fits"),
        ((93, 90), (80, 80), "tight"),
        ((120, 90), (100, 80), "tight"),
        ((101, 90), (101, 80), "too large"),
        # Each stage decides, not only the stage that needs most with the cache.
        ((120, 110), (90, 101), "too large"),
    ],
)
def test_only_what_the_allocator_cannot_free_makes_a_layout_too_large(
    need: tuple[int, ...], least: tuple[int, ...], expected: str
) -> None:
    """A limit of 92 and a device of 100 bytes: the cache decides between fits and tight."""
    memory = memory_need(need, 92, 100, least_bytes=least)

    assert (expected, expected == "fits") == (memory.verdict, memory.fits)


def reading(**changes: object) -> StageReading:
    """Return the reading of a stage without memory."""
    fields = {
        "job_digest": "",
        "layout": Layout(pp=2),
        "pp_rank": 0,
        "slot": 0,
        "allocator_peak_bytes": 0,
        "reserved_peak_bytes": 0,
        "device_peak_bytes": 0,
    }
    return StageReading(**{**fields, **changes})  # type: ignore[arg-type]


def test_nothing_is_negative() -> None:
    """Negative overheads and readings are refused."""
    with pytest.raises(FactError, match="alone_bytes must be at least 0, got -1"):
        DeviceOverhead(alone_bytes=-1, together_bytes=0, num_communicators=0, workspace_bytes=0)
    with pytest.raises(FactError, match="allocator_peak_bytes must be at least 0, got -1"):
        reading(allocator_peak_bytes=-1)


def test_a_reading_is_of_a_stage_that_exists() -> None:
    """Two pipeline ranks have no third rank."""
    with pytest.raises(FactError, match="pp_rank=2 is not one of the layout's 2"):
        reading(pp_rank=2)


def test_a_reading_of_an_earlier_release_has_no_time() -> None:
    """A file without the seconds reads as before, and reads as not timed."""
    plain = {
        name: value
        for name, value in files.to_plain(reading()).items()
        if name not in ("num_microbatches", "schedule_s", "update_s")
    }

    assert reading() == files.from_plain(StageReading, plain, "an earlier file")
    assert reading().num_microbatches == 0


def test_a_reading_is_of_one_job() -> None:
    """The digest depends on batch and model, but not on layout and pins."""
    job = tiny_job(4)

    assert memory_digest(job) == memory_digest(replace(job, own=Layout(tp=4), pinned=("tp",), train_iters=99))
    assert memory_digest(job) != memory_digest(replace(job, batch=Batch(global_batch_size=4)))
    assert memory_digest(job) != memory_digest(replace(job, model=tiny_model(num_layers=8)))
    assert memory_digest(job) != memory_digest(changed_job(job, megatron_version="0.17.0"))


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A document that holds only a survey."""

    KIND: ClassVar[str] = "paper"
    survey: LinkSurvey | None


def survey() -> LinkSurvey:
    """Return three hosts: one link measured again, one estimated, one cached."""
    return LinkSurvey(
        spread_HH=np.array([[0, 0.01, 0.2], [0.02, 0, 0], [0.3, 0.04, 0]]),
        origin_HH=("-am", "m-e", "mc-"),
        rails=(RailRates(source=0, target=1, bytes_per_s=(1e9, 2e9)),),
        rounds=3,
        rounds_again=1,
    )


def test_a_survey_survives_its_file() -> None:
    """After writing and reading, the survey is equal and has the same hash."""
    read = files.loads(Paper, files.dumps(Paper(survey=survey())), "here").survey

    assert survey() == read
    assert hash(survey()) == hash(read)
    assert survey() != LinkSurvey(spread_HH=np.zeros((1, 1)), origin_HH=("-",))


def test_surveys_are_compared_without_compressing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Surveys of 100 hosts differ if one spread differs."""

    def fail(_data: bytes) -> str:
        raise AssertionError

    monkeypatch.setattr(files, "pack", fail)
    size = 100
    origins = tuple("m" * host + "-" + "m" * (size - host - 1) for host in range(size))
    zeros = LinkSurvey(spread_HH=np.zeros((size, size)), origin_HH=origins)
    other = np.zeros((size, size))
    other[0, 99] = 0.1

    assert zeros == replace(zeros)
    assert zeros != replace(zeros, spread_HH=other)
    assert zeros != replace(zeros, rounds=1)


def test_origins_have_names() -> None:
    """The file has letters; `origin` returns words."""
    assert ["again", "measured", "estimated", "cached"] == [
        survey().origin(*pair) for pair in ((0, 1), (0, 2), (1, 2), (2, 1))
    ]


def test_nobody_can_change_it() -> None:
    """The array is a read-only copy."""
    with pytest.raises(ValueError, match="read-only"):
        survey().spread_HH[0, 1] = 1


@pytest.mark.parametrize(
    ("spread", "origin", "message"),
    [
        (np.zeros((2, 2)), ("-m", "x-"), r"origin_HH\[1\] must be 2 letters.*got 'x-'"),
        (np.zeros((2, 2)), ("mm", "m-"), r"origin_HH\[0\]"),
        (np.zeros((2, 2)), ("-m", "m"), r"origin_HH\[1\]"),
        (np.zeros((3, 3)), ("-m", "m-"), "2 x 2"),
        (-np.ones((2, 2)), ("-m", "m-"), "all at least 0"),
    ],
)
def test_a_bad_survey_is_refused(spread: np.ndarray, origin: tuple[str, ...], message: str) -> None:
    """The message names the row."""
    with pytest.raises(FactError, match=message):
        LinkSurvey(spread_HH=spread, origin_HH=origin)


def test_a_bad_file_is_named() -> None:
    """The message names document and field."""
    text = files.dumps(Paper(survey=survey())).replace('"-am"', '"-zz"')

    with pytest.raises(FileFormatError, match=r"here: survey.*-zz"):
        files.loads(Paper, text, "here")


CASES_of_test_some_hosts = tuple(ComputeCase(tp=tp, cp=1, micro_batch_size=1) for tp in (1, 2, 4))


def drawn(rng: random.Random, hosts: int, devices: int) -> Measurements:
    """Draw measurements with all fields and different figures; the first case was timed on all slots."""
    cluster = drawn_cluster(rng, hosts=hosts, devices=devices)
    slots = range(cluster.num_slots)

    def times(case: ComputeCase, slot: int) -> ComputeTime:
        sample = Samples(values_s=(rng.uniform(1, 2),), warmup_s=(3.0,))
        return ComputeTime(
            case=case,
            part="layer",
            slot=slot,
            forward=sample,
            input_grad=sample,
            weight_grad=sample,
            forward_idle_s=0.1,
        )

    pairs = [(one, two) for one in range(hosts) for two in range(hosts) if one != two]
    return replace(
        tiny_measurements(cluster),
        compute=(
            *(times(CASES_of_test_some_hosts[0], slot) for slot in slots),
            *(times(case, rng.choice(slots)) for case in CASES_of_test_some_hosts[1:]),
        ),
        collectives=tuple(
            CollectiveTime(
                kind="all_reduce",
                slots=tuple(sorted(rng.sample(slots, 2))),
                latency_s=rng.random(),
                seconds_per_byte=rng.random(),
                spread=0.0,
                sizes_bytes=(8,),
            )
            for _ in range(4 if len(slots) > 1 else 0)
        ),
        memory=tuple(
            MemoryReading(case=case, slot=rng.choice(slots), allocator_peak_bytes=1, device_peak_bytes=2)
            for case in CASES_of_test_some_hosts
        ),
        stages=tuple(
            StageReading(
                job_digest="",
                layout=Layout(),
                pp_rank=0,
                slot=slot,
                allocator_peak_bytes=slot,
                reserved_peak_bytes=0,
                device_peak_bytes=0,
                num_microbatches=2,
                schedule_s=rng.uniform(0.1, 1),
                update_s=rng.uniform(0.1, 1),
            )
            for slot in slots
        ),
        conditions=tuple(DeviceCondition(uuid=f"GPU-{slot}") for slot in slots),
        verdicts=tuple(
            Verdict(kind="slow-link", host=f"node{one}", other_host=f"node{two}", figure="1 GB/s") for one, two in pairs
        ),
        survey=drawn_survey(rng, hosts, devices),
    )


def drawn_survey(rng: random.Random, hosts: int, devices: int) -> LinkSurvey:
    """Draw spread, origin and rails of each link."""
    every = range(hosts)
    return LinkSurvey(
        spread_HH=np.array([[rng.uniform(0, 1) for _ in every] for _ in every]),
        origin_HH=tuple("".join("-" if one == two else rng.choice("mace") for two in every) for one in every),
        rails=tuple(
            RailRates(source=one, target=two, bytes_per_s=(rng.random(),) * devices)
            for one in every
            for two in every
            if one != two
        ),
    )


def slots_in(plain: Any) -> Iterator[int]:
    """Return all numbers of slots in a document."""
    for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain if isinstance(plain, list) else ()):
        if key in ("slot", "slots"):
            yield from [value] if key == "slot" else value
        else:
            yield from slots_in(value)


def named(measurements: Measurements, slot: int) -> str:
    """Name a slot by its host and local index."""
    return measurements.cluster.slot_name(slot)


@st.composite
def cut(draw: st.DrawFn) -> tuple[Measurements, Measurements, set[str]]:
    """Measurements, those without some of the hosts, and the names of these hosts."""
    hosts = draw(st.integers(2, 5))
    whole = drawn(draw(st.randoms(use_true_random=False)), hosts, draw(st.integers(1, 3)))
    names = [host.name for host in whole.cluster.hosts]
    gone = draw(st.sets(st.sampled_from(names), min_size=1, max_size=hosts - 1))
    return whole, without_hosts(whole, gone), gone


@settings(max_examples=60, deadline=None)
@given(cut())
def test_links_and_speeds_that_are_left_say_the_same(found: tuple[Measurements, Measurements, set[str]]) -> None:
    """Links inside and between the remaining hosts, their survey and the relative speeds of slots stay the same."""
    whole, less, gone = found
    old = {host.name: index for index, host in enumerate(whole.cluster.hosts)}
    kept = [old[host.name] for host in less.cluster.hosts]

    assert sorted(kept) == kept
    assert set(old) - gone == {host.name for host in less.cluster.hosts}
    speed = {named(whole, slot): speed for slot, speed in enumerate(whole.cluster.slot_speed)}
    names = [named(less, slot) for slot in range(less.cluster.num_slots)]
    middle = statistics.median(speed[name] for name in names)
    assert [speed[name] / middle for name in names] == pytest.approx(less.cluster.slot_speed)
    assert [whole.cluster.within_host[one] for one in kept] == [*less.cluster.within_host]
    assert less.survey is not None
    assert whole.survey is not None
    before, after = whole.cluster.between_hosts, less.cluster.between_hosts
    for (new_one, one), (new_two, two) in itertools.product(enumerate(kept), repeat=2):
        assert before.bandwidth_bytes_per_s[one, two] == after.bandwidth_bytes_per_s[new_one, new_two]
        assert before.latency_s[one, two] == after.latency_s[new_one, new_two]
        assert whole.survey.spread_HH[one, two] == less.survey.spread_HH[new_one, new_two]
        assert whole.survey.origin_HH[one][two] == less.survey.origin_HH[new_one][new_two]
    rails = {(kept[rail.source], kept[rail.target]): rail.bytes_per_s for rail in less.survey.rails}
    assert {
        (rail.source, rail.target): rail.bytes_per_s
        for rail in whole.survey.rails
        if {rail.source, rail.target} <= {*kept}
    } == rails


@settings(max_examples=60, deadline=None)
@given(cut())
def test_readings_of_slots_that_are_left_say_the_same(found: tuple[Measurements, Measurements, set[str]]) -> None:
    """Groups, conditions, verdicts and stages of the remaining hosts stay the same, under the slots' new numbers."""
    whole, less, gone = found
    slots = {named(whole, slot): slot for slot in range(whole.cluster.num_slots)}
    names = [named(less, slot) for slot in range(less.cluster.num_slots)]

    def groups(of: Measurements) -> list[tuple[list[str], float]]:
        found = [([named(of, slot) for slot in time.slots], time.latency_s) for time in of.collectives]
        return [(group, latency_s) for group, latency_s in found if not {name.split(":")[0] for name in group} & gone]

    assert groups(whole) == groups(less)
    assert len(less.collectives) == len(groups(less))
    assert [whole.conditions[slots[name]] for name in names] == [*less.conditions]
    assert {(one.host, one.other_host) for one in whole.verdicts if not {one.host, one.other_host} & gone} == {
        (one.host, one.other_host) for one in less.verdicts
    }
    assert [reading.allocator_peak_bytes for reading in whole.stages] == [
        reading.allocator_peak_bytes for reading in less.stages
    ]
    # Speed times seconds changes only by the unit of speeds, which is the median slot.
    for name in ("schedule_s", "update_s"):
        before, after = (
            [one.cluster.slot_speed[reading.slot] * getattr(reading, name) for reading in one.stages]
            for one in (whole, less)
        )
        assert [each / before[0] for each in before] == pytest.approx([each / after[0] for each in after])
    # A field that is added to the file later must also name only slots that exist.
    assert max(slots_in(files.to_plain(less))) < less.cluster.num_slots
    assert less == files.loads(Measurements, files.dumps(less), "itself")


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(1, 2), st.randoms(use_true_random=False))
def test_nothing_that_was_timed_is_lost(hosts: int, devices: int, rng: random.Random) -> None:
    """Each case remains, and times follow the speed of the slots."""
    whole = drawn(rng, hosts, devices)

    less = without_hosts(whole, ["node0"])

    assert whole.compute_cases() == less.compute_cases()
    assert {reading.case for reading in whole.memory} == {reading.case for reading in less.memory}
    speeds = less.cluster.slot_speed
    scale = whole.cluster.slot_speed[devices] / speeds[0]
    alone = {
        case
        for case in CASES_of_test_some_hosts
        if all(time.slot < devices for time in whole.compute if time.case == case)
    }
    for case in CASES_of_test_some_hosts:
        before = [
            whole.cluster.slot_speed[time.slot] * time.forward.median_s
            for time in whole.compute
            if time.case == case and (case in alone or time.slot >= devices)
        ]
        after = [scale * speeds[time.slot] * time.forward.median_s for time in less.compute if time.case == case]
        assert before == pytest.approx(after)


def test_what_cannot_be_left_out() -> None:
    """An unknown host or all hosts cannot be removed. Removing no host changes nothing."""
    whole = tiny_measurements(tiny_cluster())

    assert whole is without_hosts(whole, [])
    with pytest.raises(FactError, match="node7: no such host among node0, node1"):
        without_hosts(whole, ["node7"])
    with pytest.raises(FactError, match="no host remains"):
        without_hosts(whole, ["node0", "node1"])
