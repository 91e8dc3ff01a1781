"""The figures that describe a type of accelerator: peak rates, memory and links."""

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
    """The way from one device to another: seconds = latency_s + bytes / bytes_per_s."""

    latency_s: float
    """Of one step of a collective, or of one message."""
    bytes_per_s: float
    """In one direction, when the other devices that share the link do not send."""
    shared_by: int = 1
    """Devices that have to share it when all of them send: 8 for one network card in a host of 8 devices."""

    def __post_init__(self) -> None:
        check_numbers(self, "latency_s", limit=0)
        check_numbers(self, "bytes_per_s", limit=0, above=True)
        check_numbers(self, "shared_by")

    @property
    def fair_bytes_per_s(self) -> float:
        """What each device gets when all send at once."""
        return self.bytes_per_s / self.shared_by


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """How much of its peak a device reaches.

    A matrix product of m x n x k runs at `matmul_share` / (1 + `half_size` * (1/m + 1/n + 1/k)) of the peak: it rises
    with every dimension and saturates. It is the roofline with products and memory traffic one after the other, as
    half_size / peak = half the time to move one element.
    """

    matmul_share: float
    half_size: float
    """A product that is this long in one dimension and endless in the others reaches half of `matmul_share`."""
    attention_share: float
    """Of the peak, by flash attention's products."""
    memory_share: float
    """Of the memory bandwidth, by norms, activation functions, dropout and the optimizer."""
    launch_s: float
    """Seconds of the host (Python, torch's dispatcher, the launch) for each kernel of `cost.compute.device_work`.

    Where kernels are shorter, the host sets the time. 50 us is what Megatron-LM's functional tests come to on DGX A100
    and H100: 3 to 6 ms for a layer and micro-batch of hidden size 512.
    """
    scan_share: float | None = None
    """Of the memory bandwidth, by the kernels that scan in Mamba-2 layers; None = `memory_share`."""
    narrow_shares: dict[str, float] = field(default_factory=dict)
    """What stands in the place of `matmul_share` for products in other formats, as `fp8` and `fp4`."""
    step_s: float = 0.0
    """Seconds of the host once a step, while the device waits: from the gradient norm, for which Megatron waits, to the
    first kernels of the next step (clipping, the optimizer's loops, logging, the batch)."""

    def __post_init__(self) -> None:
        shares = {name: getattr(self, name) for name in ("matmul_share", "attention_share", "memory_share")}
        shares |= {} if self.scan_share is None else {"scan_share": self.scan_share}
        for name, share in (shares | self.narrow_shares).items():
            if not 0 < share <= 1:
                raise FactError(f"{name} must be above 0 and at most 1, got {share}")
        check_numbers(self, "half_size", "launch_s", "step_s", limit=0)

    def share_of(self, dtype: str) -> float:
        """Share of its peak that a large product in a format reaches."""
        return self.narrow_shares.get(dtype, self.matmul_share)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """One type of accelerator in its usual host."""

    name: str
    flops_per_s: dict[str, float]
    """Peak of dense matrix products, by element type: fp32 (as Megatron runs it, TF32 off), fp16, bf16, fp8, fp4."""
    memory_bytes_per_s: float
    memory_bytes: int
    within_host: Link
    between_hosts: Link
    efficiency: Efficiency
    source: str
    """Where the figures come from, one sentence."""
    devices_per_host: int = 8
    """Of its usual host."""
    exponentials_per_s: float = math.inf
    """Of all its special function units: what softmax takes beside attention's products."""
    domain_hosts: int = 1
    """Hosts whose devices share one NVLink domain: between them, links are as `within_host`."""
    host_bytes_per_s: float = 0.0
    """To pinned memory of the host, and as fast back, when all devices of a host copy; 0 where it is not known."""
    compute_capability: int | None = None
    """CUDA's major number; None where it is not known."""

    def __post_init__(self) -> None:
        if not self.flops_per_s or not all(peak > 0 for peak in self.flops_per_s.values()):
            raise FactError(f"device {self.name} needs peaks above 0, got {self.flops_per_s}")
        check_numbers(self, "memory_bytes_per_s", "memory_bytes", limit=0, above=True)
        check_numbers(self, "devices_per_host", "domain_hosts")
        check_numbers(self, "host_bytes_per_s", limit=0)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Peak for one element type; raises FactError with those that are known."""
        if dtype not in self.flops_per_s:
            known = ", ".join(sorted(self.flops_per_s))
            raise FactError(f"{self.name} has no known peak for {dtype}; known: {known}")
        return self.flops_per_s[dtype]


Words = tuple[str, ...]

_NOISE = set("NVIDIA TESLA GEFORCE GPU TENSOR CORE GENERATION VOLTA TURING AMPERE GRACE HOPPER SUPERCHIP".split())
"""Words that change nothing."""
_ONE_WORD = (
    # RTX4090, RTXPRO6000, H100SXM5: several words.
    (re.compile(r"\b([GR]TX)(?=[A\dP])"), r"\1 "),
    (re.compile(r"(?<=\d)(?=SXM|PCIE|NVL\b|ADA\b)|(?<=\bPRO)(?=\d)"), " "),
    # 80 GB, 80G and 80GiB: one word.
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
"""Least capabilities by the words of the chip: the first that fits counts. Minor numbers matter for FP8 alone."""
_CHIP = {capability: re.compile(rf"(?<!\S)({chips})(?!\S)") for capability, chips in _CAPABILITIES.items()}


def words_of(name: str) -> Words:
    """Take a name apart: `NVIDIA A100-SXM4-40GB` and `a100_sxm4_40g` are A100, SXM4, 40GB."""
    plain = re.sub(r"[^A-Z0-9]+", " ", name.upper().replace("PCI-E", "PCIE"))
    for pattern, replacement in _ONE_WORD:
        plain = pattern.sub(replacement, plain)
    return tuple(word for word in plain.split() if word not in _NOISE)


def compute_capability(name: str) -> int | None:
    """Return the major number of a GPU's capability by its chip's name; None for a chip that is not known.

    Parts of a device (MIG), laptops and sizes of memory have the capability of their chip.
    """
    capability = chip_capability(name)
    return capability and capability[0]


def chip_capability(name: str) -> tuple[int, int] | None:
    """Return major and least minor number of a GPU's capability by its chip's name; None for an unknown chip."""
    plain = " ".join(words_of(name))
    return next((capability for capability, chip in _CHIP.items() if chip.search(plain)), None)


def nvidia(
    name: str,
    *,
    half_tflops: float,
    fp32_tflops: float,
    memory_gb_per_s: float,
    memory_gib: float,
    within: tuple[float, float],
    between: tuple[float, float, int],
    fp8_tflops: float = 0.0,
    fp4_tflops: float = 0.0,
    exp_per_ns: float,
    host_gb_per_s: float,
    bf16: bool = True,
    efficiency: Efficiency,
    sheet: str,
    remark: str = "",
    devices_per_host: int = 8,
    domain_hosts: int = 1,
) -> DeviceSpec:
    """Bring a data sheet to SI; links are (us, GB/s) and (us, GB/s, devices that share it).

    `exp_per_ns`: multiprocessors x 16 special function units (32 of Blackwell Ultra) x boost clock in GHz.

    `memory_gib` is what torch reports as the device's total capacity, which is less than the data sheet's round number:
    the driver and ECC keep the rest, and no process can have it.
    """
    peaks = {"fp32": fp32_tflops * 1e12, "fp16": half_tflops * 1e12}
    peaks |= {"bf16": half_tflops * 1e12} if bf16 else {}
    peaks |= {"fp8": fp8_tflops * 1e12} if fp8_tflops else {}
    peaks |= {"fp4": fp4_tflops * 1e12} if fp4_tflops else {}
    return DeviceSpec(
        name=name,
        flops_per_s=peaks,
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        memory_bytes=int(memory_gib * GIB),
        within_host=Link(latency_s=within[0] * 1e-6, bytes_per_s=within[1] * 1e9),
        between_hosts=Link(latency_s=between[0] * 1e-6, bytes_per_s=between[1] * 1e9, shared_by=between[2]),
        efficiency=efficiency,
        source=(
            f"Peaks and memory bandwidth: NVIDIA's data sheet ({sheet}); memory: the total that torch reports; shares "
            f"of peaks and links: usual figures{remark}."
        ),
        devices_per_host=devices_per_host,
        exponentials_per_s=exp_per_ns * 1e9,
        domain_hosts=domain_hosts,
        host_bytes_per_s=host_gb_per_s * 1e9,
        compute_capability=compute_capability(name),
    )


def at(usual: Efficiency, matmul_share: float) -> Efficiency:
    """Return a generation's shares for a device whose large products reach another one, all of them in proportion."""
    ratio = matmul_share / usual.matmul_share
    return replace(
        usual,
        matmul_share=matmul_share,
        attention_share=min(1.0, round(usual.attention_share * ratio, 2)),
        narrow_shares={dtype: min(1.0, round(share * ratio, 2)) for dtype, share in usual.narrow_shares.items()},
    )


