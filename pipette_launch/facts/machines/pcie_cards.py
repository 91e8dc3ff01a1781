"""Cards that meet each other over PCIe; bridges that join two or four of them by NVLink are not counted."""

from __future__ import annotations

from typing import NamedTuple

from pipette_launch.facts.machines.accelerator import DeviceSpec, Efficiency
from pipette_launch.facts.machines.data_sheets import (
    ADA,
    AMPERE_300_W,
    GB202,
    HOPPER,
    PCIE3,
    PCIE4,
    PCIE5,
    VOLTA,
    at,
    nvidia,
)


class _Bus(NamedTuple):
    """Links of a card to its neighbours, its host and other hosts."""

    within: tuple[float, float]
    """us and GB/s."""
    host_gb_per_s: float
    between: tuple[float, float, int]
    """us, GB/s, and cards that share it."""
    words: str


class _Card(NamedTuple):
    """One row of the table."""

    name: str
    usual: Efficiency
    """Shares of its generation."""
    matmul_share: float
    """Part of the 16-bit peak that large products reach in public tests (github.com/mag-/gpu_benchmark and
    github.com/zzc0721/torch-performance-test-data), less the 7 % by which A100 and H100 stay below theirs in training.
    Without a test (A10, A30, A40, L20, H200-NVL): a similar chip's. L4 holds its clock at 72 W for a moment only.
    GeForce cards have 0.85: in short tests they run above the clock of their data sheets.
    """
    multiprocessors: int
    ghz: float
    half_tflops: float
    """Dense, with accumulation in FP32, which GeForce cards do at half the rate of others."""
    fp32_tflops: float
    fp8_tflops: float
    fp4_tflops: float
    memory_gb_per_s: float
    memory_gib: float
    bus: _Bus
    sheet: str

    def spec(self) -> DeviceSpec:
        """Return the device of this row."""
        return nvidia(
            self.name,
            exp_per_ns=self.multiprocessors * 16 * self.ghz,
            host_gb_per_s=self.bus.host_gb_per_s,
            half_tflops=self.half_tflops,
            fp32_tflops=self.fp32_tflops,
            fp8_tflops=self.fp8_tflops,
            fp4_tflops=self.fp4_tflops,
            memory_gb_per_s=self.memory_gb_per_s,
            memory_gib=self.memory_gib,
            bf16=self.usual != VOLTA,
            within=self.bus.within,
            between=self.bus.between,
            efficiency=at(self.usual, self.matmul_share),
            sheet=f"{self.sheet}, without sparsity",
            remark=f"; {self.bus.words}",
        )


_SERVER = "PCIe, 2 cards of 200 Gbit/s for 8"
_SERVER3 = _Bus((8.0, 10.0), PCIE3, (10.0, 12.0, 4), "PCIe, 2 cards of 100 Gbit/s for 8")
_SERVER4 = _Bus((8.0, 20.0), PCIE4, (10.0, 23.0, 4), _SERVER)
_SERVER5 = _Bus((8.0, 40.0), PCIE5, (10.0, 23.0, 4), _SERVER)
_PLAIN = "PCIe through the host's memory, a card of 100 Gbit/s for 8"
_PLAIN3 = _Bus((10.0, 6.0), PCIE3, (15.0, 12.0, 8), _PLAIN)
_PLAIN4 = _Bus((10.0, 12.0), PCIE4, (15.0, 12.0, 8), _PLAIN)
_PLAIN5 = _Bus((10.0, 24.0), PCIE5, (15.0, 12.0, 8), _PLAIN)

_GEFORCE = "FP32 accumulation"
_V100, _A100, _A800 = "V100, January 2020", "A100, June 2021", "A800"
_RTX_4090 = f"Ada architecture, {_GEFORCE}"
_RTX_5090 = f"Blackwell architecture, {_GEFORCE}"
_L20 = "L20, as makers of servers publish it; memory as of L40S"
_PRO = "RTX PRO 6000 Blackwell"
_AT_48_GB = f"{_RTX_4090}; 48 GB are no product of NVIDIA's"

