"""Tests of the phases of a warm-up: the adviser, the joined results, notes and summaries."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements
from probe.workers import REFERENCE, OneRankStore, answer_next, tiny_options

from pipette_launch.errors import ProbeError
from pipette_launch.facts import ComputeTime, Links, LoadingTime, Samples
from pipette_launch.facts.measurements import DeviceOverhead, LinkSurvey
from pipette_launch.facts.messages import Advice, Dimension, MeasuringQuestion
from pipette_launch.probe import phases
from pipette_launch.probe.health.nvml import LoadReading
from pipette_launch.probe.links.fits import EarlierLinks
from pipette_launch.probe.links.selection import Line
from pipette_launch.probe.lockstep import Budget, Lockstep
from pipette_launch.probe.messages import LinkSamples, Pace, WarmupOrder, WorkerResult
from pipette_launch.probe.phases import Phases, _groups_words, _links_words, assemble
from pipette_launch.probe.progress import open_question

RANK: dict[str, Any] = {"rank": 0, "world_size": 1, "timeout_s": 1.0}
BUDGET = Budget(started_s=0.0, budget_s=1.0, clock=lambda: 0.0)
BROADCAST = """
import sys
import pickle
import torch, torch.distributed as dist
from pipette_launch.probe.phases import broadcast_text
rank, text = int(sys.argv[1]), "\u00e4 plan " * 1000
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
pickle.loads = pickle.Unpickler = None
assert text == broadcast_text("" if rank else text, torch.device("cpu"))
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_a_text_reaches_all_ranks_without_a_pickle(tmp_path: Path) -> None:
    """A pickle may contain a program, and whoever can join the workers could send one."""
    words = [sys.executable, "-c", BROADCAST]
    ranks = [subprocess.Popen([*words, str(rank), str(tmp_path / "store")]) for rank in range(2)]

    assert [0, 0] == [one.wait(60) for one in ranks]


QUESTION = MeasuringQuestion(
    job=tiny_job(2), measurements=tiny_measurements(tiny_cluster(1, 2), (REFERENCE,)), budget_s=1.0
)


def test_the_launcher_answers_a_question(tmp_path: Path) -> None:
    """The launcher finds the question file once, and its answer is returned."""
    answer = Thread(target=answer_next, args=(tmp_path, lambda asked: Advice(words=f"for {asked.job.own.world_size}")))
    answer.start()

    assert Advice(words="for 2") == phases.ask(tmp_path, "7-1", QUESTION)
    assert open_question(tmp_path) is None
    answer.join()


def test_a_launcher_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up goes on with its standard groups, and says why."""
    monkeypatch.setattr(phases, "ADVISER_START_S", 0.0)

    found = phases.ask(tmp_path, "7-1", replace(QUESTION, budget_s=0.1))

    assert ((), "the launcher did not answer within 0 s") == (found.dimensions, found.words)


def test_one_group_tells_for_all_of_its_shape() -> None:
    """Only kinds, sizes or numbers of hosts that were not measured are new."""
    measured = Dimension(name="tp", kinds=("all_reduce",), groups=((0, 1), (2, 3)))
    across = Dimension(name="dp", kinds=("all_reduce",), groups=((0, 2), (1, 3)))
    within = Dimension(name="dp", kinds=("all_reduce", "all_gather"), groups=((4, 5),))
    larger = Dimension(name="dp", kinds=("all_reduce",), groups=((0, 1, 2, 3),))

    found = phases.not_measured((measured, across, within, larger, across), (measured,), 2)

    assert (across, dataclasses.replace(within, kinds=("all_gather",)), larger) == found
    assert () == phases.not_measured(found, (measured, across, within, larger), 2)


SIZES = (8, 4096, 65536)


def link(source: int, target: int, bandwidth: float, jitter: float = 0.0) -> LinkSamples:
    """Samples of a link with 1 ms latency."""
    return LinkSamples(
        source=source,
        target=target,
        sizes_bytes=SIZES,
        samples=tuple(
            Samples(values_s=tuple((1e-3 + size / bandwidth) * (1 + sign * jitter) for sign in (-1, 0, 1)))
            for size in SIZES
        ),
    )


def layer(slot: int, seconds: float, jitter: float = 0.0) -> ComputeTime:
    """Return a layer's times, a third in each pass."""
    sample = Samples(values_s=tuple(seconds / 3 * (1 + sign * jitter) for sign in (-1, 0, 1)))
    return ComputeTime(case=REFERENCE, part="layer", slot=slot, forward=sample, input_grad=sample, weight_grad=sample)