# The trainer's own Python around each kernel, as in Megatron's functional tests of small models; CUDA takes 5 us.
_LAUNCH_S = 50e-6
# Seconds of the same tests beyond their launches, once a step: `benchmarks.validation.host`.
_DGX_A100_STEP_S = 48e-3
_DGX_H100_STEP_S = 31e-3

_DGX_A100 = partial(Efficiency, launch_s=_LAUNCH_S, step_s=_DGX_A100_STEP_S)
_DGX_H100 = partial(Efficiency, launch_s=_LAUNCH_S, step_s=_DGX_H100_STEP_S)
AMPERE = _DGX_A100(matmul_share=0.80, attention_share=0.54, memory_share=0.8, half_size=64)
# Its board takes 300 W and not 400; NVIDIA puts such a card at 90 % of the SXM module.
AMPERE_300_W = _DGX_A100(matmul_share=0.72, attention_share=0.48, memory_share=0.8, half_size=64)
# A dense product at full clock exceeds the power limit of these, so less of the nominal peak is left.
# FP8 and FP4: TransformerEngine's own benchmark of one dense layer, products alone, on H200 NVL and B300.
HOPPER = _DGX_H100(
    matmul_share=0.72, narrow_shares={"fp8": 0.68}, attention_share=0.40, memory_share=0.76, half_size=128
)
# The Triton kernels that scan gain nothing from the memory of Blackwell: 0.32 of it is as fast as 0.76 of an H100's.
_ANY_BLACKWELL = partial(_DGX_H100, attention_share=0.45, memory_share=0.75, scan_share=0.32, half_size=192)
BLACKWELL = _ANY_BLACKWELL(matmul_share=0.70, narrow_shares={"fp8": 0.62, "fp4": 0.38})
ULTRA = _ANY_BLACKWELL(matmul_share=0.76, narrow_shares={"fp8": 0.70, "fp4": 0.38})
VOLTA = _DGX_A100(matmul_share=0.75, attention_share=0.41, memory_share=0.8, half_size=64)
ADA = _DGX_H100(matmul_share=0.85, attention_share=0.61, memory_share=0.85, half_size=64)