# name, generation, share, multiprocessors, GHz, 16-bit TFLOP/s, FP32, FP8, FP4, memory GB/s, GiB, bus, sheet
PCIE_CARDS = tuple(
    card.spec()
    for card in (
        _Card("V100-PCIe-32GB", VOLTA, 0.70, 80, 1.38, 112, 14.0, 0, 0, 900, 31.73, _SERVER3, _V100),
        _Card("V100-PCIe-16GB", VOLTA, 0.70, 80, 1.38, 112, 14.0, 0, 0, 900, 15.77, _SERVER3, _V100),
        _Card("T4", VOLTA, 0.60, 40, 1.59, 65, 8.1, 0, 0, 320, 14.56, _PLAIN3, "T4"),
        _Card("A100-40GB-PCIe", AMPERE_300_W, 0.72, 108, 1.41, 312, 19.5, 0, 0, 1555, 39.5, _SERVER4, _A100),
        _Card("A100-80GB-PCIe", AMPERE_300_W, 0.72, 108, 1.41, 312, 19.5, 0, 0, 1935, 79.2, _SERVER4, _A100),
        _Card("A800-80GB-PCIe", AMPERE_300_W, 0.72, 108, 1.41, 312, 19.5, 0, 0, 1935, 79.2, _SERVER4, _A800),
        _Card("A30", AMPERE_300_W, 0.72, 56, 1.44, 165, 10.3, 0, 0, 933, 23.5, _SERVER4, "A30"),
        _Card("A40", AMPERE_300_W, 0.75, 84, 1.74, 149.7, 37.4, 0, 0, 696, 44.4, _SERVER4, "A40"),
        _Card("A10", AMPERE_300_W, 0.60, 72, 1.695, 125, 31.2, 0, 0, 600, 22.0, _PLAIN4, "A10"),
        _Card("A10G", AMPERE_300_W, 0.75, 80, 1.71, 70, 35.0, 0, 0, 600, 22.0, _PLAIN4, "A10G"),
        _Card("RTX-A6000", AMPERE_300_W, 0.75, 84, 1.8, 154.8, 38.7, 0, 0, 768, 47.4, _SERVER4, "RTX A6000"),
        _Card("RTX-3090", AMPERE_300_W, 0.85, 82, 1.695, 71, 35.6, 0, 0, 936, 23.6, _PLAIN4, f"GA102, {_GEFORCE}"),
        _Card("L4", ADA, 0.50, 58, 2.04, 121, 30.3, 242, 0, 300, 22.0, _PLAIN4, "L4"),
        _Card("L20", ADA, 0.85, 92, 2.52, 119.5, 59.8, 239, 0, 864, 44.4, _SERVER4, _L20),
        _Card("L40", ADA, 0.85, 142, 2.49, 181, 90.5, 362, 0, 864, 44.4, _SERVER4, "L40"),
        _Card("L40S", ADA, 0.68, 142, 2.52, 362, 91.6, 733, 0, 864, 44.4, _SERVER4, "L40S"),
        _Card("RTX-6000-Ada", ADA, 0.70, 142, 2.505, 364.2, 91.1, 728.5, 0, 960, 47.4, _SERVER4, "RTX 6000 Ada"),
        _Card("RTX-4090", ADA, 0.85, 128, 2.52, 165.2, 82.6, 330.3, 0, 1008, 23.64, _PLAIN4, _RTX_4090),
        _Card("RTX-4090-48GB", ADA, 0.85, 128, 2.52, 165.2, 82.6, 330.3, 0, 1008, 47.4, _PLAIN4, _AT_48_GB),
        _Card("RTX-5090", GB202, 0.85, 170, 2.407, 209.5, 104.8, 419, 1676, 1792, 31.36, _PLAIN5, _RTX_5090),
        _Card("RTX-PRO-6000-Server", GB202, 0.74, 188, 2.6, 500, 120, 1000, 2000, 1597, 94.9, _SERVER5, _PRO),
        _Card("RTX-PRO-6000-Workstation", GB202, 0.74, 188, 2.6, 500, 125, 1000, 2000, 1792, 94.9, _PLAIN5, _PRO),
        _Card("H100-PCIe", HOPPER, 0.61, 114, 1.755, 756, 51, 1513, 0, 2000, 79.1, _SERVER5, "H100, PCIe"),
        _Card("H100-NVL", HOPPER, 0.58, 132, 1.785, 835, 60, 1671, 0, 3900, 93.0, _SERVER5, "H100 NVL"),
        _Card("H800-PCIe", HOPPER, 0.61, 114, 1.755, 756, 51, 1513, 0, 2000, 79.1, _SERVER5, "H800, PCIe"),
        _Card("H200-NVL", HOPPER, 0.72, 132, 1.785, 835, 60, 1671, 0, 4800, 139.8, _SERVER5, "H200 NVL"),
    )
)
