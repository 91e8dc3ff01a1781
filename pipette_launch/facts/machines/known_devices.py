"""The table of accelerators whose figures are built in, for plans of machines that have not been measured."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial

from pipette_launch.errors import FactError
from pipette_launch.facts.machines.accelerator import DeviceSpec, Efficiency, Link
from pipette_launch.units import GIB

CAPABILITIES = {
    10: ("B100", "B200", "B300"),
    9: ("H100", "H200", "H800", "H20", "GH200"),
    8: ("A100", "A800", "A30", "A10", "A40", "A6000", "L4", "L40", "RTX 30", "RTX-30", "RTX 40", "RTX-40", "4090"),
    7: ("V100", "T4", "TITAN RTX"),
}
"""Major numbers, by what names contain; the first that fits counts."""


def device_named(name: str) -> DeviceSpec:
    """Return a known device, whatever the case of its name; raises FactError with the nearest name.

    The beginning of a name is enough where only one device's begins so.
    """
    devices = {key.lower(): device for key, device in known_devices().items()}
    if name.lower() in devices:
        return devices[name.lower()]
    begun = [key for key in devices if name and key.startswith(name.lower())]
    if len(begun) == 1:
        return devices[begun[0]]
    if begun:
        raise FactError(f"{name!r} may be {' or '.join(devices[key].name for key in begun)}; say which")
    near = difflib.get_close_matches(name.lower(), devices, n=1, cutoff=0.4)
    hint = f" Did you mean {devices[near[0]].name}?" if near else ""
    raise FactError(f"unknown device {name!r}; known: {', '.join(known_devices())}.{hint}")


def device_of_driver(name: str) -> DeviceSpec | None:
    """Find a device by its own name or by that which its driver gives, `NVIDIA H100 80GB HBM3`; None where unknown.

    A build whose peak is another (PCIe, NVL, a part by MIG) is unknown here. `cost.compute.extrapolated.spec_of` takes
    the device that is most like it all the same: that one needs only ratios of times, and never says a peak.
    """
    if name in known_devices():
        return known_devices()[name]
    words = name.replace("-", " ").split()
    for known, spec in known_devices().items():
        kind = next(word for word in known.split("-") if word.strip("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
        if kind in words and _builds(words) == _builds(known.split("-")):
            return spec
    return None


def _builds(words: Iterable[str]) -> set[str]:
    """Return the words of a name that mean another peak than usual: a PCIe card, a laptop, a part of a device."""
    return {word.upper() for word in words} & {"D", "LAPTOP", "MIG", "NVL", "PCIE"}


def peak_flops_per_s(name: str, dtype: str) -> float:
    """Peak of a device by its own or its driver's name, for one element type; 0 where it is not known."""
    found = device_of_driver(name)
    return found.flops_per_s.get(dtype, 0.0) if found else 0.0


def known_devices() -> dict[str, DeviceSpec]:
    """Return every device with built-in figures, by name."""
    return {device.name: device for device in _DEVICES}


def compute_capability(device_name: str) -> int | None:
    """Return the major number of a GPU's capability, by its name; None for an unknown one."""
    for capability, names in CAPABILITIES.items():
        if any(name in device_name.upper() for name in names):
            return capability
    return None


def _nvidia(
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
    )


# The trainer's own Python around each kernel, as in Megatron's functional tests of small models; CUDA takes 5 us.
_LAUNCH_S = 50e-6
# What the same tests take beyond their launches, once a step: `benchmarks.validation.host`.
_DGX_A100_STEP_S = 48e-3
_DGX_H100_STEP_S = 31e-3


