"""The figures that describe a type of accelerator: peak rates, memory and links."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipette_launch.errors import FactError
from pipette_launch.facts.checks import check_numbers


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
