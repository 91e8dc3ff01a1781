"""A type of accelerator as a file describes it: what differs from a known device."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

from pipette_launch.errors import FactError
from pipette_launch.facts.checks import check_numbers
from pipette_launch.facts.files import ADDED_LATER
from pipette_launch.facts.machines.accelerator import DeviceSpec, Efficiency, Link
from pipette_launch.facts.machines.known_devices import device_named

DTYPES = ("fp32", "fp16", "bf16", "fp8", "fp4")
_MOST_CAPABILITY, _MOST_LATENCY_S, _LEAST_FLOPS_PER_S = 30, 0.1, 1e10
"""Figures beyond these are in other units: 90 for 9.0, microseconds, TFLOP/s."""
_LEAST = {
    "memory_bytes": 1e9,
    "memory_bytes_per_s": 1e9,
    "within_host_bytes_per_s": 1e7,
    "between_hosts_bytes_per_s": 1e7,
    "host_bytes_per_s": 1e7,
    "compute_capability": 1,
}
"""Smaller figures are in GB or GB/s."""
_LATENCIES = ("within_host_latency_s", "between_hosts_latency_s")
_SHARES = ("matmul_share", "attention_share", "memory_share")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFile:
    """A device, by its data sheet; fields that are left out have the figures of the known device `like`.

    Bandwidths are of one device in one direction, while all devices of its host send.
    """

    KIND: ClassVar[str] = "device"
    SCHEMA_VERSION: ClassVar[int] = 1

    name: str
    """Name on screens and in plans."""
    source: str
    """Origin of the figures, one sentence; plans repeat it."""
    like: str
    """The known device that is most like it."""
    flops_per_s: dict[str, float]
    """Peaks of dense matrix products without sparsity, with accumulation in FP32: fp32, fp16, bf16, fp8, fp4."""
    memory_bytes: float
    """As torch reports it: `torch.cuda.get_device_properties(0).total_memory`; the data sheet's figure is larger."""
    memory_bytes_per_s: float
    """Bandwidth of the device's memory."""
    within_host_bytes_per_s: float | None = field(default=None, metadata=ADDED_LATER)
    """To another device of the host, over NVLink, xGMI or PCIe."""
    within_host_latency_s: float | None = field(default=None, metadata=ADDED_LATER)
    """Latency of one step of a collective."""
    between_hosts_bytes_per_s: float | None = field(default=None, metadata=ADDED_LATER)
    """The device's share of its host's network cards."""
    between_hosts_latency_s: float | None = field(default=None, metadata=ADDED_LATER)
    """Latency of one step of a collective."""
    host_bytes_per_s: float | None = field(default=None, metadata=ADDED_LATER)
    """To the host's memory, and as fast back."""
    devices_per_host: int | None = field(default=None, metadata=ADDED_LATER)
    """Devices of its usual host."""
    domain_hosts: int | None = field(default=None, metadata=ADDED_LATER)
    """Hosts of one NVLink domain: 18 of an NVL72 rack, 1 where NVLink ends at the host."""
    compute_capability: float | None = field(default=None, metadata=ADDED_LATER)
    """CUDA's, as 9.0: it decides workspaces and the attention backend."""
    matmul_share: float | None = field(default=None, metadata=ADDED_LATER)
    """Part of the 16-bit peak that large matrix products reach."""
    fp8_share: float | None = field(default=None, metadata=ADDED_LATER)
    """Part of the FP8 peak that they reach."""
    attention_share: float | None = field(default=None, metadata=ADDED_LATER)
    """Part of the 16-bit peak that flash attention's products reach."""
    memory_share: float | None = field(default=None, metadata=ADDED_LATER)
    """Part of the memory's bandwidth that norms and the optimizer reach."""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise FactError("name: a device needs a name")
        for dtype, peak in self.flops_per_s.items():
            if dtype not in DTYPES:
                raise FactError(f"flops_per_s: {dtype!r} is none of {', '.join(DTYPES)}")
            if not peak >= _LEAST_FLOPS_PER_S:
                raise FactError(
                    f"flops_per_s: {dtype} must be at least {_LEAST_FLOPS_PER_S:g}, got {peak:g}; units are FLOP/s"
                )
        if not self.flops_per_s:
            raise FactError(f"flops_per_s: at least one of {', '.join(DTYPES)} is needed")
        for name, least in _LEAST.items():
            check_numbers(self, name, limit=least)
        check_numbers(self, *_LATENCIES, limit=0)
        check_numbers(self, "devices_per_host", "domain_hosts")
        for name, most in (("compute_capability", _MOST_CAPABILITY), *((each, _MOST_LATENCY_S) for each in _LATENCIES)):
            if (getattr(self, name) or 0) > most:
                raise FactError(f"{name} must be at most {most}, got {getattr(self, name)}")
        self.spec()

    def spec(self) -> DeviceSpec:
        """Return the device; its source names the fields taken from the known one."""
        try:
            like = device_named(self.like)
        except FactError as error:
            raise FactError(f"like: {error}") from error
        return DeviceSpec(
            name=self.name,
            flops_per_s=self.flops_per_s,
            memory_bytes=int(self.memory_bytes),
            memory_bytes_per_s=self.memory_bytes_per_s,
            within_host=_link(self.within_host_bytes_per_s, self.within_host_latency_s, like.within_host),
            between_hosts=_link(self.between_hosts_bytes_per_s, self.between_hosts_latency_s, like.between_hosts),
            efficiency=self._efficiency(like.efficiency),
            source=self._source(like),
            devices_per_host=self.devices_per_host or like.devices_per_host,
            exponentials_per_s=like.exponentials_per_s,
            domain_hosts=self.domain_hosts or like.domain_hosts,
            host_bytes_per_s=self.host_bytes_per_s or like.host_bytes_per_s,
            compute_capability=int(self.compute_capability) if self.compute_capability else like.compute_capability,
        )

    def _efficiency(self, like: Efficiency) -> Efficiency:
        given = {name: getattr(self, name) for name in _SHARES if getattr(self, name) is not None}
        fp8 = {} if self.fp8_share is None else {"fp8": self.fp8_share}
        return replace(like, **given, narrow_shares=like.narrow_shares | fp8)

    def _source(self, like: DeviceSpec) -> str:
        """Return the origin of the figures, and the fields of the known device."""
        left_out = [one.name for one in fields(self) if getattr(self, one.name) is None]
        rest = f" As of {like.name}, for want of own figures: {', '.join(left_out)}." if left_out else ""
        return f"{self.source}{rest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFiles:
    """All known devices, as `pipette devices --json` prints them."""

    KIND: ClassVar[str] = "devices"
    SCHEMA_VERSION: ClassVar[int] = 1

    devices: tuple[DeviceFile, ...]


