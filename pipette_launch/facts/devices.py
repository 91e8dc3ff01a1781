"""Types of devices: peak rates, memory, links and names; the table of NVIDIA's devices; files that describe others."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

from pipette_launch.errors import FactError
from pipette_launch.facts.files import check_numbers, table
from pipette_launch.text import GIB


class UnknownDeviceError(FactError):
    """No known device has this name."""


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
    has_paired_links: bool = False
    """True if no switch joins the devices of a host, so that each pair of devices has NVLinks of its own. `within_host`
    is then the link of one pair, and a group in one host uses the links of all its pairs at the same time."""
    host_bytes_per_s: float = 0.0
    """Bandwidth to pinned memory of the host, in each direction, while all devices of a host copy. 0 = unknown."""
    compute_capability: float | None = None
    """CUDA's compute capability, such as 8.9. None = unknown."""

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


_HOSTS = {row["name"]: row for row in table("pipette_launch.facts", "hosts")}
"""Links of the hosts in which devices are usually sold. `host_gb_per_s` is the rate between a device and its host: 80 %
of 16 lanes of PCIe, or 80 % of half the NVLink-C2C of a Grace CPU, which two devices share. In a GRACE host, 6 of 18
NVLinks join each pair of superchips (CSCS's documentation of Alps). `between_us` of P5 is EFA's: in all-gathers of
256 MB on 8 to 64 nodes, a step of the ring takes 37 to 61 us more than its bytes. NVLink bridges between two or four
PCIe cards are left out."""
_GENERATIONS = {row["name"]: row for row in table("pipette_launch.facts", "generations")}
"""Shares of the peak rates that devices of a generation usually reach. `launch_us`: CUDA needs 5 us to launch a kernel,
and the trainer's Python needs the rest, because one layer with hidden size 512 takes 3 to 6 ms for a micro-batch in
Megatron-LM's functional tests on A100 and H100. `step_ms`: time of a step in the same tests that kernels do not explain
(`benchmarks.validation.host`)."""


def _efficiency(row: Mapping[str, str]) -> Efficiency:
    """Return the shares of a device: of its generation, scaled to the device's own `matmul_share`."""
    usual = _GENERATIONS[row["generation"]]
    ratio = float(row["matmul_share"]) / float(usual["matmul_share"])
    narrow = {dtype: usual[f"{dtype}_share"] for dtype in ("fp8", "fp4")}
    return Efficiency(
        matmul_share=float(row["matmul_share"]),
        half_size=float(usual["half_size"]),
        attention_share=min(1.0, round(float(usual["attention_share"]) * ratio, 2)),
        memory_share=float(usual["memory_share"]),
        launch_s=float(usual["launch_us"]) / 1e6,
        scan_share=float(usual["scan_share"]) if usual["scan_share"] else None,
        narrow_shares={dtype: min(1.0, round(float(share) * ratio, 2)) for dtype, share in narrow.items() if share},
        step_s=float(usual["step_ms"]) / 1e3,
    )


def _device(row: Mapping[str, str]) -> DeviceSpec:
    """Convert a row of `data/devices.csv` to SI units.

    `matmul_share` of PCIe cards comes from public tests (github.com/mag-/gpu_benchmark,
    github.com/zzc0721/torch-performance-test-data), minus 7 %, because A100 and H100 are 7 % slower in training than in
    such tests. Cards without a public test (A10, A30, A40, L20) have the `matmul_share` of a similar chip. L4
    cannot hold its clock for long, because its power limit is 72 W. GeForce cards have a `matmul_share` of 0.85,
    because short tests run above the clock of the data sheet. GH200 (560 W for the GPU), H200-NVL (600 W), GB200
    (1,200 W) and GB300 (1,400 W) have the share of H100-SXM (700 W), B200 (1,000 W) or B300 (1,100 W) times the square
    root of their watts for each FLOP/s, relative to that device: products at full clock need more power than Hopper
    and Blackwell may draw. `multiprocessors` is doubled for Blackwell Ultra, whose multiprocessors have 32
    special function units instead of 16. `half_tflops` is the 16-bit peak without sparsity and with accumulation in
    FP32, which halves the rate of GeForce cards. `memory_gib` is the memory that torch reports, without the memory that
    driver and ECC use.
    """
    host, capability = _HOSTS[row["host"]], float(row["capability"])
    half = float(row["half_tflops"])
    tflops = {"fp32": float(row["fp32_tflops"]), "fp16": half, "bf16": half if capability >= _BF16_SINCE else 0.0}
    tflops |= {"fp8": float(row["fp8_tflops"]), "fp4": float(row["fp4_tflops"])}
    return DeviceSpec(
        name=row["name"],
        flops_per_s={dtype: peak * 1e12 for dtype, peak in tflops.items() if peak},
        memory_bytes_per_s=float(row["memory_gb_per_s"]) * 1e9,
        memory_bytes=int(float(row["memory_gib"]) * GIB),
        within_host=Link(
            latency_s=float(host["within_us"]) * 1e-6,
            bytes_per_s=float(host["within_gb_per_s"]) * 1e9,
        ),
        between_hosts=Link(
            latency_s=float(host["between_us"]) * 1e-6,
            bytes_per_s=float(host["between_gb_per_s"]) * 1e9,
            shared_by=int(host["shared_by"]),
        ),
        efficiency=_efficiency(row),
        source=(
            f"Peaks and memory bandwidth: NVIDIA's data sheet ({row['sheet']}, without sparsity); memory: the total "
            f"that torch reports; shares of peaks and links: usual figures; {host['words']}."
        ),
        devices_per_host=int(host["devices"]),
        exponentials_per_s=int(row["multiprocessors"]) * 16 * float(row["ghz"]) * 1e9,
        domain_hosts=int(host["domain_hosts"]),
        has_paired_links=host["joined_by"] == "pairs",
        host_bytes_per_s=float(host["host_gb_per_s"]) * 1e9,
        compute_capability=capability,
    )


