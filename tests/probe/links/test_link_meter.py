"""Tests of link measurements between real processes over gloo, and of the deadline on a device."""

import json
import math
import os
import subprocess
import sys
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gpu_rules.events import SimulatedDevice
from probe.workers import LIMIT_S, ROOT, OneRankStore, tiny_options

from pipette_launch.errors import ProbeError
from pipette_launch.facts import files
from pipette_launch.probe.device_clock import QueuedCalls, await_device
from pipette_launch.probe.harness import Lockstep
from pipette_launch.probe.links.meter import LinkMeter
from pipette_launch.probe.options import LinkSamples, ProbeOptions

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


def _run(options: ProbeOptions, folder: Path) -> None:
    """Start three workers, and wait for those that do not hang."""
    order = folder / "options.json"
    files.write(order, options)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in (".", "patches", "tests")),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, str(WORKER), str(order), str(store.port)]
    workers = [subprocess.Popen([*words, str(rank), str(SILENT)], env=environment) for rank in range(3)]
    try:
        codes = [worker.wait(timeout=LIMIT_S) for rank, worker in enumerate(workers) if rank != SILENT]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [0, 0] == codes


class LateEvent:
    """An event of a device that is done after so many looks; None = never."""

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
    """The device's events are late ones."""
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(LateEvent, "looks", None)
    return LateEvent


def test_a_device_is_awaited(event: type[LateEvent], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done at the third look, before the deadline."""
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
    """NCCL's wait takes no time limit that reaches the device: the meter looks at an event until the deadline."""
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
    """A meter whose messages and acknowledgements take the device `hop_s` each, over NCCL's stream."""
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
    """There and back is two hops; launches of 20 us and wake-ups of 10 us are in no value once the host is ahead."""
    meter = meter_on(SimulatedDevice(launch_s=20e-6, wake_s=10e-6), tmp_path, monkeypatch, hop_s=hop_s)
    times_s = [meter._message(index, (0, 1), is_sender=is_sender) for index in (0, 0, 1, 2)]

    assert [2 * hop_s] * 4 == pytest.approx(times_s)


def test_all_rails_keep_their_devices_busy_for_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rails that share a wire begin at the same time: the rank that wants the most passes decides for all."""
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