_DGX_A100 = partial(Efficiency, launch_s=_LAUNCH_S, step_s=_DGX_A100_STEP_S)
_DGX_H100 = partial(Efficiency, launch_s=_LAUNCH_S, step_s=_DGX_H100_STEP_S)
_AMPERE = _DGX_A100(matmul_share=0.80, attention_share=0.54, memory_share=0.8, half_size=64)
# Its board takes 300 W and not 400; NVIDIA puts such a card at 90 % of the SXM module.
_AMPERE_300_W = _DGX_A100(matmul_share=0.72, attention_share=0.48, memory_share=0.8, half_size=64)
# A dense product at full clock exceeds the power limit of these, so less of the nominal peak is left.
# FP8 and FP4: TransformerEngine's own benchmark of one dense layer, products alone, on H200 NVL and B300.
_HOPPER = _DGX_H100(
    matmul_share=0.72, narrow_shares={"fp8": 0.68}, attention_share=0.40, memory_share=0.76, half_size=128
)
# The Triton kernels that scan gain nothing from the memory of Blackwell: 0.32 of it is as fast as 0.76 of an H100's.
_ANY_BLACKWELL = partial(_DGX_H100, attention_share=0.45, memory_share=0.75, scan_share=0.32, half_size=192)
_BLACKWELL = _ANY_BLACKWELL(matmul_share=0.70, narrow_shares={"fp8": 0.62, "fp4": 0.38})
_ULTRA = _ANY_BLACKWELL(matmul_share=0.76, narrow_shares={"fp8": 0.70, "fp4": 0.38})
_VOLTA = _DGX_A100(matmul_share=0.75, attention_share=0.41, memory_share=0.8, half_size=64)
_ADA = _DGX_H100(matmul_share=0.85, attention_share=0.61, memory_share=0.85, half_size=64)

# GB/s of each direction between a device and its host: four fifths of the nominal rate of 16 lanes of PCIe 3, 4 and 5,
# and of half a Grace's NVLink-C2C, which two devices share.
_PCIE3, _PCIE4, _PCIE5, _C2C = 12.5, 25.0, 50.0, 180.0
_NVLINK3 = (6.5, 230.0)
_NVLINK4 = (4.0, 360.0)
_NVLINK5 = (4.0, 720.0)
_HDR = (10.0, 24.0, 1)
_NDR = (10.0, 47.0, 1)
_XDR = (10.0, 94.0, 1)
# All-gathers of 256 MB on 8 to 64 nodes: 37 to 61 us for each of the ring's steps, however short its piece.
_EFA = (45.0, 47.0, 1)

_V100 = partial(
    _nvidia,
    exp_per_ns=80 * 16 * 1.53,
    host_gb_per_s=_PCIE3,
    half_tflops=125,
    fp32_tflops=15.7,
    memory_gb_per_s=900,
    bf16=False,
    within=(5.0, 130.0),
    between=(10.0, 12.0, 2),
    efficiency=_VOLTA,
    sheet="V100, January 2020",
    remark="; 4 cards of 100 Gbit/s for 8 devices",
)
_A100 = partial(
    _nvidia,
    exp_per_ns=108 * 16 * 1.41,
    host_gb_per_s=_PCIE4,
    half_tflops=312,
    fp32_tflops=19.5,
    within=_NVLINK3,
    between=_HDR,
    efficiency=_AMPERE,
    sheet="A100, June 2021",
    remark="; a card of 200 Gbit/s for each device",
)
_H100 = partial(
    _nvidia,
    exp_per_ns=132 * 16 * 1.755,
    host_gb_per_s=_PCIE5,
    half_tflops=989,
    fp32_tflops=67,
    fp8_tflops=1979,
    within=_NVLINK4,
    between=_NDR,
    efficiency=_HOPPER,
    sheet="H100, SXM5, without sparsity",
    remark="; a card of 400 Gbit/s for each device",
)
_BLACKWELL_DEVICE = partial(
    _nvidia,
    exp_per_ns=148 * 16 * 1.92,
    host_gb_per_s=_PCIE5,
    within=_NVLINK5,
    between=_NDR,
    efficiency=_BLACKWELL,
)
_BLACKWELL_ULTRA = partial(_BLACKWELL_DEVICE, exp_per_ns=148 * 32 * 1.92, between=_XDR, efficiency=_ULTRA)
_RTX_4090 = partial(
    _nvidia,
    exp_per_ns=128 * 16 * 2.52,
    host_gb_per_s=_PCIE4,
    half_tflops=165.2,
    fp32_tflops=82.6,
    fp8_tflops=330.3,
    memory_gb_per_s=1008,
    within=(10.0, 12.0),
    between=(15.0, 12.0, 8),
    efficiency=_ADA,
    remark="; PCIe through the host's memory, a card of 100 Gbit/s for 8",
)
_RTX_4090_SHEET = "Ada architecture, FP32 accumulation, without sparsity"

