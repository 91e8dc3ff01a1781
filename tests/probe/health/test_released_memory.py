"""Waiting until the warm-up's memory is free again, with a driver and a clock that are made up."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from facts_for_tests import tiny_cluster

from pipette_launch.errors import ClusterError
from pipette_launch.facts import Device, Host
from pipette_launch.probe.health.released_memory import DEADLINE_S, TOLERANCE_BYTES, await_memory

GIB = 1 << 30


@dataclass
class Machine:
    """A host whose GPUs report memory in use as listed, the last value for ever; time passes in sleep alone."""

    host: Host
    used: dict[str, Sequence[int]]
    now_s: float = 0.0
    asked: dict[str, int] = field(default_factory=dict)

    def used_bytes(self, uuid: str) -> int:
        """Answer as the driver."""
        turn = self.asked.get(uuid, 0)
        self.asked[uuid] = turn + 1
        return self.used[uuid][min(turn, len(self.used[uuid]) - 1)]

    def holders(self, host: Host) -> tuple[str, ...]:
        """Name a process on every device."""
        return tuple(f"{host.name}: GPU {device.uuid}: process 7 holds it" for device in host.devices)

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    def wait(self) -> tuple[str, ...]:
        """Wait for this machine's memory."""
        return await_memory(
            self.host,
            used_bytes=self.used_bytes,
            holders=self.holders,
            clock=lambda: self.now_s,
            sleep=self.sleep,
        )


def gpu_host(num_devices: int) -> Host:
    """A host of idle GPUs."""
    names = [f"GPU-{index}" for index in range(num_devices)]
    devices = tuple(
        Device(kind="cuda", uuid=name, name="H100", memory_total_bytes=80 * GIB, memory_free_bytes=80 * GIB)
        for name in names
    )
    return Host(name="node0", address="10.0.0.1", cores=8, devices=devices)


def machine(*used: Sequence[int]) -> Machine:
    """A host of as many GPUs."""
    host = gpu_host(len(used))
    return Machine(host, {device.uuid: values for device, values in zip(host.devices, used, strict=True)})


def test_free_memory_is_not_waited_for() -> None:
    """Each device is asked once, and no time passes; what was in use before the warm-up counts as free."""
    idle = machine([0], [TOLERANCE_BYTES])

    assert () == idle.wait()
    assert 0 == idle.now_s
    assert [1, 1] == list(idle.asked.values())


def test_memory_that_comes_back_late_is_waited_for() -> None:
    """Two looks later it is there: nothing to say, and only the device that was full was asked again."""
    slow = machine([0], [4 * GIB, 2 * GIB, 0])

    assert () == slow.wait()
    assert 0 < slow.now_s < 5
    assert [1, 3] == list(slow.asked.values())


def test_memory_that_never_comes_back_is_named_with_its_holder() -> None:
    """After the deadline: the device, how much, and who; the free device is not mentioned."""
    stuck = machine([0], [3 * GIB])
    free, full = (device.uuid for device in stuck.host.devices)
    said = stuck.wait()

    assert DEADLINE_S <= stuck.now_s < DEADLINE_S + 1
    assert 2 == len(said)
    assert f"{full} still holds 3.00 GiB more than before the warm-up, 50 s after it" in said[0]
    assert f"{full}: process 7 holds it" in said[1]
    assert not any(free in sentence for sentence in said)


def test_a_cpu_has_nothing_to_give_back() -> None:
    """No driver is asked."""
    host = tiny_cluster(1, 2).hosts[0]

    assert () == await_memory(host, used_bytes=pytest.fail, sleep=pytest.fail)


def test_a_driver_that_no_longer_answers_is_one_sentence() -> None:
    """The training is not held up by it."""

    def dead(uuid: str) -> int:
        raise ClusterError(f"NVML no longer answers for {uuid}")

    host = gpu_host(1)
    assert (f"NVML no longer answers for {host.devices[0].uuid}",) == await_memory(host, used_bytes=dead)
