"""A stand-in for NVIDIA's management library: a machine with GPUs where there is none.

Rules are those of nvml.h and of the NVML API Reference Guide; the function that a rule is about is named beside it.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest

from pipette_launch.facts.health import DeviceCondition

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
    persistence_mode=True,
    temperature_c=31,
)
"""An idle GPU with which nothing is amiss: figures in SI units, idle as the only reason of its clock."""


class FakeNvml(types.ModuleType):
    """NVML of a machine with GPUs whose memory is partly in use. A handle is the index, or the UUID of a MIG device."""

    class NVMLError(Exception):
        """Anything that NVML refuses."""

    class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801, N818 - NVML's own name
        """No driver."""

    class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801, N818 - NVML's own name
        """No driver either."""

    class NVMLError_NoPermission(NVMLError):  # noqa: N801, N818 - NVML's own name
        """A control group hides the device, or only an administrator may ask."""

    class NVMLError_OperatingSystem(NVMLError):  # noqa: N801, N818 - NVML's own name
        """The operating system or a control group blocks the device (nvmlReturn_t, 17)."""

    class NVMLError_GpuIsLost(NVMLError):  # noqa: N801, N818 - NVML's own name
        """The device has fallen off the bus (nvmlReturn_t, 15)."""

    class NVMLError_FunctionNotFound(NVMLError):  # noqa: N801, N818 - NVML's own name
        """The driver is older than the binding."""

    class NVMLError_NotFound(NVMLError):  # noqa: N801, N818 - NVML's own name
        """There is no MIG device at this index."""

    # The version of a structure is its size and number (nvml.h, NVML_STRUCT_VERSION).
    nvmlMemory_v2: int | None = 0x02000028

    def __init__(self, num_gpus: int, processes: dict[int, list[SimpleNamespace]] | None = None) -> None:
        super().__init__("pynvml")
        self.num_gpus = num_gpus
        self.processes = processes or {}
        self.used = 2 * GIB
        """Memory that processes hold on each device."""
        self.reserved = 700 << 20
        """Memory that the driver reserves on each device: the figure of an idle H200."""
        self.has_memory_v2 = True
        self.hidden: set[int] = set()
        """GPUs that a control group hides."""
        self.lost: set[int] = set()
        self.mig: dict[int, list[str]] = {}
        """UUIDs of the MIG devices that this process may use, by the GPU that is in MIG mode."""
        self.is_asleep = False
        """Whether the driver starts the devices with the first question, as without persistence mode."""
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
        """All of them, whatever CUDA_VISIBLE_DEVICES says, and those without permission too (nvmlDeviceGetCount_v2)."""
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        """An index is as good a handle as any; hidden and lost devices have none (nvmlDeviceGetHandleByIndex_v2)."""
        if index in self.hidden:
            raise self.NVMLError_NoPermission("Insufficient Permissions")
        if index in self.lost:
            raise self.NVMLError_GpuIsLost("GPU is lost")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int | str:
        """The other way round; the UUID of a MIG device begins with MIG (nvmlDeviceGetHandleByUUID)."""
        return uuid if uuid.startswith("MIG-") else int(uuid.rpartition("-")[2])

    def nvmlDeviceGetUUID(self, handle: int | str) -> str:
        """The same letter twice, then the index."""
        return handle if isinstance(handle, str) else f"GPU-{'ab'[handle % 2] * 4}-{handle}"

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        """Now and after the next reset (nvmlDeviceGetMigMode)."""
        return [int(handle in self.mig)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        """Seven, whether they exist or not (nvmlDeviceGetMaxMigDeviceCount)."""
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> str:
        """Indices may have gaps: the first is unused here (nvmlDeviceGetMigDeviceHandleByIndex)."""
        if not 0 < index <= len(self.mig[handle]):
            raise self.NVMLError_NotFound("Not Found")
        return self.mig[handle][index - 1]

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        """Bytes, as old bindings answer."""
        return b"Test GPU"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        """Major and minor number, as of an A100."""
        capability: tuple[int, int] = self._answer("ComputeCapability", handle, (8, 0))
        return capability

    def nvmlDeviceGetMemoryInfo(self, handle: int | str, version: int | None = None) -> SimpleNamespace:
        """80 GiB. `used` of version 1 has the driver's reserve in it (nvmlMemory_t, nvmlMemory_v2_t).

        In MIG mode the memory of the whole GPU needs privileges (nvmlDeviceGetMemoryInfo).
        """
        if handle in self.mig:
            raise self.NVMLError_NoPermission("Insufficient Permissions")
        if version and not self.has_memory_v2:
            raise self.NVMLError_FunctionNotFound("Function Not Found")
        total, free = 80 * GIB, 80 * GIB - self.used - self.reserved
        if version:
            return SimpleNamespace(version=version, total=total, free=free, used=self.used, reserved=self.reserved)
        return SimpleNamespace(total=total, free=free, used=total - free)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        """Who computes there."""
        return self.processes.get(handle, [])

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        """Nobody computes; while the driver starts, it scrubs ECC memory (nvmlDeviceGetUtilizationRates, its note)."""
        usual, self.is_asleep = 100 if self.is_asleep else 0, False
        return SimpleNamespace(gpu=self._answer("UtilizationRates", handle, usual), memory=0)

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        """An idle clock, in MHz."""
        assert kind == 1
        return int(self._answer("ClockInfo", handle, 345))

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        """As sold."""
        assert kind == 1
        return int(self._answer("MaxClockInfo", handle, 1980))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        """Milliwatts, the mean of the last second (nvmlDeviceGetPowerUsage)."""
        return int(self._answer("PowerUsage", handle, 71_000))

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