_BF16_SINCE = 8.0
_ROWS = table("pipette_launch.facts", "devices")
KNOWN_DEVICES = {row["name"]: _device(row) for row in _ROWS}
"""Built-in devices by name."""


def key_of(name: str) -> str:
    """Return the letters and digits of a name in capitals, without the vendor: names are equal if these are equal."""
    return "".join(filter(str.isalnum, name.upper())).removeprefix("NVIDIA")


BY_KEY = {
    key_of(name): KNOWN_DEVICES[row["name"]] for row in _ROWS for name in (row["name"], *row["aliases"].split(";"))
}
"""Built-in devices by the keys of their names and aliases."""
_LEAST_LIKENESS = 0.66
"""Least similarity of a suggested name to the given name, as `difflib` measures it."""


def device_named(name: str) -> DeviceSpec:
    """Return the known device with this name or alias; case and punctuation do not matter.

    The UnknownDeviceError for another name suggests the nearest names.
    """
    found = known_device(name)
    if found is None:
        near = [device.name for device in devices_like(name)]
        raise UnknownDeviceError(f"unknown device {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    return found


def known_device(name: str) -> DeviceSpec | None:
    """Return the known device with this name, also in the driver's form, such as `NVIDIA H100 80GB HBM3`, or None.

    MIG partitions, vGPUs, laptop GPUs and cards with other memory sizes are unknown, because their peak rates differ.
    """
    return BY_KEY.get(key_of(name))


def devices_like(name: str) -> tuple[DeviceSpec, ...]:
    """Return up to four known devices whose names begin with a name, or else are similar to it, best first."""
    key = key_of(name)
    near = [one for one in BY_KEY if key and one.startswith(key)]
    near = near or difflib.get_close_matches(key, BY_KEY, n=8, cutoff=_LEAST_LIKENESS)
    return tuple({BY_KEY[one].name: BY_KEY[one] for one in near}.values())[:4]


def capability_named(name: str) -> float | None:
    """Return the compute capability of the known device with this name, or None for an unknown device."""
    device = known_device(name)
    return device.compute_capability if device else None


DTYPES = ("fp32", "fp16", "bf16", "fp8", "fp4")
_MOST_CAPABILITY, _MOST_LATENCY_S, _LEAST_FLOPS_PER_S = 30, 0.1, 1e10
"""Figures beyond these limits probably have another unit or form: microseconds, TFLOP/s, or 90 instead of 9.0."""
_LEAST = {
    "memory_bytes": 1e9,
    "memory_bytes_per_s": 1e9,
    "within_host_bytes_per_s": 1e7,
    "between_hosts_bytes_per_s": 1e7,
    "host_bytes_per_s": 1e7,
    "compute_capability": 1,
}
"""Lower limit of each field of a device file. A smaller figure probably has the unit GB or GB/s."""
_LATENCIES = ("within_host_latency_s", "between_hosts_latency_s")
_SHARES = ("matmul_share", "attention_share", "memory_share")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFile:
    """A file in which a user describes a device with figures of the data sheet.

    A field that is left out has the figure of the known device `like`. Each bandwidth is the bandwidth of one device in
    one direction while all devices of its host send.
    """

    KIND: ClassVar[str] = "device"

    name: str
    """Name of the device on screens and in plans."""
    source: str
    """Origin of the device's figures, as one sentence that plans repeat."""
    like: str
    """Name of the most similar known device."""
    flops_per_s: dict[str, float]
    """Peak rate of dense matrix products with accumulation in FP32, by format: fp32, fp16, bf16, fp8, fp4."""
    memory_bytes: float
    """Value of `torch.cuda.get_device_properties(0).total_memory`, which is less than the data sheet's figure."""
    memory_bytes_per_s: float
    within_host_bytes_per_s: float | None = None
    """Bandwidth to another device of the host, over NVLink, xGMI or PCIe."""
    within_host_latency_s: float | None = None
    """Latency in seconds of one step of a collective over the link to another device of the host."""
    between_hosts_bytes_per_s: float | None = None
    """Bandwidth of the host's network cards divided by the devices of the host."""
    between_hosts_latency_s: float | None = None
    """Latency in seconds of one step of a collective over the network between hosts."""
    host_bytes_per_s: float | None = None
    """Bandwidth between the device and its host's memory, in each direction."""
    devices_per_host: int | None = None
    domain_hosts: int | None = None
    """Number of hosts of one NVLink domain: 18 for an NVL72 rack, 1 if NVLink ends at the host."""
    compute_capability: float | None = None
    """CUDA's compute capability, such as 9.0. Workspaces and the attention backend depend on the compute capability."""
    matmul_share: float | None = None
    """Share of the 16-bit peak that large matrix products reach."""
    fp8_share: float | None = None
    """Share of the FP8 peak that large matrix products reach."""
    attention_share: float | None = None
    """Share of the 16-bit peak that the products of flash attention reach."""
    memory_share: float | None = None
    """Share of the memory bandwidth that norms and the optimizer reach."""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise FactError("name: a device needs a name")
        for dtype, peak in self.flops_per_s.items():
            if dtype not in DTYPES:
                raise FactError(f"flops_per_s: {dtype!r} is not one of {', '.join(DTYPES)}")
            if not peak >= _LEAST_FLOPS_PER_S:
                limit = f"at least {_LEAST_FLOPS_PER_S:g}, got {peak:g}; units are FLOP/s"
                raise FactError(f"flops_per_s: {dtype} must be {limit}")
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
        """Return the device that the file describes. The result's `source` names the figures from the known device."""
        try:
            like = device_named(self.like)
        except FactError as error:
            raise FactError(f"like: {error}") from error
        given = {name: getattr(self, name) for name in _SHARES if getattr(self, name) is not None}
        fp8 = {} if self.fp8_share is None else {"fp8": self.fp8_share}
        left_out = [one.name for one in fields(self) if getattr(self, one.name) is None]
        rest = f" Taken from {like.name}: {', '.join(left_out)}." if left_out else ""
        return DeviceSpec(
            name=self.name,
            flops_per_s=self.flops_per_s,
            memory_bytes=int(self.memory_bytes),
            memory_bytes_per_s=self.memory_bytes_per_s,
            within_host=_link(self.within_host_bytes_per_s, self.within_host_latency_s, like.within_host),
            between_hosts=_link(self.between_hosts_bytes_per_s, self.between_hosts_latency_s, like.between_hosts),
            efficiency=replace(like.efficiency, **given, narrow_shares=like.efficiency.narrow_shares | fp8),
            source=f"{self.source}{rest}",
            devices_per_host=self.devices_per_host or like.devices_per_host,
            exponentials_per_s=like.exponentials_per_s,
            domain_hosts=self.domain_hosts or like.domain_hosts,
            has_paired_links=like.has_paired_links,
            host_bytes_per_s=self.host_bytes_per_s or like.host_bytes_per_s,
            compute_capability=self.compute_capability or like.compute_capability,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFiles:
    """Document with all known devices that `pipette devices --json` prints."""

    KIND: ClassVar[str] = "devices"

    devices: tuple[DeviceFile, ...]


def file_of(device: DeviceSpec) -> DeviceFile:
    """Return a device file that describes a known device, for users who describe a similar device."""
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
    latency_s = like.latency_s if latency_s is None else latency_s
    if bytes_per_s is None:
        return replace(like, latency_s=latency_s)
    return Link(latency_s=latency_s, bytes_per_s=bytes_per_s)
