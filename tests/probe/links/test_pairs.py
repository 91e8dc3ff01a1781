"""Tests of timing links: numbers of messages, the link meter, and rounds."""

import json
import math
import subprocess
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import warm
from gpu_rules.events import SimulatedDevice
from hypothesis import given
from hypothesis import strategies as st
from probe.workers import LIMIT_S, ROOT, OneRankStore, tiny_options

from pipette_launch.errors import ProbeError
from pipette_launch.facts import Samples, files
from pipette_launch.probe.instruments import QueuedCalls, await_device
from pipette_launch.probe.links import pairs
from pipette_launch.probe.links.fits import fit_line
from pipette_launch.probe.links.pairs import (
    MAX_MEASUREMENTS,
    MAX_VALUES,
    MIN_VALUES,
    LinkMeter,
    Tally,
    condensed,
    direction_s,
    in_turns,
    ladder,
    local_groups,
    num_exchanges,
    one_way,
    quartile_spread,
    rail_groups,
    sending_order,
    settled,
    undisturbed,
)
from pipette_launch.probe.links.selection import Lines, Measure, Round, Scouted, all_pairs
from pipette_launch.probe.lockstep import Budget, Lockstep
from pipette_launch.probe.messages import LinkSamples, WarmupOrder, WorkerResult

SIZES = (8, 65536, 1 << 19, 1 << 21)


def in_passes(counts: Sequence[int]) -> list[int]:
    """Return the index of each message's size, in the order of sending."""
    return [index for index, count in sending_order(counts) for _ in range(count)]


def sent(tally: Tally, rate: float, noise: list[float] | None = None, latency_s: float = 1e-4) -> list[tuple[int, ...]]:
    """Send the wished messages over a link of `rate` bytes/s until there is no wish; returns the wishes."""
    factors = iter(noise or [])
    wishes = []
    while any(wish := tally.wish()):
        wishes.append(wish)
        for index in in_passes(wish):
            tally.add(index, (latency_s + tally.sizes[index] / rate) * next(factors, 1.0))
        assert len(wishes) < 100, "a tally must come to an end"
    return wishes


def tally(bound_s: float = 1.0, sizes: tuple[int, ...] = SIZES) -> Tally:
    """Return a new tally."""
    return Tally(sizes=sizes, repeats=5, warmups=1, bound_s=bound_s)


