"""Types of accelerators: peak rates, memory and links of a device, and a table of NVIDIA's devices."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from pipette_launch.errors import FactError
from pipette_launch.facts.files import check_numbers
from pipette_launch.text import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The connection from one device to another: seconds = latency_s + bytes / bytes_per_s."""

    latency_s: float
    """Seconds of latency of one message, or of one step of a collective."""
    bytes_per_s: float
    """Bandwidth in one direction while no other device uses the link."""
    shared_by: int = 1
    """Number of devices that share the link: 8 for one network card in a host of 8 devices."""

    def __post_init__(self) -> None:
        check_numbers(self, "latency_s", limit=0)
        check_numbers(self, "bytes_per_s", limit=0, above=True)
        check_numbers(self, "shared_by")

    @property
    def fair_bytes_per_s(self) -> float:
        """Bandwidth of each device when all devices send."""
        return self.bytes_per_s / self.shared_by


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of the peak rates that a device reaches.

    A matrix product of m x n x k reaches `matmul_share` / (1 + `half_size` * (1/m + 1/n + 1/k)) of the peak. This is a
    roofline in which products and memory traffic do not overlap: half_size / peak is half the time to move one element.
    """

    matmul_share: float
    half_size: float
    """Length of one dimension at which a product reaches half of `matmul_share`, if the other two are very long."""
    attention_share: float
    """Share of the peak that the matrix products of flash attention reach."""
    memory_share: float
    """Share of the memory bandwidth that norms, activation functions, dropout and the optimizer reach."""
    launch_s: float
    """Seconds of the host (Python, torch's dispatcher, the launch) for each kernel, which no kernel undercuts."""
    scan_share: float | None = None
    """Share of the memory bandwidth that the scan kernels of Mamba-2 layers reach. None = `memory_share`."""
    narrow_shares: dict[str, float] = field(default_factory=dict)
    """Share of the peak that products in `fp8` or `fp4` reach, by format. Other formats have `matmul_share`."""
    step_s: float = 0.0
    """Seconds of the host in each step while the device waits: from the gradient norm, for which Megatron waits, to
    the first kernels of the next step (clipping, the optimizer's loops, logging, the batch)."""

    def __post_init__(self) -> None:
        shares = {name: getattr(self, name) for name in ("matmul_share", "attention_share", "memory_share")}
        shares |= {} if self.scan_share is None else {"scan_share": self.scan_share}
        for name, share in (shares | self.narrow_shares).items():
            if not 0 < share <= 1:
                raise FactError(f"{name} must be above 0 and at most 1, got {share}")
        check_numbers(self, "half_size", "launch_s", "step_s", limit=0)

    def share_of(self, dtype: str) -> float:
        """Return the share of the peak that a large product in this format reaches."""
        return self.narrow_shares.get(dtype, self.matmul_share)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """One type of accelerator in its usual host."""

    name: str
    flops_per_s: dict[str, float]
    """Peak of dense matrix products by format: fp32 (without TF32, as in Megatron), fp16, bf16, fp8, fp4."""
    memory_bytes_per_s: float
    memory_bytes: int
    within_host: Link
    between_hosts: Link
    efficiency: Efficiency
    source: str
    """Origin of the device's figures, one sentence."""
    devices_per_host: int = 8
    exponentials_per_s: float = math.inf
    """Rate of all special function units, which compute softmax beside attention's products."""
    domain_hosts: int = 1
    """Number of hosts in one NVLink domain. Links between these hosts are as fast as `within_host`."""
    host_bytes_per_s: float = 0.0
    """Bandwidth to pinned memory of the host, in each direction, while all devices of a host copy. 0 = unknown."""
    compute_capability: int | None = None
    """Major number of CUDA's compute capability. None = unknown."""

    def __post_init__(self) -> None:
        if not self.flops_per_s or not all(peak > 0 for peak in self.flops_per_s.values()):
            raise FactError(f"device {self.name} needs peaks above 0, got {self.flops_per_s}")
        check_numbers(self, "memory_bytes_per_s", "memory_bytes", limit=0, above=True)
        check_numbers(self, "devices_per_host", "domain_hosts")
        check_numbers(self, "host_bytes_per_s", limit=0)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the peak rate in one format. The FactError for an unknown format lists the known formats."""
        if dtype not in self.flops_per_s:
            known = ", ".join(sorted(self.flops_per_s))
            raise FactError(f"{self.name} has no known peak for {dtype}; known: {known}")
        return self.flops_per_s[dtype]


Words = tuple[str, ...]

_NOISE = set("NVIDIA TESLA GEFORCE GPU TENSOR CORE GENERATION VOLTA TURING AMPERE GRACE HOPPER SUPERCHIP".split())
"""Words in device names that do not identify a device."""
_ONE_WORD = (
    # RTX4090, RTXPRO6000 and H100SXM5 become several words.
    (re.compile(r"\b([GR]TX)(?=[A\dP])"), r"\1 "),
    (re.compile(r"(?<=\d)(?=SXM|PCIE|NVL\b|ADA\b)|(?<=\bPRO)(?=\d)"), " "),
    # 80 GB, 80G and 80GiB become one word.
    (re.compile(r"\b(\d+) ?(?:GB?|GIB)\b"), r"\1GB"),
)
_CAPABILITIES = {
    (12, 0): r"RTX 50[5-9]0|RTX PRO \d{4}|GB10",
    (11, 0): r"THOR",
    (10, 0): r"G?B[123]00",
    (9, 0): r"GH200|H20|H100|H200|H800",
    (8, 9): r"L2|L4|L20|L40|L40S|(RTX )?40[5-9]0|RTX \d{4} ADA",
    (8, 0): r"A2|A10|A10G|A16|A30|A40|A100|A800|RTX A\d{3,4}|A[456][05]00|(RTX )?30[5-9]0|ORIN",
    (7, 0): r"V100S?|T4G?|TITAN (RTX|V)|GV100|RTX 20[678]0|RTX [3-8]000",
}
"""Least compute capability of a chip, by patterns of the chip's name. The first matching pattern counts."""
_CHIP = {capability: re.compile(rf"(?<!\S)({chips})(?!\S)") for capability, chips in _CAPABILITIES.items()}


def words_of(name: str) -> Words:
    """Split a name into words: `NVIDIA A100-SXM4-40GB` and `a100_sxm4_40g` become A100, SXM4, 40GB."""
    plain = re.sub(r"[^A-Z0-9]+", " ", name.upper().replace("PCI-E", "PCIE"))
    for pattern, replacement in _ONE_WORD:
        plain = pattern.sub(replacement, plain)
    return tuple(word for word in plain.split() if word not in _NOISE)


def compute_capability(name: str) -> int | None:
    """Return the major number of a GPU's compute capability by the name of its chip. None for an unknown chip.

    Parts of a device (MIG), laptops and other memory sizes have the capability of their chip.
    """
    capability = chip_capability(name)
    return capability and capability[0]


def chip_capability(name: str) -> tuple[int, int] | None:
    """Return the capability (major, least minor) of a GPU by the name of its chip. None for an unknown chip."""
    plain = " ".join(words_of(name))
    return next((capability for capability, chip in _CHIP.items() if chip.search(plain)), None)


class _Host(NamedTuple):
    """Links of a device in its usual host."""

    within: tuple[float, float]
    """Latency in us and bandwidth in GB/s of the link to another device of the host."""
    host_gb_per_s: float
    between: tuple[float, float, int]
    """Link to another host: latency in us, bandwidth in GB/s, number of devices that share the link."""
    words: str
    devices: int = 8
    domain_hosts: int = 1


class _Row(NamedTuple):
    """One row of the table of devices."""

    name: str
    usual: Efficiency
    """Shares of the peak rates that devices of this generation usually reach."""
    matmul_share: float
    """Share of the 16-bit peak that large products reach.

    Shares of PCIe cards come from public tests (github.com/mag-/gpu_benchmark,
    github.com/zzc0721/torch-performance-test-data), minus 7 %, because A100 and H100 are 7 % slower in training than in
    such tests. Cards without a test (A10, A30, A40, L20, H200-NVL) have the share of a similar chip. L4 cannot hold its
    clock for long, because its power limit is 72 W. GeForce cards have 0.85, because short tests run above the clock of
    the data sheet.
    """
    multiprocessors: int
    """Doubled for Blackwell Ultra, whose multiprocessors have 32 special function units instead of 16."""
    ghz: float
    half_tflops: float
    """Dense, with accumulation in FP32, which halves the rate of GeForce cards."""
    fp32_tflops: float
    fp8_tflops: float
    fp4_tflops: float
    memory_gb_per_s: float
    memory_gib: float
    """Memory that torch reports. The data sheet also counts the memory that driver and ECC use."""
    host: _Host
    sheet: str

    def spec(self) -> DeviceSpec:
        """Convert the row to SI units."""
        host = self.host
        tflops = {"fp32": self.fp32_tflops, "fp16": self.half_tflops}
        tflops |= {"bf16": self.half_tflops} if self.usual != VOLTA else {}
        tflops |= {"fp8": self.fp8_tflops, "fp4": self.fp4_tflops}
        (within_us, within_gb), (between_us, between_gb, shared_by) = host.within, host.between
        return DeviceSpec(
            name=self.name,
            flops_per_s={dtype: peak * 1e12 for dtype, peak in tflops.items() if peak},
            memory_bytes_per_s=self.memory_gb_per_s * 1e9,
            memory_bytes=int(self.memory_gib * GIB),
            within_host=Link(latency_s=within_us * 1e-6, bytes_per_s=within_gb * 1e9),
            between_hosts=Link(latency_s=between_us * 1e-6, bytes_per_s=between_gb * 1e9, shared_by=shared_by),
            efficiency=_scaled(self.usual, self.matmul_share),
            source=(
                f"Peaks and memory bandwidth: NVIDIA's data sheet ({self.sheet}, without sparsity); memory: the total "
                f"that torch reports; shares of peaks and links: usual figures; {host.words}."
            ),
            devices_per_host=host.devices,
            exponentials_per_s=self.multiprocessors * 16 * self.ghz * 1e9,
            domain_hosts=host.domain_hosts,
            host_bytes_per_s=host.host_gb_per_s * 1e9,
            compute_capability=compute_capability(self.name),
        )


def _scaled(usual: Efficiency, matmul_share: float) -> Efficiency:
    """Scale a generation's shares to a device with another `matmul_share`."""
    ratio = matmul_share / usual.matmul_share
    return replace(
        usual,
        matmul_share=matmul_share,
        attention_share=min(1.0, round(usual.attention_share * ratio, 2)),
        narrow_shares={dtype: min(1.0, round(share * ratio, 2)) for dtype, share in usual.narrow_shares.items()},
    )


# The trainer's Python around each kernel: CUDA itself needs 5 us. In Megatron-LM's functional tests on A100 and H100,
# one layer and micro-batch with hidden size 512 takes 3 to 6 ms.
_LAUNCH_S = 50e-6
# Seconds of each step in Megatron's functional tests that kernels do not explain (`benchmarks.validation.host`).
_DGX_A100_STEP_S = 48e-3
_DGX_H100_STEP_S = 31e-3

_DGX_A100 = partial(Efficiency, launch_s=_LAUNCH_S, step_s=_DGX_A100_STEP_S)
_DGX_H100 = partial(Efficiency, launch_s=_LAUNCH_S, step_s=_DGX_H100_STEP_S)
AMPERE = _DGX_A100(matmul_share=0.80, attention_share=0.54, memory_share=0.8, half_size=64)
# The board is limited to 300 W instead of 400 W. NVIDIA states 90 % of the SXM module's speed for a card with 300 W.
AMPERE_300_W = _DGX_A100(matmul_share=0.72, attention_share=0.48, memory_share=0.8, half_size=64)
# A dense product at full clock exceeds the power limit of the following devices, so the devices reach less of the
# nominal peak. FP8 and FP4: products in TransformerEngine's own benchmark of one dense layer, on H200 NVL and B300.
HOPPER = _DGX_H100(
    matmul_share=0.72, narrow_shares={"fp8": 0.68}, attention_share=0.40, memory_share=0.76, half_size=128
)
# Blackwell's faster memory does not help the Triton scan kernels: a share of 0.32 is as fast as 0.76 on an H100.
_ANY_BLACKWELL = partial(_DGX_H100, attention_share=0.45, memory_share=0.75, scan_share=0.32, half_size=192)
BLACKWELL = _ANY_BLACKWELL(matmul_share=0.70, narrow_shares={"fp8": 0.62, "fp4": 0.38})
ULTRA = _ANY_BLACKWELL(matmul_share=0.76, narrow_shares={"fp8": 0.70, "fp4": 0.38})
VOLTA = _DGX_A100(matmul_share=0.75, attention_share=0.41, memory_share=0.8, half_size=64)
ADA = _DGX_H100(matmul_share=0.85, attention_share=0.61, memory_share=0.85, half_size=64)

# Blackwell's graphics chips have no tensor memory, so attention uses the kernels for Ada.
GB202 = _DGX_H100(matmul_share=0.74, attention_share=0.53, memory_share=0.85, half_size=64)

# GB/s in each direction between a device and its host: 80 % of the nominal rate of 16 lanes of PCIe 3, 4 and 5, and of
# half a Grace's NVLink-C2C, which two devices share.
PCIE3, PCIE4, PCIE5, C2C = 12.5, 25.0, 50.0, 180.0
NVLINK3 = (6.5, 230.0)
NVLINK4 = (4.0, 360.0)
NVLINK5 = (4.0, 720.0)
# A800 has 8 of A100's 12 links, H800 8 of H100's 18.
NVLINK_400_AMPERE = (6.5, 153.0)
NVLINK_400_HOPPER = (4.0, 160.0)
HDR = (10.0, 24.0, 1)
NDR = (10.0, 47.0, 1)
XDR = (10.0, 94.0, 1)
# All-gathers of 256 MB on 8 to 64 nodes: 37 to 61 us for each step of the ring, independent of the message size.
EFA = (45.0, 47.0, 1)

# FP8 and attention of H20: 400 W suffice for its peak, as large products reach 141.8 TFLOP/s in public tests.
H20 = replace(_scaled(HOPPER, 0.90), attention_share=0.75, narrow_shares={"fp8": 0.85})

_TO_CARD = "a card of {} Gbit/s for each device"
_SXM2 = _Host((5.0, 130.0), PCIE3, (10.0, 12.0, 2), "4 cards of 100 Gbit/s for 8 devices")
_SXM4 = _Host(NVLINK3, PCIE4, HDR, _TO_CARD.format(200))
_SXM4_400 = _SXM4._replace(within=NVLINK_400_AMPERE, words=f"400 GB/s of NVLink instead of 600; {_TO_CARD.format(200)}")
_SXM5 = _Host(NVLINK4, PCIE5, NDR, _TO_CARD.format(400))
_SXM5_400 = _SXM5._replace(within=NVLINK_400_HOPPER, words=f"400 GB/s of NVLink instead of 900; {_TO_CARD.format(400)}")
_P5 = _SXM5._replace(
    between=EFA, words="steps between hosts as published for nanotron's cluster (all-gather of 256 MB on 2 to 64 nodes)"
)
_GRACE = _Host(NVLINK4, 2 * C2C, HDR, "hosts of 4 superchips joined by NVLink, a card of 200 Gbit/s for each", 4)
_HGX_B200 = _Host(NVLINK5, PCIE5, NDR, _TO_CARD.format(400))
_HGX_B300 = _Host(NVLINK5, PCIE5, XDR, _TO_CARD.format(800))
_RACK = "18 trays of 4 devices in one NVLink domain, "
_NVL72_B200 = _Host(NVLINK5, C2C, NDR, _RACK + _TO_CARD.format(400), 4, 18)
_NVL72_B300 = _Host(NVLINK5, C2C, XDR, _RACK + _TO_CARD.format(800), 4, 18)
# NVLink bridges between two or four PCIe cards are ignored.
_SERVER = "PCIe, 2 cards of 200 Gbit/s for 8"
_SERVER3 = _Host((8.0, 10.0), PCIE3, (10.0, 12.0, 4), "PCIe, 2 cards of 100 Gbit/s for 8")
_SERVER4 = _Host((8.0, 20.0), PCIE4, (10.0, 23.0, 4), _SERVER)
_SERVER5 = _Host((8.0, 40.0), PCIE5, (10.0, 23.0, 4), _SERVER)
_PLAIN = "PCIe through the host's memory, a card of 100 Gbit/s for 8"
_PLAIN3 = _Host((10.0, 6.0), PCIE3, (15.0, 12.0, 8), _PLAIN)
_PLAIN4 = _Host((10.0, 12.0), PCIE4, (15.0, 12.0, 8), _PLAIN)
_PLAIN5 = _Host((10.0, 24.0), PCIE5, (15.0, 12.0, 8), _PLAIN)

_GEFORCE = "FP32 accumulation"
_V100, _A100, _A800, _A800_SXM = "V100, January 2020", "A100, June 2021", "A800", "A800, SXM4"
_H100, _H200, _H800, _GH200 = "H100, SXM5", "H200, SXM", "H800, SXM", "GH200 Grace Hopper"
_H20 = "HGX H20, as makers of servers publish it"
_B200, _GB200 = "Blackwell, HGX B200", "Blackwell, GB200 NVL72"
_B300, _GB300 = "Blackwell Ultra, HGX B300", "Blackwell Ultra, GB300 NVL72"
_RTX_4090 = f"Ada architecture, {_GEFORCE}"
_RTX_5090 = f"Blackwell architecture, {_GEFORCE}"
_L20 = "L20, as makers of servers publish it; memory as of L40S"
_PRO = "RTX PRO 6000 Blackwell"
_AT_48_GB = f"{_RTX_4090}; NVIDIA sells no card with 48 GB"

# name, generation, share, multiprocessors, GHz, 16-bit TFLOP/s, FP32, FP8, FP4, memory GB/s, GiB, host, sheet
NVIDIA_DEVICES = tuple(
    row.spec()
    for row in (
        _Row("V100-SXM2-32GB", VOLTA, 0.75, 80, 1.53, 125, 15.7, 0, 0, 900, 31.73, _SXM2, _V100),
        _Row("V100-SXM2-16GB", VOLTA, 0.75, 80, 1.53, 125, 15.7, 0, 0, 900, 15.77, _SXM2, _V100),
        _Row("A100-40GB", AMPERE, 0.80, 108, 1.41, 312, 19.5, 0, 0, 1555, 39.5, _SXM4, _A100),
        _Row("A100-80GB", AMPERE, 0.80, 108, 1.41, 312, 19.5, 0, 0, 2039, 79.2, _SXM4, _A100),
        _Row("A800-40GB", AMPERE, 0.80, 108, 1.41, 312, 19.5, 0, 0, 1555, 39.5, _SXM4_400, _A800_SXM),
        _Row("A800-80GB", AMPERE, 0.80, 108, 1.41, 312, 19.5, 0, 0, 2039, 79.2, _SXM4_400, _A800_SXM),
        _Row("H100-SXM", HOPPER, 0.72, 132, 1.755, 989, 67, 1979, 0, 3350, 79.1, _SXM5, _H100),
        _Row("AWS-P5-H100", HOPPER, 0.72, 132, 1.755, 989, 67, 1979, 0, 3350, 79.1, _P5, _H100),
        _Row("H200", HOPPER, 0.72, 132, 1.755, 989, 67, 1979, 0, 4800, 139.8, _SXM5, _H200),
        _Row("H800-SXM", HOPPER, 0.72, 132, 1.755, 989, 67, 1979, 0, 3350, 79.1, _SXM5_400, _H800),
        _Row("H20", H20, 0.90, 78, 1.98, 148, 44, 296, 0, 4000, 95.0, _SXM5, _H20),
        _Row("H20-3e", H20, 0.90, 78, 1.98, 148, 44, 296, 0, 4800, 139.8, _SXM5, _H20),
        _Row("GH200-96GB", HOPPER, 0.72, 132, 1.755, 989, 67, 1979, 0, 4000, 94.5, _GRACE, _GH200),
        _Row("GH200-144GB", HOPPER, 0.72, 132, 1.755, 989, 67, 1979, 0, 4900, 142.5, _GRACE, _GH200),
        _Row("B200", BLACKWELL, 0.70, 148, 1.92, 2250, 75, 4500, 9000, 7700, 178.35, _HGX_B200, _B200),
        _Row("GB200-NVL72", BLACKWELL, 0.70, 148, 1.92, 2500, 80, 5000, 10000, 8000, 184.31, _NVL72_B200, _GB200),
        _Row("B300", ULTRA, 0.76, 296, 1.92, 2250, 75, 4500, 13500, 8000, 267.69, _HGX_B300, _B300),
        _Row("GB300-NVL72", ULTRA, 0.76, 296, 1.92, 2500, 80, 5000, 15000, 8000, 276.5, _NVL72_B300, _GB300),
        _Row("V100-PCIe-32GB", VOLTA, 0.70, 80, 1.38, 112, 14.0, 0, 0, 900, 31.73, _SERVER3, _V100),
        _Row("V100-PCIe-16GB", VOLTA, 0.70, 80, 1.38, 112, 14.0, 0, 0, 900, 15.77, _SERVER3, _V100),
        _Row("T4", VOLTA, 0.60, 40, 1.59, 65, 8.1, 0, 0, 320, 14.56, _PLAIN3, "T4"),
        _Row("A100-40GB-PCIe", AMPERE_300_W, 0.72, 108, 1.41, 312, 19.5, 0, 0, 1555, 39.5, _SERVER4, _A100),
        _Row("A100-80GB-PCIe", AMPERE_300_W, 0.72, 108, 1.41, 312, 19.5, 0, 0, 1935, 79.2, _SERVER4, _A100),
        _Row("A800-80GB-PCIe", AMPERE_300_W, 0.72, 108, 1.41, 312, 19.5, 0, 0, 1935, 79.2, _SERVER4, _A800),
        _Row("A30", AMPERE_300_W, 0.72, 56, 1.44, 165, 10.3, 0, 0, 933, 23.5, _SERVER4, "A30"),
        _Row("A40", AMPERE_300_W, 0.75, 84, 1.74, 149.7, 37.4, 0, 0, 696, 44.4, _SERVER4, "A40"),
        _Row("A10", AMPERE_300_W, 0.60, 72, 1.695, 125, 31.2, 0, 0, 600, 22.0, _PLAIN4, "A10"),
        _Row("A10G", AMPERE_300_W, 0.75, 80, 1.71, 70, 35.0, 0, 0, 600, 22.0, _PLAIN4, "A10G"),
        _Row("RTX-A6000", AMPERE_300_W, 0.75, 84, 1.8, 154.8, 38.7, 0, 0, 768, 47.4, _SERVER4, "RTX A6000"),
        _Row("RTX-3090", AMPERE_300_W, 0.85, 82, 1.695, 71, 35.6, 0, 0, 936, 23.6, _PLAIN4, f"GA102, {_GEFORCE}"),
        _Row("L4", ADA, 0.50, 58, 2.04, 121, 30.3, 242, 0, 300, 22.0, _PLAIN4, "L4"),
        _Row("L20", ADA, 0.85, 92, 2.52, 119.5, 59.8, 239, 0, 864, 44.4, _SERVER4, _L20),
        _Row("L40", ADA, 0.85, 142, 2.49, 181, 90.5, 362, 0, 864, 44.4, _SERVER4, "L40"),
        _Row("L40S", ADA, 0.68, 142, 2.52, 362, 91.6, 733, 0, 864, 44.4, _SERVER4, "L40S"),
        _Row("RTX-6000-Ada", ADA, 0.70, 142, 2.505, 364.2, 91.1, 728.5, 0, 960, 47.4, _SERVER4, "RTX 6000 Ada"),
        _Row("RTX-4090", ADA, 0.85, 128, 2.52, 165.2, 82.6, 330.3, 0, 1008, 23.64, _PLAIN4, _RTX_4090),
        _Row("RTX-4090-48GB", ADA, 0.85, 128, 2.52, 165.2, 82.6, 330.3, 0, 1008, 47.4, _PLAIN4, _AT_48_GB),
        _Row("RTX-5090", GB202, 0.85, 170, 2.407, 209.5, 104.8, 419, 1676, 1792, 31.36, _PLAIN5, _RTX_5090),
        _Row("RTX-PRO-6000-Server", GB202, 0.74, 188, 2.6, 500, 120, 1000, 2000, 1597, 94.9, _SERVER5, _PRO),
        _Row("RTX-PRO-6000-Workstation", GB202, 0.74, 188, 2.6, 500, 125, 1000, 2000, 1792, 94.9, _PLAIN5, _PRO),
        _Row("H100-PCIe", HOPPER, 0.61, 114, 1.755, 756, 51, 1513, 0, 2000, 79.1, _SERVER5, "H100, PCIe"),
        _Row("H100-NVL", HOPPER, 0.58, 132, 1.785, 835, 60, 1671, 0, 3900, 93.0, _SERVER5, "H100 NVL"),
        _Row("H800-PCIe", HOPPER, 0.61, 114, 1.755, 756, 51, 1513, 0, 2000, 79.1, _SERVER5, "H800, PCIe"),
        _Row("H200-NVL", HOPPER, 0.72, 132, 1.785, 835, 60, 1671, 0, 4800, 139.8, _SERVER5, "H200 NVL"),
    )
)
