"""A data sheet of NVIDIA's as a device: shares of its peaks, its links, and the memory that its driver leaves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pipette_launch.facts.machines.accelerator import DeviceSpec, Efficiency, Link
from pipette_launch.facts.machines.device_names import compute_capability
from pipette_launch.units import GIB


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