_DEVICES = (
    _V100("V100-SXM2-32GB", memory_gib=31.73),
    _V100("V100-SXM2-16GB", memory_gib=15.77),
    _A100("A100-40GB", memory_gib=39.5, memory_gb_per_s=1555),
    _A100("A100-80GB", memory_gib=79.2, memory_gb_per_s=2039),
    _A100(
        "A100-80GB-PCIe",
        memory_gib=79.2,
        memory_gb_per_s=1935,
        within=(8.0, 20.0),
        between=(10.0, 23.0, 4),
        efficiency=_AMPERE_300_W,
        remark="; PCIe, 2 cards of 200 Gbit/s for 8",
    ),
    _H100("H100-SXM", memory_gib=79.1, memory_gb_per_s=3350),
    _H100(
        "AWS-P5-H100",
        memory_gib=79.1,
        memory_gb_per_s=3350,
        between=_EFA,
        remark="; steps between hosts as published for nanotron's cluster (all-gather of 256 MB on 2 to 64 nodes)",
    ),
    _H100("H200", memory_gib=139.8, memory_gb_per_s=4800, sheet="H200, SXM, without sparsity"),
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
        host_gb_per_s=_C2C,
    ),
    _BLACKWELL_ULTRA(
        "B300",
        half_tflops=2250,
        fp32_tflops=75,
        fp8_tflops=4500,
        fp4_tflops=13500,
        memory_gb_per_s=8000,
        memory_gib=264.7,
        sheet="Blackwell Ultra, HGX B300, without sparsity",
        remark="; a card of 800 Gbit/s for each device; memory: 288 GB, less the share that B200's driver keeps",
    ),
    _BLACKWELL_ULTRA(
        "GB300-NVL72",
        half_tflops=2500,
        fp32_tflops=80,
        fp8_tflops=5000,
        fp4_tflops=15000,
        memory_gb_per_s=8000,
        memory_gib=264.7,
        sheet="Blackwell Ultra, GB300 NVL72, without sparsity",
        remark=(
            "; 18 trays of 4 devices in one NVLink domain, a card of 800 Gbit/s for each device; memory: 288 GB, less "
            "the share that B200's driver keeps"
        ),
        devices_per_host=4,
        domain_hosts=18,
        host_gb_per_s=_C2C,
    ),
    _nvidia(
        "L40S",
        host_gb_per_s=_PCIE4,
        exp_per_ns=142 * 16 * 2.52,
        half_tflops=362,
        fp32_tflops=91.6,
        fp8_tflops=733,
        memory_gb_per_s=864,
        memory_gib=44.4,
        within=(8.0, 20.0),
        between=(10.0, 23.0, 4),
        efficiency=_ADA,
        sheet="L40S, without sparsity",
        remark="; PCIe, 2 cards of 200 Gbit/s for 8",
    ),
    _RTX_4090("RTX-4090", memory_gib=23.64, sheet=_RTX_4090_SHEET),
    _RTX_4090("RTX-4090-48GB", memory_gib=47.4, sheet=f"{_RTX_4090_SHEET}; 48 GB are no product of NVIDIA's"),
)