def result(slot: int, **changes: object) -> WorkerResult:
    """Return a worker's empty result."""
    empty = WorkerResult(
        slot=slot,
        links=(),
        collectives=(),
        compute=(layer(slot, 3.0),),
        stretch=1.0,
        paces=(Pace(turn=0, seconds=3.0),),
        memory=(),
        overhead=DeviceOverhead(alone_bytes=0, together_bytes=slot, num_communicators=2, workspace_bytes=0),
        optimizer_s_per_parameter=None if slot == 0 else slot * 1e-9,
        phase_s={"links": float(slot)},
        notes=(),
    )
    return replace(empty, **changes)  # type: ignore[arg-type]


def three_hosts(tmp_path: Path) -> WarmupOrder:
    """Return an order for three hosts with a device each."""
    return tiny_options(tmp_path, hosts=3, devices=1, message_sizes_bytes=SIZES)


def test_links_become_a_matrix_with_the_sender_in_the_row(tmp_path: Path) -> None:
    """Each direction has its own bandwidth, and each pair an entry with its spread."""
    options = tiny_options(tmp_path, hosts=2, devices=1, message_sizes_bytes=SIZES)
    found = assemble(
        options,
        [result(0, links=(link(0, 1, 1e6),)), result(1, links=(link(1, 0, 2e6, jitter=0.01),))],
        versions={"torch": "2"},
        taken_at="now",
    )

    between = found.cluster.between_hosts
    assert pytest.approx(1e6) == between.bandwidth_bytes_per_s[0][1]
    assert pytest.approx(2e6) == between.bandwidth_bytes_per_s[1][0]
    assert pytest.approx(1e-3) == between.latency_s[0][1]
    assert [("send", (0, 1), 0.0), ("send", (1, 0), 0.01)] == [
        (entry.kind, entry.slots, round(entry.spread, 6)) for entry in found.collectives
    ]
    assert 1 == found.overhead_bytes
    assert 1e-9 == found.optimizer_s_per_parameter
    assert 1.0 == found.phase_s["links"]
    assert () == found.notes


def test_what_nobody_measured_is_estimated_from_its_ends(tmp_path: Path) -> None:
    """Host 2 receives slowly, so the unmeasured 1 -> 2 is estimated slower than 0 -> 1, with a note."""
    links = [(link(0, 1, 9e6), link(0, 2, 1e6)), (link(1, 0, 9e6),), (link(2, 0, 1e6),)]
    found = assemble(
        three_hosts(tmp_path),
        [result(slot, links=mine) for slot, mine in enumerate(links)],
        versions={},
        taken_at="now",
    )

    assert 1e6 <= found.cluster.between_hosts.bandwidth_bytes_per_s[1][2] < 9e6
    assert found.survey
    assert ("-mm", "m-e", "me-") == found.survey.origin_HH
    assert "links: 2 of 6 pairs between hosts were estimated from the others" in found.notes


def test_what_an_earlier_warm_up_measured_is_believed(tmp_path: Path) -> None:
    """Cached links are used for hosts in another order, new ones replace them, and each has its origin."""
    options = three_hosts(tmp_path)
    rates = [[0.0 if i == j else 1e6 * (3 * i + j) for j in range(3)] for i in range(3)]
    cluster = tiny_cluster(3, 1)
    then = replace(
        tiny_measurements(
            replace(
                cluster,
                hosts=cluster.hosts[::-1],
                between_hosts=Links(latency_s=[[1e-3] * 3] * 3, bandwidth_bytes_per_s=rates),
            )
        ),
        survey=LinkSurvey(spread_HH=np.zeros((3, 3)), origin_HH=("-mm", "m-e", "mm-")),
    )
    earlier = EarlierLinks.of(then, options)
    results = [result(0, links=(link(0, 1, 5e6),)), result(1), result(2)]
    found = assemble(options, results, earlier=earlier, versions={}, taken_at="now")

    assert found.survey
    # Today's 1 -> 0 is then's 1 -> 2, which was only estimated.
    assert ("-mc", "e-c", "cc-") == found.survey.origin_HH
    assert pytest.approx(5e6) == found.cluster.between_hosts.bandwidth_bytes_per_s[0][1]
    assert pytest.approx(rates[0][1]) == found.cluster.between_hosts.bandwidth_bytes_per_s[2][1]
    assert EarlierLinks.of(tiny_measurements(tiny_cluster(2, 1)), options) is None


