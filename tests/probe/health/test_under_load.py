"""A GPU's clock and power while it works, read from a stand-in for NVIDIA's library."""

from __future__ import annotations

import pytest
from gpu_rules.nvml import FakeNvml, install

from pipette_launch.probe.health.under_load import LoadReading, read_under_load

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
    """NVML starts before the work does: the work of one layer would be over by then."""
    nvml = install(monkeypatch, FakeNvml(1))

    def work() -> None:
        assert 1 == nvml.open
        nvml.answers = {("ClockInfo", 0): 1605, ("ClocksEventReasons", 0): POWER_CAP}

    found = read_under_load("GPU-aaaa-0", work)

    assert found is not None
    assert (1.605e9, ("SwPowerCap",)) == (found.sm_clock_hz, found.clock_reasons)


def test_what_a_driver_does_not_report_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused power is 0 W, and no driver gives no reading: a figure for a note costs no measurement."""
    nvml = FakeNvml(1)
    nvml.answers = {("PowerUsage", 0): nvml.NVMLError}
    install(monkeypatch, nvml)
    found = read_under_load("GPU-aaaa-0", lambda: None)
    install(monkeypatch, FakeNvml(0))

    assert found is not None
    assert 0 == found.power_w
    assert read_under_load("GPU-aaaa-0", lambda: None) is None