def test_a_quiet_link_takes_few_messages() -> None:
    """Warm-ups from small to large, then five values of each size, and 20 of tiny ones."""
    wishes = sent(tally(), 1e9)

    assert [(4, 4, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (20, 5, 5, 5)] == wishes


def test_a_noisy_link_takes_more_until_its_spread_is_known_or_its_time_is_up() -> None:
    """If every other value is 30 % off, the number of values grows to the limit."""
    noisy = tally(bound_s=10.0)
    sent(noisy, 1e9, noise=[1.0, 1.3] * 500)
    sizes, samples = noisy.samples()

    assert SIZES == sizes
    assert [4 * MAX_VALUES, MAX_VALUES, MAX_VALUES, MAX_VALUES] == [len(values) for values in noisy.values_s]
    assert all(found.spread > 0.1 for found in samples[1:])
    assert [4, 4, 1, 1] == [len(found.warmup_s) for found in samples]


def test_two_disturbed_values_of_five_leave_doubt() -> None:
    """The median absolute deviation of these values is 0."""
    assert 0 == quartile_spread([1, 1, 1, 1, 2])
    assert 0.5 == quartile_spread([1, 1, 1, 2, 2])


def test_a_disturbance_that_passes_is_outvoted() -> None:
    """With two disturbed values of five, sizes that scatter get more values."""
    disturbed = tally()
    sent(disturbed, 1e9, noise=[*[1.0] * 10, *[1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0], *[2.0] * 14])
    _, samples = disturbed.samples()

    assert all(found.spread <= 0.04 for found in samples)


def test_a_slow_link_keeps_to_its_time() -> None:
    """At 1 MB/s half a second is enough for three values of the three smallest sizes, not for 2 MiB."""
    slow = tally(bound_s=0.5)
    sent(slow, 1e6)
    sizes, samples = slow.samples()

    assert SIZES[:3] == sizes
    assert all(len(found.values_s) >= MIN_VALUES for found in samples)


@given(
    rate=st.floats(1e5, 1e11),
    latency_s=st.floats(1e-6, 1e-2),
    bound_s=st.floats(0.01, 2.0),
    noise=st.lists(st.floats(0.5, 5.0), max_size=300),
)
def test_the_least_is_always_measured(rate: float, latency_s: float, bound_s: float, noise: list[float]) -> None:
    """Any link gets at least three values of at least three sizes, and at most the limit."""
    any_link = tally(bound_s=bound_s)
    sent(any_link, rate, noise=noise, latency_s=latency_s)
    sizes, samples = any_link.samples()

    assert SIZES[:3] == sizes[:3]
    assert all(MIN_VALUES <= len(found.values_s) <= 4 * MAX_VALUES for found in samples)


@given(begin_s=st.floats(0.0, 1.0), factor=st.floats(1.0, 8.0))
def test_a_passing_disturbance_does_not_bend_the_fit(begin_s: float, factor: float) -> None:
    """For a tenth of a second all is up to eight times as slow, whenever that is: the rate stays within a tenth.

    Sent size by size instead of pass by pass, all values of the largest size would be too slow.
    """
    shaken, now_s = tally(), 0.0
    while any(wish := shaken.wish()):
        for index in in_passes(wish):
            slowed = begin_s <= now_s < begin_s + 0.1
            seconds = (1e-4 + SIZES[index] / 1e8) * (factor if slowed else 1.0)
            now_s += seconds
            shaken.add(index, seconds)
    sizes, samples = shaken.samples()
    line = fit_line(sizes, [each.median_s for each in samples])

    assert pytest.approx(1e-8, rel=0.1) == line.seconds_per_byte


@given(rate=st.floats(1e6, 1e11), bound_s=st.floats(0.01, 2.0))
def test_beyond_the_least_the_time_is_kept(rate: float, bound_s: float) -> None:
    """The time spent is within the bound, or only the least number of messages was sent."""
    steady = tally(bound_s=bound_s)
    sent(steady, rate, latency_s=0)
    spent_s = sum(map(sum, (*steady.warm_s, *steady.values_s)))
    sizes, _ = steady.samples()
    least_s = sum((4 if size <= 65536 else 1) * size + 3 * size * (4 if size == 8 else 1) for size in sizes) / rate

    assert spent_s <= max(bound_s, least_s) * (1 + 1e-9)


@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_passes_hold_what_was_asked_for(counts: list[int]) -> None:
    """Every size appears as often as wished."""
    assert {index: count for index, count in enumerate(counts) if count} == Counter(in_passes(counts))


def test_passes_go_over_all_sizes() -> None:
    """Largest first, with tiny ones in equal parts."""
    assert [2, 1, 0, 0, 2, 1, 0, 0] == in_passes((4, 2, 2))


def test_rails_go_message_by_message() -> None:
    """Only tiny messages follow each other without a pause."""
    assert [(2, 1), (1, 1), (0, 4), (2, 1), (1, 1), (0, 4)] == sending_order((8, 2, 2))


def test_what_all_rails_took_decides_and_what_one_took_is_kept() -> None:
    """Tiny messages do not wait for other rails."""
    rails = tally(sizes=(8, 4096))
    for _ in range(6):
        rails.add(1, 1.0, 2.0)
    for _ in range(5):
        rails.add(0, 0.5)
    _, together = rails.samples()
    _, own = rails.samples(own=True)

    assert ((0.5,), (2.0, 2.0)) == tuple(samples.values_s for samples in together)
    assert ((0.5,), (1.0, 1.0)) == tuple(samples.values_s for samples in own)


def test_the_ladder_begins_low() -> None:
    """A tiny message for the latency, and a first step before large sizes."""
    assert (8, 65536, 1 << 24, 1 << 26) == ladder((1 << 24, 1 << 26))
    assert (8, 100, 1000) == ladder((8, 100, 1000))


def test_the_latency_is_that_of_undisturbed_messages() -> None:
    """Slow tiny messages, which waited for a processor, do not count; of large messages all values count."""
    assert [1.0, 2.0] == undisturbed([9.0, 2.0, 8.0, 7.0, 1.0, 6.0, 5.0, 4.0])
    busy = tally(sizes=(8, 4096))
    for index, seconds in ((0, 9.0), (0, 1.0), (0, 8.0), (1, 3.0), (1, 4.0), (1, 5.0)):
        busy.values_s[index].append(seconds)

    assert ((1.0,), (3.0, 4.0, 5.0)) == tuple(samples.values_s for samples in busy.samples()[1])


@given(values=st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=30))
def test_few_values_say_as_much_as_many(values: list[float]) -> None:
    """Three values have the lower quartile as median and the spread of all, and none is below 0."""
    samples = Samples(values_s=tuple(values), warmup_s=(3.0, 2.0))
    few = condensed(samples)

    assert np.quantile(values, 0.25) == pytest.approx(few.median_s, rel=1e-5)
    assert samples.spread == pytest.approx(few.spread, rel=1e-4, abs=1e-5)
    assert (3, (2.0,)) == (len(few.values_s), few.warmup_s)


