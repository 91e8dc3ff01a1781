"""Measurements without some hosts say of the others what they said before."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from facts_for_tests import drawn_cluster, tiny_cluster, tiny_measurements
from hypothesis import given, settings
from hypothesis import strategies as st

from pipette_launch.errors import FactError
from pipette_launch.facts import (
    CollectiveTime,
    ComputeCase,
    ComputeTime,
    Layout,
    Measurements,
    MemoryReading,
    Samples,
    StageReading,
    files,
)
from pipette_launch.facts.health.condition import DeviceCondition
from pipette_launch.facts.health.verdict import Verdict
from pipette_launch.facts.machines.link_survey import LinkSurvey, RailRates
from pipette_launch.facts.some_hosts import without_hosts

CASES = tuple(ComputeCase(tp=tp, cp=1, micro_batch_size=1) for tp in (1, 2, 4))


def drawn(rng: random.Random, hosts: int, devices: int) -> Measurements:
    """Everything that a warm-up may leave, each figure its own; the first case was timed everywhere."""
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
            *(times(CASES[0], slot) for slot in slots),
            *(times(case, rng.choice(slots)) for case in CASES[1:]),
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
            for case in CASES
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
    """Spread, origin and rails of every link, each its own."""
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
    """All numbers of slots in a document."""
    for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain if isinstance(plain, list) else ()):
        if key in ("slot", "slots"):
            yield from [value] if key == "slot" else value
        else:
            yield from slots_in(value)


def named(measurements: Measurements, slot: int) -> str:
    """A slot by the name that it keeps."""
    return measurements.cluster.slot_name(slot)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.integers(1, 3), st.randoms(use_true_random=False), st.data())
def test_what_is_left_says_the_same(hosts: int, devices: int, rng: random.Random, data: st.DataObject) -> None:
    """Links, speeds, groups, conditions, verdicts and the survey are those that the same hosts and slots had."""
    whole = drawn(rng, hosts, devices)
    gone = data.draw(
        st.sets(st.sampled_from([host.name for host in whole.cluster.hosts]), min_size=1, max_size=hosts - 1)
    )

    less = without_hosts(whole, gone)

    old = {host.name: index for index, host in enumerate(whole.cluster.hosts)}
    kept = [old[host.name] for host in less.cluster.hosts]
    assert sorted(kept) == kept
    assert set(old) - gone == {host.name for host in less.cluster.hosts}
    speed = dict(
        zip([named(whole, slot) for slot in range(whole.cluster.num_slots)], whole.cluster.slot_speed, strict=True)
    )
    names = [named(less, slot) for slot in range(less.cluster.num_slots)]
    middle = statistics.median(speed[name] for name in names)
    assert [speed[name] / middle for name in names] == pytest.approx(less.cluster.slot_speed)
    assert less.survey is not None
    assert whole.survey is not None
    for new_one, one in enumerate(kept):
        assert whole.cluster.within_host[one] == less.cluster.within_host[new_one]
        for new_two, two in enumerate(kept):
            assert (
                whole.cluster.between_hosts.bandwidth_bytes_per_s[one, two]
                == less.cluster.between_hosts.bandwidth_bytes_per_s[new_one, new_two]
            )
            assert (
                whole.cluster.between_hosts.latency_s[one, two]
                == less.cluster.between_hosts.latency_s[new_one, new_two]
            )
            assert whole.survey.spread_HH[one, two] == less.survey.spread_HH[new_one, new_two]
            assert whole.survey.origin_HH[one][two] == less.survey.origin_HH[new_one][new_two]

    def groups(of: Measurements) -> list[tuple[list[str], float]]:
        found = [([named(of, slot) for slot in time.slots], time.latency_s) for time in of.collectives]
        return [(group, latency_s) for group, latency_s in found if not {name.split(":")[0] for name in group} & gone]

    assert groups(whole) == groups(less)
    assert len(less.collectives) == len(groups(less))
    assert [whole.conditions[old[name.split(":")[0]] * devices + int(name.split(":")[1])] for name in names] == [
        *less.conditions
    ]
    assert {(one.host, one.other_host) for one in whole.verdicts if not {one.host, one.other_host} & gone} == {
        (one.host, one.other_host) for one in less.verdicts
    }
    rails = {(kept[rail.source], kept[rail.target]): rail.bytes_per_s for rail in less.survey.rails}
    assert {
        (rail.source, rail.target): rail.bytes_per_s
        for rail in whole.survey.rails
        if {rail.source, rail.target} <= {*kept}
    } == rails
    assert [reading.allocator_peak_bytes for reading in whole.stages] == [
        reading.allocator_peak_bytes for reading in less.stages
    ]
    # Whatever else is added to a warm-up's file: no slot is named that is not there.
    assert max(slots_in(files.to_plain(less))) < less.cluster.num_slots
    assert less == files.loads(Measurements, files.dumps(less), "itself")


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(1, 2), st.randoms(use_true_random=False))
def test_nothing_that_was_timed_is_lost(hosts: int, devices: int, rng: random.Random) -> None:
    """Every case is still there, and every slot still needs as long for it as its speed says."""
    whole = drawn(rng, hosts, devices)

    less = without_hosts(whole, ["node0"])

    assert whole.compute_cases() == less.compute_cases()
    assert {reading.case for reading in whole.memory} == {reading.case for reading in less.memory}
    speeds = less.cluster.slot_speed
    scale = whole.cluster.slot_speed[devices] / speeds[0]
    alone = {case for case in CASES if all(time.slot < devices for time in whole.compute if time.case == case)}
    for case in CASES:
        before = [
            whole.cluster.slot_speed[time.slot] * time.forward.median_s
            for time in whole.compute
            if time.case == case and (case in alone or time.slot >= devices)
        ]
        after = [scale * speeds[time.slot] * time.forward.median_s for time in less.compute if time.case == case]
        assert before == pytest.approx(after)


def test_what_cannot_be_left_out() -> None:
    """Nobody leaves out a stranger, or everybody; to leave out nobody changes nothing."""
    whole = tiny_measurements(tiny_cluster())

    assert whole is without_hosts(whole, [])
    with pytest.raises(FactError, match="node7: no such host among node0, node1"):
        without_hosts(whole, ["node7"])
    with pytest.raises(FactError, match="no host remains"):
        without_hosts(whole, ["node0", "node1"])