def test_no_link_at_all_is_an_error(tmp_path: Path) -> None:
    """Without any link there is no estimate."""
    with pytest.raises(ProbeError, match="no link between hosts was measured"):
        assemble(three_hosts(tmp_path), [result(slot) for slot in range(3)], versions={}, taken_at="now")


def test_unstable_links_are_counted_and_the_worst_is_named(tmp_path: Path) -> None:
    """One of two links scatters by 30 %."""
    options = tiny_options(tmp_path, hosts=2, devices=1, message_sizes_bytes=SIZES)
    found = assemble(
        options,
        [result(0, links=(link(0, 1, 1e9),)), result(1, links=(link(1, 0, 1.5e6, jitter=0.3),))],
        versions={},
        taken_at="now",
    )

    assert ("links: 1 of 2 scatter by more than 10%, most of all node1:0 -> node0:0 (1.5 MB/s +- 30%)",) == found.notes


def test_uneven_sharing_of_cores_falls_on_no_case(tmp_path: Path) -> None:
    """Stretches of 1.9, 2 and 2.1 are chance, and all count as 2."""
    links = tuple(tuple(link(a, b, 1e9) for b in range(3) if b != a) for a in range(3))
    results = [result(slot, links=links[slot], stretch=1.9 + slot / 10) for slot in range(3)]
    found = assemble(three_hosts(tmp_path), results, versions={}, taken_at="now")

    assert (1.0, 1.0, 1.0) == found.cluster.slot_speed
    assert [2.0, 2.0, 2.0] == [time.forward.median_s for time in found.compute]


def test_a_throttled_slot_is_slow_named_and_comparable(tmp_path: Path) -> None:
    """A slot at a third of the speed in two turns is slow; its times agree with the others by its speed."""
    links = tuple(tuple(link(a, b, 1e9) for b in range(4) if b != a) for a in range(4))
    options = tiny_options(tmp_path, hosts=4, devices=1, message_sizes_bytes=SIZES)
    slow = tuple(Pace(turn=turn, seconds=9.0) for turn in (0, 1, 2))
    usual = tuple(Pace(turn=turn, seconds=3.0) for turn in (0, 1, 2))
    results = [
        result(slot, links=links[slot], stretch=(1.0, 1.0, 1.0, 3.0)[slot], paces=slow if slot == 3 else usual)
        for slot in range(4)
    ]
    found = assemble(options, results, versions={}, taken_at="now")

    assert pytest.approx((1.0, 1.0, 1.0, 1 / 3)) == found.cluster.slot_speed
    assert pytest.approx([1.0, 1.0, 1.0, 3.0]) == [time.forward.median_s for time in found.compute]
    assert [("slow-device", "node3")] == [(verdict.kind, verdict.host) for verdict in found.verdicts]


def test_no_compute_at_all_is_an_error(tmp_path: Path) -> None:
    """The error has one reason: that of the reference case."""
    options = tiny_options(tmp_path, hosts=1, devices=1)
    refused = "the script refuses tp1 cp1 mbs1: no data here"
    notes = (f"compute: without CUDA graphs, because {refused}", f"compute: {refused}", "compute: tp2 cp1 mbs1 too")

    with pytest.raises(ProbeError, match=f"^no slot could measure a layer: {refused}$"):
        assemble(options, [result(0, compute=(), notes=notes)], versions={}, taken_at="now")


def test_skipped_cases_are_counted(tmp_path: Path) -> None:
    """One of two cases was measured."""
    other = replace(REFERENCE, micro_batch_size=2)
    options = tiny_options(tmp_path, hosts=1, devices=1, cases=(REFERENCE, other))
    found = assemble(options, [result(0)], versions={}, taken_at="now")

    assert ("compute: not measured: 1 of 2 cases, such as tp1 cp1 mbs2",) == found.notes


def test_clocks_under_load_are_noted(tmp_path: Path) -> None:
    """One note for all slots: ranges of clocks and power, and how many slots each reason holds back."""
    options = tiny_options(tmp_path, hosts=1, devices=2)
    slow = LoadReading(sm_clock_hz=1.605e9, sm_clock_max_hz=1.98e9, power_w=698.4, clock_reasons=("SwPowerCap",))
    fast = replace(slow, sm_clock_hz=1.98e9, power_w=590.0, clock_reasons=())
    there, back = (link(source, 1 - source, 1e9) for source in (0, 1))
    results = [result(0, links=(there,), under_load=slow), result(1, links=(back,), under_load=fast)]
    (note,) = assemble(options, results, versions={}, taken_at="now").notes

    clocks = "SM clocks are 1.6 GHz to 1.98 GHz of 1.98 GHz"
    assert f"compute: with all slots at work {clocks}, power is 590 to 698 W, SwPowerCap on 1 of 2" == note