def test_a_gpus_value_is_the_mean_of_a_few_small_messages() -> None:
    """Eight exchanges of a small message, and at most 1 MiB in a row."""
    assert [8, 8, 4, 1, 1] == [num_exchanges(size) for size in (8, 128 << 10, 256 << 10, 1 << 20, 1 << 26)]


def test_what_a_value_takes_on_a_gpu_counts() -> None:
    """The bound covers exchanges in a row and the time before them."""
    plain, queued = (
        Tally(sizes=SIZES, repeats=5, warmups=1, bound_s=0.04, is_queued=is_queued) for is_queued in (False, True)
    )
    sent(plain, 1e9)
    sent(queued, 1e9)

    assert [20, 5, 5, 5] == [len(values) for values in plain.values_s]
    assert [12, 3, 3, 3] == [len(values) for values in queued.values_s]


WORKER = Path(__file__).parents[1] / "link_worker.py"
SILENT = 2


@pytest.mark.processes
def test_three_hosts_measure_each_other_and_name_who_falls_silent(tmp_path: Path) -> None:
    """Every direction once; then the partner of a worker that hangs names it and the round.

    With three hosts one rests in each round, and still takes part in every step.
    """
    options = tiny_options(tmp_path, hosts=3, devices=1)
    _run(options, tmp_path)
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(3)]
    errors = [(tmp_path / f"error-{rank}").read_text() for rank in range(3) if rank != SILENT]
    links = [files.from_plain(LinkSamples, plain, "links") for one in found for plain in one["links"]]
    rates_HH = np.array(found[0]["rates"])

    assert sorted(permutations(range(3), 2)) == sorted((link.source, link.target) for link in links)
    assert all(options.message_sizes_bytes == link.sizes_bytes for link in links)
    assert all(samples.median_s > 0 for link in links for samples in link.samples)
    # Not-a-number on the diagonal; the same numbers everywhere, or ranks would decide differently.
    assert np.array_equal(np.eye(3, dtype=bool), np.isnan(rates_HH))
    assert all(np.array_equal(rates_HH, np.array(one["rates"]), equal_nan=True) for one in found)
    (partner,) = [error for error in errors if "no answer from node2:0 in round 4 of 6" in error]
    assert "between hosts" in partner
    assert all("links: no answer from" in error for error in errors)


def _run(options: WarmupOrder, folder: Path) -> None:
    """Start three workers, and wait for those that do not hang."""
    order = folder / "options.json"
    files.write(order, options)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    environment = warm.environment([ROOT, ROOT / "patches", ROOT / "tests"])
    words = [warm.python().path, str(WORKER), str(order), str(store.port)]
    workers = [subprocess.Popen([*words, str(rank), str(SILENT)], env=environment) for rank in range(3)]
    try:
        codes = [worker.wait(timeout=LIMIT_S) for rank, worker in enumerate(workers) if rank != SILENT]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [0, 0] == codes


class LateEvent:
    """A device's event that completes after a number of queries; None = never."""

    looks: int | None = None

    def __init__(self) -> None:
        self._seen = 0

    def record(self) -> None:
        """Take the place of CUDA's."""

    def query(self) -> bool:
        """Count a look."""
        self._seen += 1
        return self.looks is not None and self._seen > self.looks


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> type[LateEvent]:
    """Return the class of late events of the device."""
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(LateEvent, "looks", None)
    return LateEvent


def test_a_device_is_awaited(event: type[LateEvent], monkeypatch: pytest.MonkeyPatch) -> None:
    """The event completes at the third query, before the deadline."""
    monkeypatch.setattr(event, "looks", 3)
    clock = iter(range(9))
    await_device(5.0, lambda: float(next(clock)))

    assert 4 == next(clock)


def test_a_device_that_hangs_is_given_up(event: type[LateEvent]) -> None:
    """NCCL would wait for its peer for ever."""
    clock = iter(range(9))

    with pytest.raises(TimeoutError, match="waited 5 s for the device"):
        await_device(5.0, lambda: float(next(clock)))


