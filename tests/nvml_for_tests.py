"""A stand-in for NVIDIA's management library: a machine with GPUs where there is none."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest

from pipette_launch.facts.health.condition import DeviceCondition

GIB = 1 << 30
HEALTHY = DeviceCondition(
    uuid="GPU-aaaa-0",
    used_bytes=GIB // 8,
    utilisation=0.0,
    sm_clock_hz=345_000_000,
    sm_clock_max_hz=1_980_000_000,
    clock_reasons=("GpuIdle",),
    ecc_volatile=0,
    ecc_aggregate=0,
    rows_correctable=0,
    rows_uncorrectable=0,
    rows_pending=False,
    rows_failed=False,
    nvlinks_up=18,
    nvlinks_total=18,
    pcie_width=16,
    pcie_width_max=16,
    pcie_generation=1,
    pcie_generation_max=5,
    nic="mlx5_0",
    nic_distance="switch",
    persistence_mode=True,
    temperature_c=31,
)
"""An idle GPU with which nothing is amiss: figures in SI units, idle as the only reason of its clock."""


class FakeNvml(types.ModuleType):
    """NVML of a machine with so many GPUs, whose memory is partly in use."""

    class NVMLError(Exception):
        """Anything that NVML refuses."""

    class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801, N818 - NVML's own name
        """No driver."""

    class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801, N818 - NVML's own name
        """No driver either."""

    def __init__(self, num_gpus: int, processes: dict[int, list[SimpleNamespace]] | None = None) -> None:
        super().__init__("pynvml")
        self.num_gpus = num_gpus
        self.processes = processes or {}
        self.used = 2 * GIB
        self.open = 0
        self.answers: dict[tuple[str, int], object] = {}
        """What one GPU answers to one question otherwise; an NVMLError is raised."""

    def nvmlInit(self) -> None:
        """Start."""
        if not self.num_gpus:
            raise self.NVMLError_LibraryNotFound
        self.open += 1

    def nvmlShutdown(self) -> None:
        """End."""
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        """Some version."""
        return "580.1"

    def nvmlDeviceGetCount(self) -> int:
        """All of them, whatever CUDA_VISIBLE_DEVICES says."""
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        """An index is as good a handle as any."""
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        """The other way round."""
        return int(uuid.rpartition("-")[2])

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        """The same letter twice, then the index."""
        return f"GPU-{'ab'[handle % 2] * 4}-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        """Bytes, as old bindings answer."""
        return b"Test GPU"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        """80 GiB."""
        return SimpleNamespace(total=80 * GIB, free=80 * GIB - self.used, used=self.used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        """Who computes there."""
        return self.processes.get(handle, [])

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        """Nobody computes."""
        return SimpleNamespace(gpu=self._answer("UtilizationRates", handle, 0), memory=0)

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        """An idle clock, in MHz."""
        assert kind == 1
        return int(self._answer("ClockInfo", handle, 345))

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        """As sold."""
        assert kind == 1
        return int(self._answer("MaxClockInfo", handle, 1980))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        """Idle."""
        return int(self._answer("ClocksEventReasons", handle, 0x1))

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, period: int) -> int:
        """Uncorrected ones since the driver was loaded (period 0), and ever (1)."""
        assert kind == 1
        return int(self._answer(("EccVolatile", "EccAggregate")[period], handle, 0))

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        """Correctable, uncorrectable, pending, failed."""
        rows: tuple[int, int, int, int] = self._answer("RemappedRows", handle, (0, 0, 0, 0))
        return rows

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        """Eighteen links are up."""
        if link >= 18:
            raise self.NVMLError
        return int(link < self._answer("NvLinks", handle, 18))

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        """All lanes."""
        return int(self._answer("PcieWidth", handle, 16))

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        """All lanes."""
        return int(self._answer("MaxPcieWidth", handle, 16))

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        """Idle."""
        return int(self._answer("PcieGeneration", handle, 1))

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        """As sold."""
        return int(self._answer("MaxPcieGeneration", handle, 5))

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        """One bus for each."""
        return SimpleNamespace(busId=f"00000000:{16 * (handle + 1):02X}:00.0".encode())

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> int:
        """On."""
        return int(self._answer("PersistenceMode", handle, 1))

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        """Cool."""
        assert sensor == 0
        return int(self._answer("Temperature", handle, 31))

    def _answer(self, question: str, handle: int, usual: Any) -> Any:
        answer = self.answers.get((question, handle), usual)
        if answer is self.NVMLError:
            raise self.NVMLError
        return answer


def install(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, visible: str | None = None) -> FakeNvml:
    """Put the stand-in in place."""
    nvml.__spec__ = ModuleSpec("pynvml", None)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return nvml