# Blackwell's graphics chips have no tensor memory: attention runs there by the kernels for Ada.
GB202 = _DGX_H100(matmul_share=0.74, attention_share=0.53, memory_share=0.85, half_size=64)

# GB/s of each direction between a device and its host: four fifths of the nominal rate of 16 lanes of PCIe 3, 4 and 5,
# and of half a Grace's NVLink-C2C, which two devices share.
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
# All-gathers of 256 MB on 8 to 64 nodes: 37 to 61 us for each of the ring's steps, however short its piece.
EFA = (45.0, 47.0, 1)


_V100 = partial(
    nvidia,
    exp_per_ns=80 * 16 * 1.53,
    host_gb_per_s=PCIE3,
    half_tflops=125,
    fp32_tflops=15.7,
    memory_gb_per_s=900,
    bf16=False,
    within=(5.0, 130.0),
    between=(10.0, 12.0, 2),
    efficiency=VOLTA,
    sheet="V100, January 2020",
    remark="; 4 cards of 100 Gbit/s for 8 devices",
)
_A100 = partial(
    nvidia,
    exp_per_ns=108 * 16 * 1.41,
    host_gb_per_s=PCIE4,
    half_tflops=312,
    fp32_tflops=19.5,
    within=NVLINK3,
    between=HDR,
    efficiency=AMPERE,
    sheet="A100, June 2021",
    remark="; a card of 200 Gbit/s for each device",
)
_A800 = partial(
    _A100,
    within=NVLINK_400_AMPERE,
    sheet="A800, SXM4",
    remark="; 400 GB/s of NVLink and not 600; a card of 200 Gbit/s for each device",
)
_H100 = partial(
    nvidia,
    exp_per_ns=132 * 16 * 1.755,
    host_gb_per_s=PCIE5,
    half_tflops=989,
    fp32_tflops=67,
    fp8_tflops=1979,
    within=NVLINK4,
    between=NDR,
    efficiency=HOPPER,
    sheet="H100, SXM5, without sparsity",
    remark="; a card of 400 Gbit/s for each device",
)
_H20 = partial(
    nvidia,
    exp_per_ns=78 * 16 * 1.98,
    host_gb_per_s=PCIE5,
    half_tflops=148,
    fp32_tflops=44,
    fp8_tflops=296,
    within=NVLINK4,
    between=NDR,
    # 141.8 TFLOP/s of large products in public tests: 400 W are enough for its peak, and for attention's products.
    efficiency=replace(at(HOPPER, 0.90), attention_share=0.75, narrow_shares={"fp8": 0.85}),
    sheet="HGX H20, without sparsity, as makers of servers publish it",
    remark="; a card of 400 Gbit/s for each device",
)
_GH200 = partial(
    _H100,
    host_gb_per_s=2 * C2C,
    between=HDR,
    sheet="GH200 Grace Hopper, without sparsity",
    remark="; hosts of 4 superchips joined by NVLink, a card of 200 Gbit/s for each",
    devices_per_host=4,
)
_BLACKWELL_DEVICE = partial(
    nvidia,
    exp_per_ns=148 * 16 * 1.92,
    host_gb_per_s=PCIE5,
    within=NVLINK5,
    between=NDR,
    efficiency=BLACKWELL,
)
_BLACKWELL_ULTRA = partial(_BLACKWELL_DEVICE, exp_per_ns=148 * 32 * 1.92, between=XDR, efficiency=ULTRA)
NVLINK_DEVICES = (
    _V100("V100-SXM2-32GB", memory_gib=31.73),
    _V100("V100-SXM2-16GB", memory_gib=15.77),
    _A100("A100-40GB", memory_gib=39.5, memory_gb_per_s=1555),
    _A100("A100-80GB", memory_gib=79.2, memory_gb_per_s=2039),
    _A800("A800-40GB", memory_gib=39.5, memory_gb_per_s=1555),
    _A800("A800-80GB", memory_gib=79.2, memory_gb_per_s=2039),
    _H100("H100-SXM", memory_gib=79.1, memory_gb_per_s=3350),
    _H100(
        "AWS-P5-H100",
        memory_gib=79.1,
        memory_gb_per_s=3350,
        between=EFA,
        remark="; steps between hosts as published for nanotron's cluster (all-gather of 256 MB on 2 to 64 nodes)",
    ),
    _H100("H200", memory_gib=139.8, memory_gb_per_s=4800, sheet="H200, SXM, without sparsity"),
    _H100(
        "H800-SXM",
        memory_gib=79.1,
        memory_gb_per_s=3350,
        within=NVLINK_400_HOPPER,
        sheet="H800, SXM, without sparsity",
        remark="; 400 GB/s of NVLink and not 900; a card of 400 Gbit/s for each device",
    ),
    _H20("H20", memory_gib=95.0, memory_gb_per_s=4000),
    _H20("H20-3e", memory_gib=139.8, memory_gb_per_s=4800),
    _GH200("GH200-96GB", memory_gib=94.5, memory_gb_per_s=4000),
    _GH200("GH200-144GB", memory_gib=142.5, memory_gb_per_s=4900),
    _BLACKWELL_DEVICE(
        "B200",
        half_tflops=2250,
        fp32_tflops=75,
        fp8_tflops=4500,
        fp4_tflops=9000,
        memory_gb_per_s=7700,
        memory_gib=178.35,
        sheet="Blackwell, HGX B200, without sparsity",
        remark="; a card of 400 Gbit/s for each device",
    ),
    _BLACKWELL_DEVICE(
        "GB200-NVL72",
        half_tflops=2500,
        fp32_tflops=80,
        fp8_tflops=5000,
        fp4_tflops=10000,
        memory_gb_per_s=8000,
        memory_gib=184.31,
        sheet="Blackwell, GB200 NVL72, without sparsity",
        remark="; 18 trays of 4 devices in one NVLink domain, a card of 400 Gbit/s for each device",
        devices_per_host=4,
        domain_hosts=18,
        host_gb_per_s=C2C,
    ),
    _BLACKWELL_ULTRA(
        "B300",
        half_tflops=2250,
        fp32_tflops=75,
        fp8_tflops=4500,
        fp4_tflops=13500,
        memory_gb_per_s=8000,
        memory_gib=267.69,
        sheet="Blackwell Ultra, HGX B300, without sparsity",
        remark="; a card of 800 Gbit/s for each device",
    ),
    _BLACKWELL_ULTRA(
        "GB300-NVL72",
        half_tflops=2500,
        fp32_tflops=80,
        fp8_tflops=5000,
        fp4_tflops=15000,
        memory_gb_per_s=8000,
        memory_gib=276.5,
        sheet="Blackwell Ultra, GB300 NVL72, without sparsity",
        remark="; 18 trays of 4 devices in one NVLink domain, a card of 800 Gbit/s for each device",
        devices_per_host=4,
        domain_hosts=18,
        host_gb_per_s=C2C,
    ),
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
_V100_of_pcie_cards, _A100_of_pcie_cards, _A800_of_pcie_cards = "V100, January 2020", "A100, June 2021", "A800"
_RTX_4090 = f"Ada architecture, {_GEFORCE}"
_RTX_5090 = f"Blackwell architecture, {_GEFORCE}"
_L20 = "L20, as makers of servers publish it; memory as of L40S"
_PRO = "RTX PRO 6000 Blackwell"
_AT_48_GB = f"{_RTX_4090}; 48 GB are no product of NVIDIA's"

# name, generation, share, multiprocessors, GHz, 16-bit TFLOP/s, FP32, FP8, FP4, memory GB/s, GiB, bus, sheet
PCIE_CARDS = tuple(
    card.spec()
    for card in (
        _Card("V100-PCIe-32GB", VOLTA, 0.70, 80, 1.38, 112, 14.0, 0, 0, 900, 31.73, _SERVER3, _V100_of_pcie_cards),
        _Card("V100-PCIe-16GB", VOLTA, 0.70, 80, 1.38, 112, 14.0, 0, 0, 900, 15.77, _SERVER3, _V100_of_pcie_cards),
        _Card("T4", VOLTA, 0.60, 40, 1.59, 65, 8.1, 0, 0, 320, 14.56, _PLAIN3, "T4"),
        _Card(
            "A100-40GB-PCIe", AMPERE_300_W, 0.72, 108, 1.41, 312, 19.5, 0, 0, 1555, 39.5, _SERVER4, _A100_of_pcie_cards
        ),
        _Card(
            "A100-80GB-PCIe", AMPERE_300_W, 0.72, 108, 1.41, 312, 19.5, 0, 0, 1935, 79.2, _SERVER4, _A100_of_pcie_cards
        ),
        _Card(
            "A800-80GB-PCIe", AMPERE_300_W, 0.72, 108, 1.41, 312, 19.5, 0, 0, 1935, 79.2, _SERVER4, _A800_of_pcie_cards
        ),
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