def test_work_on_a_device_has_a_deadline_too(
    tmp_path: Path, event: type[LateEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's wait has no limit on the device, so the meter queries an event until the deadline."""
    clock = iter(range(99))
    meter = LinkMeter(
        options=tiny_options(tmp_path, hosts=2, devices=1),
        lockstep=Lockstep(store=OneRankStore(), rank=0, world_size=1, timeout_s=1),
        bound_s=1.0,
        clock=lambda: float(next(clock)),
    )
    monkeypatch.setattr(meter, "_ack", SimpleNamespace(is_cuda=True))
    waited = []

    class Work:
        def wait(self) -> None:
            waited.append(True)

    with pytest.raises(TimeoutError, match="waited 7 s"):
        meter._finish([Work()], 7.0)  # type: ignore[list-item]
    assert [True] == waited
    assert event.looks is None


def meter_on(device: SimulatedDevice, folder: Path, monkeypatch: pytest.MonkeyPatch, *, hop_s: float) -> LinkMeter:
    """Return a meter whose messages and acknowledgements take the device `hop_s` each."""
    device.install(monkeypatch)

    def batch(operations: list[object]) -> list[SimpleNamespace]:
        assert 1 == len(operations)
        device.launch(hop_s)
        return [SimpleNamespace(wait=lambda: None)]

    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    monkeypatch.setattr(dist, "P2POp", lambda *words: words)
    meter = LinkMeter(
        options=tiny_options(folder, hosts=2, devices=1, timeout_s=10.0),
        lockstep=Lockstep(store=OneRankStore(), rank=0, world_size=1, timeout_s=1),
        bound_s=1.0,
        clock=device.clock,
    )
    meter._place = "round 1 of 1 between hosts"
    meter._queued = QueuedCalls(device.clock, keep_busy=lambda: device.launch(50e-6))
    return meter


@pytest.mark.parametrize("is_sender", [True, False])
@pytest.mark.parametrize("hop_s", [3e-6, 40e-6, 5e-3])
def test_a_message_between_gpus_takes_what_the_devices_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hop_s: float, *, is_sender: bool
) -> None:
    """A round trip is two hops; launches and wake-ups of the host are in no value."""
    meter = meter_on(SimulatedDevice(launch_s=20e-6, wake_s=10e-6), tmp_path, monkeypatch, hop_s=hop_s)
    times_s = [meter._message(index, (0, 1), is_sender=is_sender) for index in (0, 0, 1, 2)]

    assert [2 * hop_s] * 4 == pytest.approx(times_s)


def test_all_rails_keep_their_devices_busy_for_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that wants most passes decides, so rails that share a wire begin together."""
    meter = meter_on(SimulatedDevice(), tmp_path, monkeypatch, hop_s=1e-5)
    wanted: list[list[float]] = []

    def largest(wishes: torch.Tensor) -> list[list[float]]:
        wanted.extend(wishes.tolist())
        return [[200.0] + [0.0] * len(meter.sizes)]

    monkeypatch.setattr(meter, "_largest", largest)
    meter._direction((((0, 1),),), (0, (0, 1)), None)

    assert [[64.0] + [0.0] * len(meter.sizes)] == wanted
    assert meter._queued is not None
    assert 200 == meter._queued.passes


def test_a_partner_that_hangs_is_named_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 0.8 of the time limit of 10 s."""
    meter = meter_on(SimulatedDevice(), tmp_path, monkeypatch, hop_s=math.inf)

    with pytest.raises(ProbeError, match=r"no answer from node1:0 in round 1 of 1 between hosts .waited 8 s"):
        meter._message(0, (0, 1), is_sender=True)


TWO_SIZES = (8, 5 << 20)


def test_one_way_takes_the_acknowledgement_off() -> None:
    """A tiny round trip of 2 s has an acknowledgement of 1 s, so a round trip of 5 s is a message of 4 s."""
    tiny, large = one_way([Samples(values_s=(2.0,)), Samples(values_s=(5.0, 1.5), warmup_s=(9.0,))])

    assert Samples(values_s=(1.0,)) == tiny
    assert Samples(values_s=(4.0, 1.0), warmup_s=(9.0,)) == large


@pytest.mark.parametrize(
    ("left_s", "rounds", "seconds"), [(24.0, 24, 0.5), (24.0, 2, 1.0), (-5.0, 7, 0.1), (1.0, 0, 0.5)]
)
def test_a_direction_gets_its_share_of_the_time(left_s: float, rounds: int, seconds: float) -> None:
    """Half a round's share, at most a second, and a minimum even without time."""
    assert seconds == direction_s(left_s, rounds, "cpu")


@pytest.mark.parametrize(
    ("hosts", "devices", "times", "measured", "note"),
    [
        (4, 1, [0.0, 0.0, 99.0], 2, ("links: skipped 1 of 3 rounds, because the budget was spent",)),
        (4, 1, [0.0, 99.0], 1, ("links: skipped 2 of 3 rounds, because the budget was spent",)),
        (2, 4, [0.0, 99.0, 99.0], 2, ("links: skipped 2 of 4 rounds, because the budget was spent",)),
        (4, 1, [0.0, 0.0, 0.0], 3, ()),
    ],
)
def test_a_spent_budget_cuts_rounds_but_not_the_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hosts: int,
    devices: int,
    times: list[float],
    measured: int,
    note: tuple[str, ...],
) -> None:
    """One round of each kind is measured with any budget."""
    rounds: list[object] = []
    monkeypatch.setattr(LinkMeter, "_round", lambda _, groups: rounds.append(groups) or [])
    monkeypatch.setattr(pairs, "shared_bandwidth_HH", lambda *_: np.full((4, 4), np.nan))
    clock = deque(times)
    found = pairs.measure(
        tiny_options(tmp_path, hosts=hosts, devices=devices),
        lockstep=Lockstep(store=OneRankStore(), rank=0, world_size=1, timeout_s=1),
        budget=Budget(started_s=0, budget_s=10, clock=clock.popleft),
    )

    assert (measured, note) == (len(rounds), found.notes)
    assert not clock


