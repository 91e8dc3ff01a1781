"""Tests of NVML's documented rules: reserved memory, hidden and lost devices, MIG, a driver that has just started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from gpu_rules.nvml import GIB, FakeNvml, install
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.errors import ClusterError
from pipette_launch.facts import Host
from pipette_launch.probe.health import inventory, nvml
from pipette_launch.probe.health.nvml import LoadReading, read_under_load
from pipette_launch.probe.health.verdicts import judge

MIB = 1 << 20


def host_of(num_devices: int) -> Host:
    """Return the host as its agent describes it."""
    return inventory.host(name="n", address="a", num_devices=num_devices, device="cuda")


def verdicts(num_devices: int) -> list[tuple[str, bool]]:
    """Return (kind, whether a fault) of all verdicts on this host."""
    host = host_of(num_devices)
    return [(one.kind, one.is_sick) for one in judge([host], [inventory.conditions(host, sleep=lambda _: None)])]


@pytest.mark.parametrize("reserved_mib", [328, 516, 700, 763])
@pytest.mark.parametrize("lacks", ["nothing", "driver", "binding"])
def test_the_drivers_reserve_makes_nobody_busy(monkeypatch: pytest.MonkeyPatch, reserved_mib: int, lacks: str) -> None:
    """Idle H100, H200 and A100 are healthy, even if driver or binding cannot separate the reserve."""
    library = install(monkeypatch, FakeNvml(8))
    library.reserved, library.used = reserved_mib * MIB, 0
    library.has_memory_v2 = lacks != "driver"
    if lacks == "binding":
        library.nvmlMemory_v2 = None

    assert [] == verdicts(8)


@pytest.mark.parametrize("has_memory_v2", [True, False])
def test_memory_of_others_is_still_seen(monkeypatch: pytest.MonkeyPatch, has_memory_v2: bool) -> None:
    """9 GiB that NVML attributes to no process are a fault, also beside the reserve."""
    library = install(monkeypatch, FakeNvml(1))
    library.used, library.has_memory_v2 = 9 * GIB, has_memory_v2

    assert [("busy", True)] == verdicts(1)


@given(st.integers(0, 60 * GIB), st.integers(0, GIB), st.booleans())
def test_held_memory_is_what_processes_hold(used: int, reserved: int, includes_reserve: bool) -> None:
    """Both definitions of `used` in version 2 (driver 525, and later) give the same value."""
    library = FakeNvml(1)
    library.used, library.reserved = used, reserved
    of_version = library.nvmlDeviceGetMemoryInfo

    def other_manual(handle: int, version: int | None = None) -> SimpleNamespace:
        info = of_version(handle, version)
        return SimpleNamespace(**{**vars(info), "used": info.used + (reserved if version and includes_reserve else 0)})

    library.nvmlDeviceGetMemoryInfo = other_manual  # type: ignore[method-assign]

    assert nvml.Memory(80 * GIB, 80 * GIB - used - reserved, used) == nvml.memory(library, 0)


def test_the_capacity_is_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory and differences of used memory do not contain the reserve."""
    library = install(monkeypatch, FakeNvml(1))
    (device,) = host_of(1).devices
    before = inventory.device_used_bytes(device.uuid)
    library.used += 3 * GIB

    assert (80 * GIB, 78 * GIB - 700 * MIB) == (device.memory_total_bytes, device.memory_free_bytes)
    assert 3 * GIB == inventory.device_used_bytes(device.uuid) - before
    assert before == device.memory_total_bytes - device.memory_free_bytes


@pytest.mark.parametrize("error", nvml.HIDDEN)
@pytest.mark.parametrize(("visible", "expected"), [(None, [3, 4, 6, 7]), ("1,0", [4, 3]), ("GPU-bbbb-7", [7])])
def test_hidden_devices_have_no_number(
    monkeypatch: pytest.MonkeyPatch, error: str, visible: str | None, expected: list[int]
) -> None:
    """A control group leaves four of eight GPUs: CUDA numbers these, and the others are not reported."""
    library = install(monkeypatch, FakeNvml(8), visible)
    library.hidden = {0, 1, 2, 5}
    library.NVMLError_NoPermission = getattr(library, error)  # type: ignore[misc]

    assert expected == [int(device.uuid[-1]) for device in host_of(len(expected)).devices]
    assert () == inventory.lost_gpus()