def test_what_is_amiss_goes_on_file(tmp_path: Path) -> None:
    """A slow link is a verdict."""
    options = three_hosts(tmp_path)
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    rates = {pair: 1e6 if pair == (0, 1) else 4e6 for pair in pairs}
    found = [*(link(*pair, rates[pair]) for pair in pairs), replace(link(0, 1, 1e6), is_again=True)]
    results = [result(slot, links=tuple(one for one in found if one.source == slot)) for slot in range(3)]
    verdicts = assemble(options, results, versions={}, taken_at="now").verdicts

    names = [host.name for host in options.hosts]
    assert [("slow-link", names[0], names[1])] == [
        (verdict.kind, verdict.host, verdict.other_host) for verdict in verdicts
    ]


def test_a_link_that_scatters_accuses_nobody(tmp_path: Path) -> None:
    """A link that is slow twice but scatters by 30 % gets no verdict."""
    options = three_hosts(tmp_path)
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    slow = link(0, 1, 1e6, jitter=0.3)
    found = [*(slow if pair == (0, 1) else link(*pair, 4e6) for pair in pairs), replace(slow, is_again=True)]
    results = [result(slot, links=tuple(one for one in found if one.source == slot)) for slot in range(3)]

    assert () == assemble(options, results, versions={}, taken_at="now").verdicts


def test_loading_is_that_of_the_median_slot(tmp_path: Path) -> None:
    """It is wall time, so nothing scales it; slots without it do not count."""
    options = tiny_options(tmp_path, hosts=1, devices=3, message_sizes_bytes=SIZES)
    links = [(link(slot, (slot + 1) % 3, 1e6),) for slot in range(3)]

    def loading(*times: LoadingTime | None) -> LoadingTime | None:
        """Return the loading time in the file."""
        found = [
            result(slot, loading=time, stretch=2.0, links=mine)
            for slot, (time, mine) in enumerate(zip(times, links, strict=True))
        ]
        return assemble(options, found, versions={}, taken_at="now").loading

    few, many = LoadingTime(batch_s=1.0, sample_s=0.5), LoadingTime(batch_s=3.0, sample_s=0.25)
    assert loading(few, None, many) == LoadingTime(batch_s=2.0, sample_s=0.375)
    assert loading(None, None, None) is None


@pytest.mark.parametrize(
    ("changed", "hosts", "is_stale"), [(0, 2, False), (1, 2, True), (1, 3, False), (2, 3, True), (None, 3, True)]
)
def test_earlier_links_are_stale_if_many_have_changed(
    tmp_path: Path, changed: int | None, hosts: int, is_stale: bool
) -> None:
    """More than a quarter of the checked links; with few hosts a single one, and always if no link was checked."""
    options = tiny_options(tmp_path, hosts=hosts, devices=1, message_sizes_bytes=SIZES, full_hosts=2)
    ways = [(a, b) for a in range(hosts) for b in range(hosts) if a != b][: 0 if changed is None else 4]
    rates = [1e6 * (0.5 if at < (changed or 0) else 1.0) for at in range(len(ways))]
    one = Phases(options=options, layers=None, lockstep=Lockstep(store=OneRankStore(), **RANK), budget=BUDGET)
    one._gathered = [result(0, links=tuple(link(*way, rate) for way, rate in zip(ways, rates, strict=True)))]
    one._earlier = EarlierLinks(between={way: Line(1e-3, 1e-6) for way in ways}, within={})

    assert is_stale == one._is_stale()
    assert f"{changed or 0} of {len(ways)} checked links changed" in one._mine.notes[0]


def test_one_thing_is_not_called_several() -> None:
    """Nouns after a number are singular or plural."""
    one, more = WorkerResult(slot=0, link_rounds=(1,)), WorkerResult(slot=0, link_rounds=(3, 4), link_rounds_again=(2,))

    assert "2 hosts in 1 round" == _links_words(one, 2)
    assert "8 hosts in 7 rounds and 2 again for suspects" == _links_words(more, 8)
    assert "1 collective timed in 1 set of groups" == _groups_words(1, 1)
    assert "3 collectives timed in 2 sets of groups" == _groups_words(3, 2)