def test_only_suspect_links_are_marked_as_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pairs of hosts are measured, then the pair of hosts 0 and 1 again."""

    def samples(_: LinkMeter, groups: Sequence[Sequence[tuple[int, int]]]) -> list[LinkSamples]:
        return [LinkSamples(source=a, target=b, sizes_bytes=(), samples=()) for group in groups for a, b in group]

    monkeypatch.setattr(LinkMeter, "_round", samples)
    monkeypatch.setattr(pairs, "shared_bandwidth_HH", lambda *_: np.full((3, 3), np.nan))
    monkeypatch.setattr(pairs, "suspect_links", lambda _: [(0, 1)])
    found = pairs.measure(
        tiny_options(tmp_path, hosts=3, devices=1),
        lockstep=Lockstep(store=OneRankStore(), rank=0, world_size=1, timeout_s=1),
        budget=Budget(started_s=0, budget_s=10, clock=lambda: 0.0),
    )

    assert 4 == len(found.links)
    assert [(0, 1)] == [(link.source, link.target) for link in found.links if link.is_again]


def test_rails_of_two_hosts_by_hand() -> None:
    """Hosts 0 and 2 of two devices each: both rails are one group."""
    assert (((0, 4), (1, 5)),) == rail_groups([(0, 2)], 2)


def test_local_pairs_of_two_hosts_by_hand() -> None:
    """The same pair in each host, each a group of its own."""
    assert (((0, 2),), ((3, 5),)) == local_groups([(0, 2)], 2, 3)


@given(hosts=st.integers(1, 9), devices=st.integers(1, 9))
def test_slots_never_do_two_things_at_once(hosts: int, devices: int) -> None:
    """No slot is twice in a round, and every rail and local pair appears once."""
    rounds = [
        rail_groups(pairs, devices) if is_between else local_groups(pairs, hosts, devices)
        for is_between, _, pairs in in_turns(all_pairs(range(hosts)), all_pairs(range(devices)))
    ]
    slots = [[slot for group in groups for pair in group for slot in pair] for groups in rounds]
    pairs = [pair for groups in rounds for group in groups for pair in group]

    assert all(len(busy) == len(set(busy)) for busy in slots)
    assert len(pairs) == len(set(pairs))
    assert hosts * devices * (devices - 1) // 2 + devices * hosts * (hosts - 1) // 2 == len(pairs)


def test_rounds_between_and_within_hosts_take_turns() -> None:
    """Three rounds between hosts and one within: the second is the one within."""
    order = [(is_between, number) for is_between, number, _ in in_turns(all_pairs(range(4)), all_pairs(range(2)))]

    assert [(True, 1), (False, 1), (True, 2), (True, 3)] == order


def measured(rate: float) -> tuple[LinkSamples]:
    """Return one link whose large message has this rate."""
    samples = tuple(Samples(values_s=(size / rate,)) for size in TWO_SIZES)
    return (LinkSamples(source=0, target=1, sizes_bytes=TWO_SIZES, samples=samples),)


@pytest.mark.parametrize(
    ("rates", "count", "best"),
    [
        ([300e6, 310e6, 1.0], 2, 310e6),
        ([39e6, 290e6, 310e6, 1.0], 3, 310e6),
        ([300e6, 150e6, 1.0], 2, 300e6),
        ([1e6 * 2**power for power in range(9)], MAX_MEASUREMENTS, 1e6 * 2 ** (MAX_MEASUREMENTS - 1)),
    ],
    ids=["steady", "slow-at-first", "disturbed-later", "ever-faster"],
)
def test_a_transfer_that_is_slow_at_first_is_repeated_until_two_agree(
    rates: list[float], count: int, best: float
) -> None:
    """A steady link is measured twice, a cold link until two measurements agree, with a limit."""
    left = iter(rates)
    (found,) = settled(lambda: measured(next(left)), lambda own: own, lambda: True)

    assert pytest.approx(best) == TWO_SIZES[-1] / found.samples[-1].median_s
    assert count == len(rates) - len(list(left))


def test_what_another_rank_saw_counts() -> None:
    """While another rank's link becomes faster, all ranks measure again."""
    left, others = iter([3e8] * 9), iter([3.0, 1.0])
    settled(lambda: measured(next(left)), lambda own: max(own, next(others)), lambda: True)

    assert 6 == len(list(left))


