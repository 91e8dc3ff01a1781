"""Tests of timing collectives on a group."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from facts_for_tests import tiny_job, tiny_model
from gpu_rules.events import SimulatedDevice
from probe.workers import OneRankStore, tiny_options

from pipette_launch.errors import ProbeError
from pipette_launch.facts import Samples
from pipette_launch.probe.instruments import QueuedCalls
from pipette_launch.probe.links import collectives
from pipette_launch.probe.links.collectives import padded_bytes
from pipette_launch.probe.lockstep import Budget, Lockstep


def test_sizes_divide_among_the_members() -> None:
    """Each member's share is a whole number of four-byte elements."""
    assert [12, 12, 108] == [padded_bytes(size, 3) for size in (1, 8, 100)]


def test_only_experts_exchange_all_to_all(tmp_path: Path) -> None:
    """A dense model has no all-to-all."""
    options = tiny_options(tmp_path, hosts=1, devices=2)
    moe = replace(tiny_job(2), model=tiny_model(num_experts=4, moe_layer_freq=(1, 1, 1, 1)))

    assert ("all_reduce", "all_gather", "reduce_scatter") == options.dimensions()[0].kinds
    assert "all_to_all" in replace(options, job=moe).dimensions()[0].kinds


class _Refuses(collectives._Timer):
    """A backend that lacks every collective."""

    def time(self, asked_bytes: int, repeats: int | None = None) -> None:
        self.refused = f"gloo has no {self.kind}"