def file_of(device: DeviceSpec) -> DeviceFile:
    """Return the file that describes a known device, to start another description from."""
    inside, between, efficiency = device.within_host, device.between_hosts, device.efficiency
    return DeviceFile(
        name=device.name,
        source=device.source,
        like=device.name,
        flops_per_s=device.flops_per_s,
        memory_bytes=device.memory_bytes,
        memory_bytes_per_s=device.memory_bytes_per_s,
        within_host_bytes_per_s=inside.fair_bytes_per_s,
        within_host_latency_s=round(inside.latency_s, 9),
        between_hosts_bytes_per_s=between.fair_bytes_per_s,
        between_hosts_latency_s=round(between.latency_s, 9),
        host_bytes_per_s=device.host_bytes_per_s,
        devices_per_host=device.devices_per_host,
        domain_hosts=device.domain_hosts,
        compute_capability=device.compute_capability,
        matmul_share=efficiency.matmul_share,
        fp8_share=efficiency.share_of("fp8"),
        attention_share=efficiency.attention_share,
        memory_share=efficiency.memory_share,
    )


def _link(bytes_per_s: float | None, latency_s: float | None, like: Link) -> Link:
    """Return the link of a known device with the figures that are given in place of its own."""
    latency_s = like.latency_s if latency_s is None else latency_s
    if bytes_per_s is None:
        return replace(like, latency_s=latency_s)
    return Link(latency_s=latency_s, bytes_per_s=bytes_per_s)
