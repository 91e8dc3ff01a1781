"""Search for a known device by name, and files in which users describe further devices."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import ClassVar, NamedTuple

from pipette_launch.errors import FactError
from pipette_launch.facts import accelerators
from pipette_launch.facts.accelerators import DeviceSpec, Link, words_of
from pipette_launch.facts.cluster import Cluster
from pipette_launch.facts.files import ADDED_LATER, check_numbers

_PREFERRED = frozenset(row["name"] for row in accelerators.ROWS if row["preferred"])
"""Preferred devices. A name that fits several devices means the preferred device if only one of them is preferred."""
_LEAST_LIKENESS, _LESS_LIKE = 0.52, 0.25
"""Least similarity of a suggested name to the given name, and largest difference from the best name's similarity."""


class UnknownDeviceError(FactError):
    """No known device has this name."""


class _Names(NamedTuple):
    """The words in all names of one device."""

    own: frozenset[str]
    chip: frozenset[str]
    """Words that occur in every name of the device."""
    known: frozenset[str]
    """Words that occur in at least one name of the device. A name with any other word means another device."""


def device_named(name: str) -> DeviceSpec:
    """Return the known device with this name. The FactError for an unknown name suggests the nearest names.

    Only whole words count, so H20 is not H200. A name with a word that the device's names lack means another device.
    """
    found = _meant(name)
    if len(found) == 1:
        return found[0]
    if found:
        raise FactError(f"{name!r} may be {_listed([device.name for device in found], 'or')}; give the full name")
    near = nearest_names(name)
    raise UnknownDeviceError(f"unknown device {name!r}" + (f"; did you mean {_listed(near, 'or')}?" if near else ""))


def other_meanings(name: str) -> str:
    """Return a sentence that lists other devices with this name; empty if the name fits only one device."""
    fitting = _fitting(words_of(name))
    taken = device_named(name)
    others = [device.name for device in fitting if device != taken]
    if not others or frozenset(words_of(name)) == _NAMES[taken.name].own:
        return ""
    return f"{name} is taken as {taken.name}, not as {_listed(others, 'or')}."


def device_of_driver(name: str) -> DeviceSpec | None:
    """Return the device with this name, also in the driver's form, such as `NVIDIA H100 80GB HBM3`.

    Return None for an unknown device. MIG partitions, vGPUs, laptop GPUs and cards with other memory sizes are unknown,
    because their peak rates differ. `cost.compute.carried_over.spec_of` takes the most similar device, but only for
    ratios of times.
    """
    found = _meant(name)
    return found[0] if len(found) == 1 else None


def devices_like(name: str) -> tuple[DeviceSpec, ...]:
    """Return all known devices, such as SXM and PCIe builds, whose chip is in this name."""
    words = set(words_of(name))
    return tuple(device for device in known_devices().values() if _NAMES[device.name].chip <= words)


def spec_of_cluster(cluster: Cluster) -> DeviceSpec | None:
    """Return the type of a cluster's devices: described by the user, or found by name; None for unknown devices."""
    return cluster.imagined or device_of_driver(cluster.hosts[0].devices[0].name)


def capability_of_cluster(cluster: Cluster) -> int | None:
    """Return the major number of the compute capability of a cluster's devices. Return None for unknown devices."""
    if cluster.imagined is not None:
        return cluster.imagined.compute_capability
    device = cluster.hosts[0].devices[0]
    return device.compute_capability or accelerators.compute_capability(device.name)


@cache
def known_devices() -> dict[str, DeviceSpec]:
    """Return all built-in devices by name."""
    return {device.name: device for device in accelerators.NVIDIA_DEVICES}


def nearest_names(name: str) -> list[str]:
    """Return up to three known names that are similar to an unknown name. Other builds of the same chip come first."""
    words = words_of(name)
    plain = " ".join(words)
    if not any(map(str.isdigit, plain)):
        return []

    def likeness(device: str) -> float:
        chip, whole = _NAMES[device].chip, " ".join(words_of(device))
        texts = (whole, " ".join(sorted(chip)))
        ratio, chip_ratio = (difflib.SequenceMatcher(None, plain, text).ratio() for text in texts)
        other_letter = whole[:1] != plain[:1]
        return (chip <= set(words)) + max(chip_ratio, ratio) + 0.1 * ratio - 0.2 * other_letter

    near = sorted(known_devices(), key=likeness, reverse=True)[:3]
    return [device for device in near if likeness(device) >= max(_LEAST_LIKENESS, likeness(near[0]) - _LESS_LIKE)]


def _meant(name: str) -> tuple[DeviceSpec, ...]:
    """Return the devices that a name may mean: one device if the name is clear, no device if the name is unknown."""
    words = words_of(name)
    exact = [device for device, names in _NAMES.items() if names.own == frozenset(words)]
    fitting = tuple(known_devices()[device] for device in exact) or _fitting(words)
    usual = tuple(device for device in fitting if device.name in _PREFERRED)
    return usual if len(usual) == 1 else fitting


def _fitting(words: tuple[str, ...]) -> tuple[DeviceSpec, ...]:
    """Return the devices whose names have all words of the given name, and whose chip is in the given name."""
    fits = {device for device, names in _NAMES.items() if names.chip <= set(words) <= names.known}
    return tuple(device for name, device in known_devices().items() if name in fits)


def _names_of(row: Mapping[str, str]) -> _Names:
    own, chip = words_of(row["name"]), row["chip"].split()
    return _Names(frozenset(own), frozenset(chip), frozenset((*own, *chip, *row["other_words"].split())))


_NAMES = {row["name"]: _names_of(row) for row in accelerators.ROWS}


def _listed(names: list[str], word: str) -> str:
    """Join names into a list such as `A, B or C`."""
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last


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
    within_host_bytes_per_s: float | None = field(default=None, metadata=ADDED_LATER)
    """Bandwidth to another device of the host, over NVLink, xGMI or PCIe."""
    within_host_latency_s: float | None = field(default=None, metadata=ADDED_LATER)
    """Latency in seconds of one step of a collective over the link to another device of the host."""
    between_hosts_bytes_per_s: float | None = field(default=None, metadata=ADDED_LATER)
    """Bandwidth of the host's network cards divided by the devices of the host."""
    between_hosts_latency_s: float | None = field(default=None, metadata=ADDED_LATER)
    """Latency in seconds of one step of a collective over the network between hosts."""
    host_bytes_per_s: float | None = field(default=None, metadata=ADDED_LATER)
    """Bandwidth between the device and its host's memory, in each direction."""
    devices_per_host: int | None = field(default=None, metadata=ADDED_LATER)
    domain_hosts: int | None = field(default=None, metadata=ADDED_LATER)
    """Number of hosts of one NVLink domain: 18 for an NVL72 rack, 1 if NVLink ends at the host."""
    compute_capability: float | None = field(default=None, metadata=ADDED_LATER)
    """CUDA's compute capability, such as 9.0. Workspaces and the attention backend depend on the compute capability."""
    matmul_share: float | None = field(default=None, metadata=ADDED_LATER)
    """Share of the 16-bit peak that large matrix products reach."""
    fp8_share: float | None = field(default=None, metadata=ADDED_LATER)
    """Share of the FP8 peak that large matrix products reach."""
    attention_share: float | None = field(default=None, metadata=ADDED_LATER)
    """Share of the 16-bit peak that the products of flash attention reach."""
    memory_share: float | None = field(default=None, metadata=ADDED_LATER)
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
            compute_capability=int(self.compute_capability) if self.compute_capability else like.compute_capability,
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