def test_a_spent_budget_keeps_the_first_dimension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first dimension is measured with any budget, a note names the others and what gloo lacks."""
    monkeypatch.setattr(collectives, "_open", lambda *_: object())
    monkeypatch.setattr(collectives, "_Timer", _Refuses)
    options = tiny_options(tmp_path, hosts=2, devices=2)
    found, num_groups = collectives.measure(
        options,
        options.dimensions(),
        lockstep=Lockstep(store=OneRankStore(), rank=0, world_size=1, timeout_s=1),
        budget=Budget(started_s=0, budget_s=10, clock=lambda: 10.0),
    )

    assert (
        "collectives: all_reduce was not measured on groups of 4 x stride 1: gloo has no all_reduce",
        "collectives: all_gather was not measured on groups of 4 x stride 1: gloo has no all_gather",
        "collectives: reduce_scatter was not measured on groups of 4 x stride 1: gloo has no reduce_scatter",
        "collectives: groups of 2 x stride 1, 2 x stride 2 were skipped, because the budget was spent",
    ) == found.notes
    assert 1 == num_groups


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotImplementedError("no such thing\nat all"), "no such thing"),
        (RuntimeError("ProcessGroupGloo does not support reduce_scatter"), "ProcessGroupGloo does not support"),
    ],
)
def test_what_a_backend_lacks_is_a_reason(error: Exception, reason: str) -> None:
    """The reason is the first line of the error."""

    def refuse() -> None:
        raise error

    assert reason in (collectives._first_try(refuse))


def test_a_broken_connection_is_no_lack_of_support() -> None:
    """A real failure is raised."""

    def fail() -> None:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        collectives._first_try(fail)


@pytest.mark.parametrize(
    ("most_bytes", "left_s", "reach_bytes"),
    [
        pytest.param(10 << 20, 60.0, 10 << 20, id="all of it"),
        pytest.param(1 << 30, 60.0, 15 << 20, id="what passes in the time"),
        pytest.param(1 << 30, 2.0, 10 << 20, id="what passes in half of the time that is left"),
        pytest.param(1 << 30, 0.2, 0, id="hardly more than is known"),
        pytest.param(0, 60.0, 0, id="not said"),
    ],
)
def test_a_large_tensor_is_timed_as_far_as_there_is_time(
    tmp_path: Path, most_bytes: int, left_s: float, reach_bytes: int
) -> None:
    """The largest size so far predicts the time: 1 MiB took 25 ms."""
    timer = collectives._Timer(
        options=tiny_options(tmp_path, hosts=2, devices=1), kind="all_gather", size=2, group=None
    )
    timer.timed = {8: Samples(values_s=(1e-3,)), 1 << 20: Samples(values_s=(0.025,))}
    budget = Budget(started_s=0, budget_s=left_s / collectives.COLLECTIVES_SHARE, clock=lambda: 0.0)

    assert reach_bytes == pytest.approx(timer.reach_bytes(most_bytes, budget), abs=1)


def test_a_rank_without_a_group_names_no_size(tmp_path: Path) -> None:
    """It has no times from which it could predict."""
    timer = collectives._Timer(
        options=tiny_options(tmp_path, hosts=2, devices=1), kind="all_gather", size=0, group=None
    )

    assert 0 == timer.reach_bytes(1 << 30, Budget(started_s=0, budget_s=60, clock=lambda: 0.0))


class OnGpu(collectives._Timer):
    """A timer on a simulated GPU; an all-reduce over the slots takes no time."""

    def __init__(
        self, folder: Path, device: SimulatedDevice, *, call_s: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = replace(tiny_options(folder, hosts=2, devices=1), timeout_s=5.0)
        group, queued = object(), QueuedCalls(device.clock, keep_busy=lambda: device.launch(50e-6))
        monkeypatch.setattr(type(options), "device_kind", "cuda")
        monkeypatch.setattr(collectives, "_action", lambda *_, **__: self._call)
        monkeypatch.setattr(collectives.time, "perf_counter", device.clock)
        monkeypatch.setattr(collectives, "slowest_of_all", self._largest)
        super().__init__(
            options=options,
            kind="all_gather",
            size=2,
            group=group,  # type: ignore[arg-type]
            queued=queued,
            place="all_gather of 2 x stride 1",
        )
        self.device, self.call_s, self.calls = device, call_s, 0
        self.slowest_s, self.most_passes = 0.0, 0

    def _largest(self, number: float, *_: object) -> float:
        """The other rank took `slowest_s`, or wants this number of passes."""
        return max(number, self.most_passes if number >= 1 else self.slowest_s)

    def _call(self) -> None:
        self.calls += 1
        self.device.launch(self.call_s)


def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call_s: float) -> OnGpu:
    """Return a collective of this duration, with a launch of 20 us and a wake-up of the host of 10 us."""
    device = SimulatedDevice(launch_s=20e-6, wake_s=10e-6)
    device.install(monkeypatch)
    return OnGpu(tmp_path, device, call_s=call_s, monkeypatch=monkeypatch)


@pytest.mark.parametrize("call_s", [8e-6, 60e-6, 2e-3, 0.5])
def test_a_collective_takes_what_the_device_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call_s: float
) -> None:
    """Launch and wake-up of the host, 30 us, are in no value, even of short collectives."""
    timer = on_gpu(tmp_path, monkeypatch, call_s)
    timer.time(4096)

    assert [call_s] * 3 == pytest.approx(list(timer.timed[4096].values_s))


@pytest.mark.parametrize(
    ("call_s", "slowest_s", "expected"),
    [
        # A first call that opens connections, one that is waited for, a trial and 4 values with an untimed call each.
        pytest.param(60e-6, 0.0, 2 + 5 * (1 + 16), id="short: 16 calls"),
        pytest.param(60e-6, 2.1e-3, 2 + 5 * (1 + 4), id="slow on another rank: 4 calls in 10 ms"),
        pytest.param(0.5, 0.0, 2 + 5 * (1 + 1), id="long: 1 call"),
    ],
)
def test_all_ranks_make_the_calls_that_the_slowest_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call_s: float, slowest_s: float, expected: int
) -> None:
    """The slowest rank's single call sets the number, so members of a group make equally many calls."""
    timer = on_gpu(tmp_path, monkeypatch, call_s)
    timer.slowest_s = slowest_s
    timer.time(4096)

    assert expected == timer.calls


def test_all_ranks_keep_their_devices_busy_for_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank with the slowest host sets the passes, so groups that share links begin together."""
    timer = on_gpu(tmp_path, monkeypatch, 60e-6)
    timer.most_passes = 200
    timer.time(4096)

    assert timer.queued is not None
    assert 200 == timer.queued.passes


def test_a_collective_whose_peer_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker gives up after 0.8 of its time limit of 5 s, before NCCL's watchdog ends it without a reason."""
    timer = on_gpu(tmp_path, monkeypatch, math.inf)

    with pytest.raises(ProbeError, match=r"all_gather of 2 x stride 1 did not end .waited 4 s for the device"):
        timer.time(4096)


def test_ranks_are_aligned_with_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest all-reduce of a GPU raises TimeoutError if a rank hangs."""
    device = SimulatedDevice()
    device.install(monkeypatch)
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: torch.zeros(1, dtype=torch.float64))
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: device.launch(math.inf))

    with pytest.raises(TimeoutError, match="waited 3 s for the device"):
        collectives.slowest_of_all(0.0, "cuda", 3.0, device.clock)