def test_lost_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven of eight GPUs are usable; a sentence and the error name the eighth."""
    library = install(monkeypatch, FakeNvml(8))
    library.lost = {2}
    sentence = "GPU 2 of 8 cannot be used (NVML: GPU is lost); reset it or reboot the node"

    assert [0, 1, 3, 4, 5, 6, 7] == [int(device.uuid[-1]) for device in host_of(7).devices]
    assert (sentence,) == inventory.lost_gpus()
    with pytest.raises(ClusterError) as caught:
        host_of(8)
    assert str(caught.value).startswith("n: 8 workers for 7 visible GPUs")
    assert str(caught.value).endswith(sentence)


def test_a_host_that_lost_all_gpus_is_no_cpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with `auto`, because the training would use GPUs."""
    library = install(monkeypatch, FakeNvml(2))
    library.lost = {0, 1}

    with pytest.raises(ClusterError, match=r"n: no GPU can be used; GPU 0 of 2 .*; GPU 1 of 2 "):
        inventory.host(name="n", address="a", num_devices=1, device="auto")


def test_a_host_whose_gpus_are_hidden_is_a_cpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA finds no device either."""
    install(monkeypatch, FakeNvml(2)).hidden = {0, 1}

    assert "cpu" == inventory.host(name="n", address="a", num_devices=1, device="auto").devices[0].kind


@pytest.mark.parametrize("visible", [None, "0", "MIG-one"])
def test_cuda_uses_the_first_mig_device(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    """Reading the memory of the whole GPU needs privileges; reading a MIG device's does not."""
    install(monkeypatch, FakeNvml(1), visible).mig = {0: ["MIG-one", "MIG-two"]}

    assert ["MIG-one"] == [device.uuid for device in host_of(1).devices]
    assert () == inventory.lost_gpus()


def test_a_gpu_whose_memory_is_secret_ends_planning_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a container hides the MIG device, NVML shows the GPU but not its memory."""
    install(monkeypatch, FakeNvml(1)).mig = {0: []}

    with pytest.raises(ClusterError, match=r"GPU 0 of 1 cannot be used \(NVML: Insufficient Permissions\)"):
        inventory.host(name="n", address="a", num_devices=1)


def test_a_driver_that_has_just_started_makes_nobody_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reading is 100 % while the driver scrubs memory; the second one counts."""
    library = install(monkeypatch, FakeNvml(1))
    library.is_asleep, library.used = True, GIB // 8
    waits: list[float] = []
    (found,) = inventory.conditions(host_of(1), sleep=waits.append)

    assert (0.0, [1.0]) == (found.utilisation, waits)


def test_a_device_that_nobody_holds_is_not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 100 % without processes and memory nobody computes; with a context somebody does."""
    library = install(monkeypatch, FakeNvml(1))
    library.answers, library.used = {("UtilizationRates", 0): 100}, 7 * MIB
    assert [] == verdicts(1)

    library.used = 400 * MIB
    assert [("busy", True)] == verdicts(1)


@pytest.mark.parametrize(
    ("ours", "cudas", "is_same"),
    [
        ("GPU-5a3b-1", "5a3b-1", True),
        ("GPU-5a3b-1", "5a3b-2", False),
        ("MIG-77aa-0", "5a3b-1", True),
        ("GPU-5a3b-1", None, True),
    ],
)
def test_uuids_are_compared_without_nvmls_prefix(ours: str, cudas: str | None, is_same: bool) -> None:
    """MIG devices, and devices without a UUID in torch, cannot be compared."""
    assert is_same == nvml.is_same_device(ours, cudas)


POWER_CAP = 0x4
"""nvmlClocksEventReasonSwPowerCap (nvml.h)."""


def test_a_capped_gpu_in_si_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megahertz, milliwatts and a bit become hertz, watts and a name."""
    nvml = FakeNvml(1)
    nvml.answers = {("ClockInfo", 0): 1605, ("PowerUsage", 0): 698_500, ("ClocksEventReasons", 0): POWER_CAP}
    install(monkeypatch, nvml)

    expected = LoadReading(sm_clock_hz=1.605e9, sm_clock_max_hz=1.98e9, power_w=698.5, clock_reasons=("SwPowerCap",))
    assert expected == read_under_load("GPU-aaaa-0", lambda: None)
    assert 0 == nvml.open


def test_the_device_is_read_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML starts before the work, because one layer would end earlier."""
    nvml = install(monkeypatch, FakeNvml(1))

    def work() -> None:
        assert 1 == nvml.open
        nvml.answers = {("ClockInfo", 0): 1605, ("ClocksEventReasons", 0): POWER_CAP}

    found = read_under_load("GPU-aaaa-0", work)

    assert found is not None
    assert (1.605e9, ("SwPowerCap",)) == (found.sm_clock_hz, found.clock_reasons)


def test_what_a_driver_does_not_report_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unsupported power is 0 W, and without a driver there is no reading."""
    nvml = FakeNvml(1)
    nvml.answers = {("PowerUsage", 0): nvml.NVMLError}
    install(monkeypatch, nvml)
    found = read_under_load("GPU-aaaa-0", lambda: None)
    install(monkeypatch, FakeNvml(0))

    assert found is not None
    assert 0 == found.power_w
    assert read_under_load("GPU-aaaa-0", lambda: None) is None
