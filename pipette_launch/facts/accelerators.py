"""Types of accelerators: peak rates, memory and links of a device, and the table of NVIDIA's devices."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from pipette_launch.errors import FactError
from pipette_launch.facts.files import ADDED_LATER, check_numbers, table
from pipette_launch.text import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Link from one device to another. A message takes latency_s + bytes / bytes_per_s seconds."""

    latency_s: float
    """Latency in seconds of one message, or of one step of a collective."""
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
        """Bandwidth of each device if all devices of the link send at the same time."""
        return self.bytes_per_s / self.shared_by


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of the peak rates that a device reaches.

    A matrix product of m x n x k reaches `matmul_share` / (1 + `half_size` * (1/m + 1/n + 1/k)) of the peak. The
    formula is a roofline in which products and memory traffic do not overlap. Moving one element takes 2 * half_size /
    peak seconds.
    """

    matmul_share: float
    half_size: float
    """Length of a dimension at which a product reaches half of `matmul_share`, if both other dimensions are long."""
    attention_share: float
    """Share of the peak that the matrix products of flash attention reach."""
    memory_share: float
    """Share of the memory bandwidth that norms, activation functions, dropout and the optimizer reach."""
    launch_s: float
    """Least seconds of a kernel: the time that the host (Python, torch's dispatcher, CUDA) needs to launch a kernel."""
    scan_share: float | None = None
    """Share of the memory bandwidth that the scan kernels of Mamba-2 layers reach. None = `memory_share`."""
    narrow_shares: dict[str, float] = field(default_factory=dict)
    """Share of the peak that products in `fp8` or `fp4` reach, by format. Other formats reach `matmul_share`."""
    step_s: float = 0.0
    """Seconds in each step in which the device waits for the host: from Megatron's read of the gradient norm to the
    next step's first kernels. The host clips gradients, runs the optimizer's loops, logs, and loads the batch."""

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
    """Origin of the device's figures, as one sentence."""
    devices_per_host: int = 8
    exponentials_per_s: float = math.inf
    """Exponentials per second of all special function units, which compute the softmax of attention."""
    domain_hosts: int = 1
    """Number of hosts in one NVLink domain. Links between hosts of one domain are as fast as `within_host`."""
    has_paired_links: bool = field(default=False, metadata=ADDED_LATER)
    """True if no switch joins the devices of a host, so that each pair of devices has NVLinks of its own. `within_host`
    is then the link of one pair, and a group in one host uses the links of all its pairs at the same time."""
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


_NOISE = set("NVIDIA TESLA GEFORCE GPU TENSOR CORE GENERATION VOLTA TURING AMPERE GRACE HOPPER SUPERCHIP".split())
"""Words in device names that do not identify a device."""
_ONE_WORD = (
    # Names such as RTX4090, RTXPRO6000 and H100SXM5 are split into words.
    (re.compile(r"\b([GR]TX)(?=[A\dP])"), r"\1 "),
    (re.compile(r"(?<=\d)(?=SXM|PCIE|NVL\b|ADA\b)|(?<=\bPRO)(?=\d)"), " "),
    # The memory sizes 80 GB, 80G and 80GiB become the word 80GB.
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
"""Patterns of chip names, by compute capability (major, least minor). The first matching pattern counts."""
_CHIP = {capability: re.compile(rf"(?<!\S)({chips})(?!\S)") for capability, chips in _CAPABILITIES.items()}


def words_of(name: str) -> tuple[str, ...]:
    """Split a name into words: `NVIDIA A100-SXM4-40GB` and `a100_sxm4_40g` become A100, SXM4, 40GB."""
    plain = re.sub(r"[^A-Z0-9]+", " ", name.upper().replace("PCI-E", "PCIE"))
    for pattern, replacement in _ONE_WORD:
        plain = pattern.sub(replacement, plain)
    return tuple(word for word in plain.split() if word not in _NOISE)


def compute_capability(name: str) -> int | None:
    """Return the major number of a GPU's compute capability by the chip's name, or None for an unknown chip.

    MIG partitions, laptop GPUs and cards with other memory sizes have the compute capability of their chip.
    """
    capability = chip_capability(name)
    return capability and capability[0]


def chip_capability(name: str) -> tuple[int, int] | None:
    """Return the compute capability (major, least minor) of a GPU by the chip's name, or None for an unknown chip."""
    plain = " ".join(words_of(name))
    return next((capability for capability, chip in _CHIP.items() if chip.search(plain)), None)


class _Host(NamedTuple):
    """Links of a device in the host in which the device is usually sold."""

    within: tuple[float, float]
    """Latency in us and bandwidth in GB/s of the link to another device of the host."""
    host_gb_per_s: float
    between: tuple[float, float, int]
    """Link to another host: latency in us, bandwidth in GB/s, number of devices that share the link."""
    words: str
    devices: int = 8
    domain_hosts: int = 1
    has_paired_links: bool = False


def _scaled(usual: Efficiency, matmul_share: float) -> Efficiency:
    """Scale a generation's shares to a device with another `matmul_share`."""
    ratio = matmul_share / usual.matmul_share
    return replace(
        usual,
        matmul_share=matmul_share,
        attention_share=min(1.0, round(usual.attention_share * ratio, 2)),
        narrow_shares={dtype: min(1.0, round(share * ratio, 2)) for dtype, share in usual.narrow_shares.items()},
    )


# `launch_s`: one layer with hidden size 512 takes 3 to 6 ms for a micro-batch in Megatron-LM's functional tests on A100
# and H100. CUDA needs 5 us to launch a kernel, and the trainer's Python needs the rest. `step_s`: time of a step in the
# same tests that kernels do not explain (`benchmarks.validation.host`).
_DGX_A100 = partial(Efficiency, launch_s=50e-6, step_s=48e-3)
_DGX_H100 = partial(Efficiency, launch_s=50e-6, step_s=31e-3)
# Blackwell's faster memory helps norms and activations less than its data sheet promises, and the Triton scan kernels
# not at all: a scan share of 0.32 would give the same speed as 0.76 on an H100.
_ANY_BLACKWELL = partial(_DGX_H100, attention_share=0.45, memory_share=0.58, scan_share=0.24, half_size=192)
# A dense product at full clock exceeds the power limit of Hopper and Blackwell, so both generations reach a smaller
# share of the nominal peak. The shares of FP8 and FP4 come from TransformerEngine's own benchmark of one dense layer,
# on H200 NVL and B300.
_HOPPER = _DGX_H100(
    matmul_share=0.72, narrow_shares={"fp8": 0.68}, attention_share=0.40, memory_share=0.76, half_size=128
)
_GENERATIONS = {
    "VOLTA": _DGX_A100(matmul_share=0.75, attention_share=0.41, memory_share=0.8, half_size=64),
    "AMPERE": _DGX_A100(matmul_share=0.80, attention_share=0.54, memory_share=0.8, half_size=64),
    # NVIDIA states that cards with 300 W reach 90 % of the speed of the SXM module with 400 W.
    "AMPERE_300_W": _DGX_A100(matmul_share=0.72, attention_share=0.48, memory_share=0.8, half_size=64),
    "ADA": _DGX_H100(matmul_share=0.85, attention_share=0.61, memory_share=0.85, half_size=64),
    "HOPPER": _HOPPER,
    # H20's 400 W suffice for its peak: large products reach 141.8 TFLOP/s in public tests.
    "H20": replace(_scaled(_HOPPER, 0.90), attention_share=0.75, narrow_shares={"fp8": 0.85}),
    "BLACKWELL": _ANY_BLACKWELL(matmul_share=0.70, narrow_shares={"fp8": 0.62, "fp4": 0.38}),
    "ULTRA": _ANY_BLACKWELL(matmul_share=0.76, narrow_shares={"fp8": 0.70, "fp4": 0.38}),
    # Blackwell's graphics chips have no tensor memory, so attention uses the kernels for Ada.
    "GB202": _DGX_H100(matmul_share=0.74, attention_share=0.53, memory_share=0.85, half_size=64),
}
"""Shares of the peak rates that devices of a generation usually reach."""

# Bandwidth in GB/s between a device and its host, in each direction. PCIE3, PCIE4 and PCIE5 are 80 % of the nominal
# rate of 16 lanes. C2C is 80 % of half the NVLink-C2C of a Grace CPU, because two devices share this link.
PCIE3, PCIE4, PCIE5, C2C = 12.5, 25.0, 50.0, 180.0
NVLINK3 = (6.5, 230.0)
NVLINK4 = (4.0, 360.0)
NVLINK5 = (4.0, 720.0)
# Six of an H100's 18 NVLinks join each pair of superchips in a host of four GH200 (CSCS's documentation of Alps).
NVLINK4_PAIR = (4.0, 120.0)
# A800 has 8 NVLinks and A100 has 12. H800 has 8 NVLinks and H100 has 18.
NVLINK_400_AMPERE = (6.5, 153.0)
NVLINK_400_HOPPER = (4.0, 160.0)
HDR = (10.0, 24.0, 1)
NDR = (10.0, 47.0, 1)
XDR = (10.0, 94.0, 1)
# Latency of EFA: in all-gathers of 256 MB on 8 to 64 nodes, a step of the ring takes 37 to 61 us more than its bytes.
EFA = (45.0, 47.0, 1)
_TO_CARD = "a card of {} Gbit/s for each device"
_RACK = "18 trays of 4 devices in one NVLink domain, "
_SERVER = "PCIe, 2 cards of 200 Gbit/s for 8"
_PLAIN = "PCIe through the host's memory, a card of 100 Gbit/s for 8"
_HOSTS = {
    "SXM2": _Host((5.0, 130.0), PCIE3, (10.0, 12.0, 2), "4 cards of 100 Gbit/s for 8 devices"),
    "SXM4": _Host(NVLINK3, PCIE4, HDR, _TO_CARD.format(200)),
    "SXM4_400": _Host(NVLINK_400_AMPERE, PCIE4, HDR, f"400 GB/s of NVLink instead of 600; {_TO_CARD.format(200)}"),
    "SXM5": _Host(NVLINK4, PCIE5, NDR, _TO_CARD.format(400)),
    "SXM5_400": _Host(NVLINK_400_HOPPER, PCIE5, NDR, f"400 GB/s of NVLink instead of 900; {_TO_CARD.format(400)}"),
    "P5": _Host(
        *(NVLINK4, PCIE5, EFA),
        "steps between hosts as published for nanotron's cluster (all-gather of 256 MB on 2 to 64 nodes)",
    ),
    "GRACE": _Host(
        *(NVLINK4_PAIR, 2 * C2C, HDR),
        "hosts of 4 superchips of 660 W as in Alps, 6 NVLinks for each pair, a card of 200 Gbit/s for each",
        devices=4,
        has_paired_links=True,
    ),
    "HGX_B200": _Host(NVLINK5, PCIE5, NDR, _TO_CARD.format(400)),
    "HGX_B300": _Host(NVLINK5, PCIE5, XDR, _TO_CARD.format(800)),
    "NVL72_B200": _Host(NVLINK5, C2C, NDR, _RACK + _TO_CARD.format(400), 4, 18),
    "NVL72_B300": _Host(NVLINK5, C2C, XDR, _RACK + _TO_CARD.format(800), 4, 18),
    # The figures ignore NVLink bridges between two or four PCIe cards.
    "SERVER3": _Host((8.0, 10.0), PCIE3, (10.0, 12.0, 4), "PCIe, 2 cards of 100 Gbit/s for 8"),
    "SERVER4": _Host((8.0, 20.0), PCIE4, (10.0, 23.0, 4), _SERVER),
    "SERVER5": _Host((8.0, 40.0), PCIE5, (10.0, 23.0, 4), _SERVER),
    "PLAIN3": _Host((10.0, 6.0), PCIE3, (15.0, 12.0, 8), _PLAIN),
    "PLAIN4": _Host((10.0, 12.0), PCIE4, (15.0, 12.0, 8), _PLAIN),
    "PLAIN5": _Host((10.0, 24.0), PCIE5, (15.0, 12.0, 8), _PLAIN),
}


ROWS = table("pipette_launch.facts", "devices")
"""Table of NVIDIA's devices. Column `chip` has words that occur in every name of a device. Column `other_words` has
words that occur only in some names."""
_REFERENCES = {"HOPPER": "H100-SXM", "BLACKWELL": "B200", "ULTRA": "B300"}
"""Device of each generation whose `matmul_share` gives the shares of devices with another power limit."""


def _matmul_share(row: Mapping[str, str]) -> float:
    """Return the share of the peak that large products reach: from the table, else from the device's power limit.

    Products at full clock need more power than Hopper and Blackwell may draw. So their rate is assumed to grow with the
    square root of the power for each FLOP/s of the peak. Public tests give H100-PCIe (350 W) a share of 0.61 and
    H100-NVL (400 W) a share of 0.58; the square root gives 0.58 and 0.59. The power of GH200 is what remains for the
    GPU: CPU and GPU share 660 W on Alps, and the CPU takes its part first (CSCS's documentation), about 100 W.
    """
    if row["matmul_share"]:
        return float(row["matmul_share"])
    usual = next(one for one in ROWS if one["name"] == _REFERENCES[row["generation"]])
    watts_per_tflops, usual_watts = (float(one["watts"]) / float(one["half_tflops"]) for one in (row, usual))
    return round(float(usual["matmul_share"]) * math.sqrt(watts_per_tflops / usual_watts), 3)


def _device(row: Mapping[str, str]) -> DeviceSpec:
    """Convert a row of `data/devices.csv` to SI units.

    `matmul_share` of PCIe cards comes from public tests (github.com/mag-/gpu_benchmark,
    github.com/zzc0721/torch-performance-test-data), minus 7 %, because A100 and H100 are 7 % slower in training than in
    such tests. Cards without a public test (A10, A30, A40, L20) have the `matmul_share` of a similar chip. L4
    cannot hold its clock for long, because its power limit is 72 W. GeForce cards have a `matmul_share` of 0.85,
    because short tests run above the clock of the data sheet. `multiprocessors` is doubled for Blackwell Ultra, whose
    multiprocessors have 32 special function units instead of 16. `half_tflops` is the 16-bit peak without sparsity and
    with accumulation in FP32, which halves the rate of GeForce cards. `memory_gib` is the memory that torch reports,
    without the memory that driver and ECC use.
    """
    host, generation = _HOSTS[row["host"]], row["generation"]
    half = float(row["half_tflops"])
    tflops = {"fp32": float(row["fp32_tflops"]), "fp16": half, "bf16": 0.0 if generation == "VOLTA" else half}
    tflops |= {"fp8": float(row["fp8_tflops"]), "fp4": float(row["fp4_tflops"])}
    (within_us, within_gb), (between_us, between_gb, shared_by) = host.within, host.between
    return DeviceSpec(
        name=row["name"],
        flops_per_s={dtype: peak * 1e12 for dtype, peak in tflops.items() if peak},
        memory_bytes_per_s=float(row["memory_gb_per_s"]) * 1e9,
        memory_bytes=int(float(row["memory_gib"]) * GIB),
        within_host=Link(latency_s=within_us * 1e-6, bytes_per_s=within_gb * 1e9),
        between_hosts=Link(latency_s=between_us * 1e-6, bytes_per_s=between_gb * 1e9, shared_by=shared_by),
        efficiency=_scaled(_GENERATIONS[generation], _matmul_share(row)),
        source=(
            f"Peaks and memory bandwidth: NVIDIA's data sheet ({row['sheet']}, without sparsity); memory: the total "
            f"that torch reports; shares of peaks and links: usual figures; {host.words}."
        ),
        devices_per_host=host.devices,
        exponentials_per_s=int(row["multiprocessors"]) * 16 * float(row["ghz"]) * 1e9,
        domain_hosts=host.domain_hosts,
        has_paired_links=host.has_paired_links,
        host_bytes_per_s=host.host_gb_per_s * 1e9,
        compute_capability=compute_capability(row["name"]),
    )


NVIDIA_DEVICES = tuple(map(_device, ROWS))