def test_without_time_links_are_measured_once() -> None:
    """The budget is spent."""
    left = iter([3e8] * 9)
    settled(lambda: measured(next(left)), lambda own: own, lambda: False)

    assert 8 == len(list(left))


def test_a_slot_without_a_partner_has_nothing_to_tell() -> None:
    """One of three slots rests in each round."""
    assert () == settled(lambda: (), lambda own: own, lambda: True)


def samples_of(rank: int, rounds: Sequence[Round]) -> list[LinkSamples]:
    """Return a rank's samples in these rounds, with times that identify the rank."""
    peers = [other for one in rounds for pair in one for other in pair if rank in pair and other != rank]
    samples = Samples(values_s=(1.0 + rank,))
    return [LinkSamples(source=rank, target=peer, sizes_bytes=(8, 64), samples=(samples,) * 2) for peer in peers]


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_all_ranks_measure_what_rank_0_chooses(turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank measures the same rounds, rank 0 gets all links, and all ranks end with it."""
    store = dist.HashStore()
    rounds: tuple[Round, ...] = (((0, 1), (2, 3)), ((0, 2),))
    heard: dict[int, list[Sequence[Round]]] = {rank: [] for rank in range(4)}
    ends: dict[int, WorkerResult] = {}
    seen: list[Lines] = []

    def choose(num_hosts: int, known: Lines, *, measure: Measure, **_: object) -> Scouted:
        assert (4, {}) == (num_hosts, known)
        seen.extend(measure(rounds) for _ in range(turns))
        return Scouted(lines={}, scouting=2 * turns, random=0)

    class Meter(NamedTuple):
        options: WarmupOrder
        lockstep: Lockstep
        bound_s: float

        def measure(self, some: Sequence[Round]) -> tuple[LinkSamples, ...]:
            heard[self.lockstep.rank].append(tuple(some))
            return tuple(samples_of(self.lockstep.rank, some))

    monkeypatch.setattr(pairs, "scout", choose)
    monkeypatch.setattr(pairs, "LinkMeter", Meter)
    options = tiny_options(tmp_path, hosts=4, devices=1, full_hosts=3)

    def work(rank: int) -> None:
        lockstep = Lockstep(store=store, rank=rank, world_size=4, timeout_s=10)
        budget = Budget(started_s=0.0, budget_s=1.0, clock=lambda: 0.0)
        ends[rank] = pairs.explore(options, dict, lockstep=lockstep, budget=budget)

    run_all([lambda rank=rank: work(rank) for rank in range(4)])  # type: ignore[misc]

    assert [[rounds] * turns] * 4 == list(heard.values())
    assert [{(0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0)}] * turns == [set(lines) for lines in seen]
    assert [2 * turns, turns, 2 * turns, turns] == [len(ends[rank].links) for rank in range(4)]
    assert [bool(turns), False, False, False] == [bool(ends[rank].notes) for rank in range(4)]


def run_all(works: Sequence[Callable[[], None]]) -> None:
    """Run all functions at the same time, to their end."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
