"""What a type of accelerator can do: rates, memory and links, for plans of machines that nobody has measured yet."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from pipette_launch.errors import FactError


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The way from one device to another: seconds = latency_s + bytes / bytes_per_s."""

    latency_s: float
    """Of one step of a collective, or of one message."""
    bytes_per_s: float
    """In one direction, when the devices that share it are silent."""
    shared_by: int = 1
    """Devices that have to share it when all of them send: 8 for one network card in a host of 8 devices."""

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.bytes_per_s <= 0 or self.shared_by < 1:
            raise FactError(
                f"a link needs latency_s >= 0, bytes_per_s > 0 and shared_by >= 1, got {self.latency_s}, "
                f"{self.bytes_per_s} and {self.shared_by}"
            )

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
    """Seconds of the host (Python, torch's dispatcher, the launch itself) for each kernel of `cost.device_work`.

    Where kernels are shorter, the host sets the time. 50 us is what Megatron-LM's functional tests come to on DGX A100
    and H100: 3 to 6 ms for a layer and micro-batch of hidden size 512.
    """

    def __post_init__(self) -> None:
        for name in ("matmul_share", "attention_share", "memory_share"):
            if not 0 < getattr(self, name) <= 1:
                raise FactError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        if self.half_size < 0 or self.launch_s < 0:
            raise FactError(f"half_size={self.half_size} and launch_s={self.launch_s} must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """One type of accelerator in its usual host."""

    name: str
    flops_per_s: dict[str, float]
    """Peak of dense matrix products, by element type: fp32 (as Megatron runs it, TF32 off), fp16, bf16, fp8."""
    memory_bytes_per_s: float
    memory_bytes: int
    within_host: Link
    between_hosts: Link
    efficiency: Efficiency
    source: str
    """Where the figures come from, one sentence."""

    def __post_init__(self) -> None:
        if not self.flops_per_s or not all(peak > 0 for peak in self.flops_per_s.values()):
            raise FactError(f"device {self.name} needs peaks above 0, got {self.flops_per_s}")
        if self.memory_bytes_per_s <= 0 or self.memory_bytes <= 0:
            raise FactError(f"device {self.name} needs a memory size and bandwidth above 0")

    def peak_flops_per_s(self, dtype: str) -> float:
        """Peak for one element type; raises FactError with those that are known."""
        if dtype not in self.flops_per_s:
            known = ", ".join(sorted(self.flops_per_s))
            raise FactError(f"{self.name} has no known peak for {dtype}; known: {known}")
        return self.flops_per_s[dtype]


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
    near = difflib.get_close_matches(name.lower(), devices, n=1, cutoff=0.4)
    hint = f" Did you mean {devices[near[0]].name}?" if near else ""
    raise FactError(f"unknown device {name!r}; known: {', '.join(known_devices())}.{hint}")


def known_devices() -> dict[str, DeviceSpec]:
    """Return every device with built-in figures, by name."""
    return {device.name: device for device in _DEVICES}


def _nvidia(
    name: str,
    *,
    half_tflops: float,
    fp32_tflops: float,
    memory_gb_per_s: float,
    memory_gb: float,
    within: tuple[float, float],
    between: tuple[float, float, int],
    fp8_tflops: float = 0.0,
    bf16: bool = True,
    efficiency: Efficiency,
    remark: str = "",
) -> DeviceSpec:
    """Bring a data sheet to SI; links are (us, GB/s) and (us, GB/s, devices that share it)."""
    peaks = {"fp32": fp32_tflops * 1e12, "fp16": half_tflops * 1e12}
    peaks |= {"bf16": half_tflops * 1e12} if bf16 else {}
    peaks |= {"fp8": fp8_tflops * 1e12} if fp8_tflops else {}
    return DeviceSpec(
        name=name,
        flops_per_s=peaks,
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        memory_bytes=int(memory_gb * 1024**3),
        within_host=Link(latency_s=within[0] * 1e-6, bytes_per_s=within[1] * 1e9),
        between_hosts=Link(latency_s=between[0] * 1e-6, bytes_per_s=between[1] * 1e9, shared_by=between[2]),
        efficiency=efficiency,
        source=f"Peaks and memory: NVIDIA's data sheet; shares of them and links: usual figures{remark}.",
    )


# 50 us: the trainer's own Python around each kernel, as in Megatron's functional tests of small models; CUDA takes 5.
_AMPERE = Efficiency(matmul_share=0.80, half_size=64, attention_share=0.5, memory_share=0.8, launch_s=50e-6)
# A dense product at full clock exceeds the power limit of these, so less of the nominal peak is left.
_HOPPER = Efficiency(matmul_share=0.72, half_size=128, attention_share=0.4, memory_share=0.8, launch_s=50e-6)
_BLACKWELL = Efficiency(matmul_share=0.70, half_size=192, attention_share=0.35, memory_share=0.8, launch_s=50e-6)
_VOLTA = Efficiency(matmul_share=0.75, half_size=64, attention_share=0.4, memory_share=0.8, launch_s=50e-6)
_ADA = Efficiency(matmul_share=0.85, half_size=64, attention_share=0.6, memory_share=0.85, launch_s=50e-6)

_NVLINK3 = (6.5, 230.0)
_NVLINK4 = (4.0, 360.0)
_HDR = (10.0, 24.0, 1)
_NDR = (10.0, 47.0, 1)
# All-gathers of 256 MB on 8 to 64 nodes: 37 to 61 us for each of the ring's steps, however short its piece.
_EFA = (45.0, 47.0, 1)

_DEVICES = (
    _nvidia(
        "V100-SXM2-32GB",
        half_tflops=125,
        fp32_tflops=15.7,
        memory_gb_per_s=900,
        memory_gb=32,
        bf16=False,
        within=(5.0, 130.0),
        between=(10.0, 12.0, 2),
        efficiency=_VOLTA,
        remark="; 4 cards of 100 Gbit/s for 8 devices",
    ),
    _nvidia(
        "A100-40GB",
        half_tflops=312,
        fp32_tflops=19.5,
        memory_gb_per_s=1555,
        memory_gb=40,
        within=_NVLINK3,
        between=_HDR,
        efficiency=_AMPERE,
        remark="; a card of 200 Gbit/s for each device",
    ),
    _nvidia(
        "A100-80GB",
        half_tflops=312,
        fp32_tflops=19.5,
        memory_gb_per_s=2039,
        memory_gb=80,
        within=_NVLINK3,
        between=_HDR,
        efficiency=_AMPERE,
        remark="; a card of 200 Gbit/s for each device",
    ),
    _nvidia(
        "H100-SXM",
        half_tflops=989,
        fp32_tflops=67,
        fp8_tflops=1979,
        memory_gb_per_s=3350,
        memory_gb=80,
        within=_NVLINK4,
        between=_NDR,
        efficiency=_HOPPER,
        remark="; a card of 400 Gbit/s for each device",
    ),
    _nvidia(
        "AWS-P5-H100",
        half_tflops=989,
        fp32_tflops=67,
        fp8_tflops=1979,
        memory_gb_per_s=3350,
        memory_gb=80,
        within=_NVLINK4,
        between=_EFA,
        efficiency=_HOPPER,
        remark="; steps between hosts as published for nanotron's cluster (all-gather of 256 MB on 2 to 64 nodes)",
    ),
    _nvidia(
        "H200",
        half_tflops=989,
        fp32_tflops=67,
        fp8_tflops=1979,
        memory_gb_per_s=4800,
        memory_gb=141,
        within=_NVLINK4,
        between=_NDR,
        efficiency=_HOPPER,
        remark="; a card of 400 Gbit/s for each device",
    ),
    _nvidia(
        "B200",
        half_tflops=2250,
        fp32_tflops=80,
        fp8_tflops=4500,
        memory_gb_per_s=7700,
        memory_gb=180,
        within=(4.0, 720.0),
        between=_NDR,
        efficiency=_BLACKWELL,
        remark="; a card of 400 Gbit/s for each device",
    ),
    _nvidia(
        "L40S",
        half_tflops=362,
        fp32_tflops=91.6,
        fp8_tflops=733,
        memory_gb_per_s=864,
        memory_gb=48,
        within=(8.0, 20.0),
        between=(10.0, 23.0, 4),
        efficiency=_ADA,
        remark="; PCIe, 2 cards of 200 Gbit/s for 8",
    ),
    _nvidia(
        "RTX-4090",
        half_tflops=165.2,
        fp32_tflops=82.6,
        fp8_tflops=330.3,
        memory_gb_per_s=1008,
        memory_gb=24,
        within=(10.0, 12.0),
        between=(15.0, 12.0, 8),
        efficiency=_ADA,
        remark="; PCIe through the host's memory, a card of 100 Gbit/s for 8",
    ),
    _nvidia(
        "RTX-4090-48GB",
        half_tflops=165.2,
        fp32_tflops=82.6,
        fp8_tflops=330.3,
        memory_gb_per_s=1008,
        memory_gb=48,
        within=(10.0, 12.0),
        between=(15.0, 12.0, 8),
        efficiency=_ADA,
        remark="; PCIe through the host's memory, a card of 100 Gbit/s for 8",
    ),
)
